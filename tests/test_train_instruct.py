"""Instruction tuning: what is learned of a conversation, the blend, and the command."""

import dataclasses
import json
from functools import partial

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ralm_jax.cli import main
from ralm_jax.errors import RalmError
from ralm_jax.reader import load_reader
from ralm_jax.sharding import make_mesh
from ralm_jax.tokenizer import Tokenizer
from tests import tiny
from train.instruct import Conversation, blend, divide, encode, encode_chat, read_conversation, read_source
from train.windows import make_windows

CONFIG = dataclasses.replace(tiny.LLAMA, num_layers=1, max_positions=64)
END = 2
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TWO = Conversation("be du", "fa fe", (("da de", "ka ke"), ("do", "lo")))


def text(conversation):
    return "".join(prompt + answer for prompt, answer in conversation.texts())


def chat_tokenizer(template=CHATML, **named):
    """Bytes, and the special tokens of ChatML."""
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    pieces = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(special)
    return Tokenizer(backend, (0,) if named else (), (), "chat", template, tuple(named.items()))


class TestConversations:
    def test_the_template(self):
        expected = "System: be du\n\nfa fe\n\nUser: da de\n\nAssistant: ka ke\n\nUser: do\n\nAssistant: lo"
        assert text(TWO) == expected
        assert text(Conversation("", "", (("da", "ka"),))) == "User: da\n\nAssistant: ka"

    def test_rows(self):
        turns = [("user", "da de"), ("assistant", "ka ke"), ("user", "do"), ("assistant", "lo")]
        messages = [{"role": role, "content": content} for role, content in turns]
        assert read_conversation({"system": "be du", "context": "fa fe", "messages": messages}, "f:1") == TWO
        system = {"role": "system", "content": "be du"}
        assert read_conversation({"context": "fa fe", "messages": [system, *messages]}, "f:1") == TWO
        assert read_conversation({"question": "da", "answer": "ka"}, "f:1").turns == (("da", "ka"),)

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ("da", "an object with a text 'system'"),
            ({"question": "da"}, "an object with a text 'answer'"),
            ({"question": "da", "answer": 3}, "an object with a text 'answer'"),
            ({"messages": "da"}, "'messages' is no list"),
            ({"messages": []}, "must be of user and assistant in turn"),
            ({"messages": [{"role": "user", "content": "da"}]}, "must be of user and assistant in turn"),
            ({"messages": [{"role": "assistant", "content": "da"}] * 2}, "must be of user and assistant in turn"),
            ({"messages": ["da"]}, "an object with a text 'role'"),
        ],
    )
    def test_what_is_no_conversation(self, row, message):
        with pytest.raises(RalmError, match=rf"f:1: .*{message}"):
            read_conversation(row, "f:1")

    @pytest.mark.parametrize("bos", [True, False])
    def test_answers_and_their_ends_are_learned_and_nothing_else(self, bos):
        tokenizer = tiny.tokenizer(bos=bos)
        tokens, learned = encode(TWO, tokenizer, END)
        first, second = (prompt for prompt, _ in TWO.texts())
        expected = [
            *((token, False) for token in (*tokenizer.prefix, *tokenizer.encode(first))),
            *((token, True) for token in (*tokenizer.encode(" ka ke"), END)),
            *((token, False) for token in tokenizer.encode(second)),
            *((token, True) for token in (*tokenizer.encode(" lo"), END)),
        ]
        assert [*tokens] == [token for token, _ in expected]
        assert [*learned] == [answer for _, answer in expected[1:]]

    def test_a_token_over_the_join_is_learned(self):
        """Byte-level: the answer's first token has the space in front of it."""
        tokenizer = tiny.trimming_tokenizer()
        tokens, learned = encode(Conversation("", "", (("da", "ka"),)), tokenizer, 1)
        assert tokenizer.decode(tokens[1:][learned]) == " ka</s>"

    def test_a_label_is_weighed_where_it_is_predicted(self):
        """Of two conversations in a window."""
        one, other = (encode(found, tiny.tokenizer(bos=True), END) for found in (TWO, Conversation("", "", TWO.turns)))
        (windows,) = make_windows([[one, other]], 64, together=True)
        batch, border, end = windows(0), len(one.learned), len(one.learned) + len(other.learned)
        np.testing.assert_array_equal(batch.tokens[:end], [*one.tokens[:-1], *other.tokens[:-1]])
        np.testing.assert_array_equal(
            batch.labels[batch.weight > 0], [*one.tokens[1:][one.learned], *other.tokens[1:][other.learned]]
        )
        assert batch.weight[end:].sum() == 0
        assert [*batch.documents] == [1] * border + [2] * (end - border) + [0] * (64 - end)


class TestChatTemplate:
    def test_what_is_read_and_what_is_learned(self):
        tokenizer = chat_tokenizer()
        tokens, learned = encode_chat(TWO, tokenizer)
        turns = [("system", "be du"), ("user", "fa fe\n\nda de"), ("assistant", "ka ke"), ("user", "do")]
        expected = [f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in [*turns, ("assistant", "lo")]]
        assert tokenizer.decode(tokens) == "".join(expected)
        assert tokenizer.decode(tokens[1:][learned]) == "ka ke<|im_end|>lo<|im_end|>"
        assert not learned[-1]  # the line break

    def test_bos_stands_in_front_and_the_template_s_own_inside(self):
        """As LLaMA 2's, whose answer begins with a space."""
        template = (
            "{% for m in messages %}{{ bos_token + '[' + m.content + ']' if m.role == 'user' else "
            "' ' + m.content + ' ' + eos_token }}{% endfor %}"
        )
        tokenizer = chat_tokenizer(template, bos_token="<s>", eos_token="</s>")
        tokens, learned = encode_chat(Conversation("", "", TWO.turns), tokenizer)
        assert tokenizer.decode(tokens) == "<s>[da de] ka ke </s><s>[do] lo </s>"
        assert tokenizer.decode(tokens[1:][learned]) == " ka ke </s> lo </s>"

    def test_as_transformers(self):
        transformers = pytest.importorskip("transformers")
        tokenizer = chat_tokenizer()
        theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend, chat_template=CHATML)
        for conversation in (TWO, Conversation("", "", (("da  ", " ka\n"),))):
            expected = theirs.apply_chat_template(
                conversation.messages(), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            tokens, learned = encode_chat(conversation, tokenizer)
            assert [*tokens] == expected["input_ids"]
            assert [*learned] == [mask == 1 for mask in expected["assistant_masks"][1:]]

    def test_a_template_that_changes_what_was_said(self):
        template = "{% for m in messages %}{{ m.content if loop.last or m.role == 'user' else '…' }}{% endfor %}"
        assert encode_chat(Conversation("", "", (("da", "ka"),)), chat_tokenizer(template)).learned.sum() == 2
        with pytest.raises(RalmError, match="chat: the chat template rewrites earlier turns and cannot be learned"):
            encode_chat(TWO, chat_tokenizer(template))


def rows_of(path, count, seed):
    rng = np.random.default_rng(seed)
    rows = [{"question": str(a), "answer": str(b)} for a, b in rng.choice(tiny.WORDS, (count, 2))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def source(path, length=64):
    return read_source(str(path), partial(encode, tokenizer=tiny.tokenizer(), end=END), length)


def test_what_has_no_room_is_counted(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"question": "da", "answer": "ka"}, {"question": "da", "answer": tiny.text(99)}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pieces, left_out = source(path)
    assert (len(pieces), left_out) == (1, 1)
    assert len(pieces[0].learned) == 8
    assert source(path, 8)[1] == 1
    with pytest.raises(RalmError, match="none of its 2 conversations has room in 7 tokens"):
        source(path, 7)


def test_the_blend_has_its_shares_and_goes_on_where_it_stopped(tmp_path):
    paths = [rows_of(tmp_path / f"{seed}.jsonl", count, seed) for seed, count in enumerate((5, 40))]
    sources = make_windows([source(path)[0] for path in paths], 24, together=True)
    assert all(1 < len(windows) < len(windows.pieces) for windows in sources)
    straight = [*blend(sources, [0.75, 0.25], 8, 0, 0, 10)]
    own = {tuple(sources[0](row).labels) for row in range(len(sources[0]))}
    assert len(straight) == 10
    assert sum(tuple(labels) in own for batch in straight for labels in batch.labels) == pytest.approx(60, abs=2)
    later = [*blend(sources, [0.75, 0.25], 8, 0, 6, 10)]
    for left, right in zip(straight[6:], later, strict=True):
        for one, other in zip(left, right, strict=True):
            np.testing.assert_array_equal(one, other)


def test_the_last_are_held_out():
    assert divide([*range(40)], 0.1) == ([*range(36)], [*range(36, 40)])
    assert divide([0, 1], 0.1) == ([0], [1])
    assert divide([0], 0.9) == ([0], [])
    assert divide([0, 1], 0.0) == ([0, 1], [])


@pytest.fixture
def ralm(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(*options):
        code = 0
        try:
            main(["train", "instruct", *map(str, options)])
        except SystemExit as stopped:
            code = stopped.code
        return code, capsys.readouterr()

    return run


@pytest.fixture
def command(tmp_path):
    tiny.edit_config(tiny.save_model(tmp_path / "llama", CONFIG, bos=True), eos_token_id=END)
    data = [rows_of(tmp_path / f"{seed}.jsonl", 20, seed) for seed in range(2)]
    return ["--model", tmp_path / "llama", "--data", *data, "--out", "out", "--steps", 4, "--batch-size", 8, "--mesh",
            "data=1", "--learning-rate", 1e-2, "--held-out", 0.1, "--check-every", 4]  # fmt: skip


def test_what_is_refused(tmp_path, ralm, command):
    for options, code, message in (
        (["--weights", 1], 2, "--weights must be 2 numbers above 0"),
        (["--template", "chat"], 2, "llama: has no chat template"),
        (["--window", 65], 2, "--window 65 is more than the 64 positions"),
        (["--model", tiny.save_model(tmp_path / "endless", CONFIG)], 1, "has no eos_token_id"),
    ):
        found, told = ralm(*command, *options)
        assert (found, told.err.count("\n")) == (code, 1), told.err
        assert message in told.err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "filled"),
    [
        (["--weights", 3, 1], "in 3 windows, 15.6% of them padding"),
        (["--no-pack", "--template", "chat"], "in 18 windows, 93.8% of them padding"),
    ],
    ids=["packed", "in a chat"],
)
def test_it_learns_the_answers(tmp_path, ralm, command, options, filled):
    template = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": template}
    (tmp_path / "llama" / "tokenizer_config.json").write_text(json.dumps(about))
    code, told = ralm(*command, *options)
    assert code == 0, told.err
    assert f"0.jsonl: 18 of 20 conversations to train on, {filled}; 0 more are longer than 64 tokens" in told.out
    losses = [float(line.split("held_out_loss ")[1].split(",")[0]) for line in told.out.splitlines() if "held_" in line]
    assert losses[-1] < losses[0]
    loaded, init = (load_reader(str(folder), mesh=make_mesh(data=1)) for folder in ("out/model", "llama"))
    assert (loaded.config, loaded.ends) == (init.config, (END,))
