"""Several processes: what each does, and commands run by two of them, as on two hosts, with four CPU devices each."""

import dataclasses
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from ralm_jax import processes
from ralm_jax.cli import Report
from ralm_jax.cli_options import DeviceOptions, JobOptions, job_options
from ralm_jax.cli_train import Reranker, Train
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.processes import Job
from ralm_jax.reader import load_reader
from ralm_jax.score_table import open_scores
from ralm_jax.sharding import make_mesh
from ralm_jax.share import Share
from ralm_jax.windows import Windows
from retrieval.ranking_table import open_ranking
from retrieval.table import open_retrieval
from tests import tiny
from tests.test_cli import ralm
from tests.test_tasks import longbench, write

LIMIT = 400  # seconds that a command may take; two processes share what one has
ROOT = Path(__file__).parents[1]


class TestAlone:
    def test_one_process_is_the_first(self):
        assert (processes.count(), processes.index(), processes.first()) == (1, 0, True)
        assert processes.once(lambda: 5) == 5
        assert processes.own_share([1, 2, 3]) == [1, 2, 3]
        assert [processes.bar_hidden(progress) for progress in (None, True, False)] == [None, False, True]

    def test_nothing_heavy_is_imported(self):
        code = "import sys, ralm_jax.processes as p; p.count(), p.wait(); sys.exit('jax' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0

    def test_of_several_each_has_a_share(self, monkeypatch):
        found = []
        for index in range(3):
            monkeypatch.setattr(processes, "job", Job(3, index))
            found.append(processes.own_share(list(range(8))))
            assert processes.bar_hidden(True) == (index > 0)
        assert found == [[0, 3, 6], [1, 4, 7], [2, 5]]

    @pytest.mark.parametrize(
        "options",
        [
            {"coordinator": "a:1"},
            {"coordinator": "a:1", "num_processes": 2},
            {"distributed": True, "process_id": 0},
            {"process_id": 0},
        ],
    )
    def test_a_job_is_named_as_a_whole(self, options):
        with pytest.raises(UsageError, match="name all of --coordinator, --num-processes and --process-id, or"):
            JobOptions(**options).join()

    def test_where_no_job_is(self, monkeypatch):
        monkeypatch.setattr("jax.distributed.initialize", lambda *a, **k: (_ for _ in ()).throw(ValueError("none")))
        with pytest.raises(UsageError, match=r"cannot be joined \(none\); name them with --coordinator"):
            JobOptions(distributed=True).join()

    def test_options_are_found_in_a_command(self):
        devices = DeviceOptions(mesh="data=2")
        assert job_options(Train(Reranker("a", "b", "c", devices=devices))) is devices
        assert job_options(Report(("a",))) is None


class TestShare:
    def test_one_process_has_all(self):
        share, rows = Share(make_mesh(2, 2, 2)), np.arange(24).reshape(8, 3)
        assert (share.multiple, share.groups, share.group, share.leads) == (4, 1, 0, True)
        placed = share.place(rows)
        assert {shard.data.shape for shard in placed.addressable_shards} == {(2, 3)}
        np.testing.assert_array_equal(share.read(placed), rows)

    @pytest.mark.parametrize(
        ("owners", "shape", "expected"),
        [
            ([0, 0, 0, 0, 1, 1, 1, 1], (8, 1, 1), (4, 2, 0, True)),
            ([0, 1, 0, 1, 0, 1, 0, 1], (4, 2, 1), (4, 2, 0, True)),
            ([1, 1, 1, 1, 0, 0, 0, 0], (2, 1, 4), (1, 2, 1, True)),
            ([0, 0, 0, 0, 1, 1, 1, 1], (1, 1, 8), (1, 1, 0, True)),
            ([1, 1, 0, 0, 2, 2, 3, 3], (2, 1, 4), (1, 2, 0, True)),
        ],
    )
    def test_of_several(self, monkeypatch, owners, shape, expected):
        """The devices' owners are made up; what this process, number 0, has of a batch follows."""
        share = self.share(monkeypatch, owners, shape)
        assert (share.multiple, share.groups, share.group, share.leads) == expected

    @pytest.mark.parametrize(
        ("owners", "shape"),
        [([0, 0, 0, 1, 1, 1, 1, 1], (4, 1, 2)), ([0, 0, 0, 1, 1, 1, 1, 1], (8, 1, 1)), ([0] * 4 + [1] * 4, (4, 1, 1))],
    )
    def test_what_processes_cannot_share_is_refused(self, monkeypatch, owners, shape):
        with pytest.raises(UsageError, match=r"mesh data=.*: 2 processes cannot share it; take all devices of each"):
            self.share(monkeypatch, owners, shape)

    def share(self, monkeypatch, owners, shape):
        devices = [SimpleNamespace(process_index=owner) for owner in owners[: math.prod(shape)]]
        mesh = SimpleNamespace(devices=np.array(devices).reshape(shape), shape=make_mesh(*shape).shape)
        monkeypatch.setattr("jax.process_count", lambda: len(set(owners)))
        monkeypatch.setattr("ralm_jax.share.NamedSharding", lambda *_: None)
        return Share(mesh)


def test_windows_run_out():
    """As they do for one process before another: the last is repeated, and there are empty ones where there is none."""
    some = Windows(*(np.arange(1, 7, dtype=np.int32).reshape(2, 3) for _ in range(3)), np.ones((2, 3), bool))
    np.testing.assert_array_equal(some.rows(4, 2).tokens, some.tokens[[1, 1]])
    none = Windows(*(part[:0] for part in (some.tokens, some.positions, some.labels, some.scored)))
    assert none.rows(0, 2).tokens.tolist() == [[0] * 3] * 2
    assert not none.rows(0, 2).scored.any()


# --- commands ---


def start(*args, count=2, devices=4):
    """The processes of a job that runs `ralm ARGS`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={devices}"
    place = ("--coordinator", f"127.0.0.1:{port}", "--num-processes", str(count), "--process-id")
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "ralm_jax", *map(str, args), *place, str(i)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for i in range(count)
    ]  # fmt: skip


def finish(job, code=0):
    """What each process says on stdout and stderr; all have to end with `code`, or for None with any failure."""
    said, deadline = [], time.monotonic() + LIMIT
    try:
        for one in job:
            said.append(one.communicate(timeout=max(1, deadline - time.monotonic())))
    finally:
        for one in job:
            one.kill()
    codes = [one.returncode for one in job]
    assert all(codes) if code is None else codes == [code] * len(job), said
    return said


def wait_for(there, job):
    deadline = time.monotonic() + LIMIT
    while not there():
        assert time.monotonic() < deadline
        assert all(one.poll() is None for one in job)
        time.sleep(0.02)


def errors(said):
    return [line for _, error in said for line in error.splitlines() if "error:" in line]


def assert_same_lines(*files, besides=()):
    """The rows of jsonl files, in any order."""
    one, two = (
        sorted(json.dumps({name: value for name, value in json.loads(line).items() if name not in besides})
               for line in Path(file).read_text().splitlines())
        for file in files
    )  # fmt: skip
    assert one == two


SIZES = ("--window", "64", "--stride", "16", "--k", "3")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Models, a text, a corpus, what is retrieved and what one process makes of it."""
    root = tmp_path_factory.mktemp("processes")
    tiny.save_model(root / "reader", tiny.GPT2)
    tiny.save_encoder(root / "encoder")
    tiny.save_cross_encoder(root / "cross")
    (root / "text.txt").write_text(tiny.text(1200))
    tiny.write_corpus(root / "corpus.jsonl", 40)
    before = os.getcwd()
    os.chdir(root)
    ralm("index", "--corpus", "corpus.jsonl", "--out", "index")
    ralm("retrieve", "--index", "index", "--tokenizer", "reader", "--text", "text.txt", "--out", "found", *SIZES)
    ralm(*SCORE, "--out", "one")
    yield root
    os.chdir(before)


SCORE = ("score", "--model", "reader", "--retrieval", "found", "--text", "text.txt", "--batch-size", "8", *SIZES)


def assert_same_scores(found, expected="one", tolerance=1e-5):
    found, expected = open_scores(found), open_scores(expected)
    for name in ("first_window", "past", "target"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), atol=tolerance, err_msg=name)
    assert found.settings == expected.settings
    assert found.about | {"retrieved": ""} == expected.about | {"retrieved": ""}  # where it lies


@pytest.mark.slow
class TestTwo:
    @pytest.mark.parametrize("mesh", ["auto", "data=2,fsdp=1,tensor=4", "data=1,fsdp=2,tensor=4", "data=2,fsdp=4"])
    def test_a_text_has_the_same_scores(self, place, mesh):
        said = finish(start(*SCORE, "--out", f"two {mesh}", "--mesh", mesh))
        assert_same_scores(f"two {mesh}")
        assert [out.strip() for out, _ in said] == [f"two {mesh}: 72 strides, 213 passages scored", ""]

    def test_a_tensor_axis_over_both(self, place):
        tiny.save_model(place / "llama", tiny.LLAMA)
        command = (*SCORE[:2], "llama", *SCORE[3:])
        ralm(*command, "--out", "one llama")
        finish(start(*command, "--out", "two llama", "--mesh", "data=1,tensor=8"))
        assert_same_scores("two llama", "one llama")

    def test_one_is_killed_and_both_are_started_again(self, place):
        """The other one ends by itself; what was written before is not scored again."""
        job = start(*SCORE, "--out", "killed")
        chunks = place / "killed" / "log_probs" / "c"
        wait_for(lambda: len(list(chunks.glob("*"))) >= 1, job)
        job[1].send_signal(signal.SIGKILL)
        finish(job, None)
        there = {path: path.stat().st_mtime_ns for path in chunks.rglob("*") if path.is_file()}
        assert there
        with pytest.raises(RalmError, match=r"not complete|nothing is scored yet"):
            open_scores("killed")
        finish(start(*SCORE, "--out", "killed", "--resume"))
        assert_same_scores("killed")
        assert there.items() <= {path: path.stat().st_mtime_ns for path in chunks.rglob("*") if path.is_file()}.items()

    def test_what_both_cannot_do_one_says(self, place):
        said = finish(start(*SCORE, "--out", "one"), 2)
        assert errors(said) == [
            "ralm: error: one: holds an earlier run's scores; add --resume to go on, or --overwrite"
        ]

    def test_what_one_cannot_do_ends_both(self, place):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            named = ("--coordinator", f"127.0.0.1:{free.getsockname()[1]}", "--num-processes", "2", "--process-id")
        job = []
        for index, model in enumerate(("reader", "none")):
            command = [*SCORE[:2], model, *SCORE[3:], "--out", "broken", *named, str(index)]
            job.append(
                subprocess.Popen(
                    [sys.executable, "-m", "ralm_jax", *command],
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                    env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
                )
            )  # fmt: skip
        said = errors(finish(job, None))
        assert any(line.startswith("ralm: error: process 1 of 2: none: ") for line in said), said
        assert "ralm: error: process 0 of 2 ends, as another one failed" in said

    def test_a_dense_index(self, place):
        corpus = ("index", "--corpus", "corpus.jsonl", "--engine", "dense", "--encoder", "encoder", "--out")
        search = ("retrieve", "--tokenizer", "reader", "--text", "text.txt", *SIZES)
        ralm(*corpus, "dense one")
        ralm(*search, "--index", "dense one", "--out", "dense found one")
        finish(start(*corpus, "dense two"))
        finish(start(*search, "--index", "dense two", "--out", "dense found two"))
        one, two = open_retrieval("dense found one"), open_retrieval("dense found two")
        np.testing.assert_array_equal(two.rows, one.rows)
        np.testing.assert_array_equal(two.scores, one.scores)
        assert two.settings == one.settings

    def test_a_ranking(self, place):
        command = ("rerank", "--reranker", "cross", "--retrieval", "found", "--text", "text.txt", "--prefix-tokens", 16)
        ralm(*command, "--out", "ranked one")
        finish(start(*command, "--out", "ranked two"))
        one, two = open_ranking("ranked one"), open_ranking("ranked two")
        np.testing.assert_array_equal(two.scores, one.scores)
        assert two.settings == one.settings

    def test_a_text_is_written(self, place, capsys):
        command = (
            "generate",
            "--model",
            "reader",
            "--prompt",
            "ba be bi",
            "--max-new-tokens",
            8,
            "--attribution",
            "json",
        )
        command = (*command, "--index", "index")
        capsys.readouterr()
        ralm(*command)
        alone = capsys.readouterr().out
        assert [out for out, _ in finish(start(*command))] == [alone, ""]

    def test_questions_are_answered(self, place):
        rows = [{"question": f"{word}?", "answer": [word]} for word in tiny.WORDS[:5]]
        write(place / "questions.jsonl", *rows)
        command = ("eval", "qa", "--model", "reader", "--data", "questions.jsonl", "--index", "index", "--passages",
                   "0,1", "--max-new-tokens", 4)  # fmt: skip
        ralm(*command, "--out", "answers one")
        finish(start(*command, "--out", "answers two"))
        assert_same_lines("answers one/predictions.jsonl", "answers two/predictions.jsonl")
        assert (place / "answers two/qa.csv").read_text() == (place / "answers one/qa.csv").read_text()

    def test_long_documents(self, place):
        write(place / "data/hotpotqa.jsonl", *(longbench(word, input=f"{word}?", context=tiny.text(700, i))
                                               for i, word in enumerate(tiny.WORDS[:3])))  # fmt: skip
        command = ("eval", "long", "--task", "hotpotqa", "--model", "reader", "--data", "data", "--window", 100, 200,
                   "--retriever", "none", "encoder", "--top", 1, "--max-new-tokens", 4)  # fmt: skip
        ralm(*command, "--out", "long one")
        finish(start(*command, "--out", "long two"))
        for cell in ("100-none", "200-none", "100-encoder-1", "200-encoder-1"):
            files = [f"{out}/hotpotqa-{cell}/predictions.jsonl" for out in ("long one", "long two")]
            assert_same_lines(*files, besides=("seconds", "retrieval_seconds"))
        assert len((place / "long two/long.csv").read_text().splitlines()) == 5

    def test_all_in_one_go(self, place):
        command = ("lm", "--model", "reader", "--text", "text.txt", "--corpus", "corpus.jsonl", *SIZES)
        ralm(*command, "--out", "lm one")
        finish(start(*command, "--out", "lm two"))
        assert_same_scores("lm two/scores", "lm one/scores")
        assert (place / "lm two" / "report.json").is_file()

    def test_training(self, place):
        """The same losses, though each has only its rows; and SIGTERM to one of them stops both at the same step."""
        ralm(
            "train", "reranker-data", "--model", "reader", "--index", "index", "--text", "text.txt",
            "--out", "examples", "--examples", 60, *SIZES,
        )  # fmt: skip
        command = (
            "train", "reranker", "--init", "cross", "--data", "examples", "--text", "text.txt", "--k", 3,
            "--prefix-tokens", 2, "--pair-tokens", 48, "--steps", 6, "--batch-size", 8, "--check-every", 3,
            "--learning-rate", 1e-3, "--log-every", 1,
        )  # fmt: skip
        ralm(*command, "--out", "trained one")
        job = start(*command, "--out", "trained two")
        metrics = place / "trained two" / "metrics.csv"
        wait_for(lambda: metrics.is_file() and len(metrics.read_text().splitlines()) >= 2, job)
        job[1].send_signal(signal.SIGTERM)
        said = finish(job, 143)
        assert len(errors(said)) == 1
        assert "stopped by SIGTERM after step" in errors(said)[0]
        finish(start(*command, "--out", "trained two", "--resume"))
        one, two = (self.figures(place / name / "metrics.csv") for name in ("trained one", "trained two"))
        np.testing.assert_allclose(two, one, rtol=1e-4)
        assert (place / "trained two" / "model" / "model.safetensors").is_file()

    @pytest.mark.slow
    def test_a_longer_window(self, place):
        """Two processes, four devices each, write a checkpoint together: the reader that one process writes."""
        tiny.save_model(place / "short", dataclasses.replace(tiny.LLAMA, num_layers=1, max_positions=16), bos=True)
        command = (
            "train", "context", "--model", "short", "--text", "text.txt", "--steps", 2, "--batch-size", 8,
            "--held-out", 0.2, "--learning-rate", 1e-2, "--check-every", 1, "--dtype", "float32", "--mesh", "fsdp=2",
        )  # fmt: skip
        ralm(*command, "--out", "longer one")
        finish(start(*command, "--out", "longer two"))
        assert (place / "longer two" / "model" / "orbax").is_dir()
        assert not (place / "longer one" / "model" / "orbax").exists()
        one, two = (load_reader(f"longer {name}/model", mesh=make_mesh(data=1)) for name in ("one", "two"))
        assert one.config == two.config
        for left, right in zip(jax.tree.leaves(one.state), jax.tree.leaves(two.state), strict=True):
            np.testing.assert_allclose(left, right, atol=1e-5)

    def figures(self, path):
        import csv

        names = ("step", "loss", "gradient_norm", "held_out_loss")
        with path.open(newline="") as file:
            return [[float(row[name] or "nan") for name in names] for row in csv.DictReader(file)]
