"""The paper's tables and figures: its own values, what is taken for its readers and texts, and what is refused."""

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.image import imread

from eval import paper, plots
from eval.paper import MODELS, TABLES, TEXTS, VALUES, paper_model, paper_text
from eval.sweep import KIND
from eval.sweep_rows import format_csv
from ralm_jax.errors import UsageError
from ralm_jax.models import SIZES
from ralm_jax.score_table import KIND as SCORES
from ralm_jax.storage import Folder
from tests.test_cli import ralm, refused
from tests.test_sweep import none_row, row

STRATEGIES = ("none", "first", "zero-shot", "predictive")


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name, rows, configs, *, engine="bm25", **about):
    """What a sweep leaves, without the arrays. Rows have the ScoreTable of their reader, of `configs`."""
    text = {"text": None, "dataset": "wikitext-103", "split": "test", "limit_rows": None} | about.pop("text", {})
    folder = Folder.create(name, KIND, {}, "resume")
    folder.manifest["about"] = {"limit_strides": None} | about | {"text": text}
    folder.write_manifest()
    retrieval = {"retriever": {"engine": engine}}
    for reader, config in configs.items():
        Folder.create(f"{name}/{reader}", SCORES, {"config": config.to_hf(), "retrieval": retrieval}, "overwrite")
    Path(name, "sweep.csv").write_text(format_csv([replace(one, table=one.table or one.reader) for one in rows]))
    return name


def gpt2(reader="gpt2", **values):
    """The four strategies of table 1."""
    own = {"reader": reader, "table": "", **values}
    ranked = [row(260.0 - 10 * i, **own | {"strategy": name}) for i, name in enumerate(STRATEGIES[1:])]
    return [none_row(**{k: v for k, v in own.items() if k in ("reader", "table", "stride", "window")}), *ranked]


def cells(number, *sweeps):
    return paper.table_cells(number, paper.read_sweeps(sweeps))


def printed(number, *sweeps):
    made = cells(number, *sweeps)
    return paper.format_table(number, made).splitlines(), paper.format_matches(made)


class TestValues:
    def test_are_those_of_the_paper(self, shared):
        (source,) = (shared / "papers").glob("000_*.txt")
        blocks = re.findall(r"begin{tabular}.*?end{tabular}", source.read_text(), re.DOTALL)
        stated = [[float(number) for number in re.findall(r"&\s*(\d+\.\d)\b", block)] for block in blocks]
        for number, at in ((1, 0), (2, 1), (3, 2), (5, 4)):
            table = TABLES[number]
            ours = [
                value
                for model in table.models
                for strategy in table.strategies
                for value in VALUES[model][strategy][: table.texts]
            ]
            assert ours == stated[at], number

    def test_every_table_has_its_lines(self, place):
        write("out", [], {})
        for number, count in ((1, 16), (2, 6), (3, 6), (5, 6)):
            made = cells(number, "out")
            assert len({cell.line for cell in made}) == count
            assert all(cell.found is None for cell in made)
            missing = [(cell.line.strategy, cell.text) for cell in made if cell.paper is None]
            assert all(strategy == "predictive" and text != "WikiText-103" for strategy, text in missing)
        assert printed(1, "out")[1] == "The sweeps have nothing for it."


class TestWhatIsThePapers:
    @pytest.mark.parametrize("model", MODELS)
    def test_readers(self, model):
        config = json.loads(json.dumps(SIZES[MODELS[model]].to_hf()))
        assert paper_model(config) == model

    @pytest.mark.parametrize(
        ("size", "changes", "model"),
        [
            ("gpt2", {"norm_epsilon": 1e-6}, "GPT-2 S"),
            ("gpt2", {"vocab_size": 50000}, None),
            ("gpt2", {"max_positions": 512}, None),
            ("llama-7b", {"rope_theta": 5e5}, "LLaMA-7B"),
            ("llama2-7b", {}, None),
            ("opt-125m", {}, "OPT-125M"),
        ],
    )
    def test_variants(self, size, changes, model):
        assert paper_model(replace(SIZES[size], **changes).to_hf()) == model

    @pytest.mark.parametrize(
        ("text", "limit_strides", "name"),
        [
            ({"dataset": "wikitext-103"}, None, "WikiText-103"),
            ({"dataset": "stackexchange"}, None, "Stack Exchange"),
            ({"dataset": "wikitext-103"}, 60, "part of WikiText-103"),
            ({"dataset": "arxiv", "limit_rows": 3}, None, "part of ArXiv"),
            ({"dataset": "freelaw", "split": "validation"}, None, "freelaw validation"),
            ({"text": "books/luke.txt"}, None, "luke.txt"),
        ],
    )
    def test_texts(self, text, limit_strides, name):
        whole = {"text": None, "dataset": None, "split": "test", "limit_rows": None} | text
        assert paper_text({"text": whole, "limit_strides": limit_strides}) == name

    @pytest.mark.parametrize(("engine", "retrieval"), [("bm25", "BM25"), ("lucene", "BM25"), ("dense", "words")])
    def test_retrievers(self, place, engine, retrieval):
        write("out", gpt2(), {"gpt2": SIZES["gpt2"]}, engine=engine)
        by_strategy = {one.row.strategy: one for one in paper.read_sweeps(["out"])}
        assert (by_strategy["none"].retrieval, by_strategy["first"].retrieval) == ("-", retrieval)
        (ours,) = (cell for cell in cells(1, "out") if cell.found and cell.line.strategy == "first"
                   and cell.text == "WikiText-103")  # fmt: skip
        assert ours.paper == (29.6 if retrieval == "BM25" else None)


class TestTables:
    def test_ours_beside_the_papers(self, place):
        write("out", gpt2("models/mine"), {"models/mine": SIZES["gpt2"]})
        lines, matches = printed(1, "out")
        assert "WikiText-103, word ppl" in lines[0]
        assert "FreeLaw, token ppl" in lines[0]
        assert lines[1].split() == ["model", "retrieval", "reranking", *["ours", "paper"] * 5]
        assert lines[2].split() == ["GPT-2", "S", "-", "-", "403.43", "37.5", "-", "21.3", "-", "12.0", "-", "12.8",
                                    "-", "13.0"]  # fmt: skip
        assert lines[3].split()[2:6] == ["BM25", "-", "181.27", "29.6"]
        assert lines[5].split()[2:] == ["BM25", "predictive", "121.51", "26.8", *["-"] * 8]
        assert lines[6].split()[:6] == ["GPT-2", "M", "-", "-", "-", "26.3"]
        assert len(lines) == 18
        assert len({len(line) for line in lines}) == 1
        assert matches.splitlines() == [
            "models/mine in out has the shape of GPT-2 S.", "The text of out, WikiText-103, is the paper's.",
            "out has the settings of the paper.",
        ]  # fmt: skip

    def test_what_the_paper_has_not_stands_under_its_own_name(self, place):
        write("out", gpt2("mine"), {"mine": SIZES["llama2-7b"]}, text={"dataset": None, "text": "a/luke.txt"})
        lines, matches = printed(1, "out")
        assert lines[0].endswith("luke.txt, word ppl")
        assert [line.split()[0] for line in lines[18:]] == ["mine"] * 4
        assert lines[19].split() == ["mine", "BM25", "-", *["-"] * 10, "181.27", "-"]
        assert "mine in out is no reader of the paper's." in matches
        assert "The text of out, luke.txt, is no text of the paper's." in matches

    def test_several_texts(self, place):
        write("wiki", gpt2(), {"gpt2": SIZES["gpt2"]})
        write("news", gpt2(), {"gpt2": SIZES["gpt2"]}, text={"dataset": "realnews"})
        lines, _ = printed(1, "wiki", "news")
        assert lines[2].split()[4:8] == ["403.43", "37.5", "20.09", "21.3"]

    def test_readers_of_other_tables_are_left_out(self, place):
        write("out", gpt2("llama"), {"llama": SIZES["llama-7b"]})
        assert not any(cell.found for cell in cells(1, "out"))
        lines, _ = printed(2, "out")
        assert [line.split() for line in lines[1:4]] == [
            ["model", "retrieval", "ours", "paper"], ["LLaMA-7B", "-", "403.43", "9.9"],
            ["LLaMA-7B", "BM25", "181.27", "8.8"],
        ]  # fmt: skip

    def test_small_models_that_rerank(self, place):
        own = {"reader": "medium", "table": "medium", "strategy": "zero-shot-by"}
        rows = [row(250.0, **own, ranker="small", ranker_table="small"),
                row(245.0, **own, ranker="tiny", ranker_table="tiny"),
                row(240.0, **own | {"strategy": "zero-shot"})]  # fmt: skip
        write("out", rows, {"medium": SIZES["gpt2-medium"], "small": SIZES["gpt2"], "tiny": SIZES["opt-125m"]})
        lines, matches = printed(3, "out")
        found = {line.split("  ")[1].strip(): line.split()[-4:] for line in lines[2:5]}
        assert found == {"GPT-2 S": ["148.41", "20.8", "-", "12.1"], "OPT-125M": ["134.29", "-", "-", "-"],
                         "GPT-2 M": ["121.51", "20.8", "-", "12.0"]}  # fmt: skip
        assert "zero-shot-by in out goes by small." in matches

    def test_the_settings_nearest_to_the_papers(self, place):
        rows = [*gpt2(stride=2, window=512), *gpt2(stride=5, window=512)]
        rows += [row(200.0, reader="gpt2", table="", stride=5, window=512, k=k) for k in (4, 8)]
        write("out", rows, {"gpt2": SIZES["gpt2"]})
        used = {cell.found.row.stride for cell in cells(1, "out") if cell.found}
        assert used == {5}
        (first,) = {cell.found.row.k for cell in cells(1, "out") if cell.found and cell.line.strategy == "first"}
        assert first == 16
        assert "out has window 512 (the paper 1024), stride 5 (the paper 4)." in printed(1, "out")[1]

    def test_several_readers_of_one_shape(self, place):
        rows = [*gpt2("a"), *gpt2("b")]
        write("out", rows, {"a": SIZES["gpt2"], "b": SIZES["gpt2"]})
        labels = list(dict.fromkeys(cell.line.label for cell in cells(1, "out")))
        assert labels == ["GPT-2 S (a)", "GPT-2 S (b)", "GPT-2 M", "GPT-2 L", "GPT-2 XL"]
        assert {cell.paper for cell in cells(1, "out") if cell.line[:2] == ("GPT-2 S (b)", "none")} == {
            37.5, 21.3, 12.0, 12.8, 13.0
        }  # fmt: skip

    def test_the_same_cell_in_two_sweeps(self, place, capsys):
        write("one", gpt2(), {"gpt2": SIZES["gpt2"]})
        write("two", gpt2(), {"gpt2": SIZES["gpt2"]})
        assert {cell.found.sweep for cell in cells(1, "one", "two") if cell.found} == {"one"}
        write("three", [row(111.0, reader="gpt2", table="")], {"gpt2": SIZES["gpt2"]})
        code, line = refused(capsys, "paper", "--table", "1", "--sweep", "one", "three")
        assert (code, "one (words, window 1024) and three (words, window 1024) have different results" in line) == (
            2,
            1,
        )
        write("three", [row(111.0, reader="gpt2", table="", window=512)], {"gpt2": SIZES["gpt2"]})
        with pytest.raises(UsageError, match=r"one \(words, window 1024\) and three \(words, window 512\)"):
            cells(1, "one", "three")

    def test_csv(self, place):
        write("out", gpt2("a, b"), {"a, b": SIZES["gpt2"]})
        rows = list(csv.DictReader(io.StringIO(paper.format_cells(cells(1, "out")))))
        assert len(rows) == 16 * 5
        expected = {"model": "GPT-2 S", "strategy": "first", "retrieval": "BM25", "text": "WikiText-103",
                    "measure": "word ppl", "paper": "29.6", "reader": "a, b", "k": "16"}  # fmt: skip
        assert rows[5].items() >= expected.items()
        assert float(rows[5]["ours"]) == pytest.approx(181.27, abs=0.01)
        assert (rows[6]["ours"], rows[6]["paper"], rows[6]["sweep"]) == ("", "16.1", "")


class TestFigures:
    @pytest.fixture
    def drawn(self, monkeypatch):
        """What is given to `plots.draw`, which draws it."""
        calls, draw = [], plots.draw
        monkeypatch.setattr(
            plots, "draw", lambda *args, **options: (calls.append((args, options)), draw(*args, **options))
        )
        return calls

    @pytest.mark.parametrize(
        ("number", "axis", "values"),
        [(4, "reader", ["gpt2", "large"]), (5, "stride", [4, 8]), (6, "query_length", [16, 32]), (7, "k", [1, 16])],
    )
    def test_curves(self, place, drawn, number, axis, values):
        varied = [one for value in values for one in (
            none_row(**{"reader": "gpt2", "table": "", **({axis: value} if axis in ("reader", "stride") else {})}),
            row(250.0, **{"reader": "gpt2", "table": "", axis: value}),
            row(200.0, **{"reader": "gpt2", "table": "", "strategy": "oracle", axis: value}))]  # fmt: skip
        other = {"window": 512, "reader": "gpt2", "table": ""}
        write("out", [*varied, row(240.0, **other)], {"gpt2": SIZES["gpt2"], "large": SIZES["gpt2-large"]})
        ralm("paper", "--figure", str(number), "--sweep", "out", "--out", "f.png")
        assert imread("f.png").shape[:2] == (675, 1200)
        (((_, rows, x, title), options),) = drawn
        names = {"gpt2": "GPT-2 S", "large": "GPT-2 L"}
        expected = [names.get(value, value) for value in values]
        assert (x.replace("-", "_"), plots.values(rows, x), title) == (
            axis,
            expected,
            f"WikiText-103 (figure {number})",
        )
        assert {one.strategy for one in rows} == {"none", "first"} | ({"oracle"} if number == 7 else set())
        assert {one.window for one in rows} == {1024}
        assert (options["words"], options["stated"]) == (True, {})
        written = list(csv.DictReader(io.StringIO(Path("f.csv").read_text())))
        assert [float(line["ours"]) for line in written] == [pytest.approx(one.result.word_ppl) for one in rows]
        assert {line["paper"] for line in written} == {""}

    @pytest.mark.parametrize("ranked", ["zero-shot", "predictive"])
    def test_bars_by_reader(self, place, drawn, ranked):
        shown = ("none", "first", ranked)
        rows = [
            one for name in ("gpt2", "mine") for one in gpt2(name) if one.strategy in shown or ranked != "zero-shot"
        ]
        write("out", rows, {"gpt2": SIZES["gpt2"], "mine": SIZES["llama2-7b"]})
        ralm("paper", "--figure", "1", "--sweep", "out", "--out", "f.png")
        (((_, drawn_rows, x, _), options),) = drawn
        assert [(one.reader, one.strategy) for one in drawn_rows] == [
            (r, s) for r in ("GPT-2 S", "mine") for s in shown
        ]
        assert (x, options["bars"], options["words"]) == (None, "reader", True)
        assert options["stated"] == {("GPT-2 S", s): VALUES["GPT-2 S"][s][0] for s in shown}
        assert imread("f.png").shape[:2] == (675, 1200)

    def test_tokens_where_the_paper_has_them(self, place, drawn):
        write("out", gpt2(), {"gpt2": SIZES["gpt2"]}, text={"dataset": "realnews"})
        ralm("paper", "--figure", "1", "--sweep", "out", "--out", "f.png")
        (((*_, title), options),) = drawn
        assert (options["words"], title) == (False, "RealNews (figure 1)")
        assert options["stated"] == {("GPT-2 S", "none"): 21.3, ("GPT-2 S", "first"): 16.1}


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--table", "1", "--sweep", "nowhere"], "nowhere: no sweep tables there"),
            (["--table", "1", "--sweep"], "table 1: name the folders that it is made from with --sweep, and no others"),
            (["--table", "1", "--sweep", "begun"], "begun: has no sweep.csv; let `ralm sweep` come to its end"),
            (["--figure", "5", "--sweep", "out"], "--figure needs --out for its PNG, and --table takes --csv"),
            (["--table", "1", "--sweep", "out", "--out", "f.png"], "--figure needs --out"),
            (["--figure", "5", "--sweep", "out", "--out", "f.png", "--csv", "f"], "--table takes --csv"),
            (["--figure", "5", "--sweep", "out", "--out", "f.csv"], "f.csv: is for the figure's numbers"),
            (["--figure", "5", "--sweep", "out", "--out", "no/f.png"], "the folder no does not exist"),
            (["--figure", "5", "--sweep", "out", "--out", "f.png"],
             "figure 5: needs a sweep with several values of --stride and --strategies none,first; these have none"),
            (["--figure", "4", "--sweep", "out", "--out", "f.png"], "several values of --model"),
            (["--figure", "1", "--sweep", "out", "news", "--out", "f.png"],
             "figure 1: the sweeps are of WikiText-103, RealNews; name those of one text"),
        ],
    )  # fmt: skip
    def test_one_line(self, place, capsys, options, message):
        write("out", gpt2(), {"gpt2": SIZES["gpt2"]})
        write("news", gpt2(), {"gpt2": SIZES["gpt2"]}, text={"dataset": "realnews"})
        write("begun", [], {})
        Path("begun/sweep.csv").unlink()
        code, line = refused(capsys, "paper", *options)
        assert message in line
        assert code == 2
        assert not Path("f.png").exists()

    def test_a_table_that_has_gone(self, place, capsys):
        write("out", gpt2(), {})
        code, line = refused(capsys, "paper", "--table", "1", "--sweep", "out")
        assert (code, "out: its table gpt2 has gone; run the sweep anew" in line) == (2, True)

    def test_every_text_of_the_paper_is_a_data_set(self):
        from typing import get_args

        from ralm_jax.settings import TextDataset

        assert set(TEXTS) == set(get_args(TextDataset))
