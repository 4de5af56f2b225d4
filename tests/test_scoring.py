"""Scoring against full logits, and what must never change a number: batches, buckets, devices, a kill."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from eval.lm import check_retrieved, score
from ralm_jax import ranking
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.score_table import open_scores
from ralm_jax.scoring import PassageTokens, Scorer, chunk_strides, label_log_probs
from ralm_jax.settings import QuerySettings, StrideSettings, WindowSettings
from ralm_jax.sharding import make_mesh
from ralm_jax.text import Text
from ralm_jax.tokenizer import Tokenizer
from ralm_jax.windows import make_schedule
from retrieval.bm25 import build_index
from retrieval.corpus import Passage, Passages
from retrieval.query import retrieve
from retrieval.table import RetrievalTable
from tests import tiny

STRIDES = StrideSettings(window=64, stride=4)
STRIDE3 = StrideSettings(window=64, stride=3)
WINDOWS = WindowSettings(past=8, passage_tokens=20)
K = 3


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def reader(request):
    return tiny.reader(tiny.READERS[request.param])


@pytest.fixture(scope="module")
def bare():
    return tiny.tokenizer()


@pytest.fixture(scope="module")
def with_bos():
    return tiny.tokenizer(bos=True)


def retrieved(tokens, strides=STRIDES, k=K, seed=0):
    """A table with gaps: some strides have fewer passages than k, or none."""
    schedule = make_schedule(tokens, strides)
    passages = Passages.of([Passage(row["id"], row["title"], row["text"]) for row in tiny.passages(30)])
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 30, (len(schedule), k))
    rows[np.arange(k)[None, :] >= rng.integers(0, k + 1, len(schedule))[:, None]] = -1
    rows[0] = -1
    return RetrievalTable(schedule.targets, schedule.ends, rows, rows * 0.0, {}, {}, "table"), passages


def run(tmp_path, reader, tokenizer, *, strides=STRIDES, windows=WINDOWS, tokens=131, name="scores", **options):
    options.setdefault("retrieved", retrieved(tokens, replace(strides, limit_strides=None)))
    options.setdefault("k", K)
    text = Text(tiny.text(tokens), "text.txt")
    return score(text, reader, tokenizer, str(tmp_path / name), strides=strides, windows=windows, **options)


def brute_force(reader, tokenizer, windows, tokens, table, passages):
    """Log-probabilities by the protocol, one unpadded window at a time, from all logits; where strides share windows,
    each begins half a block, less half a stride, before that of the block's last stride does."""
    ids = tokenizer.encode(tiny.text(tokens)).tolist()
    schedule = make_schedule(tokens, STRIDES)
    margin = ((windows.block or STRIDES.stride) - STRIDES.stride) // 2
    bos = list(tokenizer.prefix) if windows.bos == "every-window" else []

    def log_probs(context, labels):
        logits = np.asarray(reader.logits(np.array([context], np.int32)))[0].astype(np.float64)
        logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        return [logits[len(context) - len(labels) + i, label] for i, label in enumerate(labels)]

    first = log_probs(bos + ids[: schedule.ends[0] - 1], ids[1 : schedule.ends[0]])
    rest = {}
    for j in range(1, len(schedule)):
        last = min(j + -j % windows.block_strides(STRIDES), len(schedule) - 1)
        start, target, end = schedule.starts[last] - margin, schedule.targets[j], schedule.ends[j]
        for i in range(1 + table.k):
            window = ids[max(0, start) : end]
            if i:
                row = table.rows[j, i - 1]
                if row < 0:
                    continue
                passage = tokenizer.encode(passages.contents([row])[0]).tolist()
                if windows.bos == "passage":
                    limit = windows.passage_tokens - len(tokenizer.prefix) - len(tokenizer.suffix)
                    passage = [*tokenizer.prefix, *passage[:limit], *tokenizer.suffix]
                passage = passage[: windows.passage_tokens]
                window = [*passage, *ids[max(0, start + len(passage)) : end]]
            labels = ids[target - windows.past : end]
            rest[j - 1, i] = log_probs(bos + window[:-1], labels)
    return first, rest


@pytest.mark.parametrize(
    ("bos", "adds_bos", "block"),
    [
        ("every-window", False, None),
        ("every-window", True, None),
        ("passage", False, None),
        ("passage", True, None),
        ("every-window", True, 16),
        ("passage", True, 8),
    ],
)
def test_against_full_logits(tmp_path, reader, bare, with_bos, bos, adds_bos, block):
    tokenizer = with_bos if adds_bos else bare
    windows = replace(WINDOWS, bos=bos, block=block)
    table, passages = retrieved(131)
    scores = run(tmp_path, reader, tokenizer, windows=windows, retrieved=(table, passages), progress=False)
    first, rest = brute_force(reader, tokenizer, windows, 131, table, passages)
    np.testing.assert_allclose(scores.first_window, first, atol=1e-5)
    for j in range(len(scores.target)):
        for i in range(1 + K):
            values = np.concatenate([scores.past[j, i], scores.target[j, i]])
            if (j, i) not in rest:
                assert np.isnan(values).all()
                continue
            expected = rest[j, i]
            np.testing.assert_allclose(values[: len(expected)], expected, atol=1e-5)
            assert np.isnan(values[len(expected) :]).all()
    np.testing.assert_array_equal(scores.passages, table.rows[1:])


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_batch_size_changes_nothing(tmp_path, reader, bare, batch_size):
    one, other = (run(tmp_path, reader, bare, name=str(n), batch_size=n) for n in (16, batch_size))
    np.testing.assert_allclose(one.target, other.target, atol=1e-5)
    np.testing.assert_allclose(one.past, other.past, atol=1e-5)


class TestShared:
    """Strides of a block that have a passage in common share its window."""

    def test_a_block_of_one_stride_is_exact_mode_to_the_bit(self, tmp_path, reader, bare):
        exact = run(tmp_path, reader, bare, name="exact")
        block = run(tmp_path, reader, bare, name="block", windows=replace(WINDOWS, block=STRIDES.stride))
        for name in ("first_window", "past", "target"):
            np.testing.assert_array_equal(getattr(exact, name), getattr(block, name))
        assert exact.settings == block.settings

    def test_fewer_windows(self, tmp_path, reader, bare, monkeypatch):
        table, passages = retrieved(131)
        table.rows[1:] = [3, 5, 7]
        scored, dispatch = [], Scorer.dispatch
        monkeypatch.setattr(Scorer, "dispatch", lambda self, w: (scored.append(len(w)), dispatch(self, w))[1])
        options = {"retrieved": (table, passages), "windows": replace(WINDOWS, block=16), "batch_size": 1}
        shared = run(tmp_path, reader, bare, **options)
        assert sum(scored) == 1 + 5 * (1 + K)  # 17 strides are five blocks
        assert shared.settings["block"] == 16
        assert shared.settings["block_margin"] == 6  # half of 16 - 4
        assert not np.isnan(shared.target[:-1]).any()

    def test_a_killed_run_goes_on(self, tmp_path, reader, bare, monkeypatch):
        options = {"tokens": 431, "batch_size": 1, "windows": replace(WINDOWS, block=16)}
        whole = run(tmp_path, reader, bare, name="whole", **options)
        TestResume.interrupt(None, monkeypatch, after=30)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, reader, bare, **options)
        monkeypatch.undo()
        again = run(tmp_path, reader, bare, if_exists="resume", **options | {"batch_size": 3})
        np.testing.assert_allclose(whole.target, again.target, atol=1e-5)

    def test_no_window_is_longer_than_the_readers_positions(self, tmp_path, bare):
        few = tiny.reader(replace(tiny.GPT2, max_positions=66))
        shared = run(tmp_path, few, bare, windows=replace(WINDOWS, block=16))
        assert shared.settings["block_margin"] == 2

    @pytest.mark.parametrize(
        ("block", "message"),
        [
            (6, "a block of 6 tokens is no whole number of strides of 4"),
            (2, "a block of 2 tokens is no whole number of strides of 4"),
            (56, "a window of 64 has no room beside a block of 56 and past 8"),
        ],
    )
    def test_blocks_that_do_not_fit(self, tmp_path, reader, bare, block, message):
        with pytest.raises(UsageError, match=message):
            run(tmp_path, reader, bare, windows=replace(WINDOWS, block=block))

    def test_exact_scores_are_not_resumed_as_shared_ones(self, tmp_path, reader, bare):
        run(tmp_path, reader, bare)
        with pytest.raises(RalmError, match="cannot be resumed: block: None there, 8 now"):
            run(tmp_path, reader, bare, windows=replace(WINDOWS, block=8), if_exists="resume")


def test_all_devices_give_what_one_gives(tmp_path, bare):
    alone = run(tmp_path, tiny.reader(tiny.LLAMA), bare, name="one")
    for data, fsdp, tensor in ((8, 1, 1), (2, 2, 2)):
        spread = tiny.on(tiny.reader(tiny.LLAMA), make_mesh(data, fsdp, tensor))
        assert Scorer(spread, 64, 12, 5).batch_size % (data * fsdp) == 0
        scores = run(tmp_path, spread, bare, name=f"{data}{fsdp}{tensor}", batch_size=5)
        np.testing.assert_allclose(scores.target, alone.target, atol=1e-5)


def test_bfloat16_is_close_and_stored_in_float32(tmp_path, bare):
    reader = tiny.reader(tiny.LLAMA)
    half = replace(reader, state=jax.tree.map(lambda x: x.astype(jnp.bfloat16), reader.state), dtype="bfloat16")
    exact, close = run(tmp_path, reader, bare, name="a"), run(tmp_path, half, bare, name="b")
    assert close.target.dtype == np.float32
    np.testing.assert_allclose(close.target, exact.target, atol=0.1)
    assert not np.array_equal(close.target, exact.target, equal_nan=True)
    assert close.settings["dtype"] == "bfloat16"


def test_a_batch_is_as_large_as_memory_allows(monkeypatch, reader):
    taken = Scorer(reader, 64, 12, 16).temporary_bytes(64, 12)
    for free, expected in ((None, 64), (10 * taken, 64), (1.5 * taken, 16), (1, 1)):
        monkeypatch.setattr("ralm_jax.scoring.free_bytes", lambda free=free: free)
        assert Scorer(reader, 64, 12).batch_size == expected


def test_one_compilation_a_shape(tmp_path, reader, bare):
    """However many windows and chunks: one for the first window, one for all others; a second text adds none."""
    label_log_probs.clear_cache()
    run(tmp_path, reader, bare, tokens=200, name="a", batch_size=4)
    assert label_log_probs._cache_size() == 2
    run(tmp_path, reader, bare, tokens=331, name="b", batch_size=4)
    assert label_log_probs._cache_size() == 2


def test_logits_are_formed_a_few_rows_at_a_time():
    """What the head takes grows with the rows at once, not with the window or the labels; the numbers stay."""
    reader = tiny.reader(replace(tiny.GPT2, vocab_size=50_000))
    rng = np.random.default_rng(0)
    ids, labels = (rng.integers(0, 50_000, (2, n)).astype(np.int32) for n in (64, 40))
    positions = np.broadcast_to(np.arange(20, 60, dtype=np.int32), (2, 40))

    def step(rows):
        return label_log_probs.lower(reader.graphdef, reader.state, ids, positions, labels, rows).compile()

    few, all_of_them = step(7), step(40)
    arrays = (reader.state, ids, positions, labels)
    np.testing.assert_allclose(few(*arrays), all_of_them(*arrays), atol=1e-5)
    logits = 4 * 2 * 50_000  # bytes a row
    assert few.memory_analysis().temp_size_in_bytes < 3 * 7 * logits
    assert all_of_them.memory_analysis().temp_size_in_bytes >= 40 * logits


@pytest.mark.parametrize("tokens", [2, 3, 5, 63, 64, 65])
def test_short_texts(tmp_path, reader, bare, tokens):
    scores = run(tmp_path, reader, bare, tokens=tokens, retrieved=None)
    assert len(scores.first_window) == min(tokens, 64) - 1
    scored = len(scores.first_window) + int((~np.isnan(scores.target[:, 0])).sum())
    assert scored == tokens - 1


@pytest.mark.parametrize("tokens", [0, 1])
def test_texts_with_nothing_to_score(tmp_path, reader, bare, tokens):
    with pytest.raises(RalmError, match=r"text\.txt: \d token; scoring needs two at least"):
        run(tmp_path, reader, bare, tokens=tokens, retrieved=None)


def test_limit_strides(tmp_path, reader, bare):
    whole = run(tmp_path, reader, bare, name="whole")
    some = run(tmp_path, reader, bare, name="some", strides=replace(STRIDES, limit_strides=4))
    np.testing.assert_allclose(some.target, whole.target[:3], atol=1e-5)
    assert some.about["tokens"] == 64 + 3 * 4
    assert some.about["words"] == tiny.text(64 + 3 * 4).count(" ")
    assert whole.about["words"] == tiny.text(131).count(" ")


def test_a_tokenizer_of_another_reader(tmp_path, bare):
    small = tiny.reader(replace(tiny.GPT2, vocab_size=50))
    with pytest.raises(RalmError, match="name the reader's own tokenizer with --tokenizer"):
        run(tmp_path, small, bare)


def test_a_window_longer_than_the_reader(tmp_path, bare, caplog):
    strides = StrideSettings(window=300)
    with pytest.raises(UsageError, match="longer than the 256 positions of random; use --window 256"):
        run(tmp_path, tiny.reader(tiny.GPT2), bare, strides=strides, tokens=310, retrieved=None)
    run(tmp_path, tiny.reader(tiny.LLAMA), bare, strides=strides, tokens=310, retrieved=None)
    assert "expect worse predictions" in caplog.text


def test_a_reader_that_gives_nan(tmp_path, bare):
    reader = tiny.reader(tiny.GPT2)
    broken = replace(reader, state=jax.tree.map(lambda x: x * np.float32("nan"), reader.state))
    with pytest.raises(RalmError, match="gives NaN in float32"):
        run(tmp_path, broken, bare)


def test_a_passage_with_a_token_that_the_reader_does_not_have(tmp_path, bare):
    small = tiny.reader(replace(tiny.GPT2, vocab_size=90))
    text = Text(" ".join(tiny.WORDS[:20] * 5), "text.txt")
    passages = Passages.of([Passage("0", "", tiny.WORDS[-1])])
    schedule = make_schedule(len(bare.encode(text.content)), STRIDES)
    rows = np.zeros((len(schedule), 1), np.int64)
    table = RetrievalTable(schedule.targets, schedule.ends, rows, rows * 0.0, {}, {}, "table")
    with pytest.raises(RalmError, match=r"a window has token 10\d, the reader random knows 90"):
        score(text, small, bare, str(tmp_path / "s"), strides=STRIDES, windows=WINDOWS, retrieved=(table, passages))


def test_passages_are_cut_and_counted(with_bos):
    long = " ".join(tiny.WORDS)
    encode = PassageTokens(lambda rows: [long] * len(rows), with_bos, 20, specials=True)
    first, none = encode(np.array([3, -1]))
    assert first[0] == 1
    assert first[-1] == 2
    assert (len(first), len(none)) == (20, 0)
    assert encode.truncated == {3}
    plain = PassageTokens(lambda rows: [long] * len(rows), with_bos, 20, specials=False)(np.array([0]))[0]
    assert len(plain) == 20
    assert not {1, 2} & set(plain.tolist())


class TestSeveralPassagesInAWindow:
    def test_the_best_is_nearest_to_the_prefix(self, tmp_path, reader, bare):
        table, passages = retrieved(131, k=4)
        table.rows[1:] = [[3, 5, 7, 2]] * (len(table.rows) - 1)
        table.rows[2] = [4, -1, -1, -1]
        windows = replace(WINDOWS, passages_in_window=2, passage_tokens=10)
        scores = run(tmp_path, reader, bare, retrieved=(table, passages), k=4, windows=windows)
        assert scores.passages.tolist()[:2] == [[3, 7], [4, -1]]
        assert scores.settings["passages_in_window"] == 2
        schedule, ids = make_schedule(131, STRIDES), bare.encode(tiny.text(131)).tolist()
        for j, candidate, rows in ((1, 1, [5, 3]), (1, 2, [2, 7]), (2, 1, [4])):
            start, end = schedule.starts[j], schedule.ends[j]
            front = [token for row in rows for token in bare.encode(passages.contents([row])[0]).tolist()[:10]]
            logits = np.asarray(reader.logits(np.array([front + ids[start + len(front) : end]], np.int32)))[0]
            expected = jax.nn.log_softmax(logits[-5:-1])[np.arange(4), ids[end - 4 : end]]
            np.testing.assert_allclose(scores.target[j - 1, candidate], expected, atol=1e-5)

    def test_each_is_cut_to_its_share(self):
        windows = WindowSettings(past=8, passages_in_window=3)
        assert windows.passage_limit(StrideSettings(64, 4)) == (64 - 4 - 8) // 3
        with pytest.raises(UsageError, match="has no room for 60 passages beside stride 4 and past 8"):
            replace(windows, passages_in_window=60).passage_limit(StrideSettings(64, 4))

    def test_more_than_there_are(self, tmp_path, reader, bare):
        with pytest.raises(UsageError, match="4 passages in a window need --k 4 at least, not 3"):
            run(tmp_path, reader, bare, windows=replace(WINDOWS, passages_in_window=4))


@pytest.mark.parametrize("limit", [1, 2])
def test_special_tokens_do_not_outgrow_a_passage(with_bos, limit):
    with pytest.raises(UsageError, match=f"passages of {limit} tokens have no room"):
        PassageTokens(lambda rows: [], with_bos, limit, specials=True)


def test_a_passage_that_would_fill_the_window_leaves_target_and_past(tmp_path, reader, bare, caplog):
    strides, windows = StrideSettings(window=20), WindowSettings(past=8)
    table, _ = retrieved(60, strides)
    passages = Passages.of([Passage(str(i), "", " ".join(tiny.WORDS)) for i in range(30)])
    scores = run(tmp_path, reader, bare, strides=strides, windows=windows, tokens=60, retrieved=(table, passages))
    assert scores.about["passages_truncated"] == scores.about["passages"]
    assert "passages were cut to 8 tokens" in caplog.text


def test_fewer_passages_than_asked_for_are_told(tmp_path, reader, bare, caplog):
    assert run(tmp_path, reader, bare, k=9).settings["k"] == K
    assert "table has 3 passages a stride; scoring these, not 9" in caplog.text


class TestStridesOfAnotherTokenizer:
    """A reader that cuts the text into " word" scores the strides of one that cuts it into " " and "word"."""

    @pytest.fixture
    def table(self, tmp_path, bare):
        text = Text(tiny.text(131), "text.txt")
        index = build_index([Passage(*row.values()) for row in tiny.passages(30)], str(tmp_path / "index"))
        settings = {"strides": STRIDE3, "queries": QuerySettings(k=K)}
        return retrieve(index, text, bare, str(tmp_path / "retrieval"), **settings), index.passages

    @pytest.fixture
    def whole_words(self):
        words = ["?", *tiny.WORDS, *(f" {word}" for word in tiny.WORDS)]
        made = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "?"))
        made.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r" ?[^ ]+"), "isolated")
        made.decoder = decoders.Fuse()
        return Tokenizer(made, (), (), "words")

    def test_every_token_stands_in_the_stride_that_it_ends_in(self, tmp_path, table, whole_words):
        reader = tiny.reader(replace(tiny.GPT2, vocab_size=256))
        windows = replace(WINDOWS, past=4)
        scores = run(tmp_path, reader, whole_words, retrieved=table, windows=windows, strides_of_retrieval=True)
        retrieval, passages = table
        text, ids = tiny.text(131), whole_words.encode(tiny.text(131)).tolist()
        ends = whole_words.encode_with_offsets(text)[1][:, 1]
        np.testing.assert_array_equal(scores.begins, retrieval.characters[1:, 0])
        inside = 0
        for j, (begin, end) in enumerate(retrieval.characters[1:]):
            mine = np.flatnonzero((ends > begin) & (ends <= end))
            inside += begin not in ends
            assert (~np.isnan(scores.target[j, 0])).sum() == len(mine)
            passage = whole_words.encode(passages.contents([retrieval.rows[j + 1, 0]])[0]).tolist()[:20]
            context = ids[max(0, mine[-1] + 1 + len(passage) - 64) : mine[-1] + 1]
            logits = np.asarray(reader.logits(np.array([passage + context], np.int32)))[0]
            expected = jax.nn.log_softmax(logits[-len(mine) - 5 : -1])[
                np.arange(len(mine) + 4), ids[mine[0] - 4 : mine[-1] + 1]
            ]
            found = np.concatenate([scores.past[j, 1], scores.target[j, 1]])[: len(mine) + 4]
            np.testing.assert_allclose(found, expected, atol=1e-5)
        assert inside > 10  # beginnings that fall between " " and "word"

    def test_it_reranks(self, tmp_path, reader, bare, table, whole_words):
        own = run(tmp_path, reader, bare, retrieved=table, strides=STRIDE3, name="own")
        other = tiny.reader(replace(tiny.GPT2, vocab_size=256))
        windows = replace(WINDOWS, past=4)
        ranker = run(
            tmp_path, other, whole_words, retrieved=table, windows=windows, strides_of_retrieval=True, name="ranker"
        )
        chosen = ranking.zero_shot_by(own, ranker, 4)
        np.testing.assert_array_equal(chosen, 1 + ranker.past[:, 1:].sum(axis=2).argmax(axis=1))
        assert (chosen != ranking.zero_shot(own, 8)).any()

    def test_the_same_tokenizer_gives_the_same(self, tmp_path, reader, bare, table):
        settings = {"retrieved": table, "strides": STRIDE3}
        plain = run(tmp_path, reader, bare, name="plain", **settings)
        aligned = run(tmp_path, reader, bare, name="aligned", strides_of_retrieval=True, **settings)
        np.testing.assert_allclose(aligned.target[:-1], plain.target[:-1], atol=1e-5)
        assert plain.about["tokens"] == aligned.about["tokens"]
        assert plain.about["words"] == aligned.about["words"]

    def test_refusals(self, tmp_path, reader, bare, table, whole_words):
        text, other = Text(tiny.text(131), "text.txt"), replace(bare, origin="other")
        with pytest.raises(RalmError, match="tokenizer of tiny, not of words; add --strides-of-retrieval to score"):
            check_retrieved(table, text, np.zeros(0, np.int32), whole_words, make_schedule(131, STRIDE3), STRIDE3)
        with pytest.raises(UsageError, match="strides of another tokenizer cannot share windows; leave --block out"):
            run(tmp_path, reader, bare, windows=replace(WINDOWS, block=16), strides_of_retrieval=True)
        with pytest.raises(UsageError, match="strides of the retrieval: name it with --retrieval"):
            run(tmp_path, reader, other, retrieved=None, strides_of_retrieval=True)
        with pytest.raises(RalmError, match="does not say at which characters its strides begin"):
            run(tmp_path, reader, bare, strides_of_retrieval=True)
        wide = replace(WINDOWS, past=64)
        with pytest.raises(UsageError, match="its second stride begins at token 64; use a smaller --past"):
            run(tmp_path, reader, bare, retrieved=table, windows=wide, strides_of_retrieval=True)


class TestNoPassageOnce:
    """Scores without passage are copied into another table to the bit, and not computed."""

    def test_copied(self, tmp_path, reader, bare, monkeypatch):
        table, passages = retrieved(131)
        table.rows[5:20] = -1  # whole chunks without any passage
        options = {"retrieved": (table, passages), "batch_size": 2}
        whole = run(tmp_path, reader, bare, name="whole", **options)
        plain = run(tmp_path, reader, bare, name="plain", retrieved=None, windows=replace(WINDOWS, passage_tokens=9))
        plain.target[3, 0, 0] = plain.first_window[7] = -0.125  # nothing that the reader says
        counted, dispatch = [], Scorer.dispatch
        monkeypatch.setattr(Scorer, "dispatch", lambda self, w: (counted.append(len(w)), dispatch(self, w))[1])
        copied = run(tmp_path, reader, bare, name="copied", plain=plain, **options)
        for name in ("first_window", "past", "target"):
            found, expected = getattr(copied, name), getattr(plain, name)
            np.testing.assert_array_equal(found[:, 0] if found.ndim > 1 else found, expected.squeeze())
        for name in ("past", "target"):
            np.testing.assert_allclose(getattr(copied, name)[:, 1:], getattr(whole, name)[:, 1:], atol=1e-5)
        passages_scored = int(whole.num_passages.sum())
        assert passages_scored <= sum(counted) <= passages_scored + len(counted)
        assert (copied.settings, copied.about) == (whole.settings, whole.about)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"strides": replace(STRIDES, limit_strides=5)}, "strides: 18 there, 5 now"),
            ({"windows": replace(WINDOWS, past=4)}, "past: 8 there, 4 now"),
            ({"windows": replace(WINDOWS, bos="passage")}, "bos: 'every-window' there, 'passage' now"),
            ({"tokens": 130}, "text_sha256: "),
        ],
    )
    def test_of_something_else(self, tmp_path, reader, bare, options, message):
        plain = run(tmp_path, reader, bare, name="plain", retrieved=None)
        with pytest.raises(RalmError, match=f"not of this reader and these windows: {message}"):
            run(tmp_path, reader, bare, plain=plain, **options)

    def test_of_another_reader(self, tmp_path, reader, bare):
        plain = run(tmp_path, reader, bare, name="plain", retrieved=None)
        with pytest.raises(RalmError, match="weights_sha256: 'random 0' there, 'other' now"):
            run(tmp_path, replace(reader, fingerprint="other"), bare, plain=plain)


def test_the_first_k_are_a_table_of_k(tmp_path, reader, bare):
    table, passages = retrieved(131)
    shorter = replace(table, rows=table.rows[:, :2], scores=table.scores[:, :2])
    whole = run(tmp_path, reader, bare, name="3", retrieved=(table, passages)).first_k(2)
    fewer = run(tmp_path, reader, bare, name="2", retrieved=(shorter, passages), k=2)
    np.testing.assert_array_equal(whole.passages, fewer.passages)
    np.testing.assert_allclose(whole.target, fewer.target, atol=1e-5)
    np.testing.assert_allclose(whole.past, fewer.past, atol=1e-5)
    for policy in (ranking.first, ranking.random, partial(ranking.zero_shot, tokens=8), ranking.oracle):
        np.testing.assert_array_equal(policy(whole), policy(fewer))
    assert whole.settings["k"] == 2
    assert (whole.num_passages <= 2).all()


def test_where_each_token_ends_is_kept(tmp_path, reader, bare):
    scores = run(tmp_path, reader, bare, strides=replace(STRIDES, limit_strides=3))
    text = tiny.text(131)
    assert len(scores.token_ends) == 64 + 2 * 4
    starts = [0, *scores.token_ends[:-1]]
    assert [text[a:b] for a, b in zip(starts, scores.token_ends, strict=True)] == [
        bare.decode([i]) for i in bare.encode(text)[: len(starts)]
    ]


def test_chunks_are_whole_batches_where_they_can():
    assert chunk_strides(17 * 100, 100, 16, 1) * 17 % 16 == 0
    assert chunk_strides(100, 100, 4, 1) == 32
    assert chunk_strides(1700, 100, 1, 1) == 1
    assert chunk_strides(0, 0, 4, 1) == 4
    assert chunk_strides(0, 60_000, 4, 1) == 60_000
    assert chunk_strides(60, 100, 4, 16) == 64  # whole blocks, eight batches at least


class TestResume:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"strides": replace(STRIDES, stride=8)}, "stride: 4 there, 8 now"),
            ({"windows": replace(WINDOWS, past=4)}, "past: 8 there, 4 now"),
            ({"windows": replace(WINDOWS, passage_tokens=9)}, "passage_tokens: 20 there, 9 now"),
            ({"windows": replace(WINDOWS, bos="passage")}, "bos: 'every-window' there, 'passage' now"),
            ({"tokens": 102}, "text_sha256: "),
        ],
    )
    def test_refused_with_other_settings(self, tmp_path, reader, bare, options, message):
        run(tmp_path, reader, bare, tokens=100, retrieved=None)
        with pytest.raises(RalmError, match=f"cannot be resumed: .*{message}"):
            run(tmp_path, reader, bare, retrieved=None, if_exists="resume", **({"tokens": 100} | options))

    def test_refused_with_other_weights(self, tmp_path, reader, bare):
        run(tmp_path, reader, bare, tokens=100, retrieved=None)
        with pytest.raises(RalmError, match="weights_sha256: 'random 0' there, 'other' now"):
            run(tmp_path, replace(reader, fingerprint="other"), bare, tokens=100, retrieved=None, if_exists="resume")

    def test_refused_with_other_passages(self, tmp_path, reader, bare):
        run(tmp_path, reader, bare)
        with pytest.raises(RalmError, match="cannot be resumed: rows_sha256: "):
            run(tmp_path, reader, bare, retrieved=retrieved(131, seed=1), if_exists="resume")

    def test_refused_with_the_same_rows_of_another_file(self, tmp_path, reader, bare):
        table, passages = retrieved(131)
        run(tmp_path, reader, bare, retrieved=(replace(table, settings={"json": "a"}), passages))
        other = replace(table, settings={"json": "b"})
        with pytest.raises(RalmError, match=r"cannot be resumed: retrieval\.json: 'a' there, 'b' now"):
            run(tmp_path, reader, bare, retrieved=(other, passages), if_exists="resume")

    def test_a_finished_table_is_left_as_it_is(self, tmp_path, reader, bare, monkeypatch):
        first = run(tmp_path, reader, bare)
        monkeypatch.setattr(Scorer, "dispatch", lambda *_: pytest.fail("scored again"))
        again = run(tmp_path, reader, bare, if_exists="resume")
        np.testing.assert_array_equal(first.target, again.target)
        assert first.about == again.about

    def test_a_limit_that_is_the_whole_text_is_no_other_setting(self, tmp_path, reader, bare):
        first = run(tmp_path, reader, bare)
        strides = replace(STRIDES, limit_strides=1 + len(first.target))
        run(tmp_path, reader, bare, strides=strides, if_exists="resume")

    def test_another_batch_size_goes_on(self, tmp_path, reader, bare, monkeypatch):
        whole = run(tmp_path, reader, bare, name="whole", batch_size=2)
        self.interrupt(monkeypatch, after=6)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, reader, bare, batch_size=2)
        monkeypatch.undo()
        again = run(tmp_path, reader, bare, batch_size=5, if_exists="resume")
        np.testing.assert_allclose(whole.target, again.target, atol=1e-5)

    def test_ctrl_c_loses_no_finished_chunk(self, tmp_path, reader, bare, monkeypatch):
        whole = run(tmp_path, reader, bare, name="whole", batch_size=2)
        self.interrupt(monkeypatch, after=12)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, reader, bare, batch_size=2)
        with pytest.raises(RalmError, match="not complete"):
            open_scores(str(tmp_path / "scores"))
        monkeypatch.undo()
        count = self.count(monkeypatch)
        again = run(tmp_path, reader, bare, batch_size=2, if_exists="resume")
        assert 0 < len(count) < 30
        np.testing.assert_array_equal(whole.target, again.target)
        np.testing.assert_array_equal(whole.past, again.past)

    def interrupt(self, monkeypatch, after):
        calls, dispatch = [], Scorer.dispatch

        def interrupted(self, windows):
            calls.append(1)
            if len(calls) > after:
                raise KeyboardInterrupt
            return dispatch(self, windows)

        monkeypatch.setattr(Scorer, "dispatch", interrupted)

    def count(self, monkeypatch):
        calls, dispatch = [], Scorer.dispatch
        monkeypatch.setattr(Scorer, "dispatch", lambda self, w: (calls.append(1), dispatch(self, w))[1])
        return calls


def test_killed_and_resumed_is_the_identical_table(tmp_path, tiny_model):
    """kill -9 in the middle of a run of the real command."""
    text = tmp_path / "text.txt"
    text.write_text(tiny.text(2500))
    command = [sys.executable, "-m", "ralm_jax", "score", "--model", str(tiny_model), "--text", str(text),
               "--window", "64", "--stride", "2", "--past", "8", "--batch-size", "8"]  # fmt: skip
    environment = {**os.environ, "XLA_FLAGS": ""}
    chunks = tmp_path / "killed" / "log_probs" / "c"
    deadline = time.monotonic() + 120
    with subprocess.Popen([*command, "--out", str(tmp_path / "killed")], env=environment) as killed:
        try:
            while len(list(chunks.glob("*/0/0"))) < 3:
                assert killed.poll() is None, "finished before it could be killed"
                assert time.monotonic() < deadline
                time.sleep(0.002)
        finally:
            killed.kill()
    with pytest.raises(RalmError, match="not complete"):
        open_scores(str(tmp_path / "killed"))
    subprocess.run([*command, "--out", str(tmp_path / "killed"), "--resume"], env=environment, check=True)
    subprocess.run([*command, "--out", str(tmp_path / "whole")], env=environment, check=True)
    killed_scores, whole = (open_scores(str(tmp_path / name)) for name in ("killed", "whole"))
    for name in ("first_window", "past", "target", "passages"):
        np.testing.assert_array_equal(getattr(killed_scores, name), getattr(whole, name))
    assert killed_scores.settings == whole.settings
