"""Training a reader itself, on windows of tokens: the causal language-model loss.

Its memory does not grow with window times vocabulary: logits are formed for some rows at a time, and again in the
backward pass. Neither does it keep what layers compute inside: that is computed again as well.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from ralm_jax.model import abstract, matmul_precision
from ralm_jax.plan import Program, Work
from ralm_jax.scoring import logits_rows
from ralm_jax.settings import TrainSettings
from ralm_jax.sharding import batch_multiple, constrain
from train.loop import Task, compiled_step
from train.optim import make_optimizer
from train.state import abstract_state


class Batch(NamedTuple):
    """Windows of documents, padded on the right where they are not full: nothing before it sees the padding.

    Attributes:
        tokens: B T, int32.
        labels: B T, int32, the token after each.
        weight: B T, float32, 0 where nothing is learned: padding, a prompt.
        documents: B T, int32, the document of its window that each token is of, from 1 on, and 0 for padding: no
            document sees another. None where every window has one document.
    """

    tokens: Any
    labels: Any
    weight: Any
    documents: Any = None


def causal_loss(
    graphdef: nnx.GraphDef, mesh: Mesh
) -> Callable[[nnx.State, Batch, jax.Array], tuple[jax.Array, jax.Array]]:
    """The loss of `train.loop.Task` for a reader on `mesh`: the sum of the labels' weighted negative log-probabilities,
    and of the weights."""

    def loss(params: nnx.State, batch: Batch, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        with matmul_precision(jax.tree.leaves(params)[0].dtype):
            model = nnx.merge(graphdef, params)
            hidden = model.hidden(batch.tokens, batch.documents, remat=True)
            rows = logits_rows(model.vocab_size, -(-len(hidden) // batch_multiple(mesh)))
            total = cross_entropy(model.logits, hidden, batch.labels, batch.weight, rows)
        return total, batch.weight.sum()

    return loss


def cross_entropy(
    logits: Callable[[jax.Array], jax.Array],
    hidden: Float[Array, "B T D"],
    labels: Int[Array, "B T"],
    weight: Float[Array, "B T"],
    rows: int,
) -> Float[Array, ""]:
    """The weighted sum of -log softmax(logits(hidden))[label], with the logits of at most `rows` rows of a window at a
    time.

    The gradients of what `logits` reads beside `hidden` are added up over the blocks in float32.
    """
    blocks = -(-hidden.shape[1] // rows)
    rows = -(-hidden.shape[1] // blocks)
    padding = blocks * rows - hidden.shape[1]

    def cut(x: jax.Array) -> jax.Array:
        """B T ... -> blocks B rows ..."""
        padded = jnp.pad(x, ((0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)))
        parts = padded.reshape(len(x), blocks, rows, *x.shape[2:]).swapaxes(0, 1)
        return constrain(parts, None, "batch", *[None] * (x.ndim - 1))

    example = jax.ShapeDtypeStruct((len(hidden), rows, hidden.shape[2]), hidden.dtype)
    project, read = jax.closure_convert(logits, example)
    wide = [x.astype(jnp.float32) for x in read]

    @jax.checkpoint
    def block_loss(block: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        hidden, labels, weight = block
        found = project(hidden, *(x.astype(y.dtype) for x, y in zip(wide, read, strict=True)))
        # a comparison rather than a look-up: devices that share the vocabulary need not gather the logits
        label = labels[:, :, None] == jnp.arange(found.shape[2])[None, None]
        return (weight * (jax.nn.logsumexp(found, axis=2) - jnp.where(label, found, 0).sum(axis=2))).sum()

    return jax.lax.map(block_loss, (cut(hidden), cut(labels), cut(weight))).sum()


def finetune_program(work: Work) -> Program:
    """The step of training all parameters, for `ralm_jax.plan`: float32 state, computation in `work.dtype`."""
    graphdef, params = abstract(work.family, work.config, work.mesh)
    settings = TrainSettings(batch_size=work.batch_size, dropout=0.0, dtype=work.dtype)
    state = abstract_state(params, make_optimizer(settings), work.mesh)
    task = Task(params, work.mesh, causal_loss(graphdef, work.mesh), lambda step: (), None, {})
    batch = Batch(work.rows(work.window), work.rows(work.window), work.rows(work.window, jnp.float32))
    parts = {"weights": state.params, "optimizer": state.optimizer, "inputs": batch}
    return Program(compiled_step(task, settings, state), (state, batch), parts)
