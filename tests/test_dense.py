"""Dense indexes: vectors, exact search, shards that resume, and what the commands make of them."""

import gzip
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from ralm_jax import cli
from ralm_jax.encoder import load_encoder, text_vectors
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.settings import QuerySettings, StrideSettings
from ralm_jax.sharding import make_mesh
from ralm_jax.storage import Folder
from ralm_jax.text import Text
from ralm_jax.tokenizer import load_tokenizer
from retrieval import dense, exact
from retrieval.bm25 import build_index
from retrieval.corpus import Passage
from retrieval.dense import DenseIndex, build_dense_index
from retrieval.embedder import load_embedder
from retrieval.exact import ExactSearch
from retrieval.hybrid import fuse
from retrieval.interchange import export_json
from retrieval.query import own_queries, retrieve
from retrieval.retriever import open_index
from tests import tiny
from tests.test_cli import refused

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """The folder of a tiny encoder."""
    return str(tiny.save_encoder(tmp_path_factory.mktemp("encoders") / "passages"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return str(tiny.save_encoder(tmp_path_factory.mktemp("encoders") / "queries", seed=1))


def passages(count, seed=1):
    return [Passage(row["id"], row["title"], row["text"]) for row in tiny.passages(count, seed)]


def build(tmp_path, encoder, rows=40, *, name="index", **options):
    rows = passages(rows) if isinstance(rows, int) else rows
    return build_dense_index(rows, str(tmp_path / name), encoder, **{"pooling": "mean", "progress": False} | options)


@pytest.fixture(scope="module")
def index(encoder, tmp_path_factory):
    return build(tmp_path_factory.mktemp("built"), encoder)


def needs_faiss(backend):
    if backend == "faiss":
        pytest.importorskip("faiss", reason="needs the package faiss-cpu (make test installs it)")


class TestVectors:
    TEXTS = [tiny.text(n, n) for n in (1, 2, 5, 9, 14, 15, 30, 31, 60, 62, 63, 500)]

    def test_a_texts_vector_is_its_own(self, encoder):
        embedder = load_embedder(encoder, pooling="mean")
        together = embedder.embed(self.TEXTS)
        for i, text in enumerate(self.TEXTS):
            np.testing.assert_array_equal(embedder.embed([text])[0], together[i])
        np.testing.assert_array_equal(embedder.embed(self.TEXTS[::-1]), together[::-1])
        assert len(np.unique(together, axis=0)) == len(self.TEXTS)
        assert embedder.embed([]).shape == (0, 32)

    @pytest.mark.slow
    def test_they_are_the_encoders(self, encoder, one_device):
        """By a forward for each text without any padding."""
        plain = load_encoder(encoder, pooling="cls", mesh=one_device)
        tokens = load_tokenizer(encoder).encode_batch(self.TEXTS)
        vectors = load_embedder(encoder, pooling="cls").embed(self.TEXTS)
        for own, vector in zip(tokens, vectors, strict=True):
            alone = plain.embed(np.concatenate([[1], own[:62], [2]]).astype(np.int32)[None])
            np.testing.assert_allclose(vector, alone[0], atol=1e-5)

    def test_devices_change_nothing(self, encoder, one_device):
        one, eight = (load_embedder(encoder, pooling="mean", mesh=mesh) for mesh in (one_device, make_mesh()))
        assert one.settings == eight.settings
        np.testing.assert_allclose(one.embed(self.TEXTS), eight.embed(self.TEXTS), atol=1e-6)

    def test_one_compilation_a_length(self, encoder):
        embedder = load_embedder(encoder, pooling="mean")
        embedder.embed(self.TEXTS)
        before = text_vectors._cache_size()
        embedder.embed(self.TEXTS * 3)
        embedder.embed([tiny.text(n) for n in range(1, 100)])
        assert text_vectors._cache_size() == before

    def test_long_texts_are_counted(self, encoder, tmp_path, caplog):
        rows = [Passage("0", "", tiny.text(62)), Passage("1", "", tiny.text(63)), Passage("2", "", tiny.text(200))]
        built = build(tmp_path, encoder, rows)
        assert "2 of 3 passages were too long for it and were cut" in caplog.text
        built.search([tiny.text(63), tiny.text(5)], 1)
        assert "1 of 2 queries were too long and were cut" in caplog.text

    def test_nan_is_refused(self, encoder, tmp_path):
        broken = tiny.save_encoder(tmp_path / "broken")
        tiny.edit_tensors(broken, lambda t: t["embeddings.LayerNorm.weight"].fill(np.nan))
        with pytest.raises(RalmError, match="the encoder gives NaN in float32"):
            build(tmp_path, str(broken))

    def test_a_tokenizer_of_another_model_is_refused(self, encoder, tmp_path):
        from dataclasses import replace

        small = tiny.save_encoder(tmp_path / "small", replace(tiny.BERT, vocab_size=20))
        with pytest.raises(RalmError, match=r"the tokenizer has a token 10\d, the encoder knows 20"):
            load_embedder(str(small)).embed([tiny.text(200)])


def stored(tmp_path, vectors):
    """`vectors` as an index has them."""
    folder = Folder.create(str(tmp_path / "vectors"), "index", {}, "overwrite")
    array = folder.array("vectors", vectors.shape, (7, vectors.shape[1]), "bfloat16", np.nan)
    array[:] = vectors.astype("bfloat16")
    return folder.stored("vectors")


def reference(vectors, queries, k, allowed):
    """Rows and scores by float64 products of all, sorted."""
    scores = (queries.astype(np.float64) @ vectors.astype("bfloat16").astype(np.float64).T).astype(np.float32)
    scores[:, ~allowed | (vectors == 0).all(axis=1)] = -np.inf
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    best = np.take_along_axis(scores, order, axis=1)
    missing = ((0, 0), (0, k - order.shape[1]))
    rows = np.pad(np.where(best > -np.inf, order, -1), missing, constant_values=-1)
    return rows, np.pad(np.where(best > -np.inf, best, np.float32(0)), missing)


@pytest.mark.parametrize("devices", [1, 8, "faiss"])
class TestExactSearch:
    def search(self, tmp_path, devices, vectors, queries, k, allowed=None):
        needs_faiss(devices)
        mesh = make_mesh(data=2, fsdp=2, tensor=2) if devices == 8 else make_mesh(data=1)
        searcher = ExactSearch(stored(tmp_path, vectors), mesh, "faiss" if devices == "faiss" else "jax")
        allowed = np.ones(len(vectors), bool) if allowed is None else allowed
        found = searcher.search(queries, k, allowed)
        rows, scores = reference(vectors, queries, k, allowed)
        np.testing.assert_array_equal(found.rows, rows)
        np.testing.assert_array_equal(found.scores, scores)
        assert (found.rows.dtype, found.scores.dtype) == (np.int64, np.float32)
        again = searcher.search(queries, k, allowed)
        np.testing.assert_array_equal(again.rows, found.rows)
        return searcher

    @pytest.mark.parametrize("block_bytes", [1 << 28, 1 << 15])
    @pytest.mark.parametrize("kept", [1 << 30, 0])
    def test_is_the_sorted_products(self, tmp_path, devices, block_bytes, kept, monkeypatch):
        monkeypatch.setattr(exact, "BLOCK_BYTES", defaultdict(lambda: block_bytes))
        monkeypatch.setattr(exact, "KEPT_BYTES", defaultdict(lambda: kept))
        rng = np.random.default_rng(0)
        vectors = rng.normal(size=(301, 24)).astype(np.float32)
        vectors[rng.integers(0, 301, 60)] = vectors[5]  # ties
        vectors[[0, 77, 300]] = 0  # no text
        queries = rng.normal(size=(290, 24)).astype(np.float32)
        searcher = self.search(tmp_path, devices, vectors, queries, 10, rng.random(301) < 0.7)
        assert (searcher.block < 301) == (block_bytes < 1 << 20)
        self.search(tmp_path, devices, vectors, queries[:3], 17)

    def test_many_that_float32_cannot_tell_apart(self, tmp_path, devices):
        """More equal vectors than the margin holds, and products that differ by less than their error."""
        rng = np.random.default_rng(1)
        vectors = np.repeat(rng.normal(size=(3, 96)).astype(np.float32), 70, axis=0)[rng.permutation(210)]
        wiggle = rng.choice([0, 2.0**-8], vectors.shape, p=[0.99, 0.01])
        vectors[100:] = vectors[100:] * (1 + wiggle[100:])
        self.search(tmp_path, devices, vectors, rng.normal(size=(5, 96)).astype(np.float32), 4)

    def test_large_numbers_that_cancel(self, tmp_path, devices):
        rng = np.random.default_rng(2)
        vectors = rng.normal(size=(150, 32)).astype(np.float32)
        vectors[:, :16] *= 1000
        vectors[:, 16] = 3e4
        queries = rng.normal(size=(20, 32)).astype(np.float32)
        queries[:, 16] = 1e4
        self.search(tmp_path, devices, vectors, queries, 6)

    def test_edges(self, tmp_path, devices):
        rng = np.random.default_rng(3)
        vectors, queries = rng.normal(size=(5, 8)).astype(np.float32), rng.normal(size=(2, 8)).astype(np.float32)
        self.search(tmp_path, devices, vectors, queries, 16)  # k above the corpus
        self.search(tmp_path, devices, vectors, queries, 16, np.zeros(5, bool))
        self.search(tmp_path, devices, vectors[:1], queries, 3)
        self.search(tmp_path, devices, np.zeros_like(vectors), queries, 3)
        self.search(tmp_path, devices, vectors, np.zeros_like(queries), 3)
        self.search(tmp_path, devices, vectors, queries[:0], 3)
        self.search(tmp_path, devices, -np.abs(vectors), np.abs(queries), 3)  # scores below zero are hits


def test_one_compilation_whatever_is_asked(tmp_path):
    rng = np.random.default_rng(0)
    searcher = ExactSearch(stored(tmp_path, rng.normal(size=(50, 8)).astype(np.float32)), make_mesh())
    ask = lambda count: searcher.search(rng.normal(size=(count, 8)).astype(np.float32), 4, rng.random(50) < 0.9)  # noqa: E731
    ask(1), ask(100)
    before = exact.jax_candidates._cache_size()
    for count in (1, 7, 16, 17, 256, 300, 600):
        ask(count)
    assert exact.jax_candidates._cache_size() == before


def test_without_faiss_one_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(UsageError, match="FAISS is not installed: pip install"):
        ExactSearch(stored(tmp_path, np.ones((3, 4), np.float32)), make_mesh(), "faiss")


class TestIndex:
    def test_passages_find_themselves(self, index):
        """A query that is a passage has its vector, rounding apart."""
        found = index.search(index.passages.contents(range(40)), 3)
        vectors = index.vectors[:].astype(np.float64)
        own = load_embedder(index.about["encoder"], pooling="mean").embed(index.passages.contents(range(40)))
        np.testing.assert_array_equal(found.rows[:, 0], np.argmax(own @ vectors.T, axis=1))
        np.testing.assert_allclose(vectors, own, rtol=2**-8)
        assert index.vectors[:].dtype == "bfloat16"

    def test_two_encoders(self, tmp_path, encoder, other):
        built = build(tmp_path, encoder, query_encoder=other, pooling="cls")
        queries = load_embedder(other, pooling="cls").embed(["ba be", "da"])
        own = load_embedder(encoder, pooling="cls").embed(built.passages.contents(range(40)))
        rows, _ = reference(own, queries, 5, np.ones(40, bool))
        np.testing.assert_array_equal(built.search(["ba be", "da"], 5).rows, rows)
        assert built.settings["encoder"]["sha256"] != built.settings["query_encoder"]["sha256"]

    def test_of_different_dimensions(self, tmp_path, encoder):
        from dataclasses import replace

        wide = tiny.save_encoder(tmp_path / "wide", replace(tiny.BERT, hidden_size=64, head_dim=16))
        with pytest.raises(UsageError, match=r"makes vectors of 64 numbers, .* of 32; they do not belong together"):
            build(tmp_path, encoder, query_encoder=str(wide))
        assert not (tmp_path / "index").exists()

    @pytest.mark.parametrize("backend", ["jax", "faiss"])
    def test_edges(self, tmp_path, encoder, backend):
        needs_faiss(backend)
        rows = [Passage("a", "", "ba be"), Passage("b", "", " \n"), Passage("c", "T", ""), Passage("d", "", "ba be")]
        build(tmp_path, encoder, rows)
        built = open_index(str(tmp_path / "index"), dense_search=backend)
        found = built.search(["ba be", "", " \n", "ta"], 4)
        assert sorted(found.rows[0].tolist()) == [-1, 0, 2, 3]  # a passage without text is never a hit
        assert found.rows[0].tolist().index(0) + 1 == found.rows[0].tolist().index(3)  # equals go to the lower row
        assert (found.rows[1:3] == -1).all()
        assert found.scores[1].tolist() == [0] * 4
        assert (found.rows[3] >= 0).sum() == 3
        assert built.search([], 2).rows.shape == (0, 2)
        with pytest.raises(UsageError, match="k must be at least 1"):
            built.search(["ba"], 0)

    def test_the_top_k_begins_the_top_2k(self, index):
        queries = [tiny.text(9, seed) for seed in range(30)]
        short, long = index.search(queries, 5), index.search(queries, 10)
        np.testing.assert_array_equal(short.rows, long.rows[:, :5])
        np.testing.assert_array_equal(short.scores, long.scores[:, :5])

    def test_excluded_titles_leave_k(self, index):
        titles = frozenset(passage.title for passage in index.passages.rows(range(0, 40, 2)))
        everything = index.search(["ba be bi"], 40).rows[0]
        found = index.search(["ba be bi"], 12, titles).rows[0]
        assert found.tolist() == [row for row in everything if row % 2][:12]

    def test_fingerprints(self, tmp_path, index, encoder):
        assert build(tmp_path, encoder).fingerprint == index.fingerprint
        assert build(tmp_path, encoder, name="b", pooling="cls").fingerprint != index.fingerprint
        assert build(tmp_path, encoder, 39, name="c").fingerprint != index.fingerprint
        words = build_index(passages(40), str(tmp_path / "bm25"), progress=False)
        assert words.about["corpus"] == index.about["corpus"]

    def test_it_is_opened_without_its_encoder(self, tmp_path, other):
        moved = Path(other).rename(tmp_path / "moved")
        build(tmp_path, str(moved))
        moved.rename(other)
        again = open_index(str(tmp_path / "index"))
        assert len(again.passages) == 40
        with pytest.raises(UsageError, match="moved: no such folder"):
            again.search(["ba"], 1)
        tiny.save_encoder(moved, seed=5)
        with pytest.raises(RalmError, match="moved is not the query encoder that the index was made for"):
            again.search(["ba"], 1)

    def test_an_engine_that_is_not_here(self, tmp_path):
        Folder.create(str(tmp_path / "x"), "index", {"engine": "magic"})
        with pytest.raises(RalmError, match="an index of the engine 'magic', which is not here"):
            open_index(str(tmp_path / "x"))


def content(folder):
    """Every file of an index."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def vectors(folder):
    return content(folder / "vectors")


class TestResuming:
    @pytest.fixture(autouse=True)
    def small_shards(self, monkeypatch):
        monkeypatch.setattr(dense, "SHARD", defaultdict(lambda: 16))

    def test_finished_shards_are_kept(self, tmp_path, encoder, monkeypatch):
        build(tmp_path, encoder, 60, name="whole")
        encoded, vectors_of = [], dense.passage_vectors

        def interrupted(embedder, texts):
            if len(encoded) == 2:
                encoded.append(0)
                raise KeyboardInterrupt
            encoded.append(len(texts))
            return vectors_of(embedder, texts)

        monkeypatch.setattr(dense, "passage_vectors", interrupted)
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path, encoder, 60)
        with pytest.raises(RalmError, match=r"not finished, 28 of 60 passages are missing; repeat .* with --resume"):
            open_index(str(tmp_path / "index"))
        with pytest.raises(UsageError, match="add --resume to go on, or --overwrite"):
            build(tmp_path, encoder, 60)
        monkeypatch.setattr(dense, "SHARD", defaultdict(lambda: 30))  # an index keeps the shards that it was made with
        build(tmp_path, encoder, 60, if_exists="resume")
        assert encoded == [16, 16, 0, 16, 12]
        assert content(tmp_path / "index") == content(tmp_path / "whole")
        build(tmp_path, encoder, 60, if_exists="resume")
        assert len(encoded) == 5

    def test_a_lost_shard_is_missed_and_made_again(self, tmp_path, encoder):
        build(tmp_path, encoder, 60)
        whole = content(tmp_path / "index")
        (tmp_path / "index/vectors/c/1/0").unlink()
        with pytest.raises(RalmError, match="16 of 60 passages are missing"):
            open_index(str(tmp_path / "index"))
        build(tmp_path, encoder, 60, if_exists="resume")
        assert content(tmp_path / "index") == whole

    def test_a_damaged_shard(self, tmp_path, encoder):
        build(tmp_path, encoder, 60)
        (tmp_path / "index/vectors/c/1/0").write_bytes(b"x")
        with pytest.raises(RalmError, match="array 'vectors' is damaged"):
            open_index(str(tmp_path / "index")).search(["ba"], 2)

    def test_what_differs_is_not_mixed(self, tmp_path, encoder, other):
        build(tmp_path, encoder, 60)
        whole = content(tmp_path / "index")
        with pytest.raises(RalmError, match="was made from another corpus and cannot be resumed"):
            build(tmp_path, encoder, 59, if_exists="resume")
        for options, message in (
            ({"pooling": "cls"}, "encoder.pooling: 'mean' there, 'cls' now"),
            ({"query_encoder": other}, "query_encoder.sha256: "),
            ({"dtype": "bfloat16"}, "encoder.dtype: "),
        ):
            with pytest.raises(RalmError, match=message):
                build(tmp_path, encoder, 60, if_exists="resume", **options)
        assert content(tmp_path / "index") == whole

    def test_a_corpus_that_breaks_half_way(self, tmp_path, encoder):
        def broken():
            yield from passages(5)
            raise RalmError("c.jsonl:6: broken")

        with pytest.raises(RalmError, match=r"c\.jsonl:6"):
            build(tmp_path, encoder, broken())
        with pytest.raises(RalmError, match="the index is not finished; repeat the command with --resume"):
            open_index(str(tmp_path / "index"))
        build(tmp_path, encoder, 60, if_exists="resume")

    def test_no_passages_leave_no_folder(self, tmp_path, encoder):
        with pytest.raises(RalmError, match="the corpus has no passages"):
            build(tmp_path, encoder, [])
        assert not (tmp_path / "index").exists()

    def test_a_disk_that_is_too_small_is_known_before(self, tmp_path, encoder, monkeypatch):
        said = []
        monkeypatch.setattr("ralm_jax.storage.shutil.disk_usage", lambda path: type("Usage", (), {"free": 3000}))
        with pytest.raises(RalmError, match=r"0\.0 MB are needed and the disk has 0\.0 MB; make room"):
            build(tmp_path, encoder, 60, announce=said.append)
        assert "60 vectors of 32 bfloat16 numbers, 0.0 MB on disk; a search takes" in said[0]

    def test_killed(self, tmp_path, encoder, monkeypatch):
        """kill -9 in the middle of the encoding."""
        monkeypatch.setattr(dense, "SHARD", defaultdict(lambda: 2048))
        tiny.write_corpus(tmp_path / "c.jsonl", 6100)
        command = [sys.executable, "-m", "ralm_jax", "index", "--corpus", "c.jsonl", "--engine", "dense"]
        command += ["--encoder", encoder, "--pooling", "mean", "--out", "index"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
        first, last = (tmp_path / f"index/vectors/c/{i}/0" for i in (0, 2))
        while not first.exists() and process.poll() is None:
            time.sleep(0.002)
        process.kill()
        process.wait()
        assert first.exists()
        assert not last.exists()
        made = first.stat().st_mtime_ns
        build(tmp_path, encoder, 6100, if_exists="resume")
        assert first.stat().st_mtime_ns == made
        build(tmp_path, encoder, 6100, name="whole")
        assert vectors(tmp_path / "index") == vectors(tmp_path / "whole")


class TestQueries:
    def test_lengths_in_the_retrievers_tokens(self):
        """The reader's token is a character, the retriever's a word or a space."""
        import tokenizers

        text = tiny.text(60)
        letters = {c: i for i, c in enumerate(sorted(set(text)))}
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token=" "))
        made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
        reader = type(tiny.tokenizer())(made, (), (), "letters")
        begins = np.arange(0, len(text), 5)
        queries = own_queries(text, begins, 6, reader, tiny.tokenizer())
        words = tiny.tokenizer()
        for begin, query in zip(begins.tolist(), queries, strict=True):
            assert text[:begin].endswith(query)
            whole = [end for _, end in words.encode_with_offsets(text)[1] if end <= begin]
            assert len(words.encode(query)) - (begin not in {0, *whole}) == min(6, len(whole))
        assert queries[0] == ""

    def test_in_a_table(self, tmp_path, index):
        text, tokenizer = Text(tiny.text(300), "text.txt"), tiny.tokenizer()
        options = {"strides": StrideSettings(window=64, stride=4), "progress": False}
        queries = QuerySettings(k=5, query_length=10, query_tokens="retriever")
        table = retrieve(index, text, tokenizer, str(tmp_path / "own"), queries=queries, **options)
        plain = retrieve(
            index, text, tokenizer, str(tmp_path / "plain"), queries=QuerySettings(k=5, query_length=10), **options
        )
        np.testing.assert_array_equal(table.rows, plain.rows)  # here both tokenizers are the same
        assert (table.rows[0] == -1).all()
        assert (table.settings["query_tokens"], plain.settings["query_tokens"]) == ("retriever", "reader")
        export_json(str(tmp_path / "r.json"), table, index.passages, text, tokenizer, index.tokenizer)
        export_json(str(tmp_path / "p.json"), plain, index.passages, text, tokenizer)
        assert (tmp_path / "r.json").read_text() == (tmp_path / "p.json").read_text()

    def test_bm25_has_no_tokens(self, tmp_path):
        words = build_index(passages(5), str(tmp_path / "bm25"), progress=False)
        with pytest.raises(UsageError, match="this retriever has no tokenizer"):
            retrieve(
                words, Text(tiny.text(300), "t"), tiny.tokenizer(), str(tmp_path / "r"), progress=False,
                strides=StrideSettings(window=64), queries=QuerySettings(query_tokens="retriever"),
            )  # fmt: skip
        assert not (tmp_path / "r").exists()


class TestCommands:
    @pytest.fixture
    def place(self, tmp_path, monkeypatch, encoder, tiny_model, text_file, corpus_file):
        (tmp_path / "encoder").symlink_to(encoder)
        (tmp_path / "model").symlink_to(tiny_model)
        monkeypatch.chdir(tmp_path)

    INDEX = ["index", "--corpus", "corpus.jsonl", "--out", "index"]

    def test_from_corpus_to_scores(self, place, capsys):
        cli.main([*self.INDEX, "--engine", "dense", "--encoder", "encoder"])
        printed = capsys.readouterr().out
        assert "index: 40 vectors of 32 bfloat16 numbers, 0.0 MB on disk; a search takes" in printed
        assert "index: 40 passages, vectors of 32 numbers" in printed
        sizes = ["--window", "64", "--stride", "16", "--k", "3"]
        retrieve = ["retrieve", "--index", "index", "--text", "text.txt", "--tokenizer", "model", *sizes]
        cli.main([*retrieve, "--out", "retrieval", "--query-tokens", "retriever", "--export-json", "r.json"])
        assert "retrieval: 35 strides, 2.9 passages each, 1 without" in capsys.readouterr().out
        cli.main(["score", "--model", "model", "--text", "text.txt", "--retrieval", "retrieval", "--out", "s", *sizes])
        cli.main(["search", "--index", "index", "--query", "ba be", "--k", "2", "--json", "hits.json"])
        (row,) = [json.loads(line) for line in Path("hits.json").read_text().splitlines()]
        assert len(row["hits"]) == 2
        assert row["hits"][0]["score"] >= row["hits"][1]["score"]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--engine", "dense"], "--engine dense: name a model with --encoder"),
            (["--encoder", "encoder"], "--encoder and its options are for --engine dense"),
            (["--engine", "lucene", "--resume"], "a Lucene index is made in one go"),
            (["--engine", "dense", "--encoder", "./none"], "./none: no such folder"),
            (["--engine", "dense", "--encoder", "encoder", "--out", "gs://x/y"], "must lie on a local disk"),
        ],
    )
    def test_refusals(self, place, capsys, options, message):
        code, line = refused(capsys, *self.INDEX, *options)
        assert (code, message in line) == (2, True)
        assert not Path("index").exists()


@pytest.mark.slow
def test_minilm_on_natural_questions(shared, minilm, tmp_path, capsys):
    """Question to gold passage: the same hits on one device, on eight, and by FAISS; more of them than BM25's."""
    with gzip.open(shared / "data/qa/nq_gold_ctx_dpr_format.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    keys = [(row["ctxs"][0]["title"], row["ctxs"][0]["text"]) for row in rows]
    numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}  # questions share some passages
    golds = [Passage(str(i), *key) for key, i in numbers.items()]
    gold = np.array([numbers[key] for key in keys])
    questions = [row["question"] for row in rows]
    where = str(tmp_path / "index")
    build_dense_index(golds, where, str(minilm), progress=False)
    found = {"8 devices": DenseIndex.open(where).search(questions, 5)}
    found["1 device"] = DenseIndex.open(where, mesh=make_mesh(data=1)).search(questions, 5)
    if importlib.util.find_spec("faiss"):
        found["FAISS"] = DenseIndex.open(where, search_by="faiss").search(questions, 5)
    for name, hits in found.items():
        np.testing.assert_array_equal(hits.rows, found["1 device"].rows, err_msg=name)
        np.testing.assert_array_equal(hits.scores, found["1 device"].scores, err_msg=name)
    words = build_index(golds, str(tmp_path / "bm25"), progress=False)
    both = fuse([where, str(tmp_path / "bm25")], str(tmp_path / "both")).search(questions, 5)
    recalls = {}
    for name, hits in (("BM25", words.search(questions, 5)), ("MiniLM", found["1 device"]), ("fused", both)):
        hit = hits.rows == gold[:, None]
        recalls[name] = hit[:, 0].mean(), hit.any(axis=1).mean()
    with capsys.disabled():
        print("\n" + "\n".join(f"{name:8} top 1 {one:.1%}, top 5 {five:.1%}" for name, (one, five) in recalls.items()))
    assert min(recalls["MiniLM"], recalls["fused"]) > recalls["BM25"]
