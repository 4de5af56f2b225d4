"""From tokens to text: half characters, spaces, stop strings, ends."""

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ralm_jax.generate.writing import Writer
from ralm_jax.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def by_bytes():
    """A tokenizer with a token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, (), (), "bytes")


def write(tokenizer, text, *, prompt="x", count=None, ends=(), stop=()):
    """The writer after all tokens of `text`, and the pieces that it told."""
    tokens, pieces = tokenizer.encode(text), []
    writer = Writer(tokenizer, tokenizer.encode(prompt), count or len(tokens), stop=stop, ends=ends, tell=pieces.append)
    for token in tokens:
        writer.add(int(token), -1.0)
    return writer, pieces


def test_text_comes_in_whole_characters(by_bytes):
    writer, pieces = write(by_bytes, "aé日\U0001f600z")
    assert pieces == ["a", "é", "日", "\U0001f600", "z"]
    assert (writer.text, writer.finish) == ("aé日\U0001f600z", "length")


def test_half_a_character_at_the_end_is_left_out(by_bytes):
    writer, pieces = write(by_bytes, "aé", count=2)
    assert (writer.text, pieces, len(writer.tokens)) == ("a", ["a"], 2)


@pytest.mark.parametrize("stop", [("\n",), ("nd.",), ("zzz", "d.\nT"), ("The end.\n",)])
def test_stop_strings_are_not_told_in_part(by_bytes, stop):
    text = "The end.\nThe start"
    writer, pieces = write(by_bytes, text, stop=stop)
    expected = text[: min(text.find(s) for s in stop if s in text)]
    assert writer.finish == "stop"
    assert writer.text == "".join(pieces) == expected


def test_the_first_of_several_stop_strings_counts(by_bytes):
    assert write(by_bytes, "one two three", stop=("three", "two"))[0].text == "one "


def test_what_only_began_like_a_stop_string_is_told(by_bytes):
    writer, pieces = write(by_bytes, "a##b#", stop=("###",))
    assert "".join(pieces) == writer.text == "a##b#"
    assert writer.finish == "length"


def test_an_end_token_is_counted_but_not_shown(by_bytes):
    end = int(by_bytes.encode("!")[0])
    writer, pieces = write(by_bytes, "ab!cd", ends=(end,))
    assert (writer.text, writer.finish, len(writer.tokens), pieces) == ("ab", "end", 3, ["a", "b"])


def test_nothing_is_added_after_the_end(by_bytes):
    writer, _ = write(by_bytes, "abc", count=2)
    assert (writer.text, writer.log_probs) == ("ab", [-1.0, -1.0])


def test_words_keep_the_space_before_them():
    """A decoder that drops the first space of a text must not drop that of its continuation."""
    backend = tokenizers.Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "<unk>": 2}, unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    writer = Writer(Tokenizer(backend, (), (), "words"), np.array([0, 1], np.int32), 2)
    for token in (0, 1):
        writer.add(token, 0.0)
    assert writer.text == " a b"
