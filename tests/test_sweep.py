"""Sweeps: the figures of the separate commands, every table made once, and what becomes of them on paper."""

import csv
import gc
import io
import math
import os
import shutil
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from matplotlib.image import imread
from tokenizers import decoders, models, pre_tokenizers

import eval.sweep_tables
import retrieval.query
from eval.metrics import Perplexity
from eval.plots import draw, picture, x_axis
from eval.report import make_report, policies
from eval.sweep import KIND, stride_grid
from eval.sweep_rows import Row, format_csv, format_rows, read_csv
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.score_table import open_scores
from ralm_jax.scoring import Scorer
from ralm_jax.storage import Folder
from ralm_jax.windows import make_schedule
from retrieval.bm25 import build_index
from retrieval.corpus import Passage
from retrieval.dense import build_dense_index
from retrieval.hybrid import fuse
from retrieval.table import open_retrieval
from tests import tiny
from tests.test_cli import ralm, refused

ALL = "none,first,random,zero-shot,oracle"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with readers, retrievers and a text."""
    root = tmp_path_factory.mktemp("made")
    tiny.save_model(root / "small", tiny.GPT2)
    tiny.save_model(root / "other", tiny.LLAMA, seed=1)
    tiny.save_model(root / "bos", tiny.LLAMA, bos=True)
    tiny.save_model(root / "letters", tiny.GPT2, seed=2)
    letters().save(str(root / "letters" / "tokenizer.json"))
    tiny.save_cross_encoder(root / "pairs")
    rows = [Passage(row["id"], row["title"], row["text"]) for row in tiny.passages(40)]
    build_index(rows, str(root / "words"), progress=False)
    encoder = tiny.save_encoder(root / "encoder")
    build_dense_index(rows, str(root / "vectors"), str(encoder), pooling="mean", progress=False)
    fuse([str(root / "words"), str(root / "vectors")], str(root / "both"))
    (root / "text.txt").write_text(tiny.text(200))
    return root


def letters():
    """One token a character."""
    vocabulary = {token: i for i, token in enumerate(["<unk>", " ", "\n", *sorted(set("".join(tiny.WORDS)))])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return backend


@pytest.fixture
def place(made, tmp_path, monkeypatch):
    """The current folder, with all of `made` in it."""
    for path in made.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sweep(**options):
    """`ralm sweep` with small values, and others in their place."""
    defaults = {"model": "small", "text": "text.txt", "index": "words", "out": "out", "window": 64, "stride": 16,
                "query_length": 8, "k": 2, "strategies": "none,first"}  # fmt: skip
    arguments = []
    for name, values in (defaults | options).items():
        listed = values if isinstance(values, list) else [values]
        arguments += [f"--{name.replace('_', '-')}", *listed]
    ralm("sweep", *arguments)
    return list(csv.DictReader(io.StringIO(Path("out/sweep.csv").read_text())))


def tables(kind):
    return {path.name for path in Path("out").glob(f"{kind}-*")}


@pytest.fixture
def windows(monkeypatch):
    """How many windows each scoring has had, copies that fill a batch left out."""
    counted, batches = [], Scorer.batches
    monkeypatch.setattr(Scorer, "batches", lambda self, w, *n: (counted.append(len(w)), batches(self, w, *n))[1])
    return counted


@pytest.fixture
def queries(monkeypatch):
    """How many queries each search has had."""
    counted, search = [], retrieval.query.search
    monkeypatch.setattr(retrieval.query, "search", lambda r, q, *rest: (counted.append(len(q)), search(r, q, *rest))[1])
    return counted


def test_every_cell_is_what_the_commands_give(place, capsys):
    rows = sweep(index=["words", "vectors", "both"], query_length=[8, 16], stride=[8, 16], k=[1, 3], strategies=ALL)
    printed = capsys.readouterr().out
    assert len(rows) == 2 * (1 + 3 * 2 * 2 * 4)
    for index, length, stride, k in (("words", "8", "16", "1"), ("vectors", "16", "8", "3"), ("both", "8", "8", "3")):
        sizes = ["--window", "64", "--stride", stride, "--k", k]
        ralm("retrieve", "--index", index, "--text", "text.txt", "--tokenizer", "small", "--out", f"r-{index}",
             "--query-length", length, *sizes)  # fmt: skip
        ralm("score", "--model", "small", "--text", "text.txt", "--retrieval", f"r-{index}", "--out", f"s-{index}",
             *sizes)  # fmt: skip
        report = make_report(f"s-{index}", ALL.split(","))
        for name, expected in report.strategies.items():
            cell = {"stride": stride, "strategy": name}
            cell |= {"retriever": index, "query_length": length, "k": k} if name != "none" else {}
            (row,) = (row for row in rows if row.items() >= cell.items())
            for figure in ("token_ppl", "word_ppl", "nll"):
                assert float(row[figure]) == pytest.approx(getattr(expected, figure), rel=1e-6), (index, name)
            for figure in ("strides_without_passage", "strides", "tokens", "scored_tokens", "words"):
                assert int(row[figure]) == getattr(expected, figure)
            assert f"{expected.token_ppl:,.3f}" in printed
            change = 100 * (expected.token_ppl / report.strategies["none"].token_ppl - 1)
            assert float(row["vs_none_percent"]) == pytest.approx(change, abs=1e-4)


class TestTablesAreMadeOnce:
    def test_no_passage_is_scored_once(self, place, windows):
        rows = sweep(index=["words", "vectors"], query_length=[8, 16])
        plain, *rest = sorted(tables("scores"), key=lambda name: not name.endswith("-k0"))
        strides = int(rows[0]["strides"]) - 1
        passages = [int(open_scores(f"out/{name}").num_passages.sum()) for name in rest]
        assert sorted(windows) == sorted([1, strides, *passages])
        for name in rest:
            for part in ("past", "target"):
                np.testing.assert_array_equal(
                    getattr(open_scores(f"out/{name}"), part)[:, 0], getattr(open_scores(f"out/{plain}"), part)[:, 0]
                )

    def test_a_second_run_computes_nothing(self, place, monkeypatch, capsys):
        options = {"index": ["words", "vectors"], "k": [1, 2], "strategies": ALL}
        sweep(**options)
        before, printed = Path("out/sweep.csv").read_bytes(), capsys.readouterr().out
        assert printed.count("out/retrieval-") == 2
        assert printed.count("out/scores-") == 3
        for name in ("retrieve", "score", "load_reader"):
            monkeypatch.setattr(eval.sweep_tables, name, lambda *_, **__: pytest.fail("computed again"))
        sweep(**options)
        again = capsys.readouterr().out
        assert Path("out/sweep.csv").read_bytes() == before
        assert again == "".join(line for line in printed.splitlines(keepends=True) if not line.startswith("out/"))

    @pytest.mark.parametrize(
        ("added", "retrievals", "scored"),
        [
            ({"query_length": [8, 16]}, 1, 1),
            ({"index": ["words", "vectors"]}, 1, 1),
            ({"stride": [16, 8]}, 1, 2),
            ({"window": [64, 48], "past": 24}, 1, 2),
            ({"model": ["small", "other"]}, 0, 2),  # the tokenizer is the same
            ({"model": ["small", "bos"]}, 1, 2),
            ({"k": [2, 4]}, 1, 1),
            ({"k": [1, 2]}, 0, 0),
            ({"k": 1}, 0, 0),
            ({"strategies": ALL}, 0, 0),
            ({"strategies": "none"}, 0, 0),
            ({"limit_strides": 6}, 1, 2),
            ({"exclude_titles": "titles.txt"}, 1, 1),
        ],
    )
    def test_an_added_value_computes_what_is_new(self, place, windows, queries, added, retrievals, scored):
        Path("titles.txt").write_text(tiny.passages(1)[0]["title"])
        past = {"past": added["past"]} if "past" in added else {}
        first = sweep(**past)
        windows.clear(), queries.clear()
        before = tables("retrieval"), tables("scores")
        rows = sweep(**added)
        assert len(tables("retrieval") - before[0]) == len(queries) == retrievals
        new = tables("scores") - before[1]
        assert len(new) == scored
        lengths = [len(open_scores(f"out/{name}").passages) for name in new if name.endswith("-k0")]
        passages = [int(open_scores(f"out/{name}").num_passages.sum()) for name in new if not name.endswith("-k0")]
        assert sum(windows) == sum(1 + length for length in lengths) + sum(passages)
        if added.keys() <= {"query_length", "index", "stride", "model"}:
            assert all(row in rows for row in first)

    def test_smaller_k_are_views(self, place):
        whole = {(row["k"], row["strategy"]): row["nll"] for row in sweep(k=[1, 2, 4], strategies=ALL)}
        assert {name[-3:] for name in tables("scores")} == {"-k0", "-k4"}
        for k in (1, 2):
            shutil.rmtree("out")
            for row in sweep(k=k, strategies=ALL):
                assert float(row["nll"]) == pytest.approx(float(whole[row["k"], row["strategy"]]), rel=1e-6)

    def test_of_tables_for_several_k_the_smallest_that_serves(self, place):
        sweep(k=2), sweep(k=4)
        for k, expected in ((1, 2), (2, 2), (3, 4), (4, 4)):
            assert sweep(k=k)[1]["table"].endswith(f"-k{expected}")

    @pytest.mark.slow
    def test_readers_are_freed_one_after_another(self, place, monkeypatch):
        loaded, load = [], eval.sweep_tables.load_reader

        def watched(model, **options):
            gc.collect()
            assert not any(reader() for reader in loaded), "two readers at once"
            reader = load(model, **options)
            loaded.append(weakref.ref(reader))
            return reader

        monkeypatch.setattr(eval.sweep_tables, "load_reader", watched)
        sweep(model=["small", "other", "bos"])
        assert len(loaded) == 3


class TestRankedByOtherModels:
    STRATEGIES = "none,zero-shot,zero-shot-by,predictive,predictive-mixture"
    RANKERS = {"zero_shot_by": "letters", "ranker_window": 128, "reranker": "pairs", "prefix_tokens": 20,
               "strategies": STRATEGIES}  # fmt: skip

    def test_every_cell_is_what_the_commands_give(self, place):
        rows = sweep(model=["small", "other"], k=[1, 3], **self.RANKERS)
        assert len(rows) == 2 * (1 + 2 * 4)
        sizes = ["--text", "text.txt", "--stride", "16", "--k", "3"]
        ralm("retrieve", "--index", "words", "--tokenizer", "small", "--out", "r", "--query-length", "8",
             "--window", "64", *sizes)  # fmt: skip
        ralm("score", "--model", "letters", "--retrieval", "r", "--out", "by", "--strides-of-retrieval",
             "--window", "128", *sizes)  # fmt: skip
        ralm("rerank", "--reranker", "pairs", "--retrieval", "r", "--text", "text.txt", "--out", "ranking",
             "--prefix-tokens", "20")  # fmt: skip
        for model in ("small", "other"):
            ralm("score", "--model", model, "--retrieval", "r", "--out", f"s-{model}", "--window", "64", *sizes)
            expected = make_report(f"s-{model}", self.STRATEGIES.split(","), ranked="ranking", by_another="by")
            nll = {strategy: result.nll for strategy, result in expected.strategies.items()}
            assert len(set(nll.values())) == 5
            for strategy, value in nll.items():
                (row,) = (row for row in rows if (row["reader"], row["strategy"]) == (model, strategy)
                          and row["k"] in ("", "3"))  # fmt: skip
                assert float(row["nll"]) == pytest.approx(value, rel=1e-6), (model, strategy)
        one = {float(row["nll"]) for row in rows if row["reader"] == "small" and row["k"] == "1"}
        assert max(one) - min(one) < 1e-9, "among one passage there is no choice"
        rankers = {row["strategy"]: (row["ranker"], row["ranker_table"][:3]) for row in rows}
        assert rankers == {"none": ("", ""), "zero-shot": ("", ""), "zero-shot-by": ("letters", "sco"),
                           "predictive": ("pairs", "ran"), "predictive-mixture": ("pairs", "ran")}  # fmt: skip

    def test_each_retrieval_is_ranked_once(self, place, monkeypatch, capsys):
        options = {"model": ["small", "other"], "index": ["words", "vectors"], **self.RANKERS}
        rows = sweep(**options)
        printed = capsys.readouterr().out
        assert (printed.count("letters ranks retrieval-"), printed.count("pairs ranks retrieval-")) == (2, 2)
        assert (len(tables("retrieval")), len(tables("ranking")), len(tables("scores"))) == (2, 2, 2 + 4 + 2)
        for name in ("retrieve", "score", "rerank", "load_reader", "load_cross_encoder"):
            monkeypatch.setattr(eval.sweep_tables, name, lambda *_, **__: pytest.fail("computed again"))
        assert sweep(**options) == rows
        assert [row["nll"] for row in sweep(**options | {"k": 1}) if row["strategy"] == "predictive"]

    @pytest.mark.parametrize("added", [{"prefix_tokens": 10}, {"ranker_window": 160}])
    def test_another_setting_of_a_ranker_is_another_table(self, place, added):
        sweep(**self.RANKERS)
        before = tables("ranking"), tables("scores")
        sweep(**self.RANKERS | added)
        new = len(tables("ranking") - before[0]), len(tables("scores") - before[1])
        assert new == ((1, 0) if "prefix_tokens" in added else (0, 1))

    def test_a_ranker_with_the_same_tokens_and_windows_has_the_tables_of_a_reader(self, place, windows):
        options = {"model": ["small", "other"], "strategies": "none,zero-shot,zero-shot-by"}
        rows = sweep(**options, zero_shot_by="small")
        found = {(row["reader"], row["strategy"]): row for row in rows}
        assert found["small", "zero-shot-by"]["ranker_table"] == found["small", "zero-shot"]["table"]
        assert found["small", "zero-shot-by"]["nll"] == found["small", "zero-shot"]["nll"]
        assert found["other", "zero-shot-by"]["nll"] != found["other", "zero-shot"]["nll"]
        assert len(tables("scores")) == 4
        total = sum(windows)
        windows.clear(), shutil.rmtree("out")
        sweep(model=["small", "other"], strategies="none,zero-shot")
        assert sum(windows) == total

    @pytest.mark.slow
    def test_models_are_freed_one_after_another(self, place, monkeypatch):
        loaded = []

        def watched(load, model, **options):
            gc.collect()
            assert not any(there() for there in loaded), "two models at once"
            made = load(model, **options)
            loaded.append(weakref.ref(made))
            return made

        for name in ("load_reader", "load_cross_encoder"):
            monkeypatch.setattr(eval.sweep_tables, name, partial(watched, getattr(eval.sweep_tables, name)))
        sweep(model=["small", "bos"], **self.RANKERS)
        assert len(loaded) == 4

    @pytest.mark.slow
    def test_the_window_is_no_longer_than_the_positions_of_the_ranker(self, place):
        """The ranker has 256."""
        tiny.save_model(place / "long", replace(tiny.LLAMA, max_positions=512))
        Path("long.txt").write_text(tiny.text(700))
        rows = sweep(model="long", text="long.txt", window=300, zero_shot_by="small", strategies="zero-shot-by")
        made = open_scores(f"out/{rows[0]['ranker_table']}").settings
        assert (made["window"], made["strides_of_retrieval"]) == (256, True)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--strategies", "zero-shot-by"], "or have `ralm sweep` make it with its --zero-shot-by"),
            (["--strategies", "predictive"], "or have `ralm sweep` make it with --reranker"),
            (["--zero-shot-by", "small"], "--zero-shot-by small: nothing goes by it; add zero-shot-by to --strategies"),
            (["--reranker", "pairs"], "--reranker pairs: nothing goes by it; add predictive to --strategies"),
            (["--strategies", "zero-shot-by", "--zero-shot-by", "./no"], "./no: no such folder or file"),
            (["--strategies", "predictive", "--reranker", "./no"], "./no: no such folder or file"),
            (["--strategies", "zero-shot-by", "--zero-shot-by", "small", "--zero-shot-tokens", "33"], "raise --past"),
            (["--strategies", "zero-shot-by", "--zero-shot-by", "small", "--ranker-window", "300"],
             "--ranker-window 300: small has 256 positions"),
            (["--strategies", "zero-shot-by", "--zero-shot-by", "small", "--ranker-window", "40"],
             "a window of 40 has no room beside stride 16 and past 32"),
            (["--strategies", "zero-shot-by", "--zero-shot-by", "small", "--ranker-window", "0"],
             "ranker window must be at least 1, not 0"),
            (["--ranker-window", "128"], "--ranker-window is for --zero-shot-by"),
            (["--prefix-tokens", "20"], "--prefix-tokens and --pair-tokens are for --reranker"),
            (["--strategies", "predictive", "--reranker", "pairs", "--passages-in-window", "2"], "single passages"),
            (["--strategies", "predictive", "--reranker", "pairs", "--prefix-tokens", "64"], "64"),
        ],
    )  # fmt: skip
    def test_refused_before_anything_is_made(self, place, capsys, options, message):
        found, line = refused(capsys, "sweep", *TestInterrupted().arguments(), *options)
        assert message in line
        assert found == 2
        assert not Path("out").exists()

    def test_an_encoder_without_a_head_is_no_reranker(self, place, capsys):
        arguments = [*TestInterrupted().arguments(), "--strategies", "predictive", "--reranker", "encoder"]
        code, line = refused(capsys, "sweep", *arguments)
        assert (code, "encoder: no trained reranker" in line, Path("out").exists()) == (1, True, False)


class TestInterrupted:
    def test_ctrl_c_is_one_line_and_the_same_command_goes_on(self, place, capsys, monkeypatch, windows):
        options = {"index": ["words", "vectors"], "stride": 4, "batch_size": 8}
        whole = sweep(**options)
        total = sum(windows)
        shutil.rmtree("out")
        calls, dispatch = [], Scorer.dispatch

        def interrupted(self, batch):
            calls.append(batch)
            if len(calls) > 12:
                raise KeyboardInterrupt
            return dispatch(self, batch)

        with monkeypatch.context() as patched:
            patched.setattr(Scorer, "dispatch", interrupted)
            with pytest.raises(SystemExit) as caught:
                sweep(**options)
        assert caught.value.code == 130
        message = "ralm: error: interrupted; what is finished is kept, and the same command goes on from there"
        assert message in capsys.readouterr().err
        assert not Path("out/sweep.csv").exists()
        windows.clear()
        again = sweep(**options)
        assert 0 < sum(windows) < total
        for one, other in zip(again, whole, strict=True):
            assert one | {"nll": 0} == other | {"nll": 0} | {key: one[key] for key in ("token_ppl", "word_ppl",
                                                                                      "vs_none_percent")}  # fmt: skip
            assert float(one["nll"]) == pytest.approx(float(other["nll"]), rel=1e-7)

    @pytest.mark.slow
    def test_kill_9(self, made, tmp_path):
        text = tmp_path / "long.txt"
        text.write_text(tiny.text(1500))
        command = [sys.executable, "-m", "ralm_jax", "sweep", "--model", str(made / "small"), "--text", str(text),
                   "--index", str(made / "words"), "--window", "64", "--stride", "2", "--k", "4", "--batch-size", "8",
                   "--out"]  # fmt: skip
        options = {"env": {**os.environ, "XLA_FLAGS": ""}, "stdout": subprocess.DEVNULL}
        killed, whole = tmp_path / "killed", tmp_path / "whole"
        deadline = time.monotonic() + 120
        with subprocess.Popen([*command, str(killed)], **options) as started:
            try:
                while len(list(killed.glob("scores-*-k4/log_probs/c/*/0/0"))) < 3:
                    assert started.poll() is None, "finished before it could be killed"
                    assert time.monotonic() < deadline
                    time.sleep(0.002)
            finally:
                started.kill()
        assert not (killed / "sweep.csv").exists()
        for out in (killed, whole):
            subprocess.run([*command, str(out)], check=True, **options)
        assert (killed / "sweep.csv").read_text() == (whole / "sweep.csv").read_text()

    def test_a_damaged_table_says_what_to_do(self, place, capsys):
        rows = sweep()
        chunk = next(Path("out", rows[1]["table"]).glob("log_probs/c/*/0/0"))
        chunk.write_bytes(b"no chunk")
        code, line = refused(capsys, "sweep", *self.arguments())
        assert (code, f"{rows[1]['table']}: array 'log_probs' is damaged" in line) == (1, True)
        assert line.endswith("make it anew after removing that folder")
        shutil.rmtree(Path("out", rows[1]["table"]))
        assert sweep() == rows

    def arguments(self):
        return ["--model", "small", "--text", "text.txt", "--index", "words", "--out", "out", "--window", 64,
                "--stride", 16, "--query-length", 8, "--k", 2]  # fmt: skip


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "code", "message"),
        [
            (["--stride", "0"], 2, "stride must be at least 1, not 0"),
            (["--stride", "16", "64"], 2, "stride 64 in windows of 64 would leave tokens unscored"),
            (["--window", "64", "40"], 2, "a window of 40 has no room beside stride 16 and past 32"),
            (["--window", "64", "300"], 2, "longer than the 256 positions of small; use --window 256"),
            (["--query-length", "8", "0"], 2, "query length must be at least 1, not 0"),
            (["--k", "2", "0"], 2, "k must be at least 1, not 0"),
            (["--k"], 2, "--k: name at least one"),
            (["--model"], 2, "--model: name at least one"),
            (["--index"], 2, "--index: name at least one, or ask for --strategies none alone"),
            (["--index", "words", "nowhere"], 2, "nowhere: no index there"),
            (["--model", "small", "./nowhere"], 2, "./nowhere: no such folder or file"),
            (["--text", "nowhere.txt"], 2, "nowhere.txt: no such file"),
            (["--strategies", "best"], 2, "expected some of none, first"),
            (["--zero-shot-tokens", "33"], 2, "raise --past, or lower --zero-shot-tokens"),
            (["--x", "stride"], 2, "--x stride: has one value in this sweep; none can be the x axis"),
            (["--x", "stride", "--k", "1", "2"], 2, "--x stride: has one value in this sweep; k can be the x axis"),
            (["--batch-size", "0"], 2, "batch size must be at least 1"),
            (["--exclude-titles", "nowhere.txt"], 2, "nowhere.txt: no such file"),
            (["--limit-strides", "0"], 2, "limit strides must be at least 1, not 0"),
            (["--out", "gs://bucket/sweep"], 2, "gs://bucket/sweep: a sweep needs a local disk"),
        ],
    )
    def test_before_anything_is_loaded(self, place, capsys, monkeypatch, options, code, message):
        for name in ("retrieve", "score", "load_reader"):
            monkeypatch.setattr(eval.sweep_tables, name, lambda *_, **__: pytest.fail("begun"))
        arguments = [*TestInterrupted().arguments()]
        if options[0] in arguments:
            at = arguments.index(options[0])
            del arguments[at : at + 2]
        found, line = refused(capsys, "sweep", *arguments, *options)
        assert message in line
        assert found == code
        assert not Path("out").exists()

    def test_a_text_of_one_token(self, place, capsys):
        Path("one.txt").write_text("ba")
        arguments = TestInterrupted().arguments()
        arguments[3] = "one.txt"
        code, line = refused(capsys, "sweep", *arguments)
        assert (code, "one.txt: 1 token; scoring needs two at least" in line) == (1, True)

    def test_a_folder_of_something_else(self, place, capsys):
        Path("out").mkdir()
        Path("out/mine.txt").write_text("mine")
        code, line = refused(capsys, "sweep", *TestInterrupted().arguments())
        assert (code, "out: exists and does not hold sweep tables of ours; choose another folder" in line) == (2, True)
        assert [path.name for path in Path("out").iterdir()] == ["mine.txt"]
        arguments = TestInterrupted().arguments()
        arguments[arguments.index("out")] = "words"
        assert refused(capsys, "sweep", *arguments)[0] == 2

    def test_a_plot_that_cannot_be_written_leaves_the_tables(self, place, capsys):
        sweep()
        before = tables("scores")
        Path("out/sweep.png").unlink()
        Path("out/sweep.png.part").mkdir()
        code, line = refused(capsys, "sweep", *TestInterrupted().arguments())
        assert (code, "out/sweep.png: cannot be written" in line) == (1, True)
        assert tables("scores") == before


def test_without_retrieval(place):
    rows = sweep(index=[], model=["small", "other"], window=[64, 128], strategies="none")
    assert [(row["reader"], row["window"], row["retriever"]) for row in rows] == [
        ("small", "64", ""), ("small", "128", ""), ("other", "64", ""), ("other", "128", "")
    ]  # fmt: skip
    assert not tables("retrieval")


def test_what_the_paper_has_of_it(place, capsys):
    rows = sweep(k=[1, 2], strategies="none,first,zero-shot,oracle")
    capsys.readouterr()
    ralm("paper", "--table", "1", "--sweep", "out", "--csv", "table.csv")
    printed = capsys.readouterr().out
    ours = {(row["strategy"], row["k"]): float(row["word_ppl"]) for row in rows}
    for strategy, k in (("none", ""), ("first", "2"), ("zero-shot", "2")):
        assert f"{ours[strategy, k]:,.2f}       -\n" in printed
    assert "small in out is no reader of the paper's." in printed
    assert "out has window 64 (the paper 1024), stride 16 (the paper 4), query length 8 (the paper 32), k 2 " in printed
    found = [row for row in csv.DictReader(io.StringIO(Path("table.csv").read_text())) if row["ours"]]
    assert [(row["strategy"], float(row["ours"])) for row in found] == [
        (name, pytest.approx(ours[name, k])) for name, k in (("none", ""), ("first", "2"), ("zero-shot", "2"))
    ]
    ralm("paper", "--figure", "7", "--sweep", "out", "--out", "oracle.png")
    assert imread("oracle.png").shape[:2] == (675, 1200)
    found = list(csv.DictReader(io.StringIO(Path("oracle.csv").read_text())))
    assert [(row["strategy"], row["k"]) for row in found] == [
        ("none", ""), ("first", "1"), ("oracle", "1"), ("first", "2"), ("oracle", "2")
    ]  # fmt: skip


def test_the_folder_says_how_it_was_made(place):
    sweep(query_length=[8, 16])
    about = Folder.open("out", KIND).about
    assert (about["model"], about["query_length"], about["windows"]["past"]) == (["small"], [8, 16], 32)


def test_an_unfinished_sweep_leaves_what_is_said_of_the_one_before(place, monkeypatch):
    sweep()
    with monkeypatch.context() as patched:
        patched.setattr(Scorer, "dispatch", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(SystemExit):
            sweep(limit_strides=5)
    assert Folder.open("out", KIND).about["limit_strides"] is None
    sweep(limit_strides=5)
    assert Folder.open("out", KIND).about["limit_strides"] == 5


def test_the_tables_are_those_of_the_other_commands(place, capsys):
    rows = sweep()
    ralm("report", "--scores", f"out/{rows[1]['table']}", "--strategies", "first")
    assert f"{float(rows[1]['token_ppl']):,.3f}" in capsys.readouterr().out
    assert open_retrieval(f"out/{next(iter(tables('retrieval')))}").k == 2


@pytest.mark.parametrize(("windows", "strides"), [((64,), (4, 8, 16)), ((64, 128), (4, 16)), ((96,), (5, 16))])
def test_a_limit_is_the_same_part_of_the_text(windows, strides):
    grid = stride_grid(windows, strides, 7, "default")
    assert {(s.window, s.stride) for s in grid} == {(w, s) for w in windows for s in strides}
    end = max(windows) + 6 * max(strides)
    for settings in grid:
        reached = make_schedule(10_000, settings).ends[-1]
        assert end <= reached < end + settings.stride
        assert reached == end or (end - settings.window) % settings.stride
    assert {s.limit_strides for s in stride_grid(windows, strides, None, "ai21")} == {None}


def row(nll, **values):
    result = Perplexity(nll, tokens=100, scored_tokens=99, words=50, strides=7, strides_without_passage=2)
    plain = replace(result, nll=300.0, strides_without_passage=7)
    result = plain if values.get("strategy") == "none" else result
    defaults = {"reader": "gpt2", "parameters": 124_000_000, "retriever": "words", "query_length": 32, "stride": 4,
                "k": 16, "window": 1024, "strategy": "first", "table": "scores-0"}  # fmt: skip
    return Row(**(defaults | values), result=result, none=plain)


def none_row(**values):
    return row(300.0, retriever=None, query_length=None, k=None, strategy="none", **values)


class TestOutput:
    def test_a_table_for_the_terminal(self):
        printed = format_rows([none_row(), row(250.0), row(math.inf, retriever="vectors")]).splitlines()
        assert printed[0].split("  ")[0] == "reader"
        assert printed[1].split() == ["gpt2", "-", "-", "4", "-", "1024", "none", "20.086", "403.429", "+0.0%", "7"]
        assert printed[2].split() == ["gpt2", "words", "32", "4", "16", "1024", "first", "12.182", "148.413", "-39.3%",
                                      "2"]  # fmt: skip
        assert printed[3].split()[-4:] == ["-", "-", "-", "2"]
        assert len({len(line) for line in printed[:4]}) == 1
        assert printed[-1] == "Token perplexity is over 100 tokens, word perplexity over 50 words."

    def test_different_parts_of_the_text_are_told(self):
        other = replace(row(250.0), result=replace(row(250.0).result, tokens=103, words=52))
        printed = format_rows([none_row(), other]).splitlines()
        assert printed[-2] == "Token perplexity is over 100 to 103 tokens, word perplexity over 50 to 52 words."
        assert printed[-1].startswith("These are different parts of the text")

    def test_csv_keeps_every_digit(self):
        rows = [none_row(), row(250.0, retriever='a "b", c'), row(math.inf)]
        first, second, third = csv.DictReader(io.StringIO(format_csv(rows)))
        assert (first["retriever"], first["query_length"], first["k"], first["vs_none_percent"]) == ("", "", "", "0.0")
        assert second["retriever"] == 'a "b", c'
        assert float(second["token_ppl"]) == rows[1].result.token_ppl
        assert (third["token_ppl"], third["nll"]) == ("", "inf")

    def test_csv_reads_back(self, tmp_path):
        rows = [none_row(), row(250.0, retriever="a, b", strategy="predictive", ranker="r", ranker_table="ranking-1"),
                row(math.inf)]  # fmt: skip
        (tmp_path / "sweep.csv").write_text(format_csv(rows))
        assert read_csv(tmp_path / "sweep.csv") == rows

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [("nll_none", "other", "sweep.csv: has no column nll_none; run the sweep anew, which keeps its tables"),
         (",1024,", ",big,", "sweep.csv:2: not a row of a sweep"),
         (",100,99,50,300.0", "", "sweep.csv:2: not a row of a sweep")],
    )  # fmt: skip
    def test_csv_of_something_else(self, tmp_path, old, new, message):
        (tmp_path / "sweep.csv").write_text(format_csv([none_row()]).replace(old, new))
        with pytest.raises(RalmError, match=message):
            read_csv(tmp_path / "sweep.csv")

    def test_names_are_short_where_they_differ(self):
        names = ["models/gpt2", "other/gpt2", "opt", "..", "big/llama.gguf"]
        assert [eval.sweep_tables.short(name, names) for name in names] == ["models/gpt2", "other/gpt2", "opt", "..",
                                                                     "llama.gguf"]  # fmt: skip


class TestPlot:
    """What stands in the picture."""

    SIZES = {"query-length": 1, "stride": 1, "k": 1, "window": 1, "reader": 1}

    def test_the_axis(self):
        assert x_axis(self.SIZES) is None
        assert x_axis(self.SIZES | {"reader": 2}) == "reader"
        assert x_axis(self.SIZES | {"reader": 2, "window": 2, "k": 3}) == "k"
        assert x_axis(self.SIZES | {"reader": 2, "window": 2, "k": 3}, "window") == "window"
        with pytest.raises(UsageError, match="--x stride: has one value in this sweep; k, window can be the x axis"):
            x_axis(self.SIZES | {"window": 2, "k": 3}, "stride")

    def lines(self, axes):
        return {line.get_label(): list(zip(*(np.asarray(d, float).tolist() for d in line.get_data()), strict=True))
                for line in axes.get_lines()}  # fmt: skip

    def test_lines_over_query_lengths(self):
        cells = (("words", 64, 230.0), ("words", 16, 250.0), ("vectors", 16, 260.0), ("vectors", 64, 240.0))
        rows = [none_row(), *(row(nll, retriever=name, query_length=length) for name, length, nll in cells)]
        (axes,) = picture(rows, "query-length", "wiki").axes
        lines = self.lines(axes)
        assert list(lines) == ["words, first", "vectors, first", "none"]
        assert lines["words, first"] == [(16, math.exp(2.5)), (64, math.exp(2.3))]
        assert {y for _, y in lines["none"]} == {math.exp(3)}
        assert axes.get_lines()[-1].get_linestyle() == "--"
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("query length (tokens)", "perplexity per token")
        assert axes.get_xscale() == "log"
        assert [label.get_text() for label in axes.get_xticklabels()] == ["64", "16"]
        assert axes.get_title() == "wiki\ngpt2, stride 4, k 16, window 1024"
        assert [text.get_text() for text in axes.figure.legends[0].get_texts()] == list(lines)

    def test_no_passage_goes_along_where_it_varies(self):
        rows = [make(stride=stride) for stride in (3, 6) for make in (none_row, lambda **v: row(250.0, **v))]
        (axes,) = picture(rows, "stride", "wiki").axes
        lines = self.lines(axes)
        assert list(lines) == ["first", "none"]
        assert [x for x, _ in lines["none"]] == [3, 6]
        assert axes.get_xscale() == "linear"

    def test_strategies_differ_in_marker_and_line(self):
        strategies = [name for name in policies() if name != "none"]
        (axes,) = picture([row(250.0, k=k, strategy=s) for k in (1, 2) for s in strategies], "k", "wiki").axes
        assert list(self.lines(axes)) == strategies
        assert len({(line.get_marker(), line.get_linestyle()) for line in axes.get_lines()}) == len(strategies)

    def test_two_axes_and_strategies(self):
        rows = [none_row(window=window) for window in (512, 1024)]
        rows += [row(200.0 + k, k=k, window=w, strategy=s) for k in (1, 4) for w in (512, 1024)
                 for s in ("first", "oracle")]  # fmt: skip
        (axes,) = picture(rows, "k", "wiki").axes
        assert list(self.lines(axes)) == [
            "window 512, first", "window 512, oracle", "window 1024, first", "window 1024, oracle",
            "window 512, none", "window 1024, none",
        ]  # fmt: skip

    @pytest.mark.parametrize(("sizes", "places", "scale"), [((1e8, 1e9), [1e8, 1e9], "log"),
                                                            ((1e8, 1e8), [0, 1], "linear")])  # fmt: skip
    def test_readers_stand_at_their_sizes(self, sizes, places, scale):
        rows = [make(reader=name, parameters=int(size)) for name, size in zip("ab", sizes, strict=True)
                for make in (none_row, lambda **v: row(250.0, **v))]  # fmt: skip
        (axes,) = picture(rows, "reader", "wiki").axes
        assert [x for x, _ in self.lines(axes)["first"]] == places
        assert (axes.get_xscale(), axes.get_ylabel()) == (scale, "perplexity per word")
        assert axes.get_xticklabels()[0].get_text() == "a\n100 M"

    def test_bars_for_retrievers(self):
        rows = [none_row(), *(row(nll, retriever=name) for name, nll in (("words", 250.0), ("vectors", 240.0)))]
        (axes,) = picture(rows, None, "wiki").axes
        assert [bar.get_height() for bar in axes.patches] == [math.exp(2.5), math.exp(2.4)]
        assert [label.get_text() for label in axes.get_xticklabels()] == ["words", "vectors"]
        assert list(self.lines(axes)) == ["none"]

    def test_bars_for_readers_beside_what_is_stated(self):
        rows = [make(reader=name) for name in "ab" for make in (none_row, lambda **v: row(250.0, **v))]
        (axes,) = picture(rows, None, "wiki", words=True, bars="reader", stated={("b", "first"): 7.5}).axes
        assert [bar.get_height() for bar in axes.patches] == [math.exp(6), math.exp(6), math.exp(5), math.exp(5)]
        assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "b"]
        ((x, y),) = self.lines(axes)["paper"]
        assert (x, y) == (pytest.approx(axes.patches[3].get_x() + axes.patches[3].get_width() / 2), 7.5)
        assert axes.get_ylabel() == "perplexity per word"

    def test_what_is_no_number_is_a_gap(self):
        rows = [none_row(), row(250.0, k=1), row(math.inf, k=2)]
        (axes,) = picture(rows, "k", "wiki").axes
        assert math.isnan(self.lines(axes)["first"][1][1])

    @pytest.mark.parametrize("x", [None, "k"])
    def test_is_an_image(self, tmp_path, x):
        draw(str(tmp_path / "a.png"), [none_row(), row(250.0, k=1), row(240.0, k=2)], x, "wiki")
        pixels = imread(tmp_path / "a.png")
        assert pixels.shape[:2] == (675, 1200)
        assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 20
        assert [path.name for path in tmp_path.iterdir()] == ["a.png"]

    def test_the_command_draws_it(self, place):
        sweep(query_length=[8, 16])
        assert imread("out/sweep.png").shape[:2] == (675, 1200)

    def test_no_state_is_left_behind(self, tmp_path):
        draw(str(tmp_path / "a.png"), [none_row(), row(250.0)], None, "wiki")
        assert "matplotlib.pyplot" not in sys.modules


def test_a_table_that_cannot_be_made(tmp_path):
    def fails(location):
        raise RalmError(f"{location}: cannot be written (full); finished chunks are kept: go on with --resume")

    with pytest.raises(RalmError, match=r"scores-1-k2: cannot be written .* go on with the same command"):
        eval.sweep_tables.kept(tmp_path, "scores-1", 2, open_scores, fails)
