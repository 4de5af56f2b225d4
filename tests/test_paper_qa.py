"""Table 4, figure 8 and Lost in the Middle: the paper's values, what counts as its readers and data, and refusals."""

import csv
import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.image import imread

from eval import paper_qa
from eval.paper_qa import VALUES
from eval.qa import KIND
from eval.qa_report import QARow, format_csv
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.models import SIZES
from ralm_jax.storage import Folder
from tests.test_cli import ralm, refused

ROW = QARow(0, None, 200, 0.1, 0.2, None, 0.3, None, 20.5, 0, 0, 0)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(name, ems, size="llama-7b", *, places=None, index="to/words", model="m", limit=None, **asked):
    """What `ralm eval qa` leaves, without predictions: exact match by number of passages; or containment by `places` of
    the gold one among 5."""
    config = SIZES[size].to_hf() if size else None
    folder = Folder.create(name, KIND, {"reader": {"config": config} if config else {}}, "overwrite")
    folder.manifest["about"] = {
        "model": model, "index": index, "prompt_preset": "ram2023", "limit_questions": limit,
        "questions": {"data": None, "dataset": "nq", "split": "test"} | asked,
    }  # fmt: skip
    folder.write_manifest()
    rows = [replace(ROW, passages=n, em=em) for n, em in ems.items()]
    rows += [replace(ROW, passages=5, gold_at=at, contains=share) for at, share in (places or {}).items()]
    Path(name, "qa.csv").write_text(format_csv(rows))
    return name


def cells(*names):
    return paper_qa.table_cells(paper_qa.read_runs(names))


def test_values_are_those_of_the_paper(shared):
    (source,) = (shared / "papers").glob("000_*.txt")
    blocks = re.findall(r"begin{tabular}.*?end{tabular}", source.read_text(), re.DOTALL)
    stated = [float(number) for number in re.findall(r"&\s*(\d+\.\d)\b", blocks[3])]
    ours = [VALUES[model][data][i] for model in VALUES for i in range(2) for data in ("NQ", "TriviaQA")]
    assert ours == stated


class TestTable:
    def test_ours_beside_the_papers(self):
        write("nq", {0: 0.12, 1: 0.2, 2: 0.31})
        write("trivia", {0: 0.5}, dataset="triviaqa")
        write("mine", {0: 0.01, 5: 0.02}, size=None, data="qa/mine.jsonl", dataset=None, index=None, model="server")
        made = cells("nq", "trivia", "mine")
        lines = [line.split() for line in paper_qa.format_table(made).splitlines()]
        assert lines[0] == ["NQ,", "EM", "TriviaQA,", "EM", "mine.jsonl,", "EM"]
        assert lines[1] == ["model", "book", *["ours", "paper"] * 3]
        assert lines[2] == ["LLaMA-7B", "closed", "12.0", "10.3", "50.0", "47.5", "-", "-"]
        assert lines[3] == ["LLaMA-7B", "open", "31.0", "28.0", "-", "56.0", "-", "-"]
        assert lines[4] == ["LLaMA-13B", "closed", "-", "12.0", "-", "54.8", "-", "-"]
        assert lines[8] == ["server", "closed", "-", "-", "-", "-", "1.0", "-"]
        assert lines[9] == ["server", "open", "-", "-", "-", "-", "2.0", "-"]
        assert len(lines) == 10
        assert paper_qa.format_matches(made).splitlines() == [
            "m in nq has the shape of LLaMA-7B; its questions, NQ, are the paper's.",
            "m in trivia has the shape of LLaMA-7B; its questions, TriviaQA, are the paper's.",
            "nq has 2 passages of words, asked as ram2023 (the paper 2 of DPR, as ram2023).",
            "server in mine is no reader of the paper's; its questions, mine.jsonl, are no data of the paper's.",
            "mine has 5 passages of given, asked as ram2023 (the paper 2 of DPR, as ram2023).",
        ]

    @pytest.mark.parametrize(
        ("asked", "name"),
        [({}, "NQ"), ({"limit": 200}, "part of NQ"), ({"split": "validation"}, "NQ validation"),
         ({"dataset": None, "data": "a/b.jsonl"}, "b.jsonl")],
    )  # fmt: skip
    def test_data(self, asked, name):
        write("out", {0: 0.5}, **asked)
        (cell,) = [cell for cell in cells("out") if cell.row]
        assert (cell.data, cell.paper) == (name, 10.3 if name == "NQ" else None)

    @pytest.mark.parametrize(("counts", "chosen"), [((1, 2, 5), 2), ((1, 3), 1), ((3, 10), 3), ((0,), None)])
    def test_open_book_is_what_is_nearest_to_two(self, counts, chosen):
        write("out", dict.fromkeys(counts, 0.5))
        found = [cell.row.passages for cell in cells("out") if cell.row and cell.book == "open"]
        assert found == ([chosen] if chosen else [])

    def test_two_readers_of_one_shape(self):
        write("one", {0: 0.5}, model="a")
        write("two", {0: 0.6}, model="b")
        assert [cell.label for cell in cells("one", "two") if cell.row] == ["LLaMA-7B (a)", "LLaMA-7B (b)"]

    def test_two_results_of_one_cell(self, capsys):
        write("one", {0: 0.5, 2: 0.6})
        write("same", {0: 0.5})
        assert {cell.run.folder for cell in cells("one", "same", "one") if cell.run} == {"one"}
        write("other", {2: 0.7})
        code, line = refused(capsys, "paper", "--table", "4", "--qa", "one", "other")
        assert code == 2
        assert "one and other have different results for LLaMA-7B, open book on NQ; name one of them" in line

    def test_csv(self, capsys):
        write("out", {0: 0.125, 2: 0.5})
        capsys.readouterr()
        ralm("paper", "--table", "4", "--qa", "out", "--csv", "t.csv")
        assert capsys.readouterr().out.lstrip().startswith("NQ, EM")
        rows = list(csv.DictReader(io.StringIO(Path("t.csv").read_text())))
        assert len(rows) == 3 * 2 * 2
        expected = {"model": "LLaMA-7B", "book": "closed", "data": "NQ", "ours": "12.5", "paper": "10.3",
                    "passages": "0", "questions": "200", "f1": "0.2", "has_answer": "", "folder": "out"}  # fmt: skip
        assert rows[0].items() >= expected.items()
        assert (rows[1]["ours"], rows[1]["paper"], rows[1]["folder"]) == ("", "47.5", "")


class TestFigure:
    def test_a_line_for_each_folder(self, monkeypatch, capsys):
        drawn, draw = [], paper_qa.draw
        monkeypatch.setattr(paper_qa, "draw", lambda *args: (drawn.append(args), draw(*args)))
        write("one", {0: 0.1, 1: 0.2, 2: 0.3}, split="validation")
        write("two", {0: 0.1, 2: 0.2}, split="validation", index="dense")
        write("three", {0: 0.4, 1: 0.5}, size="llama-13b", dataset="triviaqa", split="validation", model="big")
        ralm("paper", "--figure", "8", "--qa", "one", "two", "three", "--out", "f.png")
        ((_, lines, title),) = drawn
        assert {name: [row.em for row in rows] for name, rows in lines.items()} == {
            "LLaMA-7B, NQ validation (one)": [0.1, 0.2, 0.3],
            "LLaMA-7B, NQ validation (two)": [0.1, 0.2],
            "LLaMA-13B, TriviaQA validation": [0.4, 0.5],
        }
        assert title == "figure 8"
        assert imread("f.png").shape[:2] == (600, 900)
        rows = list(csv.DictReader(io.StringIO(Path("f.csv").read_text())))
        assert [float(row["ours"]) for row in rows] == pytest.approx([10, 20, 30, 10, 20, 40, 50])


class TestLost:
    def test_a_line_for_each_folder(self, monkeypatch, capsys):
        drawn, draw = [], paper_qa.draw
        monkeypatch.setattr(paper_qa, "draw", lambda *args: (drawn.append(args), draw(*args)))
        write("one", {}, places={1: 0.5, 3: 0.25, 5: 0.75})
        write("two", {}, size=None, model="server", places={1: 0.5}, dataset=None, data="a/b.jsonl")
        capsys.readouterr()
        ralm("paper", "--figure", "1", "--qa", "one", "two", "--out", "f.png")
        ((_, lines, title),) = drawn
        assert {name: [(row.gold_at, row.contains) for row in rows] for name, rows in lines.items()} == {
            "LLaMA-7B, NQ": [(1, 0.5), (3, 0.25), (5, 0.75)],
            "server, b.jsonl": [(1, 0.5)],
        }
        assert title == "lost in the middle"
        assert imread("f.png").shape[:2] == (600, 900)
        rows = list(csv.DictReader(io.StringIO(Path("f.csv").read_text())))
        assert [(row["metric"], row["ours"], row["gold_at"]) for row in rows] == [
            ("contains", "50.0", "1"), ("contains", "25.0", "3"), ("contains", "75.0", "5"), ("contains", "50.0", "1"),
        ]  # fmt: skip
        assert capsys.readouterr().out.splitlines()[2] == (
            "m in one has 5 passages, one of them gold, the others of words, asked as ram2023 (Lost in the Middle 10, "
            "20 or 30, the others of Contriever, as liu2023)."
        )

    @pytest.mark.parametrize(
        ("show", "names", "message"),
        [
            ("lost_cells", ["moved", "out"], "out: was made without --gold-at, which figure 1 is of; leave it out"),
            ("lost_cells", ["still"], "figure 1: needs answers with several places of --gold-at; these have one"),
            ("table_cells", ["out", "moved"], "moved: was made with --gold-at, which table 4 is not of; leave it out"),
            ("figure_cells", ["moved"], "moved: was made with --gold-at, which figure 8 is not of; leave it out"),
        ],
    )
    def test_refusals(self, show, names, message):
        write("moved", {}, places={1: 0.5, 2: 0.5})
        write("still", {}, places={1: 0.5})
        write("out", {0: 0.5, 1: 0.5})
        with pytest.raises(UsageError, match=message):
            getattr(paper_qa, show)(paper_qa.read_runs(names))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--table", "4"], "table 4: name the folders that it is made from with --qa or --long, and no others"),
        (["--table", "4", "--sweep", "out"], "table 4: name the folders that it is made from with --qa or --long"),
        (["--table", "4", "--qa", "out", "--sweep", "out"], "table 4: name the folders that it is made from with --qa"),
        (["--table", "1", "--qa", "out"], "table 1: name the folders that it is made from with --sweep, and no others"),
        (["--table", "4", "--qa", "nowhere"], "nowhere: no answers there"),
        (["--table", "4", "--qa", "begun"], "begun: has no qa.csv; let `ralm eval qa` come to its end"),
        (["--figure", "8", "--qa", "out"], "--figure needs --out for its PNG"),
        (
            ["--figure", "8", "--qa", "out", "--out", "f.png"],
            "figure 8: needs answers with several numbers of --passages",
        ),
        (
            ["--figure", "1", "--qa", "out", "--out", "f.png"],
            "out: was made without --gold-at, which figure 1 is of; leave it out",
        ),
    ],
)
def test_refusals(capsys, options, message):
    write("out", {0: 0.5})
    write("begun", {})
    Path("begun/qa.csv").unlink()
    code, line = refused(capsys, "paper", *options)
    assert message in line
    assert code == 2
    assert not Path("f.png").exists()


def test_a_damaged_sheet():
    write("out", {0: 0.5})
    sheet = Path("out/qa.csv")
    sheet.write_text(sheet.read_text().replace("0.5", "half"))
    with pytest.raises(RalmError, match=r"qa\.csv:2: not a row of `ralm eval qa`"):
        paper_qa.read_runs(["out"])
