"""The causal language-model loss: plain cross-entropy in less memory."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ralm_jax import scoring
from ralm_jax.settings import TrainSettings
from ralm_jax.sharding import make_mesh, on_mesh
from tests import tiny
from train import causal
from train.context import token_nll
from train.data import stack
from train.loop import Task, compiled_step
from train.optim import make_optimizer
from train.state import new_state
from train.windows import Piece, make_windows

WINDOW = 24
FAMILIES = ["gpt2", "llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt-neo", "gptj", "opt-350m"))]


def windows(batch=2, window=WINDOW, seed=0):
    """Packed text; the second half of the last window is padding."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, tiny.GPT2.vocab_size, (batch, window + 1)).astype(np.int32)
    weight = rng.integers(0, 3, (batch, window)).astype(np.float32)
    weight[-1, window // 2 :] = 0
    return causal.Batch(*map(jnp.asarray, (text[:, :-1], text[:, 1:], weight)))


def packed():
    """Documents of 11, 3, 14 and 9 labels: in two windows, and each in a window of its own."""
    rng, pieces = np.random.default_rng(0), []
    for size in (11, 3, 14, 9):
        tokens = rng.integers(0, tiny.GPT2.vocab_size, size + 1).astype(np.int32)
        pieces.append(Piece(tokens, rng.random(size) > 0.3))
    return [
        stack([windows(row) for row in range(len(windows))])
        for together in (True, False)
        for windows in make_windows([pieces], 32, together=together)
    ]


def plain(graphdef):
    """The loss by all logits at once."""

    def loss(params, batch):
        logits = nnx.merge(graphdef, params)(batch.tokens).astype(jnp.float32)
        found = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.labels[:, :, None], axis=2)[:, :, 0]
        return -(found * batch.weight).sum()

    return loss


def rows_at_once(monkeypatch, rows, batch, vocabulary=tiny.GPT2.vocab_size):
    monkeypatch.setattr(scoring, "LOGITS_BYTES", 4 * vocabulary * batch * rows)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt-neo", "gptj", "opt-350m"])
def test_documents_that_share_a_window_do_not_see_each_other(name, one_device):
    reader, (together, alone) = tiny.reader(tiny.READERS[name]), packed()
    assert (together.documents.max(axis=1).tolist(), alone.documents) == ([3, 1], None)
    found, expected = (
        np.asarray(token_nll(reader.graphdef, reader.state, batch, one_device)[0]) for batch in (together, alone)
    )
    row = 0
    for window, numbers in enumerate(together.documents):
        for number in range(1, numbers.max() + 1):
            nll = found[window, numbers == number]
            np.testing.assert_allclose(nll, expected[row, : len(nll)], atol=1e-5)
            row += 1
    assert row == len(alone.tokens)


@pytest.mark.parametrize("name", FAMILIES)
def test_they_are_learned_from_as_if_they_stood_alone(name, one_device):
    reader, batches = tiny.reader(tiny.READERS[name]), packed()
    gradient = jax.jit(jax.value_and_grad(causal.causal_loss(reader.graphdef, one_device), has_aux=True))
    (loss, gradients), (wanted, others) = (gradient(reader.state, batch, jax.random.key(0)) for batch in batches)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * max(1, np.abs(other).max()))


@pytest.mark.parametrize("name", FAMILIES)
def test_equals_cross_entropy_by_all_logits_and_so_do_its_gradients(name, monkeypatch, one_device):
    reader, batch = tiny.reader(tiny.READERS[name]), windows()
    rows_at_once(monkeypatch, 7, len(batch.tokens))  # 24 rows in 4 blocks of 6
    loss = causal.causal_loss(reader.graphdef, one_device)

    @jax.jit
    def both(params):
        ours = jax.value_and_grad(lambda params: loss(params, batch, jax.random.key(0))[0])(params)
        return ours, jax.value_and_grad(plain(reader.graphdef))(params, batch)

    (ours, gradients), (expected, wanted) = both(reader.state)
    np.testing.assert_allclose(ours, expected, rtol=1e-6)
    for (path, left), (_, right) in zip(*map(jax.tree_util.tree_leaves_with_path, (gradients, wanted)), strict=True):
        np.testing.assert_allclose(left, right, atol=2e-5, err_msg=jax.tree_util.keystr(path))
    assert float(loss(reader.state, batch, jax.random.key(0))[1]) == batch.weight.sum()


@pytest.mark.parametrize("rows", [1, 5, 24, 1000])
def test_the_rows_at_once_change_nothing(rows, monkeypatch, one_device):
    reader, batch = tiny.reader(tiny.LLAMA), windows()
    rows_at_once(monkeypatch, rows, len(batch.tokens))
    ours, _ = jax.jit(causal.causal_loss(reader.graphdef, one_device))(reader.state, batch, jax.random.key(0))
    np.testing.assert_allclose(ours, plain(reader.graphdef)(reader.state, batch), rtol=1e-6)


def test_padding_on_the_right_changes_nothing(one_device):
    reader, batch = tiny.reader(tiny.LLAMA), windows()
    loss = jax.jit(causal.causal_loss(reader.graphdef, one_device))
    other = batch._replace(tokens=batch.tokens.at[-1, WINDOW // 2 :].set(5))
    left, right = (float(loss(reader.state, made, jax.random.key(0))[0]) for made in (batch, other))
    assert left == pytest.approx(right, rel=1e-6)


def test_memory_does_not_grow_with_window_times_vocabulary():
    vocabulary, size = 8192, 16

    def temporary(rows, window):
        """Bytes that the gradient takes beside what it is given and gives."""

        def loss(kernel, hidden, labels, weight):
            return causal.cross_entropy(lambda hidden: jnp.dot(hidden, kernel), hidden, labels, weight, rows)

        shapes = [((size, vocabulary), jnp.float32), ((1, window, size), jnp.float32), ((1, window), jnp.int32)]
        given = [jax.ShapeDtypeStruct(*shape) for shape in [*shapes, ((1, window), jnp.float32)]]
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*given).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    logits = 4 * 512 * vocabulary  # bytes that 512 tokens more would take
    assert temporary(1024, 1024) - temporary(1024, 512) >= logits
    assert temporary(32, 1024) - temporary(32, 512) < logits / 50


@pytest.mark.slow
def test_gradients_of_the_head_add_up_in_float32(monkeypatch, one_device):
    """In bfloat16 a sum of many blocks stops growing."""
    reader = tiny.reader(replace(tiny.LLAMA, num_layers=1))
    narrow, batch = jax.tree.map(lambda x: x.astype(jnp.bfloat16), reader.state), windows(window=256)
    rows_at_once(monkeypatch, 1, len(batch.tokens))

    @jax.jit
    def gradient(params):
        loss = causal.causal_loss(reader.graphdef, one_device)
        return jax.grad(lambda params: loss(params, batch, jax.random.key(0))[0])(params)["head"]["kernel"][...]

    wanted = jax.jit(jax.grad(plain(reader.graphdef)))(narrow, batch)["head"]["kernel"][...]
    wanted, ours = (np.asarray(x, np.float32) for x in (wanted, gradient(narrow)))
    assert np.linalg.norm(ours - wanted) < 4e-3 * np.linalg.norm(wanted)


@pytest.mark.slow
def test_a_reader_learns_a_text_by_heart_on_a_mesh(one_device):
    """bfloat16 computation, float32 state, micro-batches, two documents a window; one device begins with the same
    losses."""
    config, batch = replace(tiny.LLAMA, num_layers=1, vocab_size=130), windows(batch=8)
    batch = batch._replace(documents=jnp.broadcast_to(jnp.arange(WINDOW) // 12 + 1, batch.tokens.shape))
    settings = TrainSettings(
        steps=15, batch_size=8, micro_batches=2, learning_rate=1e-2, dropout=0.0, dtype="bfloat16", decay="constant"
    )
    losses = []
    for mesh, steps in ((one_device, 2), (make_mesh(data=1, fsdp=2, tensor=2), settings.steps)):
        reader = tiny.on(tiny.reader(config), mesh)
        task = Task(reader.state, mesh, causal.causal_loss(reader.graphdef, mesh), lambda start: (), None, {})
        state = new_state(reader.state, make_optimizer(settings), mesh)
        step, told = compiled_step(task, settings, state), []
        for _ in range(steps):
            with on_mesh(mesh):
                state, figures = step(state, batch)
            told.append(float(figures["loss"]))
        losses.append(told)
        assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    assert losses[1][-1] < losses[1][0] / 2
    np.testing.assert_allclose(losses[1][:2], losses[0], rtol=0.02)
