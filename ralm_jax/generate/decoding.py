"""Tokens after prompts, a batch at a time: one forward over the prompts, then one for every new token.

Prompts are padded on the left, so that all end in the same place and every new token goes into the next one. Padding is
masked and positions count from a prompt's own first token: a neighbour changes nothing. Lengths are those of a few
buckets, which bounds the number of compilations.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int

from ralm_jax.attention import Past
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.generate.sampling import Sampling, choose
from ralm_jax.layers import Memory
from ralm_jax.model import matmul_precision
from ralm_jax.reader import Reader
from ralm_jax.sharding import batch_multiple, constrain, on_mesh, shard_batch

SMALLEST = 32  # tokens; lengths that are compiled for are this times a power of 2, or halfway to the next


class Written(NamedTuple):
    """The tokens of a step, and what the reader gave them, whatever was drawn from it: (B,) each."""

    tokens: jax.Array | np.ndarray
    log_probs: jax.Array | np.ndarray


class Run(NamedTuple):
    """Where a batch is: what a step is a function of.

    Attributes:
        past: L B K S H, the tokens that have gone through the reader, and room for more.
        place: where in it the next token goes.
        tokens: (B,) chosen, not yet run through the reader.
        seen: (B, V) tokens that were there before; None where nothing depends on them.
        keys: (B,) random keys of the rows.
        drawn: tokens that every row has drawn.
    """

    past: Past
    place: jax.Array
    tokens: jax.Array
    seen: jax.Array | None
    keys: jax.Array
    drawn: jax.Array


@functools.partial(jax.jit, static_argnums=(0, 6, 7))
def begin(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    tokens: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    row_keys: Array,
    drawn: Int[Array, ""],
    room: int,
    sampling: Sampling,
) -> tuple[Run, Written]:
    """Runs the prompts and chooses the first token after them; `room` tokens may follow."""
    with matmul_precision(jax.tree.leaves(state)[0].dtype):
        model, memory = nnx.merge(graphdef, state), Memory()
        hidden = model.hidden(tokens, valid, memory)
        logits = model.logits(hidden[:, -1:])[:, 0]
    keys, values = (constrain_past(jnp.pad(x, [(0, 0)] * 3 + [(0, room), (0, 0)])) for x in memory.new)
    past = Past(keys, values, jnp.pad(valid, ((0, 0), (0, room))))
    seen = None
    if sampling.penalised:
        rows = jnp.arange(len(tokens))[:, None]
        seen = jnp.zeros(logits.shape, bool).at[rows, jnp.where(valid, tokens, logits.shape[1])].set(True, mode="drop")
    return chosen(Run(past, jnp.int32(tokens.shape[1]), tokens[:, -1], seen, row_keys, drawn), logits, sampling)


@functools.partial(jax.jit, static_argnums=(0, 3), donate_argnums=2)
def advance(graphdef: nnx.GraphDef, state: nnx.State, run: Run, sampling: Sampling) -> tuple[Run, Written]:
    """Runs the tokens that were chosen, and chooses the next ones."""
    with matmul_precision(jax.tree.leaves(state)[0].dtype):
        model, memory = nnx.merge(graphdef, state), Memory(run.past)
        hidden = model.hidden(run.tokens[:, None], None, memory)
        logits = model.logits(hidden)[:, 0]
    where = (0, 0, 0, run.place, 0)
    old = (run.past.keys, run.past.values)
    keys, values = (
        constrain_past(jax.lax.dynamic_update_slice(x, new, where)) for x, new in zip(old, memory.new, strict=True)
    )
    valid = jax.lax.dynamic_update_slice(run.past.valid, jnp.ones((len(run.tokens), 1), bool), (0, run.place))
    return chosen(run._replace(past=Past(keys, values, valid), place=run.place + 1), logits, sampling)


def chosen(run: Run, logits: jax.Array, sampling: Sampling) -> tuple[Run, Written]:
    keys = jax.vmap(jax.random.fold_in, (0, None))(run.keys, run.drawn)
    tokens = choose(logits, run.seen, keys, sampling)
    log_probs = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0] - jax.nn.logsumexp(logits, axis=1)
    seen = run.seen if run.seen is None else run.seen.at[jnp.arange(len(tokens)), tokens].set(True)
    return run._replace(tokens=tokens, seen=seen, drawn=run.drawn + 1), Written(tokens, log_probs)


def constrain_past(x: jax.Array) -> jax.Array:
    return constrain(x, "layers", "batch", "kv_heads", None, "head_dim")


def decode(
    reader: Reader,
    prompts: Sequence[np.ndarray],
    count: int,
    sampling: Sampling,
    *,
    keys: jax.Array,
    drawn: int = 0,
    batch: int | None = None,
) -> Iterator[Written]:
    """The `count` tokens that follow each of `prompts`, one step after the other; whoever has enough stops asking.

    While the host looks at a step, the device computes the next one.

    Args:
        prompts: int32 tokens, BOS among them where the reader wants one.
        keys: (n,) random keys, one a prompt.
        drawn: tokens that each prompt's key has been used for.
        batch: rows to compute, at least one a prompt; for few compilations.

    Raises:
        UsageError: a prompt without tokens, or one that leaves no room for `count` tokens.
        RalmError: a token that the reader does not know, or it gives NaN.
    """
    check_prompts(reader, prompts, count)
    multiple = batch_multiple(reader.mesh)
    rows = -(-max(batch or 0, len(prompts)) // multiple) * multiple
    tokens, valid = padded_left(prompts, rows, bucket(max(map(len, prompts)), reader.config.max_positions))
    keys = keys[jnp.minimum(jnp.arange(rows), len(prompts) - 1)]
    with on_mesh(reader.mesh):
        arrays = [shard_batch(reader.mesh, x) for x in (tokens, valid, keys)]
        run, written = begin(reader.graphdef, reader.state, *arrays, jnp.int32(drawn), bucket(count), sampling)
    for _ in range(count - 1):
        with on_mesh(reader.mesh):
            run, following = advance(reader.graphdef, reader.state, run, sampling)
        yield collected(reader, written, len(prompts))
        written = following
    yield collected(reader, written, len(prompts))


def collected(reader: Reader, written: Written, count: int) -> Written:
    tokens, log_probs = (np.asarray(x)[:count] for x in written)
    if np.isnan(log_probs).any():
        advice = "; try --dtype float32" if reader.dtype != "float32" else ""
        raise RalmError(f"{reader.name}: the reader gives NaN in {reader.dtype}{advice}")
    return Written(tokens, log_probs)


def check_prompts(reader: Reader, prompts: Sequence[np.ndarray], count: int) -> None:
    """
    Raises:
        UsageError: a prompt without tokens, or one that leaves no room for `count` tokens.
        RalmError: a token that the reader does not know.
    """
    longest, known = max(map(len, prompts)), reader.config.vocab_size
    if not min(map(len, prompts)):
        raise UsageError("a prompt is empty")
    if longest + count > reader.config.max_positions:
        raise UsageError(
            f"a prompt of {longest:,} tokens and {count:,} new ones are more than the {reader.config.max_positions:,} "
            f"positions of {reader.name}"
        )
    highest = max(int(prompt.max()) for prompt in prompts)
    if highest >= known:
        raise RalmError(
            f"a prompt has token {highest}, the reader {reader.name} knows {known}; name the reader's own tokenizer "
            "with --tokenizer"
        )


def padded_left(prompts: Sequence[np.ndarray], rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows, length) int32 tokens and which of them are real; the last prompt again where there are more rows."""
    tokens, valid = np.zeros((rows, length), np.int32), np.zeros((rows, length), bool)
    for row in range(rows):
        prompt = prompts[min(row, len(prompts) - 1)]
        tokens[row, length - len(prompt) :], valid[row, length - len(prompt) :] = prompt, True
    return tokens, valid


def bucket(needed: int, most: int | None = None) -> int:
    """The length to compile for: `needed` rounded up to 32, 48, 64, 96, 128, 192, …; `most` at most."""
    size = SMALLEST
    while size < needed:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return min(size, most) if most is not None else size


def keys_of(seed: int, count: int, first: int = 0) -> jax.Array:
    """Random keys of prompts `first`, `first` + 1, …: what is drawn for one follows from `seed` and its place alone."""
    key = jax.random.key(seed)
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(first, first + count))
