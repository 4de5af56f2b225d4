"""The `ralm` command as a user meets it: output, files, exit codes, one line for whatever goes wrong."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import ralm_jax
from ralm_jax import cli
from ralm_jax.reader import load_reader
from ralm_jax.score_table import open_scores
from ralm_jax.sharding import make_mesh
from ralm_jax.tokenizer import load_tokenizer
from tests import tiny

SIZES = ["--window", "64", "--stride", "16", "--k", "3"]


def ralm(*args):
    cli.main([str(arg) for arg in args])


def refused(capsys, *args):
    """Exit code and the one line of a command that fails."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        ralm(*args)
    printed = capsys.readouterr().err
    lines = [line for line in printed.splitlines() if "error:" in line]
    assert len(lines) == 1, printed
    assert "Traceback" not in printed
    return caught.value.code, lines[0]


@pytest.fixture
def place(tmp_path, monkeypatch, tiny_model, text_file, corpus_file):
    """A folder with a model, a text and a corpus; the current one."""
    (tmp_path / "model").symlink_to(tiny_model)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def index(place):
    ralm("index", "--corpus", "corpus.jsonl", "--out", "index")
    return place


class TestSteps:
    def test_from_corpus_to_report(self, index, capsys):
        ralm("retrieve", "--index", "index", "--text", "text.txt", "--tokenizer", "model", "--out", "retrieval", *SIZES,
             "--export-json", "retrieved.json")  # fmt: skip
        ralm("score", "--model", "model", "--text", "text.txt", "--retrieval", "retrieval", "--out", "scores", *SIZES)
        ralm("report", "--scores", "scores", "--strategies", "none,first,random,zero-shot,oracle", "--json", "r.json")
        printed = capsys.readouterr().out
        assert "retrieval: 35 strides" in printed
        assert "The first passage" in printed
        report = json.loads(Path("r.json").read_text())
        assert list(report["strategies"]) == ["none", "first", "random", "zero-shot", "oracle"]
        for figures in report["strategies"].values():
            assert {"token_ppl", "word_ppl", "nll", "tokens", "words", "strides", "strides_without_passage"} <= set(
                figures
            )
        assert report["strategies"]["oracle"]["nll"] <= report["strategies"]["first"]["nll"]
        assert report["config"]["window"] == 64

        # the paper's JSON in place of the table gives the same numbers
        ralm(
            "score",
            "--model",
            "model",
            "--text",
            "text.txt",
            "--retrieval",
            "retrieved.json",
            "--out",
            "scores2",
            *SIZES,
        )
        one, two = open_scores("scores"), open_scores("scores2")
        np.testing.assert_allclose(one.target, two.target, atol=1e-6)

    def test_lm_is_the_steps_in_one_go(self, index, capsys):
        ralm("retrieve", "--index", "index", "--text", "text.txt", "--tokenizer", "model", "--out", "retrieval", *SIZES)
        ralm("score", "--model", "model", "--text", "text.txt", "--retrieval", "retrieval", "--out", "scores", *SIZES)
        ralm("lm", "--model", "model", "--text", "text.txt", "--corpus", "corpus.jsonl", "--out", "all", *SIZES)
        assert "are in all." in capsys.readouterr().out
        np.testing.assert_array_equal(open_scores("scores").target, open_scores("all/scores").target)
        assert json.loads(Path("all/report.json").read_text())["strategies"]["first"]["strides"] == 35

    def test_lm_again(self, index, capsys):
        command = ["lm", "--model", "model", "--text", "text.txt", "--corpus", "corpus.jsonl", "--out", "all", *SIZES]
        ralm(*command)
        code, line = refused(capsys, *command)
        assert code == 2
        assert "all: has index, retrieval, scores, report.json already; add --resume to go on" in line
        before = Path("all/index/passages.arrow").stat().st_mtime_ns
        ralm(*command, "--resume")
        assert Path("all/index/passages.arrow").stat().st_mtime_ns == before
        ralm(*command, "--overwrite")
        assert Path("all/index/passages.arrow").stat().st_mtime_ns > before
        code, line = refused(capsys, *command, "--resume", "--passage-words", "3")
        assert (code, "cannot be resumed: passage_words: 100 there, 3 now" in line) == (1, True)
        tiny.write_corpus(Path("corpus.jsonl"), 30)
        code, line = refused(capsys, *command, "--resume")
        assert (code, "all/index: was made with other settings and cannot be resumed: files: " in line) == (1, True)

    def test_lm_knows_before_it_scores(self, place, capsys):
        command = ["lm", "--model", "model", "--text", "text.txt", "--corpus", "corpus.jsonl", *SIZES]
        for options, message in (
            (["--out", "gs://bucket/x"], "the index needs a local disk"),
            (["--out", "all", "--past", "8"], "raise --past, or lower --zero-shot-tokens"),
            (["--out", "all", "--strategies", "best"], "expected some of none, first"),
            (["--out", "all", "--exclude-titles", "none.txt"], "none.txt: no such file"),
        ):
            code, line = refused(capsys, *command, *options)
            assert (code, message in line) == (2, True)
            assert not Path("all").exists()

    def test_lm_keeps_a_report_of_somebody_elses(self, place, capsys):
        Path("all").mkdir()
        Path("all/report.json").write_text("mine")
        command = ["lm", "--model", "model", "--text", "text.txt", "--corpus", "corpus.jsonl", "--out", "all", *SIZES]
        code, line = refused(capsys, *command)
        assert (code, "all: has report.json already" in line) == (2, True)
        assert Path("all/report.json").read_text() == "mine"

    def test_scoring_without_retrieval(self, place, capsys):
        ralm("score", "--model", "model", "--text", "text.txt", "--out", "scores", "--window", "64", "--stride", "16")
        ralm("report", "--scores", "scores", "--strategies", "none,first")
        assert open_scores("scores").passages.shape[1] == 0

    def test_several_tables(self, place):
        for name, window in (("a", "64"), ("b", "48")):
            ralm("score", "--model", "model", "--text", "text.txt", "--out", name, "--window", window, "--stride", "8")
        ralm("report", "--scores", "a", "b", "--strategies", "none", "--json", "r.json")
        reports = json.loads(Path("r.json").read_text())
        assert [report["config"]["window"] for report in reports] == [64, 48]

    def test_presets_stand_in_the_settings(self, place):
        for preset, bos in (("default", "every-window"), ("ai21", "passage")):
            ralm("score", "--model", "model", "--text", "text.txt", "--out", preset, *SIZES, "--preset", preset)
            assert open_scores(preset).settings["bos"] == bos
        ralm("score", "--model", "model", "--text", "text.txt", "--out", "own", *SIZES, "--preset", "ai21",
             "--bos", "every-window")  # fmt: skip
        assert open_scores("own").settings["bos"] == "every-window"

    def test_search(self, index, capsys):
        Path("q.jsonl").write_text('{"query": "ba be"}\n{"query": "zzz"}\n')
        ralm("search", "--index", "index", "--queries", "q.jsonl", "--k", "2", "--json", "hits.json")
        rows = [json.loads(line) for line in Path("hits.json").read_text().splitlines()]
        assert [row["query"] for row in rows] == ["ba be", "zzz"]
        assert len(rows[0]["hits"]) == 2
        assert set(rows[0]["hits"][0]) == {"id", "score", "title", "text"}
        assert rows[1]["hits"] == []
        capsys.readouterr()
        ralm("search", "--index", "index", "--query", "ba be", "--k", "2")
        assert rows[0]["hits"][0]["title"] in capsys.readouterr().out

    def test_excluded_titles(self, index):
        titles = [row["title"] for row in tiny.passages(40)]
        Path("titles.txt").write_text("\n".join(titles[:38]))
        ralm(
            "search", "--index", "index", "--query", tiny.text(40), "--exclude-titles", "titles.txt", "--json", "h.json"
        )
        found = json.loads(Path("h.json").read_text())["hits"]
        assert {hit["title"] for hit in found} <= set(titles[38:])


class TestRefusals:
    """Exit code 2 for a request that cannot be met, 1 for a failure; one line that names the thing."""

    SCORE = ("score", "--model", "model", "--text", "text.txt", "--out", "scores")

    @pytest.mark.parametrize(
        ("change", "code", "message"),
        [
            (["--text", "none.txt"], 2, "none.txt: no such file"),
            (["--model", "./none"], 2, "./none: no such folder or file"),
            (["--model", "text.txt"], 2, "a model is a folder, a .gguf file or a Hugging Face id"),
            (["--model", "nobody/nothing"], 1, "nobody/nothing: no such folder, and not in the Hugging Face cache"),
            (["--model", "."], 2, "no tokenizer"),
            (["--window", "4096"], 2, "use --window 256"),
            (["--tokenizer", "text.txt"], 2, "a model is a folder, a .gguf file or a Hugging Face id"),
            (["--past", "60", "--window", "64"], 2, "no room beside stride 4 and past 60"),
            (["--batch-size", "0"], 2, "batch size must be at least 1"),
            (["--k", "-1"], 2, "k must be at least 0"),
            (["--retrieval", "none"], 2, "none: no retrieval there"),
            (["--retrieval", "text.txt"], 1, "text.txt: not JSON"),
            (["--tokenizer", "."], 2, "no tokenizer"),
        ],
    )
    def test_score(self, place, capsys, change, code, message):
        options = [*self.SCORE, "--window", "64"]
        for name, value in zip(change[::2], change[1::2], strict=True):
            if name in options:
                options[options.index(name) + 1] = value
            else:
                options += [name, value]
        found, line = refused(capsys, *options)
        assert message in line
        assert found == code
        assert not Path("scores").exists()

    def test_an_empty_text(self, place, capsys):
        Path("text.txt").write_text("")
        assert refused(capsys, *self.SCORE) == (1, "ralm: error: text.txt: the text is empty")

    def test_a_corrupt_shard(self, place, capsys, tiny_model):
        broken = place / "broken"
        broken.mkdir()
        for path in tiny_model.iterdir():
            data = path.read_bytes()
            (broken / path.name).write_bytes(data[:-64] if path.suffix == ".safetensors" else data)
        options = list(self.SCORE)
        options[2] = "broken"
        code, line = refused(capsys, *options)
        assert (code, "broken/model.safetensors: not a whole safetensors file" in line) == (1, True)

    def test_report(self, place, capsys):
        assert refused(capsys, "report", "--scores", "none") == (2, "ralm: error: none: no scores there")
        ralm(*self.SCORE, "--window", "64", "--past", "8")
        for options, message in (
            (["--strategies", "best"], "expected some of none, first"),
            (["--zero-shot-tokens", "9"], "needs a table scored with --past 9 or more"),
            (["--zero-shot-tokens", "0"], "zero shot tokens must be at least 1, not 0"),
            (["--json", "no/such/r.json"], "no/such/r.json: the folder no/such does not exist"),
            (["--json", "model"], "model: is a folder; name a file"),
        ):
            code, line = refused(capsys, "report", "--scores", "scores", *options)
            assert (code, message in line) == (2, True)

    def test_index(self, place, capsys):
        Path("bad.jsonl").write_text('{"_id": "1"}\n')
        assert refused(capsys, "index", "--corpus", "none", "--out", "x")[0] == 2
        code, line = refused(capsys, "index", "--corpus", "corpus.jsonl", "--out", "gs://bucket/index")
        assert (code, "must lie on a local disk" in line) == (2, True)
        code, line = refused(capsys, "index", "--corpus", "bad.jsonl", "--out", "x")
        assert (code, "bad.jsonl:1: field 'text' is missing" in line) == (1, True)
        assert refused(capsys, "search", "--index", "x", "--query", "a")[0] == 2

    def test_retrieval_of_another_window(self, index, capsys):
        ralm("retrieve", "--index", "index", "--text", "text.txt", "--tokenizer", "model", "--out", "r", *SIZES)
        code, line = refused(capsys, *self.SCORE, "--retrieval", "r", "--window", "48", "--stride", "16", "--past", "8")
        assert (code, "stride 0 is tokens 0 to 64 here, but 0 to 48 by window 48 and stride 16" in line) == (1, True)

    @pytest.mark.parametrize(
        "args",
        [[], ["score"], ["no-such-command"], ["score", "--no-such-option"], ["search", "--index", "x"],
         ["search", "--index", "x", "--query", "a", "--queries", "b"], ["report", "--scores"],
         ["score", "--model", "m", "--text", "t", "--out", "o", "--resume", "--overwrite"],
         ["score", "--model", "m", "--text", "t", "--out", "o", "--stride", "four"],
         ["score", "--model", "m", "--text", "t", "--out", "o", "--stride", "64", "--window", "64"],
         ["score", "--model", "m", "--text", "t", "--out", "o", "--limit-strides", "0"]],
    )  # fmt: skip
    def test_usage(self, capsys, args):
        with pytest.raises(SystemExit) as caught:
            ralm(*args)
        assert caught.value.code == 2
        assert "Traceback" not in capsys.readouterr().err


class TestModels:
    def test_inspect(self, place, capsys):
        ralm("inspect", "model", "--json", "facts.json")
        printed = capsys.readouterr().out
        facts = json.loads(Path("facts.json").read_text())
        assert "parameters        37,984\n" in printed
        assert facts["parameters"] == sum(x.size for x in jax.tree.leaves(tiny.reader(tiny.GPT2).state)) == 37_984
        assert (facts["family"], facts["context length"], facts["tied"]) == ("GPT-2", 256, "head to embedding")
        assert (facts["weights"], facts["dtypes"], facts["loads"]) == ("model.safetensors", "F32 (40 tensors)", "yes")
        assert facts["tokenizer"] == "WordLevel, 104 tokens"
        assert facts["BOS policy"] == "nothing in front of a text, nothing after it"

    def test_inspect_says_why_a_model_would_not_load(self, tmp_path, capsys):
        folder = tiny.save_model(tmp_path / "m", replace(tiny.LLAMA, rope_factor=4.0), bos=True)
        tiny.edit_tensors(folder, lambda t: t.pop("model.norm.weight"))
        ralm("inspect", folder)
        printed = capsys.readouterr().out
        assert "norm.weight is missing (expected shape [32])" in printed
        assert "rotary positions, base 10,000, linear scaling by 4" in printed
        assert "'<s>' (1) in front of a text, '</s>' (2) after it" in printed
        assert "tied              nothing" in printed

    def test_inspect_a_named_size(self, capsys):
        ralm("inspect", "llama2-70b")
        printed = capsys.readouterr().out
        assert "parameters        68,976,648,192" in printed
        assert "weights" not in printed

    @pytest.mark.parametrize("to", ["hf", "orbax"])
    @pytest.mark.parametrize("dtype", [None, "bfloat16"])
    def test_convert(self, place, capsys, to, dtype):
        Path("model").unlink()
        tiny.save_model(Path("model"), tiny.GPT2)
        tiny.edit_config(Path("model"), eos_token_id=7)
        ralm("convert", "model", "--out", "out", "--to", to, *(["--dtype", dtype] if dtype else []))
        options = {"dtype": dtype or "float32", "mesh": make_mesh(data=1)}
        reader, again = (load_reader(name, **options) for name in ("model", "out"))
        tiny.assert_same(reader.state, again.state)
        assert load_tokenizer("out").fingerprint == load_tokenizer("model").fingerprint
        ralm("convert", "out", "--out", "back", "--to", "hf")
        assert json.loads(Path("back/config.json").read_text())["eos_token_id"] == 7
        stored = load_file("back/model.safetensors")["transformer.wte.weight"]
        assert stored.dtype == (dtype or "float32")
        ralm("score", "--model", "out", "--text", "text.txt", "--out", "scores", *SIZES)
        capsys.readouterr()
        assert refused(capsys, "convert", "model", "--out", "out", "--to", to)[0] == 2

    def test_convert_refuses_what_does_not_load(self, place, capsys):
        Path("broken").mkdir()
        for path in Path("model").iterdir():
            shutil.copy(path, "broken")
        tiny.edit_tensors(Path("broken"), lambda t: t.pop("transformer.ln_f.weight"))
        for to in ("hf", "orbax"):
            code, line = refused(capsys, "convert", "broken", "--out", "out", "--to", to)
            assert (code, "ln_f.weight is missing" in line) == (1, True)
            assert not Path("out").exists()
        Path("file").write_text("mine")
        assert refused(capsys, "convert", "model", "--out", "file", "--to", "hf")[0] == 2
        assert Path("file").read_text() == "mine"

    @pytest.mark.parametrize("name", tiny.READERS)
    def test_every_reader_scores(self, place, name):
        tiny.save_model(place / "reader", tiny.READERS[name])
        ralm("score", "--model", "reader", "--text", "text.txt", "--out", "scores", *SIZES)
        assert np.nanmax(open_scores("scores").target) < 0


def test_version_and_help(capsys):
    ralm("--version")
    assert capsys.readouterr().out == f"ralm {ralm_jax.__version__}\n"
    for args in (["--help"], *([name, "--help"] for name in cli.COMMANDS)):
        with pytest.raises(SystemExit) as caught:
            ralm(*args)
        assert caught.value.code == 0
        assert "usage: ralm" in capsys.readouterr().out


def test_out_of_device_memory_is_one_line(place, capsys, monkeypatch):
    def exhausted(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes")

    monkeypatch.setattr("ralm_jax.scoring.Scorer.dispatch", exhausted)
    code, line = refused(capsys, *TestRefusals.SCORE, "--window", "64")
    assert (code, "try a smaller --batch-size" in line) == (1, True)


def test_an_unset_variable_is_not_the_current_folder(place, capsys):
    code, line = refused(capsys, "index", "--corpus", "", "--out", "x")
    assert (code, line) == (2, "ralm: error: index --corpus: what follows is empty")


def test_a_full_disk_keeps_the_file_that_was_there(index):
    ralm("search", "--index", "index", "--query", "ba be", "--json", "hits.json")
    before = Path("hits.json").read_text()
    command = (
        f"ulimit -f 1; {sys.executable} -m ralm_jax search --index index --query '{tiny.text(90)}' --json hits.json"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "ralm: error: hits.json: cannot be written (File too large)\n")
    assert Path("hits.json").read_text() == before
    assert not Path("hits.json.part").exists()


def test_what_is_no_plain_file_is_written_to(index):
    done = run("search", "--index", "index", "--query", "ba be", "--json", "/dev/stdout")
    assert json.loads(done.stdout.splitlines()[0])["query"] == "ba be"


def test_what_is_no_text_is_one_line(index, capsys):
    code, line = refused(capsys, "search", "--index", "index", "--query", "ba \udcff", "--json", "hits.json")
    assert (code, line) == (1, "ralm: error: --query: a lone surrogate, which is not text")


def test_a_link_to_a_file_is_that_file(place, capsys):
    Path("kept").mkdir()
    Path("kept/passages.tsv").write_text("before")
    Path("link.tsv").symlink_to("kept/passages.tsv")
    convert = ["convert-corpus", "corpus.jsonl", "--out", "link.tsv", "--to", "dpr"]
    code, line = refused(capsys, *convert)
    assert (code, "link.tsv: is there already; add --overwrite" in line) == (2, True)
    Path("bad.jsonl").write_text('{"_id": "1", "text": "a"}\n{"_id": "2"}\n')
    assert refused(capsys, convert[0], "bad.jsonl", *convert[2:], "--overwrite")[0] == 1
    assert Path("kept/passages.tsv").read_text() == "before"
    ralm(*convert, "--overwrite")
    assert Path("link.tsv").is_symlink()
    assert Path("kept/passages.tsv").read_text().startswith("id\ttext\ttitle\n")
    assert [file.name for file in Path("kept").iterdir()] == ["passages.tsv"]


def test_a_place_without_permission_or_room_is_one_line(place, capsys):
    code, line = refused(capsys, "index", "--corpus", "corpus.jsonl", "--out", "/proc/ralm")
    assert (code, "/proc/ralm" in line) == (1, True)


def run(*args, **options):
    command = [sys.executable, "-m", "ralm_jax", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def test_no_progress_bar_in_redirected_output(place):
    done = run("score", "--model", "model", "--text", "text.txt", "--out", "scores", "--window", "64", "--stride", "16")
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1


def test_help_starts_without_jax():
    code = "import sys; from ralm_jax import cli; sys.exit(any(m in sys.modules for m in ('jax', 'numpy', 'eval.lm')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_output_that_nobody_reads_to_its_end(index):
    command = f"{sys.executable} -m ralm_jax search --index index --query '{tiny.text(60)}' --k 30 | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


@pytest.mark.parametrize(("engine", "goes_on"), [("bm25", True), ("dense", True), ("lucene", False)])
def test_ctrl_c_says_whether_an_index_goes_on(place, capsys, monkeypatch, engine, goes_on):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.CorpusOptions, "open", interrupted)
    code, line = refused(capsys, "index", "--corpus", "corpus.jsonl", "--out", "x", "--engine", engine)
    assert (code, "--resume goes on" in line) == (130, goes_on)


def test_ctrl_c_in_a_callback_of_garbage_collection_is_not_lost(place):
    """Python ignores what such a callback raises, and JAX has one."""
    code = (
        "import gc, os, signal, time\n"
        "from ralm_jax import cli\n"
        "def callback(phase, info):\n"
        "    gc.callbacks.remove(callback)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    for _ in range(10): pass\n"
        "class Command:\n"
        "    def run(self):\n"
        "        gc.callbacks.append(callback)\n"
        "        gc.collect()\n"
        "        time.sleep(30)\n"
        "        print('went on')\n"
        "cli.tyro.extras.subcommand_cli_from_dict = lambda *args, **options: Command()\n"
        "cli.main(['x'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "ralm: error: interrupted\n")


def test_ctrl_c_is_one_line_and_resumes(place):
    Path("long.txt").write_text(tiny.text(4000))
    options = ["score", "--model", "model", "--text", "long.txt", "--out", "scores", "--window", "64", "--stride", "1",
               "--batch-size", "4"]  # fmt: skip
    command = [sys.executable, "-m", "ralm_jax", *options]
    deadline = time.monotonic() + 60
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "XLA_FLAGS": ""}) as started:
        try:
            while not list(Path("scores/log_probs/c").glob("*/0/0")):
                assert started.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.005)
            started.send_signal(signal.SIGINT)
            _, printed = started.communicate(timeout=60)
        finally:
            started.kill()
    assert started.returncode == 130
    assert printed.strip() == "ralm: error: interrupted; what is finished is kept, and --resume goes on from there"
    assert run(*options, "--resume").returncode == 0
    assert len(open_scores("scores").target) == 4000 - 64
