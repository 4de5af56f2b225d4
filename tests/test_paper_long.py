"""The tables of Retrieval meets Long Context: its own values, what is taken for its readers, and what is refused; and
the lengths of documents and chunks."""

import csv
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from eval import long_lengths, paper_long
from eval.long import KIND
from eval.long_chunks import BM25Ranker
from eval.long_report import COLUMNS
from eval.paper_long import SEVEN, SHORT, VALUES, average
from eval.tasks import Example
from ralm_jax.models import SIZES
from ralm_jax.storage import Folder
from tests import tiny
from tests.test_cli import ralm, refused
from tests.test_tasks import longbench, write


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def answered(root, task, score, *, window=4096, retriever="none", top=0, size="llama2-70b", name="to/m", **changes):
    """What `ralm eval long` leaves of a task, without predictions."""
    folder = f"{root}/{task}-{window}-{retriever}-{top}"
    config = {"config": SIZES[size].to_hf() | {"max_position_embeddings": window}} if size else {}
    Folder.create(folder, KIND, {"reader": config}, "overwrite")
    result = dict.fromkeys(COLUMNS, 0) | {
        "task": task, "window": window, "retriever": retriever, "top": top, "score": score, "metric": "F1",
        "metric_family": paper_long.TASKS[task].source, "prompt_preset": "xu2023", "chat": False, "examples": 10,
        "paper_examples": 10, "config": {"model": name}, "prompt_tokens": 100.0, "seconds_an_answer": 2.0,
    }  # fmt: skip
    result |= changes
    with open(f"{folder}/result-{result['metric_family']}.json", "w") as file:
        json.dump(result, file)
    return root


def seven(root, start, **options):
    for i, task in enumerate(SEVEN):
        answered(root, task, start + i, **options)
    return root


class TestValues:
    def test_they_are_those_of_the_paper(self, shared):
        (source,) = (shared / "papers").glob("004_*.txt")
        text = source.read_text()
        for number in (2, 4, 5):
            before = re.split(f"^表 ?{number}： ", text, flags=re.MULTILINE)[0]
            rows = re.findall(r"((?: \d+\.\d\d){8})$", before, re.MULTILINE)
            stated = [[float(value) for value in row.split()] for row in rows][-len(VALUES[number]) :]
            ours = [[line.scores[task] for task in SEVEN] for line in VALUES[number]]
            assert [row[1:] for row in stated] == ours
            for row, line in zip(stated, VALUES[number], strict=True):
                assert average(line, SEVEN) == pytest.approx(row[0], abs=0.011)

    def test_averages_of_table_3(self):
        whole = [line for line in VALUES[3] if len(line.scores) == 7]
        for line in whole:
            ours = [average(line, tasks) for tasks in (SEVEN, paper_long.FOUR)]
            assert ours == pytest.approx(line.stated, abs=0.2)
        assert average(VALUES[3][2], SEVEN) is None

    def test_table_1(self, shared):
        (source,) = (shared / "papers").glob("004_*.txt")
        text = source.read_text()
        for name, words in (("documents", "avg doc length"), ("top 5", "avg top-5 chunks"),
                            ("top 10", "avg top-10 chunks"), ("top 20", "avg top-20 chunks")):  # fmt: skip
            (stated,) = re.findall(f"{words} (.*)$", text, re.MULTILINE)
            assert stated == " ".join(f"{count:,}" for count in long_lengths.PAPER[name])


class TestTables:
    def test_ours_beside_the_papers(self, capsys):
        seven("a", 10)
        seven("a", 20, retriever="dragon", top=5)
        ralm("paper", "--table", 2, "--long", "a", "--csv", "t.csv")
        printed = capsys.readouterr().out
        assert re.search(r"ours   Llama2-70B \(m\) +4,096  - +13.00 +10.00 +11.00 .* 16.00\n", printed)
        assert re.search(r"ours   Llama2-70B \(m\) +4,096  dragon, top 5 +23.00 +20.00", printed)
        assert re.search(r"paper  Llama2-70B +4,096  the best, top 5 +36.02 +17.41", printed)
        assert "All are scored, asked and counted as in the paper." in printed
        with open("t.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == 2 * 7 + 14 * 7
        assert (rows[0]["from"], rows[0]["task"], rows[0]["score"]) == ("ours", "qmsum", "10")

    def test_what_is_not_as_in_the_paper_is_said(self, capsys):
        answered("a", "hotpotqa", 1, examples=3, paper_examples=200, chat=True, metric_family="nvidia", size=None)
        ralm("paper", "--table", 4, "--long", "a")
        printed = capsys.readouterr().out
        assert re.search(r"ours   m +4,096  - +- +- +- +- +- +- +1.00 +-\n", printed)
        assert "Examples: hotpotqa 3 (the paper 200).\n" in printed
        assert "Scored: a/hotpotqa-4096-none-0 by nvidia (the paper longbench).\n" in printed
        assert "Asked (the paper as xu2023): m as xu2023 in its chat template." in printed

    def test_the_number_of_chunks_nearest_to_five(self, capsys):
        for top in (1, 4, 20):
            answered("a", "qasper", top, retriever="bm25", top=top)
        ralm("paper", "--table", 2, "--long", "a")
        assert re.findall(r"ours.*bm25, top (\d+)", capsys.readouterr().out) == ["4"]
        ralm("paper", "--table", 5, "--long", "a")
        assert re.findall(r"ours.*bm25, top (\d+)", capsys.readouterr().out) == ["1", "4", "20"]

    def test_few_shot(self, capsys):
        answered("a", "trec", 70)
        answered("a", "hotpotqa", 1, window=512)
        ralm("paper", "--table", 6, "--long", "a")
        printed = capsys.readouterr().out
        assert re.findall(r"ours.*", printed) == ["ours   Llama2-70B (m)      4,096  -                70.00       -"]

    def test_several_folders_make_one_line(self):
        answered("a", "qasper", 1)
        answered("b", "hotpotqa", 2)
        (line,) = paper_long.read_lines(["a", "b", "a"])
        assert dict(line.scores) == {"qasper": 1, "hotpotqa": 2}

    def test_of_several_families_the_benchmarks_own(self):
        answered("a", "hotpotqa", 1, metric_family="nvidia")
        folder = Path("a/hotpotqa-4096-none-0")
        result = json.loads((folder / "result-nvidia.json").read_text()) | {"metric_family": "longbench", "score": 2}
        (folder / "result-longbench.json").write_text(json.dumps(result))
        (line,) = paper_long.read_lines(["a"])
        assert dict(line.scores) == {"hotpotqa": 2}

    def test_time(self, capsys):
        answered("a", "narrativeqa", 1, window=32768, prompt_tokens=30000.0, seconds_an_answer=8.0)
        answered("a", "narrativeqa", 1, window=32768, retriever="bm25", top=5, retrieval_seconds=10.0)
        answered("a", "qasper", 1, window=32768)
        ralm("paper", "--table", "time", "--long", "a")
        line = capsys.readouterr().out.splitlines()[1]
        assert line.split()[3:] == ["narrativeqa", "bm25,", "top", "5", "100", "of", "30,000", "3.00", "8.00", "2.67"]


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--table", 2, "--long", "none"), "none: has no results of `ralm eval long`"),
            (("--table", 6, "--long", "a"), "table 6: is of trec, samsum, and the folders have none of these"),
            (("--table", "time", "--long", "a"), "with a --retriever and with none"),
            (("--table", 1, "--long", "a"), "table 1: name the folders that it is made from with --sweep, and no"),
            (("--table", 2, "--long", "a", "--sweep", "b"), "table 2: name the folders that it is made from with "
             "--sweep or --long, and no others"),
            (("--figure", 8, "--long", "a", "--out", "f.png"), "figure 8: name the folders"),
        ],
    )  # fmt: skip
    def test_options(self, capsys, options, message):
        answered("a", "qasper", 1)
        code, line = refused(capsys, "paper", *options)
        assert (code, message in line) == (2, True), line

    def test_two_that_differ(self, capsys):
        answered("a", "qasper", 1)
        answered("b", "qasper", 2)
        code, line = refused(capsys, "paper", "--table", 2, "--long", "a", "b")
        assert code == 2
        assert "a/qasper-4096-none-0 and b/qasper-4096-none-0 have different scores of qasper" in line

    def test_a_result_of_another_version(self, capsys):
        answered("a", "qasper", 1)
        with open("a/qasper-4096-none-0/result-scrolls.json", "w") as file:
            file.write('{"task": "qasper"}')
        code, line = refused(capsys, "paper", "--table", 2, "--long", "a")
        assert (code, "result-scrolls.json: has no 'window'; make it anew with --resume" in line) == (1, True)


class TestLengths:
    def test_documents_and_their_best_chunks(self):
        words = [f"w{i}" for i in range(700)]
        words[650] = tiny.WORDS[9]
        example = Example("a", tiny.WORDS[9], " ".join(words), ("x",))
        tokenizer = tiny.tokenizer()
        found = long_lengths.measure("hotpotqa", [example, example], tokenizer, BM25Ranker(), (1, 2))
        chunks = [" ".join(words[i : i + 300]) for i in (600, 0)]
        counts = [len(tokenizer.encode(text)) for text in (" ".join(words), chunks[0], "\n\n".join(chunks))]
        assert {name: tokens.tolist() for name, tokens in found.tokens.items()} == {
            name: [count] * 2 for name, count in zip(("documents", "top 1", "top 2"), counts, strict=True)
        }

    def test_command(self, capsys, tmp_path):
        write(tmp_path / "data/hotpotqa.jsonl", longbench("a", context=tiny.text(700, 1)))
        (tmp_path / "t").mkdir()
        tiny.tokenizer().save(tmp_path / "t")
        ralm("eval", "lengths", "--tokenizer", "t", "--data", "data", "--task", "hotpotqa", "--retriever", "bm25",
             "--csv", "l.csv", "--out", "l.png")  # fmt: skip
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == [SHORT[task] for task in SEVEN]
        assert lines[2].split() == ["examples", "paper", "200", "1,726", "2,000", "2,000", "200", "200", "150"]
        assert [line.split()[:2] for line in lines[3:5]] == [["documents", "ours"], ["documents", "paper"]]
        assert imread("l.png").std() > 0
        rows = list(csv.DictReader(io.StringIO((tmp_path / "l.csv").read_text())))
        assert [row["of"] for row in rows] == ["documents", "top 5", "top 10", "top 20"]
        assert len({int(row["tokens"]) for row in rows[1:]}) == 1  # there are but three chunks

    def test_without_retriever(self, capsys, tmp_path):
        write(tmp_path / "data/hotpotqa.jsonl", longbench("a", context="ba be"))
        (tmp_path / "t").mkdir()
        tiny.tokenizer().save(tmp_path / "t")
        ralm("eval", "lengths", "--tokenizer", "t", "--data", "data", "--task", "hotpotqa")
        assert "top 5" not in capsys.readouterr().out
        code, line = refused(capsys, "eval", "lengths", "--tokenizer", "t", "--data", "data", "--task", "hotpotqa",
                             "--top", 3)  # fmt: skip
        assert (code, "--top is for a --retriever" in line) == (2, True)


def test_picture_has_a_panel_for_each_task():
    tokens = {"documents": np.arange(50), "top 5": np.arange(20)}
    made = long_lengths.picture([long_lengths.Lengths(task, tokens) for task in SEVEN])
    assert [panel.get_title() for panel in made.axes if panel.get_title()] == [SHORT[task] for task in SEVEN]
