"""Scoring against full logits, and what must never change a number: batches, buckets, devices, a kill."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import jax
import numpy as np
import pytest

from eval.lm import score
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.reader import random_reader
from ralm_jax.score_table import open_scores
from ralm_jax.scoring import PassageTokens, Scorer, chunk_strides, label_log_probs
from ralm_jax.sharding import make_mesh
from ralm_jax.text import Text
from ralm_jax.tokenizer import plain
from ralm_jax.windows import Protocol, make_schedule
from retrieval.corpus import Passage, Passages
from retrieval.table import RetrievalTable
from tests import tiny

PROTOCOL = Protocol(window=64, stride=4, past=8, passage_tokens=20)
K = 3


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def reader(request):
    return tiny.reader(tiny.READERS[request.param])


@pytest.fixture(scope="module")
def bare():
    return plain(tiny.tokenizer(), (), (), "tiny")


@pytest.fixture(scope="module")
def with_bos():
    return plain(tiny.tokenizer(bos=True), (1,), (2,), "tiny")


def retrieved(tokens, protocol, k=K, seed=0):
    """A table with gaps: some strides have fewer passages than k, or none."""
    schedule = make_schedule(tokens, protocol.window, protocol.stride)
    passages = Passages.of([Passage(row["id"], row["title"], row["text"]) for row in tiny.passages(30)])
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 30, (len(schedule), k))
    rows[np.arange(k)[None, :] >= rng.integers(0, k + 1, len(schedule))[:, None]] = -1
    rows[0] = -1
    return RetrievalTable(schedule.targets, schedule.ends, rows, rows * 0.0, {}, {}, "table"), passages


def run(tmp_path, reader, tokenizer, protocol=PROTOCOL, tokens=131, name="scores", **options):
    options.setdefault("retrieved", retrieved(tokens, protocol))
    options.setdefault("k", K)
    text = Text(tiny.text(tokens), "text.txt")
    return score(text, reader, tokenizer, protocol, str(tmp_path / name), **options)


def brute_force(reader, tokenizer, protocol, tokens, table, passages):
    """Log-probabilities by the protocol, one unpadded window at a time, from all logits."""
    ids = tokenizer.encode(tiny.text(tokens)).tolist()
    schedule = make_schedule(tokens, protocol.window, protocol.stride)
    bos = list(tokenizer.prefix) if protocol.bos == "every-window" else []

    def log_probs(context, labels):
        logits = np.asarray(reader.logits(np.array([context], np.int32)))[0].astype(np.float64)
        logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        return [logits[len(context) - len(labels) + i, label] for i, label in enumerate(labels)]

    first = log_probs(bos + ids[: schedule.ends[0] - 1], ids[1 : schedule.ends[0]])
    rest = {}
    for j in range(1, len(schedule)):
        start, target, end = schedule.starts[j], schedule.targets[j], schedule.ends[j]
        for i in range(1 + table.k):
            window = ids[start:end]
            if i:
                row = table.rows[j, i - 1]
                if row < 0:
                    continue
                passage = tokenizer.encode(passages.contents([row])[0]).tolist()
                if protocol.bos == "passage":
                    limit = protocol.passage_tokens - len(tokenizer.prefix) - len(tokenizer.suffix)
                    passage = [*tokenizer.prefix, *passage[:limit], *tokenizer.suffix]
                passage = passage[: protocol.passage_tokens]
                window[: len(passage)] = passage
            labels = ids[target - protocol.past : end]
            rest[j - 1, i] = log_probs(bos + window[:-1], labels)
    return first, rest


@pytest.mark.parametrize("bos", ["every-window", "passage"])
@pytest.mark.parametrize("adds_bos", [False, True])
def test_against_full_logits(tmp_path, reader, bare, with_bos, bos, adds_bos):
    tokenizer = with_bos if adds_bos else bare
    protocol = replace(PROTOCOL, bos=bos)
    table, passages = retrieved(131, protocol)
    scores = run(tmp_path, reader, tokenizer, protocol, retrieved=(table, passages), progress=False)
    first, rest = brute_force(reader, tokenizer, protocol, 131, table, passages)
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


def test_all_devices_give_what_one_gives(tmp_path, bare):
    alone = run(tmp_path, tiny.reader(tiny.LLAMA), bare, name="one")
    for data, fsdp, tensor in ((8, 1, 1), (2, 2, 2)):
        mesh = make_mesh(data, fsdp, tensor)
        spread = random_reader(tiny.LLAMA, mesh=mesh)
        state = jax.device_put(tiny.reader(tiny.LLAMA).state, jax.tree.map(lambda x: x.sharding, spread.state))
        scorer = Scorer(replace(spread, state=state), 64, 5)
        assert scorer.batch_size % (data * fsdp) == 0
        scores = run(tmp_path, replace(spread, state=state), bare, name=f"{data}{fsdp}{tensor}", batch_size=5)
        np.testing.assert_allclose(scores.target, alone.target, atol=1e-5)


def test_one_compilation_a_shape(tmp_path, reader, bare):
    """However many windows and chunks: one for the first window, one for all others; a second text adds none."""
    label_log_probs.clear_cache()
    run(tmp_path, reader, bare, tokens=200, name="a", batch_size=4)
    assert label_log_probs._cache_size() == 2
    run(tmp_path, reader, bare, tokens=331, name="b", batch_size=4)
    assert label_log_probs._cache_size() == 2


def test_logits_are_formed_a_few_rows_at_a_time(reader):
    """No array of the vocabulary's width has more rows than asked for, and none has all positions."""
    scorer = Scorer(reader, 64, 2)
    ids = np.zeros((2, 64), np.int32)
    jaxpr = jax.make_jaxpr(label_log_probs, static_argnums=(0, 5))(
        reader.graphdef, reader.state, ids, ids[:, :40], ids[:, :40], 16
    )
    wide = []

    def visit(inner):
        for equation in inner.eqns:
            wide.extend(v.aval.shape for v in equation.outvars if reader.config.vocab_size in v.aval.shape[1:])
            for value in equation.params.values():
                for nested in jax.tree.leaves(value, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
                    if hasattr(nested, "jaxpr"):
                        visit(nested.jaxpr)
                    elif hasattr(nested, "eqns"):
                        visit(nested)

    visit(jaxpr.jaxpr)
    logits = [shape for shape in wide if len(shape) == 3]
    assert logits
    assert max(shape[1] for shape in logits) == 16
    assert scorer._rows(2) >= 16


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
    some = run(tmp_path, reader, bare, name="some", limit_strides=4)
    np.testing.assert_allclose(some.target, whole.target[:3], atol=1e-5)
    assert some.about["tokens"] == 64 + 3 * 4
    assert some.about["words"] == tiny.text(64 + 3 * 4).count(" ")
    assert whole.about["words"] == tiny.text(131).count(" ")


def test_a_tokenizer_of_another_reader(tmp_path, bare):
    small = tiny.reader(replace(tiny.GPT2, vocab_size=50))
    with pytest.raises(RalmError, match="name the reader's own tokenizer with --tokenizer"):
        run(tmp_path, small, bare)


def test_a_window_longer_than_the_reader(tmp_path, bare, caplog):
    protocol = replace(PROTOCOL, window=300)
    with pytest.raises(UsageError, match="longer than the 256 positions of random; use --window 256"):
        run(tmp_path, tiny.reader(tiny.GPT2), bare, protocol, tokens=310, retrieved=None)
    run(tmp_path, tiny.reader(tiny.LLAMA), bare, protocol, tokens=310, retrieved=None)
    assert "expect worse predictions" in caplog.text


def test_a_reader_that_gives_nan(tmp_path, bare):
    reader = tiny.reader(tiny.GPT2)
    broken = replace(reader, state=jax.tree.map(lambda x: x * np.float32("nan"), reader.state))
    with pytest.raises(RalmError, match="gives NaN in float32"):
        run(tmp_path, broken, bare)


def test_passages_are_cut_and_counted(bare, with_bos):
    long = " ".join(tiny.WORDS)
    encode = PassageTokens(lambda rows: [long] * len(rows), with_bos, replace(PROTOCOL, bos="passage"))
    first, none = encode(np.array([3, -1]))
    assert first[0] == 1
    assert first[-1] == 2
    assert (len(first), len(none)) == (20, 0)
    assert encode.truncated == {3}
    bare_tokens = PassageTokens(lambda rows: [long] * len(rows), with_bos, PROTOCOL)(np.array([0]))[0]
    assert len(bare_tokens) == 20
    assert not {1, 2} & set(bare_tokens.tolist())


def test_a_passage_that_would_fill_the_window_leaves_target_and_past(tmp_path, reader, bare, caplog):
    protocol = Protocol(window=20, stride=4, past=8, passage_tokens=256)
    table, _ = retrieved(60, protocol)
    passages = Passages.of([Passage(str(i), "", " ".join(tiny.WORDS)) for i in range(30)])
    scores = run(tmp_path, reader, bare, protocol, tokens=60, retrieved=(table, passages))
    assert scores.about["passages_truncated"] == scores.about["passages"]
    assert "passages were cut to 8 tokens" in caplog.text


def test_chunks_are_whole_batches_where_they_can():
    assert chunk_strides(17, 16) * 17 % 16 == 0
    assert chunk_strides(1, 4) == 32
    assert chunk_strides(17, 1) == 1


class TestResume:
    def test_refused_with_other_settings(self, tmp_path, reader, bare):
        run(tmp_path, reader, bare, tokens=100, retrieved=None)
        for protocol, name in ((replace(PROTOCOL, stride=8), "stride"), (replace(PROTOCOL, past=4), "past")):
            with pytest.raises(RalmError, match=f"cannot be resumed.*{name}: "):
                run(tmp_path, reader, bare, protocol, tokens=100, retrieved=None, resume=True)

    def test_refused_with_other_weights(self, tmp_path, reader, bare):
        run(tmp_path, reader, bare, tokens=100, retrieved=None)
        with pytest.raises(RalmError, match="weights: 'random 0' there, 'other' now"):
            run(tmp_path, replace(reader, fingerprint="other"), bare, tokens=100, retrieved=None, resume=True)

    def test_refused_with_other_passages(self, tmp_path, reader, bare):
        run(tmp_path, reader, bare)
        with pytest.raises(RalmError, match="cannot be resumed: rows: "):
            run(tmp_path, reader, bare, retrieved=retrieved(131, PROTOCOL, seed=1), resume=True)

    def test_a_finished_table_is_left_as_it_is(self, tmp_path, reader, bare, monkeypatch):
        first = run(tmp_path, reader, bare)
        monkeypatch.setattr(Scorer, "dispatch", lambda *_: pytest.fail("scored again"))
        again = run(tmp_path, reader, bare, resume=True)
        np.testing.assert_array_equal(first.target, again.target)
        assert first.about == again.about

    def test_another_batch_size_goes_on(self, tmp_path, reader, bare, monkeypatch):
        whole = run(tmp_path, reader, bare, name="whole", batch_size=2)
        self.interrupt(monkeypatch, after=6)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, reader, bare, batch_size=2)
        monkeypatch.undo()
        again = run(tmp_path, reader, bare, batch_size=5, resume=True)
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
        again = run(tmp_path, reader, bare, batch_size=2, resume=True)
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
    killed = subprocess.Popen([*command, "--out", str(tmp_path / "killed")], env=environment)
    chunks = tmp_path / "killed" / "log_probs" / "c"
    deadline = time.monotonic() + 120
    while len(list(chunks.glob("*/0/0"))) < 3:
        assert killed.poll() is None, "finished before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    with pytest.raises(RalmError, match="not complete"):
        open_scores(str(tmp_path / "killed"))
    subprocess.run([*command, "--out", str(tmp_path / "killed"), "--resume"], env=environment, check=True)
    subprocess.run([*command, "--out", str(tmp_path / "whole")], env=environment, check=True)
    killed_scores, whole = (open_scores(str(tmp_path / name)) for name in ("killed", "whole"))
    for name in ("first_window", "past", "target", "passages"):
        np.testing.assert_array_equal(getattr(killed_scores, name), getattr(whole, name))
    assert killed_scores.settings == whole.settings
