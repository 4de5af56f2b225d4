"""Longer windows: the extended reader, its tuning on documents without leaks, and the command."""

import csv
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ralm_jax.cli import main
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.reader import load_reader
from ralm_jax.settings import ContextSettings, ReaderTrainSettings
from ralm_jax.sharding import make_mesh, on_mesh
from ralm_jax.tokenizer import load_tokenizer
from tests import tiny
from train import context as module
from train.causal import causal_loss
from train.context import Evaluation, bucket_edges, check_attention, extended, train_context
from train.data import stack
from train.loop import Task, compiled_step
from train.optim import make_optimizer
from train.state import new_state
from train.windows import cut, make_windows

CONFIG = dataclasses.replace(tiny.LLAMA, num_layers=1, max_positions=16)
SETTINGS = ReaderTrainSettings(
    steps=6, batch_size=8, learning_rate=1e-2, dtype="float32", check_every=2, log_every=2, seed=3
)
CONTEXT = ContextSettings(held_out=0.2)
LENGTHS = (150, 3, 64, 1, 70, 129)


def documents(lengths=LENGTHS):
    return [tiny.text(length, seed) for seed, length in enumerate(lengths)]


def windows(*, length=64, lengths=LENGTHS, together=True):
    (made,) = make_windows([cut(documents(lengths), tiny.tokenizer(bos=True), length)], length, together=together)
    return made


def test_a_batch_has_the_losses_of_its_documents_alone(one_device):
    reader, tokenizer, lengths = tiny.reader(CONFIG), tiny.tokenizer(bos=True), [40, 3, 17]
    alone = 0.0
    for text in documents(lengths):
        tokens = np.array([*tokenizer.prefix, *tokenizer.encode(text), *tokenizer.suffix])
        log_probs = jax.nn.log_softmax(reader.logits(tokens[None, :-1]))[0]
        alone -= float(log_probs[np.arange(len(tokens) - 1), tokens[1:]].sum())
    made = windows(lengths=lengths)
    assert len(made) == 1
    total, weight = jax.jit(causal_loss(reader.graphdef, one_device))(reader.state, stack([made(0)]), jax.random.key(0))
    assert float(total) == pytest.approx(alone, rel=1e-5)
    assert weight == 63


def test_cudnn_has_no_part_in_packed_windows():
    with pytest.raises(UsageError, match="cudnn does not keep the documents of a window apart; add --no-pack"):
        check_attention("cudnn", windows())
    check_attention("cudnn", windows(together=False))
    check_attention("auto", windows())


class TestExtended:
    def test_the_window_grows_with_the_factor(self):
        config = extended(CONFIG, ContextSettings(factor=4), "a")
        assert (config.rope_factor, config.max_positions) == (4, 64)
        assert config.to_hf()["rope_scaling"] == {"rope_type": "linear", "factor": 4}

    def test_again_only_if_asked(self):
        config = extended(CONFIG, ContextSettings(factor=4), "a")
        with pytest.raises(UsageError, match="interpolated by 4 already; add --again to make that 8"):
            extended(config, ContextSettings(factor=2), "a")
        again = extended(config, ContextSettings(factor=2, again=True), "a")
        assert (again.rope_factor, again.max_positions) == (8, 128)
        assert extended(config, ContextSettings(factor=1), "a") == config

    @pytest.mark.parametrize("name", ["gpt2", "gpt-neo", "opt", "gptj"])
    def test_other_positions_are_refused(self, name):
        with pytest.raises(UsageError, match=r"a: has .* positions.*; only readers of the family llama"):
            extended(tiny.READERS[name], ContextSettings(), "a")


@pytest.mark.slow
def test_micro_batches_are_weighted_by_tokens_and_may_have_none(one_device):
    """Windows with 16 labels and with 3, of which a mean of means would not be the mean; then windows with none."""
    reader, made = tiny.reader(CONFIG), windows(length=16, lengths=(15, 2, 4, 1), together=False)
    batch, found = stack([made(row) for row in range(4)]), []
    for parts in (1, 4):
        settings = dataclasses.replace(SETTINGS, batch_size=4, micro_batches=parts, learning_rate=1e-3)
        task = Task(reader.state, one_device, causal_loss(reader.graphdef, one_device), lambda start: (), None, {})
        state = new_state(reader.state, make_optimizer(settings), one_device)
        step = compiled_step(task, settings, state)
        with on_mesh(one_device):
            state, told = step(state, jax.tree.map(jnp.asarray, batch))
        found.append((jax.tree.map(np.array, state.params), told))
    (one, told), (four, others) = found
    for name in ("loss", "gradient_norm"):
        assert float(told[name]) == pytest.approx(float(others[name]), rel=1e-5)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(four), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)

    fresh = new_state(reader.state, make_optimizer(settings), one_device)
    with on_mesh(one_device):
        state, told = step(fresh, jax.tree.map(jnp.asarray, batch._replace(weight=np.zeros_like(batch.weight))))
    assert (float(told["loss"]), float(told["gradient_norm"])) == (0, 0)
    jax.tree.map(np.testing.assert_array_equal, reader.state, state.params)


@pytest.mark.parametrize("together", [True, False])
def test_perplexity_by_position(one_device, together):
    """Where documents share a window, the same as where they do not."""
    reader, held, alone = tiny.reader(CONFIG), windows(together=together), windows(together=False)
    assert held.marked is together
    edges = bucket_edges(16, 64)
    assert edges == [0, 4, 8, 16, 32, 64]
    found = Evaluation(held, one_device, dataclasses.replace(SETTINGS, batch_size=4), edges)(
        reader.graphdef, reader.state
    )
    batch = stack([alone(row) for row in range(len(alone))])
    logits = np.asarray(jax.nn.log_softmax(reader.logits(batch.tokens)))
    nll = -np.take_along_axis(logits, batch.labels[:, :, None], axis=2)[:, :, 0] * batch.weight
    for (begin, end), perplexity in found.perplexities().items():
        part = slice(begin, end)
        assert perplexity == pytest.approx(np.exp(nll[:, part].sum() / batch.weight[:, part].sum()), rel=1e-4)
    assert found.tokens.sum() == batch.weight.sum()
    assert found.figures()["held_out_loss"] == pytest.approx(nll.sum() / batch.weight.sum(), rel=1e-5)


def test_buckets_for_any_factor():
    assert bucket_edges(4096, 32768) == [0, 1024, 2048, 4096, 8192, 16384, 32768]
    assert bucket_edges(512, 1536) == [0, 128, 256, 512, 1024, 1536]
    assert bucket_edges(512, 512) == [0, 128, 256, 512]


@pytest.fixture(scope="module")
def init(tmp_path_factory):
    return str(tiny.save_model(tmp_path_factory.mktemp("init") / "llama", CONFIG, bos=True))


def run(init, out, *, if_exists="refuse", context=CONTEXT):
    said = []
    trained = train_context(
        init, iter(documents((40, 20, 1500))), str(out), settings=SETTINGS, context=context, mesh=make_mesh(data=1),
        if_exists=if_exists, announce=said.append,
    )  # fmt: skip
    return trained, said


@pytest.fixture(scope="module")
def straight(init, tmp_path_factory):
    out = tmp_path_factory.mktemp("straight") / "out"
    return out, *run(init, out)


class TestTraining:
    def test_it_is_told_by_position(self, straight):
        out, _, said = straight
        with (out / "perplexity.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [(int(row["begin"]), int(row["end"])) for row in rows] == [(0, 4), (4, 8), (8, 16), (16, 32), (32, 64)]
        assert all(float(row["tuned"]) < float(row["interpolated"]) for row in rows)
        assert len({row["as it was"] for row in rows} & {row["interpolated"] for row in rows}) == 0
        assert f"| 32 to 63 | {rows[-1]['tokens']} | {float(rows[-1]['as it was']):.2f} |" in said[-1]
        assert said[0] == "20 windows of 64 tokens to train on, 0.2% of them padding; 5 held out"

    def test_the_reader_is_written_with_its_window(self, straight, init):
        out, trained, _ = straight
        config = json.loads((out / "model" / "config.json").read_text())
        assert config["max_position_embeddings"] == 64
        assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4}
        loaded = load_reader(str(out / "model"), mesh=make_mesh(data=1))
        assert loaded.config == trained.config
        tokens = np.random.default_rng(0).integers(0, 100, (1, 64)).astype(np.int32)
        np.testing.assert_array_equal(loaded.logits(tokens), trained.logits(tokens))
        assert load_tokenizer(str(out / "model")).fingerprint == load_tokenizer(init).fingerprint

    @pytest.mark.slow
    def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(self, straight, init, tmp_path, monkeypatch):
        def stopped(*args):
            for number, batch in enumerate(batches(*args)):
                if number == 3:
                    raise KeyboardInterrupt
                yield batch

        batches = module.shuffled_batches
        monkeypatch.setattr(module, "shuffled_batches", stopped)
        with pytest.raises(KeyboardInterrupt):
            run(init, tmp_path / "out")
        assert not (tmp_path / "out" / "model").exists()
        monkeypatch.undo()
        resumed, _ = run(init, tmp_path / "out", if_exists="resume")
        tiny.assert_same(resumed.state, straight[1].state)
        assert (tmp_path / "out" / "perplexity.csv").read_text() == (straight[0] / "perplexity.csv").read_text()

    def test_other_documents_are_not_mixed_in(self, straight, init):
        with pytest.raises(RalmError, match="windows_sha256"):
            train_context(
                init, iter(documents((40, 21, 1500))), str(straight[0]), settings=SETTINGS, context=CONTEXT,
                mesh=make_mesh(data=1), if_exists="resume",
            )  # fmt: skip


def test_several_processes_write_what_loads(tmp_path, init, monkeypatch):
    """An Orbax checkpoint, of which each has a part."""
    reader, coder = load_reader(init, mesh=make_mesh(fsdp=2, data=1)), load_tokenizer(init)
    monkeypatch.setattr(module.processes, "count", lambda: 2)
    monkeypatch.setattr(module.processes, "once", lambda make: make())
    module.save(reader, coder, init, tmp_path / "model")
    monkeypatch.undo()
    loaded = load_reader(str(tmp_path / "model"), mesh=make_mesh(data=1))
    tiny.assert_same(loaded.state, load_reader(init, mesh=make_mesh(data=1)).state)
    assert load_tokenizer(str(tmp_path / "model")).fingerprint == coder.fingerprint


@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch, capsys, init, tiny_model):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(tiny.text(1500))

    def ralm(*options):
        code = 0
        try:
            main(["train", "context", *map(str, options)])
        except SystemExit as stopped:
            code = stopped.code
        return code, capsys.readouterr()

    command = ["--model", init, "--text", "text.txt", "--out", "out", "--steps", 1, "--batch-size", 8, "--factor", 2,
               "--held-out", 0.2, "--mesh", "data=1"]  # fmt: skip
    code, told = ralm(*command)
    assert code == 0, told.err
    assert "The reader, for --model out/model, is there." in told.out
    assert load_reader("out/model", mesh=make_mesh(data=1)).config.max_positions == 32
    for options, message in (
        (command, "--overwrite"),
        (["--model", init, "--out", "new"], "name what is learned from with --text or --data"),
        ([*command, "--dropout", 0.1, "--overwrite"], "readers have no dropout"),
        ([*command, "--model", tiny_model, "--overwrite"], "only readers of the family llama can be extended"),
        ([*command, "--model", "out/model", "--overwrite"], "add --again"),
    ):
        code, told = ralm(*options)
        assert (code, told.err.count("\n")) == (2, 1), told.err
        assert message in told.err
