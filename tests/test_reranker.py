"""RankingTables: a reranker's scores of every passage, resumed where they stopped; the commands about them."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from eval.lm import open_retrieved
from ralm_jax.convert import convert
from ralm_jax.cross_encoder import compiled_scores, load_cross_encoder
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.score_table import open_scores
from ralm_jax.settings import QuerySettings, RerankSettings, StrideSettings
from ralm_jax.sharding import make_mesh
from ralm_jax.storage import Folder
from ralm_jax.text import Text
from ralm_jax.tokenizer import load_tokenizer
from retrieval import reranker
from retrieval.bm25 import build_index
from retrieval.corpus import Passage
from retrieval.interchange import export_json
from retrieval.query import retrieve
from retrieval.ranking_table import open_ranking
from retrieval.reranker import rerank
from tests import tiny
from tests.test_cli import SIZES, ralm, refused

TEXT = Text(tiny.text(300), "text.txt")
SETTINGS = RerankSettings(prefix_tokens=20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a tiny cross-encoder."""
    return str(tiny.save_cross_encoder(tmp_path_factory.mktemp("rerankers") / "bert"))


@pytest.fixture(scope="module")
def model(folder):
    return load_cross_encoder(folder)


@pytest.fixture(scope="module")
def retrieved(tmp_path_factory):
    """A RetrievalTable of 60 strides and 5 passages, and the passages, some of which are long."""
    root = tmp_path_factory.mktemp("retrieved")
    rows = [Passage(row["id"], row["title"], row["text"]) for row in tiny.passages(30)]
    rows += [Passage(str(n), "", tiny.text(80, n)) for n in range(30, 34)]
    index = build_index(rows, str(root / "index"), progress=False)
    retrieve(
        index, TEXT, tiny.tokenizer(), str(root / "table"), strides=StrideSettings(64, 4),
        queries=QuerySettings(k=5, query_length=10), progress=False,
    )  # fmt: skip
    return open_retrieved(str(root / "table"))


def run(tmp_path, folder, model, retrieved, **options):
    options = {"settings": SETTINGS, "progress": False} | options
    text, tokenizer = options.pop("text", TEXT), options.pop("tokenizer", tiny.tokenizer())
    own = load_tokenizer(folder)
    return rerank(model, own, *retrieved, text, tokenizer, str(tmp_path / "ranking"), **options)


def test_scores_are_those_of_each_pair_alone(tmp_path, folder, model, retrieved, one_device):
    """By a forward for each pair without any padding."""
    made = run(tmp_path, folder, model, retrieved)
    table, passages = retrieved
    alone, own = load_cross_encoder(folder, mesh=one_device), load_tokenizer(folder)
    tokens = tiny.tokenizer().encode(TEXT.content)
    np.testing.assert_array_equal(made.rows, table.rows)
    assert np.isneginf(made.scores[table.rows < 0]).all()
    assert np.isneginf(made.scores[0]).all()
    cut = 0
    for j, i in [(1, 0), (1, 4), (7, 2), (30, 1), (59, 0), *np.argwhere(table.rows >= 30)[:5].tolist()]:
        prefix = tokens[: table.begins[j]][-20:]  # the two tokenizers differ in special tokens only
        passage = own.encode(passages.contents([table.rows[j, i]])[0])
        cut += len(passage) > 41
        ids = np.concatenate([[1], prefix, [2], passage[:41], [2]]).astype(np.int32)[None]
        types = (np.arange(ids.shape[1]) >= 22).astype(np.int32)[None]
        expected = alone.scores(ids, types, np.ones(ids.shape, bool))[0]
        np.testing.assert_allclose(made.scores[j, i], expected, atol=1e-4)
    assert cut
    assert made.scores[table.rows >= 0].std() > 0.01


def test_devices_and_batches_change_nothing(tmp_path, folder, model, retrieved):
    made = run(tmp_path, folder, model, retrieved)
    one = load_cross_encoder(folder, mesh=make_mesh(data=1))
    for options in ({"batch_size": 1}, {"batch_size": 7}, {}):
        other = run(tmp_path, folder, one, retrieved, if_exists="overwrite", **options)
        np.testing.assert_allclose(other.scores, made.scores, atol=1e-5)


def test_one_compilation_a_length(tmp_path, folder, model, retrieved, monkeypatch):
    run(tmp_path, folder, model, retrieved)
    before = compiled_scores._cache_size()
    monkeypatch.setattr("retrieval.ranking_table.CHUNK_PAIRS", 35)
    run(tmp_path, folder, model, retrieved, if_exists="overwrite")
    assert compiled_scores._cache_size() == before


def test_resumed_where_it_stopped(tmp_path, folder, model, retrieved, monkeypatch):
    monkeypatch.setattr("retrieval.ranking_table.CHUNK_PAIRS", 50)
    whole = run(tmp_path / "whole", folder, model, retrieved)
    score, calls = reranker.score_pairs, []

    def interrupted(*args):
        calls.append(len(args[2]))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return score(*args)

    monkeypatch.setattr(reranker, "score_pairs", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, folder, model, retrieved)
    with pytest.raises(RalmError, match=r"ranking: not complete, 40 of 60 strides are missing; .*with --resume"):
        open_ranking(str(tmp_path / "ranking"))
    resumed = run(tmp_path, folder, model, retrieved, if_exists="resume")
    np.testing.assert_array_equal(resumed.scores, whole.scores)
    assert len(calls) == 3 + 4
    with pytest.raises(UsageError, match="holds an earlier run's ranking; add --resume"):
        run(tmp_path, folder, model, retrieved)


def test_nothing_is_mixed(tmp_path, folder, model, retrieved):
    run(tmp_path, folder, model, retrieved)
    other = str(tiny.save_cross_encoder(tmp_path / "other", seed=1))
    with pytest.raises(RalmError, match=r"cannot be resumed: prefix_tokens: 20 there, 21 now"):
        run(tmp_path, folder, model, retrieved, settings=RerankSettings(21), if_exists="resume")
    with pytest.raises(RalmError, match="cannot be resumed: reranker_sha256"):
        run(tmp_path, other, load_cross_encoder(other), retrieved, if_exists="resume")
    with pytest.raises(RalmError, match=r"was retrieved with the text of text.txt, not of another"):
        run(tmp_path / "a", folder, model, retrieved, text=Text(tiny.text(400, 3), "another"))
    with pytest.raises(RalmError, match="is of a longer text than short"):
        run(tmp_path / "a", folder, model, retrieved, text=Text(tiny.text(100), "short"))
    with pytest.raises(RalmError, match="was retrieved with the tokenizer of"):
        run(tmp_path / "a", folder, model, retrieved, tokenizer=tiny.tokenizer(bos=True))
    assert not (tmp_path / "a").exists()


def test_it_reads_as_in_training_by_default(tmp_path, folder, model, retrieved, caplog):
    trained = shutil.copytree(folder, tmp_path / "trained")
    tiny.edit_config(trained, ralm={"prefix_tokens": 20, "pair_tokens": 40, "other": "x"})
    convert(str(trained), str(tmp_path / "orbax"), "orbax")
    for own in (trained, tmp_path / "orbax"):
        loaded = load_cross_encoder(str(own))
        assert loaded.trained_with == {"prefix_tokens": 20, "pair_tokens": 40}
        assert reranker.reading_sizes(loaded, RerankSettings()) == (20, 40)
    made = run(tmp_path, folder, loaded, retrieved, settings=RerankSettings())
    assert not caplog.records
    asked = run(tmp_path / "asked", folder, model, retrieved, settings=RerankSettings(20, 40))
    np.testing.assert_array_equal(made.scores, asked.scores)
    assert reranker.reading_sizes(loaded, RerankSettings(20, 50)) == (20, 50)
    reranker.warn_of_other_sizes(loaded, RerankSettings(20, 50))
    assert "was trained with --pair-tokens 40, not 50" in caplog.text
    assert reranker.reading_sizes(model, RerankSettings()) == (128, 64)


def test_what_cannot_be(tmp_path, folder, model, retrieved):
    with pytest.raises(UsageError, match="a prefix of 61 tokens and 3 special tokens leave a passage no room in 64"):
        run(tmp_path, folder, model, retrieved, settings=RerankSettings(61))
    with pytest.raises(UsageError, match="no room in 24"):
        run(tmp_path, folder, model, retrieved, settings=RerankSettings(21, 24))
    for wrong in ({"prefix_tokens": 0}, {"pair_tokens": 0}):
        with pytest.raises(UsageError, match="must be at least 1"):
            RerankSettings(**wrong)
    assert not (tmp_path / "ranking").exists()
    broken = tiny.save_cross_encoder(tmp_path / "broken")
    tiny.edit_tensors(broken, lambda t: t["bert.pooler.dense.weight"].fill(np.nan))
    with pytest.raises(RalmError, match="the reranker gives NaN in float32"):
        run(tmp_path, folder, load_cross_encoder(str(broken)), retrieved)
    small = tiny.save_cross_encoder(tmp_path / "small", dataclasses.replace(tiny.BERT, vocab_size=20))
    with pytest.raises(RalmError, match=r"its tokenizer has a token \d+, it knows 20"):
        run(tmp_path, folder, load_cross_encoder(str(small)), retrieved, if_exists="overwrite")


def test_a_table_that_is_none(tmp_path, folder, model, retrieved):
    run(tmp_path, folder, model, retrieved)
    with pytest.raises(UsageError, match="no ranking there"):
        open_ranking(str(tmp_path))
    Folder.create(str(tmp_path / "new"), "ranking", {})
    with pytest.raises(RalmError, match="nothing is ranked yet; repeat the command `ralm rerank` with --resume"):
        open_ranking(str(tmp_path / "new"))


@pytest.fixture
def scored(tmp_path, monkeypatch, tiny_model, text_file, corpus_file):
    """The current folder, with a model, a text, an index, its RetrievalTable and a ScoreTable."""
    (tmp_path / "model").symlink_to(tiny_model)
    monkeypatch.chdir(tmp_path)
    ralm("index", "--corpus", "corpus.jsonl", "--out", "index")
    ralm("retrieve", "--index", "index", "--text", "text.txt", "--tokenizer", "model", "--out", "retrieval", *SIZES)
    ralm("score", "--model", "model", "--text", "text.txt", "--retrieval", "retrieval", "--out", "scores", *SIZES)


class TestCommands:
    RERANK = ("rerank", "--retrieval", "retrieval", "--text", "text.txt", "--prefix-tokens", "20")

    def test_rerank_and_report(self, scored, folder, capsys):
        ralm(*self.RERANK, "--reranker", folder, "--out", "ranking")
        assert "passages ranked; in " in capsys.readouterr().out
        ralm("report", "--scores", "scores", "--ranking", "ranking", "--strategies", "none,first,predictive,oracle",
             "--compare", "predictive,first", "--json", "r.json")  # fmt: skip
        printed = capsys.readouterr().out
        report = json.loads(Path("r.json").read_text())
        scores, ranked = open_scores("scores"), open_ranking("ranking")
        best = ranked.scores[1:].argmax(axis=1)
        chosen = np.where(scores.num_passages > 0, 1 + best, 0)
        nll = -np.nansum(scores.target[np.arange(len(best)), chosen]) - scores.first_window.sum()
        assert report["strategies"]["predictive"]["nll"] == pytest.approx(nll, rel=1e-5)
        assert report["strategies"]["predictive"]["nll"] != report["strategies"]["first"]["nll"]
        found = report["comparison"]
        first = report["strategies"]["first"]["nll"]
        assert (found["strategy"], found["against"], found["strides"]) == ("predictive", "first", 34)
        assert found["mean"] * found["tokens"] == pytest.approx(nll - first, abs=1e-3)
        assert f"predictive against first: {found['mean']:+.4f} nats a token, 95% interval [" in printed

        # fewer passages and strides than were ranked; one ranking for two tables
        ralm("score", "--model", "model", "--text", "text.txt", "--retrieval", "retrieval", "--out", "two",
             "--limit-strides", "9", *SIZES[:-1], "2")  # fmt: skip
        ralm("report", "--scores", "scores", "two", "--ranking", "ranking", "--strategies", "predictive", "--json", "r")
        assert [row["strategies"]["predictive"]["strides"] for row in json.loads(Path("r").read_text())] == [35, 9]

    def test_of_the_papers_json(self, scored, folder, capsys):
        table, passages = open_retrieved("retrieval")
        text, tokenizer = Text(Path("text.txt").read_text(), "text.txt"), load_tokenizer("model")
        export_json("retrieved.json", table, passages, text, tokenizer)
        command = [*self.RERANK, "--reranker", folder, "--out", "ranking", "--retrieval", "retrieved.json"]
        del command[1:3]
        code, line = refused(capsys, *command)
        assert (code, "does not say whose tokens make its strides; add --tokenizer" in line) == (2, True)
        ralm(*command, "--tokenizer", "model")
        ralm(*self.RERANK, "--reranker", folder, "--out", "ranking2")
        np.testing.assert_allclose(open_ranking("ranking").scores, open_ranking("ranking2").scores, atol=1e-6)

    def test_refusals(self, scored, folder, capsys):
        plain = tiny.save_encoder(Path("plain"))
        ralm(*self.RERANK, "--reranker", folder, "--out", "ranking")
        report = ("report", "--scores", "scores")
        for command, code, message in (
            ([*self.RERANK, "--reranker", plain, "--out", "x"], 1, "plain: no trained reranker"),
            ([*self.RERANK, "--reranker", "model", "--out", "x"], 1, "'gpt2' is not supported"),
            ([*self.RERANK, "--reranker", folder, "--out", "ranking"], 2, "add --resume to go on, or --overwrite"),
            ([*self.RERANK, "--reranker", folder, "--out", "x", "--batch-size", "0"], 2, "must be at least 1"),
            ([*report, "--strategies", "predictive"], 2, "make one with `ralm rerank`"),
            ([*report, "--compare", "predictive,first"], 2, "make one with `ralm rerank`"),
            ([*report, "--compare", "first"], 2, "--compare first: name two strategies"),
            ([*report, "--compare", "first,best"], 2, "expected some of none, first"),
            ([*report, "--ranking", "ranking", "ranking"], 2, "--ranking: name one for all 1 ScoreTables, or one"),
            ([*report, "--ranking", "retrieval", "--strategies", "predictive"], 2, "no ranking there (but retrieval)"),
            (["lm", "--model", "model", "--text", "text.txt", "--corpus", "corpus.jsonl", "--out", "all",
              "--strategies", "predictive"], 2, "make one with `ralm rerank`"),
        ):  # fmt: skip
            found, line = refused(capsys, *command)
            assert (found, message in line) == (code, True), line
        assert not Path("x").exists()

    def test_a_ranking_of_other_passages(self, scored, folder, capsys):
        ralm("retrieve", "--index", "index", "--text", "text.txt", "--tokenizer", "model", "--out", "other", *SIZES,
             "--query-length", "4")  # fmt: skip
        ralm(*self.RERANK, "--reranker", folder, "--out", "ranking")
        ralm("score", "--model", "model", "--text", "text.txt", "--retrieval", "other", "--out", "scores2", *SIZES)
        code, line = refused(
            capsys, "report", "--scores", "scores2", "--ranking", "ranking", "--strategies", "predictive"
        )
        assert (code, "ranking: ranks other passages than scores2 has" in line) == (1, True)
        assert "(retrieval here)" in line
