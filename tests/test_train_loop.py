"""The loop on a small regression: micro-batches, devices, resumption, checkpoints and metrics."""

import csv
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ralm_jax.errors import RalmError, UsageError
from ralm_jax.settings import TrainSettings
from ralm_jax.sharding import make_mesh
from ralm_jax.weights import flat_state, unpadded
from tests import tiny
from train.checkpoints import Checkpoints
from train.loop import CHECKPOINTS, Task, Terminated, compiled_step, train
from train.metrics import METRICS
from train.optim import make_optimizer
from train.state import new_state

FEATURES, BATCH = 8, 16
SETTINGS = TrainSettings(
    steps=12, batch_size=BATCH, learning_rate=1e-2, dropout=0.3, check_every=4, log_every=3, warmup=0.25
)


def batches(start):
    """Batch i follows from i; examples have weights, some of 0."""
    step = start
    while True:
        rng = np.random.default_rng(step)
        x = rng.normal(size=(BATCH, FEATURES)).astype(np.float32)
        y = np.sin(x.sum(axis=1)).astype(np.float32)
        yield {"x": x, "y": y, "weight": rng.integers(0, 3, BATCH).astype(np.float32)}
        step += 1


def loss(params, batch, key):
    kept = jax.random.bernoulli(key, 1 - SETTINGS.dropout, batch["x"].shape)
    return plain_loss(params, batch | {"x": jnp.where(kept, batch["x"], 0)}, key)


def plain_loss(params, batch, key):
    hidden = jnp.tanh(batch["x"].astype(params["kernel"].dtype) @ params["kernel"])
    found = (hidden @ params["out"]["kernel"]).astype(jnp.float32)[:, 0] + params["out"]["bias"].astype(jnp.float32)
    return (batch["weight"] * (found - batch["y"]) ** 2).sum(), batch["weight"].sum()


def make_task(mesh=None, **changes):
    mesh = mesh or make_mesh(data=1)
    rng = np.random.default_rng(0)

    def place(shape, *axes):
        values = rng.normal(0, 0.3, shape).astype(np.float32)
        return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*axes)))

    params = {
        "kernel": place((FEATURES, 32), "fsdp", "tensor"),
        "out": {"kernel": place((32, 1), "tensor"), "bias": place((1,))},
    }
    held = next(batches(10**6))

    def evaluate(params):
        total, weight = plain_loss(jax.tree.map(np.asarray, params), held, None)
        return {"held_out_loss": float(total / weight), "other": 1.5}

    made = Task(params, mesh, loss, batches, evaluate, {"init": "regression"})
    return dataclasses.replace(made, **changes)


def rows(folder):
    with (Path(folder) / METRICS).open(newline="") as file:
        return list(csv.DictReader(file))


def figures(folder):
    """Without how long it took."""
    return [{name: x for name, x in row.items() if name not in ("seconds", "data_wait")} for row in rows(folder)]


def run(folder, settings=SETTINGS, task=None, **options):
    said = []
    params = train(task or make_task(), str(folder), settings, announce=said.append, **options)
    return jax.tree.map(np.asarray, params), said


def assert_equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


class Stop(Exception):
    pass


def stopping_at(batch):
    def interrupted(start):
        for number, made in enumerate(batches(start), start=start):
            if number == batch:
                raise Stop
            yield made

    return interrupted


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    return folder, *run(folder)


class TestUpdate:
    def update(self, count=1, mesh=None, loss=plain_loss, **changes):
        settings = dataclasses.replace(SETTINGS, **changes)
        task = make_task(mesh, loss=loss)
        state = new_state(task.params, make_optimizer(settings), task.mesh)
        step = compiled_step(task, settings, state)
        told = None
        for _, batch in zip(range(count), batches(0), strict=False):
            with jax.set_mesh(task.mesh):
                state, told = step(state, batch)
        return state, told, step

    def test_micro_batches_make_the_same_update(self):
        """Although their weights differ: sums are divided once, at the end."""
        whole, told, _ = self.update(3)
        for parts in (2, 8):
            split, also, _ = self.update(3, micro_batches=parts)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), whole.params, split.params)
            np.testing.assert_allclose(told["loss"], also["loss"], rtol=1e-6)

    @pytest.mark.parametrize("mesh", [(8, 1, 1), (2, 2, 2), (1, 2, 4)])
    def test_devices_make_the_same_update(self, mesh):
        whole, _, _ = self.update(3)
        spread, _, _ = self.update(3, mesh=make_mesh(*mesh), micro_batches=2)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), whole.params, spread.params)

    def test_what_the_optimiser_keeps_lies_where_its_parameter_does(self):
        state, _, _ = self.update(mesh=make_mesh(2, 2, 2))
        moments = [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.shape == (FEATURES, 32)]
        assert len(moments) == 2
        assert {leaf.sharding.spec for leaf in moments} == {PartitionSpec("fsdp", "tensor")}
        assert {leaf.addressable_shards[0].data.shape for leaf in moments} == {(FEATURES // 2, 32 // 2)}

    def test_one_compilation(self):
        _, _, step = self.update(5)
        assert step._cache_size() == 1

    def test_a_batch_without_labels_moves_only_what_decays(self):
        def nothing(params, batch, key):
            total, weight = plain_loss(params, batch, key)
            return total * 0, weight * 0

        state, told, _ = self.update(loss=nothing, weight_decay=0)
        assert_equal(jax.tree.map(np.asarray, make_task().params), jax.tree.map(np.asarray, state.params))
        assert float(told["loss"]) == 0

    def test_bfloat16_computes_and_float32_keeps(self):
        seen = []

        def watched(params, batch, key):
            seen.append(params["kernel"].dtype)
            return plain_loss(params, batch, key)

        state, _, _ = self.update(loss=watched, dtype="bfloat16")
        assert set(seen) == {jnp.dtype("bfloat16")}
        assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("float32"), jnp.dtype("int32")}

    def test_dropout_differs_by_step_and_micro_batch_and_follows_from_the_seed(self):
        keys = []

        def watched(params, batch, key):
            jax.debug.callback(lambda key: keys.append(tuple(key.tolist())), jax.random.key_data(key))
            return plain_loss(params, batch, key)

        self.update(3, loss=watched, micro_batches=2)
        self.update(3, loss=watched, micro_batches=2)
        jax.effects_barrier()
        assert len(keys) == 12
        assert len(set(keys)) == 6
        assert set(keys[:6]) == set(keys[6:])


class TestResuming:
    @pytest.mark.parametrize("batch", [0, 2, 3, 4, 7, 11])
    def test_an_interrupted_run_does_what_it_would_have_done(self, tmp_path, straight, batch):
        """Bitwise: every step's loss, the held-out figures and the parameters."""
        folder, params, _ = straight
        with pytest.raises(Stop):
            run(tmp_path, task=make_task(batches=stopping_at(batch)))
        resumed, _ = run(tmp_path, if_exists="resume")
        assert figures(tmp_path) == figures(folder)
        assert_equal(resumed, params)

    def test_a_finished_run_is_read_back(self, tmp_path, straight):
        _, params, _ = straight
        run(tmp_path)
        before = rows(tmp_path)
        again, _ = run(tmp_path, if_exists="resume", task=make_task(batches=stopping_at(0)))
        assert rows(tmp_path) == before
        assert_equal(again, params)

    @pytest.mark.parametrize(
        ("saved", "shape"),
        [((2, 2, 2), (1, 1, 1)), ((2, 2, 2), (1, 2, 1)), ((8, 1, 1), (2, 2, 2)), ((1, 1, 8), (4, 1, 2))],
    )
    def test_on_another_mesh(self, tmp_path, straight, saved, shape):
        with pytest.raises(Stop):
            run(tmp_path, task=make_task(make_mesh(*saved), batches=stopping_at(9)))
        mesh = make_mesh(*shape)
        resumed = train(make_task(mesh), str(tmp_path), SETTINGS, if_exists="resume", announce=lambda line: None)
        assert resumed["kernel"].sharding == NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), resumed, straight[1])

    @pytest.mark.parametrize(
        ("saved", "resumed"), [((1, 1, 4), (1, 1, 1)), ((1, 1, 1), (1, 1, 4)), ((1, 1, 4), (1, 1, 2))]
    )
    def test_a_vocabulary_is_padded_for_the_mesh(self, tmp_path, saved, resumed):
        one = tiny.reader(replace(tiny.GPTJ, vocab_size=131, num_layers=1))

        def task(shape, batches=batches):
            def loss(params, batch, key):
                return sum((leaf**2).sum() for leaf in jax.tree.leaves(params)), batch["weight"].sum()

            reader = tiny.on(one, make_mesh(*shape))
            return Task(reader.state, reader.mesh, loss, batches, None, {"init": "tiny"})

        straight = train(task((1, 1, 1)), str(tmp_path / "straight"), SETTINGS, announce=lambda line: None)
        with pytest.raises(Stop):
            run(tmp_path / "run", task=task(saved, stopping_at(9)))
        found = train(task(resumed), str(tmp_path / "run"), SETTINGS, if_exists="resume", announce=lambda line: None)
        for (path, leaf), expected in zip(flat_state(found).items(), jax.tree.leaves(straight), strict=True):
            np.testing.assert_allclose(unpadded(leaf), expected, atol=1e-5, err_msg=path)

    def test_rows_after_the_checkpoint_are_dropped(self, tmp_path, straight):
        """Even one that a kill cut off."""
        with pytest.raises(Stop):
            run(tmp_path, task=make_task(batches=stopping_at(7)))
        assert [row["step"] for row in rows(tmp_path)] == [str(step) for step in range(7)]
        with (tmp_path / METRICS).open("a") as file:
            file.write("8")
        run(tmp_path, if_exists="resume")
        assert figures(tmp_path) == figures(straight[0])

    def test_a_checkpoint_that_was_not_finished_does_not_count(self, tmp_path, straight):
        with pytest.raises(Stop):
            run(tmp_path, task=make_task(batches=stopping_at(7)))
        unfinished = tmp_path / CHECKPOINTS / "6.orbax-checkpoint-tmp"
        unfinished.mkdir()
        (unfinished / "default").write_text("half")
        run(tmp_path, if_exists="resume")
        assert figures(tmp_path) == figures(straight[0])

    def test_other_settings_are_refused(self, tmp_path):
        run(tmp_path)
        with pytest.raises(RalmError, match=r"training.learning_rate: 0.01 there, 0.5 now"):
            run(tmp_path, dataclasses.replace(SETTINGS, learning_rate=0.5), if_exists="resume")
        with pytest.raises(RalmError, match="init: 'regression' there, 'other' now"):
            run(tmp_path, task=make_task(identity={"init": "other"}), if_exists="resume")

    def test_a_run_that_is_there_is_refused_or_replaced(self, tmp_path, straight):
        run(tmp_path, dataclasses.replace(SETTINGS, steps=30, seed=5))
        with pytest.raises(UsageError, match="--resume to go on, or --overwrite"):
            run(tmp_path)
        params, _ = run(tmp_path, if_exists="overwrite")
        assert figures(tmp_path) == figures(straight[0])
        assert_equal(params, straight[1])

    def test_a_damaged_checkpoint_is_named(self, tmp_path):
        with pytest.raises(Stop):
            run(tmp_path, task=make_task(batches=stopping_at(9)))
        for file in (tmp_path / CHECKPOINTS / "8" / "default").rglob("*"):
            if file.is_file():
                file.write_bytes(b"")
        with pytest.raises(RalmError, match="8: cannot be restored"):
            run(tmp_path, if_exists="resume")

    @pytest.mark.parametrize("step", [7, 8])
    def test_sigterm_makes_a_checkpoint_of_the_step(self, tmp_path, straight, step):
        """An evaluation that is due, as after step 8, is done first."""

        def terminating(start):
            for number, made in enumerate(batches(start), start=start):
                if number == step - 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                yield made

        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(Terminated, match=f"stopped by SIGTERM after step {step}; --resume goes on") as stopped:
            run(tmp_path, task=make_task(batches=terminating))
        assert (stopped.value.exit_code, signal.getsignal(signal.SIGTERM)) == (143, before)
        assert [row["step"] for row in rows(tmp_path)] == [str(number) for number in range(step + 1)]
        params, _ = run(tmp_path, if_exists="resume")
        assert figures(tmp_path) == figures(straight[0])
        assert_equal(params, straight[1])

    @pytest.mark.slow
    def test_killed(self, tmp_path, straight):
        """SIGKILL, several times, at whatever it is doing."""
        code = textwrap.dedent(
            f"""
            import os, sys, time
            os.environ.update(JAX_PLATFORMS="cpu")
            import tests.conftest
            from tests.test_train_loop import *
            def slow(start):
                for batch in batches(start):
                    time.sleep(0.2)
                    yield batch
            train(make_task(batches=slow), {str(tmp_path / "run")!r}, SETTINGS, if_exists="resume")
            """
        )
        kills = 0
        while True:
            before = len(list((tmp_path / "run" / CHECKPOINTS).glob("[0-9]*")))
            with subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[1]) as started:
                deadline = time.monotonic() + 120
                while started.poll() is None and kills < 3:
                    there = len(list((tmp_path / "run" / CHECKPOINTS).glob("[0-9]*")))
                    if there != before:
                        time.sleep(0.3)
                        os.kill(started.pid, signal.SIGKILL)
                        kills += 1
                        break
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                started.wait(120)
            if started.returncode == 0:
                break
        assert kills == 3
        assert figures(tmp_path / "run") == figures(straight[0])


class TestCheckpoints:
    def steps(self, folder):
        return sorted(int(path.name) for path in (folder / CHECKPOINTS).iterdir() if path.name.isdecimal())

    def test_the_last_two_and_the_best_are_kept(self, tmp_path):
        losses = iter([5.0, 4.0, 1.0, 3.0, 2.0, 6.0, 7.0])
        seen = []

        def evaluate(params):
            seen.append(jax.tree.map(np.asarray, params))
            return {"held_out_loss": next(losses)}

        settings = dataclasses.replace(SETTINGS, steps=12, check_every=2)
        best, _ = run(tmp_path, settings, make_task(evaluate=evaluate))
        assert self.steps(tmp_path) == [4, 10, 12]
        assert_equal(best, seen[2])

    def test_what_is_not_a_whole_checkpoint_is_passed_over_and_kept(self, tmp_path, straight):
        """Copies, some of them not finished, and what only looks like one; with any number."""
        with pytest.raises(Stop):
            run(tmp_path, task=make_task(batches=stopping_at(7)))
        folder = tmp_path / CHECKPOINTS
        half = shutil.copytree(folder / "4", folder / "99")
        (half / "_CHECKPOINT_METADATA").unlink()
        (shutil.copytree(folder / "4", folder / "98") / "default" / "_METADATA").unlink()
        for name in ("97", "4 copy.orbax-checkpoint-tmp", "mine.orbax-checkpoint-tmp", "notes"):
            (folder / name).mkdir()
            (folder / name / "mine").write_text("mine")
        (folder / "96").write_text("mine")
        there = {
            path: path.stat().st_mtime_ns
            for path in folder.rglob("*")
            if path.relative_to(folder).parts[0] not in ("0", "4")
        }
        (folder / "6.orbax-checkpoint-tmp").mkdir()  # what a killed run leaves
        params, _ = run(tmp_path, if_exists="resume")
        assert figures(tmp_path) == figures(straight[0])
        assert_equal(params, straight[1])
        run(tmp_path, if_exists="overwrite")
        assert figures(tmp_path) == figures(straight[0])
        kept = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
        assert there.items() <= kept.items()
        assert {path.name for path in folder.iterdir()} - {path.relative_to(folder).parts[0] for path in there} == {
            "8", "12"
        }  # fmt: skip

    def test_what_is_where_a_checkpoint_goes_is_named_and_kept(self, tmp_path):
        with pytest.raises(Stop):
            run(tmp_path, task=make_task(batches=stopping_at(7)))
        (tmp_path / CHECKPOINTS / "8").mkdir()
        with pytest.raises(RalmError, match="8: is in the way and not a whole checkpoint; move it elsewhere"):
            run(tmp_path, if_exists="resume")
        assert (tmp_path / CHECKPOINTS / "8").is_dir()

    def test_without_held_out_examples_the_last_is_taken(self, tmp_path, straight):
        params, said = run(tmp_path, task=make_task(evaluate=None))
        assert self.steps(tmp_path) == [8, 12]
        assert not any("held out" in line for line in said)
        with Checkpoints(straight[0] / CHECKPOINTS, fresh=False) as checkpoints:
            task = make_task()
            last = checkpoints.restore(12, new_state(task.params, make_optimizer(SETTINGS), task.mesh))
        assert_equal(params, jax.tree.map(np.asarray, last.params))
        assert int(last.step) == 12

    def test_the_given_parameters_are_left_alone(self):
        task = make_task()
        before = jax.tree.map(np.array, task.params)
        state = new_state(task.params, make_optimizer(SETTINGS), task.mesh)
        with jax.set_mesh(task.mesh):
            compiled_step(task, SETTINGS, state)(state, next(batches(0)))
        assert_equal(before, jax.tree.map(np.asarray, task.params))


class TestMetrics:
    def test_every_step_is_a_row(self, straight):
        folder, _, said = straight
        found = rows(folder)
        assert list(found[0]) == ["step", "loss", "learning_rate", "gradient_norm", "seconds", "data_wait",
                                  "held_out_loss", "other"]  # fmt: skip
        assert [int(row["step"]) for row in found] == list(range(13))
        assert [int(row["step"]) for row in found if row["held_out_loss"]] == [0, 4, 8, 12]
        assert [float(row["learning_rate"]) for row in found[1:4]] == pytest.approx([0.01 / 3, 0.02 / 3, 0.01])
        assert all(0 <= float(row["data_wait"]) < float(row["seconds"]) for row in found[1:])
        assert float(found[12]["held_out_loss"]) < float(found[0]["held_out_loss"])
        assert [line.split(" of")[0] for line in said if "held out" not in line] == [
            "step 3", "step 6", "step 9", "step 12"
        ]  # fmt: skip

    def test_waiting_for_data_shows(self, tmp_path):
        def slow(start):
            for batch in batches(start):
                time.sleep(0.05)
                yield batch

        _, said = run(tmp_path, dataclasses.replace(SETTINGS, steps=4), make_task(batches=slow))
        assert sum(float(row["data_wait"]) for row in rows(tmp_path)[1:]) >= 4 * 0.05
        assert "waiting for data" in said[-2]

    def test_tensorboard(self, tmp_path, straight):
        pytest.importorskip("tensorboardX")
        assert list((straight[0] / "tensorboard").glob("events.out.tfevents.*"))

    def test_a_loss_that_is_not_finite_stops(self, tmp_path):
        def broken(params, batch, key):
            total, weight = plain_loss(params, batch, key)
            return total * jnp.nan, weight

        with pytest.raises(RalmError, match="step 1: the loss is not finite"):
            run(tmp_path, task=make_task(loss=broken))

    def test_a_batch_that_the_devices_cannot_share(self, tmp_path):
        with pytest.raises(UsageError, match="a batch of 16 cannot be shared by 8 devices in 4 micro batches"):
            run(tmp_path, dataclasses.replace(SETTINGS, micro_batches=4), make_task(make_mesh(8)))
        assert not (tmp_path / METRICS).exists()
