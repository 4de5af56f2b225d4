"""Recall by hand, of files and of indexes, and through the commands."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from eval.retrieval_metrics import answer_recall, gold_recall
from eval.retrievers import evaluate, format_recalls, search_questions
from ralm_jax.errors import RalmError, UsageError
from retrieval.bm25 import build_index
from retrieval.corpus import Passage, read_corpus
from retrieval.qa import Found, Question
from retrieval.results import read_questions, write_questions
from tests import tiny
from tests.test_cli import ralm, refused
from tests.test_corpus import rows, write

HITS = np.array([[True, False, True], [False, False, True], [False, False, False], [False, True, False]])


class TestMetrics:
    """Worked out by hand."""

    @pytest.mark.parametrize(
        ("k", "expected"),
        [(1, (1 / 2 + 0 + 0 + 0) / 4), (2, (1 / 2 + 0 + 0 + 1) / 4), (3, (2 / 2 + 1 / 4 + 0 + 1) / 4),
         (9, (2 / 2 + 1 / 4 + 0 + 1) / 4)],
    )  # fmt: skip
    def test_gold(self, k, expected):
        assert gold_recall(HITS, np.array([2, 4, 1, 1]), k) == expected

    @pytest.mark.parametrize(("k", "expected"), [(1, 1 / 4), (2, 2 / 4), (3, 3 / 4), (9, 3 / 4)])
    def test_answers(self, k, expected):
        assert answer_recall(HITS, k) == expected

    def test_nothing_found(self):
        assert gold_recall(np.zeros((2, 0), bool), np.array([1, 1]), 5) == answer_recall(np.zeros((2, 0), bool), 5) == 0


QUESTIONS = [
    Question("a", "q", ("one",), (Found("1", 2, "one", "no"), Found("2", 1, "", "it is One."))),
    Question("b", "q", ("two",), (Found("2", 2, "", "two"),)),
    Question("c", "q", (), (Found("3", 2, "", "x"),)),
]
GOLD = {"a": frozenset(["1", "9"]), "c": frozenset(["3"]), "z": frozenset(["1"]), "y": frozenset(["1"])}


class TestEvaluate:
    def test_both_kinds(self):
        gold, answers = evaluate(QUESTIONS, [1, 2], GOLD)
        assert (gold.kind, gold.questions, gold.at) == ("gold", 4, {1: (1 / 2 + 1) / 4, 2: (1 / 2 + 1) / 4})
        assert (answers.kind, answers.questions, answers.at) == ("answers", 2, {1: 1 / 2, 2: 1})
        assert format_recalls([gold, answers]) == (
            "recall      questions       @1       @2\n"
            "gold                4    37.5%    37.5%\n"
            "answers             2    50.0%   100.0%\n"
            "left out, without gold passages: 1\n"
            "misses, not searched for: 2\n"
            "left out, without answers: 1"
        )

    def test_a_depth_that_is_not_there_is_said(self):
        for recall in evaluate(QUESTIONS, [5], GOLD):
            assert recall.notes[0] == "no question has more than 2 passages"

    def test_labels_in_the_file_do_not_count(self):
        wrong = [Question("a", "q", ("one",), (Found("1", 1, "", "two", True),))]
        assert evaluate(wrong, [1])[0].at == {1: 0}

    def test_refusals(self):
        with pytest.raises(UsageError, match="nothing to judge by"):
            evaluate(QUESTIONS[2:], [1])
        with pytest.raises(RalmError, match="none of the 3 questions is among the 1 with gold passages"):
            evaluate(QUESTIONS, [1], {"z": frozenset("1")})
        with pytest.raises(RalmError, match="passage 1 of question a has no text to look for answers in"):
            evaluate([Question("a", "q", ("one",), (Found("1", 1),))], [1])
        with pytest.raises(UsageError, match="k must be at least 1, not 0"):
            evaluate(QUESTIONS, [0])


def test_search_gives_what_the_index_gives(tmp_path, corpus_file):
    index = build_index(read_corpus(str(corpus_file)), str(tmp_path / "index"), progress=False)
    questions = [Question(str(i), tiny.text(12, i)) for i in range(300)] + [Question("none", "zzz")]
    found = search_questions(index, questions, 4, progress=False)
    hits = index.search([question.text for question in questions], 4)
    for question, result, ids, scores in zip(questions, found, hits.rows, hits.scores, strict=True):
        assert result._replace(found=()) == question
        assert [(p.id, p.title, p.text) for p in result.found] == index.passages.rows(ids[ids >= 0])
        assert [p.score for p in result.found] == scores[ids >= 0].tolist()
    assert found[-1].found == ()


def test_gold_passages_of_natural_questions(shared, tmp_path):
    """2,655 questions, each with its gold passage (2,600 distinct ones): where BM25 ranks it among all of them."""
    questions = read_questions(str(shared / "data/qa/nq_gold_ctx_dpr_format.jsonl.gz"))
    ids: dict[tuple[str, str], str] = {}
    gold = {}
    for question in questions:
        passage = question.found[0]
        gold[question.id] = frozenset([ids.setdefault((passage.title, passage.text), str(len(ids)))])
    assert (len(questions), len(ids)) == (2655, 2600)
    passages = (Passage(id, *key) for key, id in ids.items())
    index = build_index(passages, str(tmp_path / "index"), progress=False)
    found = search_questions(index, questions, 20, progress=False)
    by_gold, by_answer = evaluate(found, [1, 5, 20], gold)
    assert by_gold.at == pytest.approx({1: 0.775, 5: 0.927, 20: 0.968}, abs=1e-3)
    assert by_answer.at == pytest.approx({1: 0.807, 5: 0.935, 20: 0.975}, abs=1e-3)


class TestCommands:
    @pytest.fixture(autouse=True)
    def place(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        write(
            tmp_path / "corpus.jsonl",
            rows({"_id": "d1", "title": "Röntgen", "text": "He found rays."}, {"_id": "d2", "text": "rays of the sun"},
                 {"_id": "d3", "text": "by Röntgen, of Lennep"}),
        )  # fmt: skip
        write(tmp_path / "qa.csv", "who found rays\t['Röntgen']\nRöntgen was of\t['Lennep', 'Remscheid']\n")
        write(tmp_path / "qrels.tsv", "query-id\tcorpus-id\tscore\n0\td1\t1\n1\td1\t1\n1\td3\t1\n")
        (tmp_path / "loop").symlink_to("loop")
        ralm("index", "--corpus", "corpus.jsonl", "--out", "index")

    def test_index_reports_rows(self, capsys):
        capsys.readouterr()
        ralm("index", "--corpus", "corpus.jsonl", "--out", "one")
        assert capsys.readouterr().out == "corpus.jsonl: 3 rows read\none: 3 passages, 6 terms\n"
        with Path("corpus.jsonl").open("a") as file:
            file.write('{"_id": "d4"}\n')
        code, line = refused(capsys, "index", "--corpus", "corpus.jsonl", "--out", "two")
        assert (code, "corpus.jsonl:4: field 'text' is missing" in line) == (1, True)
        ralm("index", "--corpus", "corpus.jsonl", "--out", "two", "--overwrite", "--skip-bad-rows")
        printed = capsys.readouterr().out
        assert (
            "corpus.jsonl: 4 rows read, 1 of them bad and skipped (the first: corpus.jsonl:4: field 'text'" in printed
        )
        assert "two: 3 passages" in printed

    def test_eval_an_index(self, capsys):
        capsys.readouterr()
        ralm(
            "eval",
            "retrieval",
            "--index",
            "index",
            "--data",
            "qa.csv",
            "--qrels",
            "qrels.tsv",
            "--k",
            "2,1",
            "--json",
            "r.json",
        )
        report = json.loads(Path("r.json").read_text())
        assert report["gold"] == {"questions": 2, "recall": {"1": 0.75, "2": 1.0}}
        assert report["answers"] == {"questions": 2, "recall": {"1": 0.5, "2": 0.5}}
        assert capsys.readouterr().out == (
            "recall      questions       @1       @2\n"
            "gold                2    75.0%   100.0%\n"
            "answers             2    50.0%    50.0%\n"
        )

    def test_a_run_on_its_way_to_dpr_and_back(self, capsys):
        run = "0 Q0 d1 1 3.5 ralm\n0 Q0 d2 2 1.5 ralm\n1 Q0 d3 1 2.0 ralm\n"
        Path("run.trec").write_text(run)
        ralm("convert-retrieval", "run.trec", "--out", "r.json.gz", "--to", "dpr", "--questions", "qa.csv",
             "--corpus", "corpus.jsonl")  # fmt: skip
        assert "r.json.gz: 2 questions, 3 passages, as dpr" in capsys.readouterr().out
        entries = json.loads(gzip.decompress(Path("r.json.gz").read_bytes()))
        assert entries[1] == {
            "question": "Röntgen was of", "answers": ["Lennep", "Remscheid"],
            "ctxs": [{"id": "d3", "title": "", "text": "by Röntgen, of Lennep", "score": 2.0, "has_answer": True}],
        }  # fmt: skip
        assert [context["has_answer"] for context in entries[0]["ctxs"]] == [False, False]
        ralm("convert-retrieval", "r.json.gz", "--out", "again.trec", "--to", "trec")
        assert Path("again.trec").read_text() == run
        ralm("eval", "retrieval", "--results", "run.trec", "--qrels", "qrels.tsv", "--k", "1", "--json", "1.json")
        ralm("eval", "retrieval", "--results", "r.json.gz", "--qrels", "qrels.tsv", "--k", "1", "--json", "2.json")
        one, two = (json.loads(Path(name).read_text()) for name in ("1.json", "2.json"))
        assert one["gold"] == two["gold"] == {"questions": 2, "recall": {"1": 0.75}}
        assert "answers" not in one
        assert two["answers"]["recall"] == {"1": 0.5}

    def test_regular_expressions(self):
        questions = [Question("0", "q", (r"ro.tgen$",), (Found("1", 1, "", "by Rontgen"),))]
        write_questions("r.jsonl", questions, "contriever")
        for options, expected in (([], 0), (["--regex"], 1)):
            ralm("eval", "retrieval", "--results", "r.jsonl", "--k", "1", "--json", "r.json", *options)
            assert json.loads(Path("r.json").read_text())["answers"]["recall"] == {"1": expected}
            ralm("convert-retrieval", "r.jsonl", "--out", "d.json", "--to", "dpr", "--overwrite", *options)
            assert json.loads(Path("d.json").read_text())[0]["ctxs"][0]["has_answer"] is bool(expected)
            write_questions("r.jsonl", questions, "contriever")

    def test_a_corpus(self, capsys):
        capsys.readouterr()
        ralm("convert-corpus", "corpus.jsonl", "--out", "p.tsv.gz", "--to", "dpr")
        assert capsys.readouterr().out == "corpus.jsonl: 3 rows read\np.tsv.gz: 3 passages, as dpr\n"
        assert list(read_corpus("p.tsv.gz")) == list(read_corpus("corpus.jsonl"))

    @pytest.mark.parametrize(
        ("args", "code", "message"),
        [
            (["eval", "retrieval", "--index", "index"], 2, "--index needs questions: add --data FILE"),
            (["eval", "retrieval", "--results", "none"], 2, "none: no such file"),
            (["eval", "retrieval", "--results", "qa.csv"], 1, "qa.csv: no passages in it, only questions"),
            (
                ["eval", "retrieval", "--index", "index", "--data", "qa.csv", "--k", "1,x"],
                2,
                "--k 1,x: expected numbers",
            ),
            (["eval", "retrieval", "--index", "index", "--data", "qa.csv", "--k", "0"], 2, "--k 0: expected numbers"),
            (["eval", "retrieval", "--index", "index", "--data", "qrels.tsv"], 1, "qrels.tsv:1: 3 fields, expected 2"),
            (["eval", "retrieval", "--index", "index", "--data", "qa.csv", "--json", "no/r"], 2, "no does not exist"),
            (
                ["convert-retrieval", "qa.csv", "--out", "qa.csv", "--to", "dpr"],
                2,
                "qa.csv: is there already; add --ov",
            ),
            (["convert-retrieval", "qa.csv", "--out", "x", "--to", "trec"], 1, "the questions have no passages"),
            (
                ["convert-retrieval", "qa.csv", "--out", "x", "--to", "dpr", "--from", "trec"],
                1,
                "qa.csv:1: expected qid",
            ),
            (
                ["convert-retrieval", "qa.csv", "--out", "x", "--to", "dpr", "--passage-words", "50"],
                2,
                "--corpus-format, --passage-words, --split-rows and --skip-bad-rows are for --corpus",
            ),
            (
                ["eval", "retrieval", "--index", "index", "--data", "qa.csv", "--split", "train"],
                2,
                "--split and --data-path are for --dataset",
            ),
            (["convert-corpus", "none", "--out", "x", "--to", "dpr"], 2, "none: no such file"),
            (
                ["convert-corpus", ".", "--out", "x", "--to", "dpr"],
                2,
                "x: lies in the corpus .; write it elsewhere",
            ),
            (["convert-corpus", "loop", "--out", "loop", "--to", "dpr"], 2, "loop: lies in the corpus loop"),
            (
                ["convert-corpus", "corpus.jsonl", "--out", "corpus.jsonl", "--to", "beir", "--overwrite"],
                2,
                "corpus.jsonl: lies in the corpus corpus.jsonl",
            ),
            (["convert-corpus", "corpus.jsonl", "--out", "index", "--to", "dpr"], 2, "index: is a folder"),
        ],
    )
    def test_refusals(self, capsys, args, code, message):
        found, line = refused(capsys, *args)
        assert message in line
        assert found == code
        assert not Path("x").exists()

    @pytest.mark.parametrize("args", [["eval", "retrieval"], ["eval", "retrieval", "--results", "a", "--index", "b"],
                                      ["convert-retrieval", "a", "--out", "b"],
                                      ["convert-retrieval", "a", "--out", "b", "--to", "x"]])  # fmt: skip
    def test_usage(self, capsys, args):
        with pytest.raises(SystemExit) as caught:
            ralm(*args)
        assert caught.value.code == 2
        assert "Traceback" not in capsys.readouterr().err
