"""Sampled strides: what is drawn, what is left out, and that their figures are those of the whole text."""

import dataclasses

import numpy as np
import pytest

from eval.lm import describe, score
from ralm_jax import ranking
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.score_table import open_scores
from ralm_jax.scoring import PassageTokens
from ralm_jax.settings import QuerySettings, StrideSettings, WindowSettings
from ralm_jax.text import Text
from ralm_jax.windows import make_schedule
from retrieval.bm25 import build_index
from retrieval.corpus import Passage, Passages
from retrieval.overlap import shared_spans
from retrieval.query import retrieve
from retrieval.table import open_retrieval
from tests import tiny
from train.collect import collect, sample_strides, touched

STRIDES, QUERIES, WINDOWS = StrideSettings(64, 8), QuerySettings(k=3, query_length=8), WindowSettings(4, 24)
SETTINGS = {"strides": STRIDES, "queries": QUERIES, "windows": WINDOWS}


@pytest.fixture(scope="module")
def text():
    return Text(tiny.text(900), "training text")


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.tokenizer()


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    rows = (Passage(row["id"], row["title"], row["text"]) for row in tiny.passages(40))
    return build_index(rows, str(tmp_path_factory.mktemp("index") / "index"))


def sample(text, tokenizer, examples, seed=0, without=()):
    _, offsets = tokenizer.encode_with_offsets(text.content)
    return sample_strides(text, offsets, examples, seed, without, STRIDES, QUERIES)


class TestSample:
    def test_strides_are_drawn_once_in_order_and_by_the_seed(self, text, tokenizer):
        some, same, other = (sample(text, tokenizer, 20, seed).schedule for seed in (1, 1, 2))
        assert len(some) == 21
        assert some.targets[0] == 0
        assert (np.diff(some.targets) > 0).all()
        np.testing.assert_array_equal(some.targets, same.targets)
        assert some.targets.tolist() != other.targets.tolist()
        np.testing.assert_array_equal(some.ends[1:] - some.targets[1:], 8)
        np.testing.assert_array_equal((some.targets[1:] - 64) % 8, 0)

    def test_more_than_there_are(self, text, tokenizer, caplog):
        found = sample(text, tokenizer, 10_000)
        assert len(found.schedule) - 1 == found.strides == 105
        assert "has 105 strides to learn from, not 10000" in caplog.text

    def test_a_text_of_one_window(self, tokenizer):
        with pytest.raises(RalmError, match="no stride to learn from: 0 after the first window"):
            sample(Text(tiny.text(60), "short"), tokenizer, 5)

    def test_what_an_evaluated_text_has_is_left_out(self, text, tokenizer):
        words = text.content.split()
        copied = Text("Another text " + " ".join(words[200:230]).upper() + ", and more", "evaluated")
        found = sample(text, tokenizer, 10_000, without=[Text(tiny.text(300, seed=9), "unlike"), copied])
        _, offsets = tokenizer.encode_with_offsets(text.content)
        kept = [text.content[offsets[b - 8, 0] : offsets[e - 1, 1]] for b, e in
                zip(found.schedule.targets[1:], found.schedule.ends[1:], strict=True)]  # fmt: skip
        inside = set(words[200:230]) - set(words[:200]) - set(words[230:])
        assert not any(inside & set(part.split()) for part in kept)
        assert 0 < found.left_out < found.strides
        # 30 words and 29 spaces, met by queries and targets of 16 tokens at every eighth
        assert found.left_out in (8, 9, 10)

    def test_a_negative_seed(self, text, tokenizer):
        with pytest.raises(UsageError, match="seed must be at least 0, not -1"):
            sample(text, tokenizer, 5, seed=-1)

    def test_all_left_out(self, text, tokenizer):
        with pytest.raises(RalmError, match="all of them in the texts to be left out"):
            sample(text, tokenizer, 5, without=[text])


class TestSharedSpans:
    TEXT = "zero one two three four five six seven"

    def spans(self, others, run=3):
        return [self.TEXT[a:b] for a, b in shared_spans(self.TEXT, others, run)]

    def test_every_run_with_its_place(self):
        assert self.spans(["x Two, three FOUR! five y"]) == ["two three four", "three four five"]
        assert self.spans(["one two", "three four"]) == []
        assert self.spans(["five six seven", "zero one two"]) == ["zero one two", "five six seven"]
        assert shared_spans("", ["one two three"], 3).shape == (0, 2)

    def test_which_places_they_touch(self):
        spans = np.array([[10, 20], [15, 25], [40, 50]])
        first, last = np.array([[0, 10], [0, 11], [24, 30], [25, 40], [49, 60], [50, 60], [0, 60]]).T
        assert touched(first, last, spans).tolist() == [False, True, True, False, True, False, True]
        assert not touched(first, last, spans[:0]).any()


@pytest.fixture(scope="module")
def collected(tmp_path_factory, text, tokenizer, index):
    folder = tmp_path_factory.mktemp("collected")
    found = collect(text, tiny.reader(tiny.GPT2), tokenizer, index, str(folder), examples=20, seed=3, **SETTINGS)
    return folder, found.schedule


def test_examples_are_the_whole_texts_strides(tmp_path, collected, text, tokenizer, index):
    """The same passages and the same log-probabilities as where all strides are retrieved for and scored."""
    folder, schedule = collected
    whole = retrieve(index, text, tokenizer, str(tmp_path / "r"), strides=STRIDES, queries=QUERIES)
    reader = tiny.reader(tiny.GPT2)
    scores = score(
        text,
        reader,
        tokenizer,
        str(tmp_path / "s"),
        strides=STRIDES,
        windows=WINDOWS,
        retrieved=(whole, index.passages),
    )
    which = np.searchsorted(whole.begins, schedule.targets)
    table, some = open_retrieval(str(folder / "retrieval")), open_scores(str(folder / "scores"))
    np.testing.assert_array_equal(table.rows, whole.rows[which])
    np.testing.assert_array_equal(table.begins, schedule.targets)
    np.testing.assert_allclose(some.target, scores.target[which[1:] - 1], atol=1e-5)
    np.testing.assert_allclose(some.past, scores.past[which[1:] - 1], atol=1e-5)
    assert ranking.oracle(some).tolist() == ranking.oracle(scores)[which[1:] - 1].tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"windows": WindowSettings(4, 24, passages_in_window=2)}, "leave --passages-in-window out"),
        ({"windows": WindowSettings(4, 24, block=16)}, "leave --block out"),
        ({"windows": WindowSettings(60)}, "no room beside stride 8 and past 60"),
        ({"strides": StrideSettings(300, 8)}, "a window of 300 is longer than the 256 positions"),
    ],
)
def test_what_cannot_be_scored_is_refused_before_retrieval(tmp_path, text, tokenizer, index, changes, message):
    with pytest.raises(UsageError, match=message):
        collect(text, tiny.reader(tiny.GPT2), tokenizer, index, str(tmp_path), examples=5, **SETTINGS | changes)
    assert not any(tmp_path.iterdir())


def test_foreign_tokens_are_refused_before_retrieval(tmp_path, text, tokenizer, index):
    small = tiny.reader(dataclasses.replace(tiny.GPT2, vocab_size=20))
    with pytest.raises(RalmError, match=r"gives token \d+, the reader random knows 20"):
        collect(text, small, tokenizer, index, str(tmp_path), examples=5, **SETTINGS)
    assert not any(tmp_path.iterdir())


def test_denominators_are_of_what_was_scored(collected, text):
    folder, _ = collected
    about = open_scores(str(folder / "scores")).about
    assert about["tokens"] == 64 + 20 * 8
    assert about["words"] == 32 + 20 * 4


def test_overlap_is_of_what_was_scored(text, tokenizer, monkeypatch):
    """Only the sampled strides' words count, and few passages are read at once."""
    monkeypatch.setattr("eval.lm.PASSAGES_AT_ONCE", 2)
    words, read = text.content.split(), []
    schedule = make_schedule(900, STRIDES).only(np.array([20, 60]))
    copied = " ".join(words[90:130])  # 108 to 111 are the twentieth stride
    passages = Passages.of([Passage(str(n), "", copied if n == 3 else tiny.text(40, n + 1)) for n in range(5)])

    def contents(rows):
        read.append(len(rows))
        return passages.contents(rows)

    encode = PassageTokens(contents, tokenizer, 24, specials=False)
    _, offsets = tokenizer.encode_with_offsets(text.content)
    rows = np.arange(6).reshape(2, 3) - 1
    about = describe(text, offsets, schedule, rows, passages, encode)
    assert about["overlap"] == 4 / (32 + 4 + 4)
    assert (about["passages"], about["passages_truncated"], read) == (5, 5, [2, 2, 1])


def test_an_interrupted_collection_goes_on(tmp_path, collected, text, tokenizer, index):
    folder, _ = collected
    options = {"examples": 20, "seed": 3, **SETTINGS}
    reader = tiny.reader(tiny.GPT2)
    collect(text, reader, tokenizer, index, str(tmp_path), **options)
    lost = next((tmp_path / "scores" / "log_probs" / "c").rglob("0"))
    lost.unlink() if lost.is_file() else next(file for file in lost.rglob("*") if file.is_file()).unlink()
    with pytest.raises(UsageError, match="--resume"):
        collect(text, reader, tokenizer, index, str(tmp_path), **options)
    collect(text, reader, tokenizer, index, str(tmp_path), if_exists="resume", **options)
    here, there = (open_scores(str(root / "scores")) for root in (tmp_path, folder))
    np.testing.assert_array_equal(here.target, there.target)
    with pytest.raises(RalmError, match="sample_sha256"):
        collect(text, reader, tokenizer, index, str(tmp_path), if_exists="resume", **options | {"seed": 4})
