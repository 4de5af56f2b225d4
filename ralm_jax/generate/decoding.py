"""Tokens after prompts, a batch at a time: one forward over the prompts, then one for every new token.

Prompts are padded on the left, so that all end in the same place and every new token goes into the next one. Padding is
masked and positions count from a prompt's own first token: a neighbour changes nothing. Lengths are those of a few
buckets, which bounds the number of compilations; prompts go through the reader together with those of their bucket.
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
from ralm_jax.layers import Memory, interleaved, part_rows
from ralm_jax.model import matmul_precision
from ralm_jax.reader import Reader
from ralm_jax.sharding import batch_multiple, constrain, on_mesh, shard_batch, whole

SMALLEST = 32  # tokens that are compiled for
PARTS = 4  # of a batch, by length: prompts go through the reader, and are kept, with others that are about as long


class Written(NamedTuple):
    """The tokens of a step, and what the reader gave them, whatever was drawn from it: (B,) each."""

    tokens: jax.Array | np.ndarray
    log_probs: jax.Array | np.ndarray


class Part(NamedTuple):
    """What the reader keeps of some rows of a batch.

    Attributes:
        keys, values: of all layers (`Past`), the tokens that have gone through the reader, and room for more.
        starts: (B,) where in them a row's first token is,
        place: and where the next one of all goes.
    """

    keys: jax.Array
    values: jax.Array
    starts: jax.Array
    place: jax.Array

    @property
    def past(self) -> Past:
        places = jnp.arange(self.values.shape[3])[None, :]
        return Past(self.keys, self.values, (places >= self.starts[:, None]) & (places < self.place))

    def spread(self) -> "Part":
        """Keeps rows and heads on their devices."""
        keys = constrain(self.keys, "layers", "batch", "kv_heads", "head_dim", None)
        return self._replace(keys=keys, values=constrain(self.values, "layers", "batch", "kv_heads", None, "head_dim"))


class Run(NamedTuple):
    """Where a batch is: what a step is a function of.

    Attributes:
        parts: what is kept of its rows, of which row i is of part i % len(parts) (`Memory.past`).
        tokens: (B,) chosen, not yet run through the reader.
        seen: (B, V) tokens that were there before; None where nothing depends on them.
        draws: (B,) random keys of the rows.
        drawn: tokens that every row has drawn.
    """

    parts: list[Part]
    tokens: jax.Array
    seen: jax.Array | None
    draws: jax.Array
    drawn: jax.Array


@functools.partial(jax.jit, static_argnums=(0, 6))
def begin(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    tokens: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    draws: Array,
    drawn: Int[Array, ""],
    sampling: Sampling,
) -> tuple[Run, Written]:
    """Runs prompts and chooses the first token after them."""
    with matmul_precision(jax.tree.leaves(state)[0].dtype):
        model, memory = nnx.merge(graphdef, state), Memory()
        hidden = model.hidden(tokens, valid, memory)
        logits = model.logits(hidden[:, -1:])[:, 0]
    seen = None
    if sampling.penalised:
        rows = jnp.arange(len(tokens))[:, None]
        seen = jnp.zeros(logits.shape, bool).at[rows, jnp.where(valid, tokens, logits.shape[1])].set(True, mode="drop")
    length = tokens.shape[1]
    part = Part(*memory.new, length - valid.sum(axis=1, dtype=jnp.int32), jnp.int32(length))
    return chosen(Run([part], tokens[:, -1], seen, draws, drawn), logits, sampling)


@functools.partial(jax.jit, static_argnums=1)
def make_room(part: Part, room: int) -> Part:
    """Makes room for `room` more tokens."""
    behind, none = (0, room), (0, 0)
    keys = jnp.pad(part.keys, [none] * 4 + [behind])
    return part._replace(keys=keys, values=jnp.pad(part.values, [none] * 3 + [behind, none])).spread()


@jax.jit
def join(parts: Sequence[tuple[jax.Array | None, ...]]) -> tuple[jax.Array | None, ...]:
    """What there is of every row of a batch, from that of the rows of its equal parts."""
    return jax.tree.map(lambda *rows: interleaved(rows), *parts)


@functools.partial(jax.jit, static_argnums=(0, 3), donate_argnums=2)
def advance(graphdef: nnx.GraphDef, state: nnx.State, run: Run, sampling: Sampling) -> tuple[Run, Written]:
    """Runs the tokens that were chosen, and chooses the next ones."""
    with matmul_precision(jax.tree.leaves(state)[0].dtype):
        model, memory = nnx.merge(graphdef, state), Memory([part.past for part in run.parts])
        hidden = model.hidden(run.tokens[:, None], None, memory)
        logits = model.logits(hidden)[:, 0]
    write = jax.lax.dynamic_update_slice_in_dim
    parts = [
        part._replace(
            keys=write(part.keys, keys, part.place, axis=4),
            values=write(part.values, values, part.place, axis=3),
            place=part.place + 1,
        ).spread()
        for part, keys, values in zip(
            run.parts, *(part_rows(new, len(run.parts), axis=1) for new in memory.new), strict=True
        )
    ]
    return chosen(run._replace(parts=parts), logits, sampling)


def chosen(run: Run, logits: jax.Array, sampling: Sampling) -> tuple[Run, Written]:
    tokens = choose(logits, run.seen, jax.vmap(jax.random.fold_in, (0, None))(run.draws, run.drawn), sampling)
    log_probs = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0] - jax.nn.logsumexp(logits, axis=1)
    seen = run.seen
    if seen is not None:
        seen = constrain(seen.at[jnp.arange(len(tokens)), tokens].set(True), "batch", "vocab")
    return run._replace(tokens=tokens, seen=seen, drawn=run.drawn + 1), Written(tokens, log_probs)


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
        batch: rows to compile for, if there are fewer prompts.

    Raises:
        UsageError: a prompt without tokens, or one that leaves no room for `count` tokens.
        RalmError: a token that the reader does not know, or it gives NaN.
    """
    check_prompts(reader, prompts, count)
    multiple, order = batch_multiple(reader.mesh), sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    wanted, room = max(batch or 0, len(prompts)), bucket(count)
    size = -(-wanted // (PARTS * multiple)) * multiple  # of a part, whose prompts are about as long
    places = np.array(order + order[-1:] * (-(-wanted // size) * size - len(order))).reshape(-1, size)
    parts, begun = [], []
    with on_mesh(reader.mesh):
        for rows in places:
            some = [prompts[i] for i in rows]
            length = bucket(max(map(len, some)), reader.config.max_positions)
            arrays = [shard_batch(reader.mesh, x) for x in (*padded_left(some, length), keys[rows])]
            run, written = begin(reader.graphdef, reader.state, *arrays, jnp.int32(drawn), sampling)
            parts.append(make_room(run.parts[0], room))
            begun.append((run.tokens, run.seen, run.draws, written))
        tokens, seen, draws, written = join(begun)
        run = Run(parts, tokens, seen, draws, run.drawn)
    del parts  # which the first step gives away
    back = np.unique(places.T, return_index=True)[1]  # the row of every prompt
    for _ in range(count - 1):
        with on_mesh(reader.mesh):
            run, following = advance(reader.graphdef, reader.state, run, sampling)
        yield collected(reader, written, back)
        written = following
    yield collected(reader, written, back)


def collected(reader: Reader, written: Written, rows: np.ndarray) -> Written:
    """`rows` of a step, once they are there."""
    tokens, log_probs = (whole(x)[rows] for x in written)
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
    if longest + count - 1 > reader.config.max_positions:  # the last one is not run through the reader
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


def padded_left(prompts: Sequence[np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray]:
    """(n, length) int32 tokens, and which of them are real."""
    tokens, valid = np.zeros((len(prompts), length), np.int32), np.zeros((len(prompts), length), bool)
    for row, prompt in enumerate(prompts):
        tokens[row, length - len(prompt) :], valid[row, length - len(prompt) :] = prompt, True
    return tokens, valid


def bucket(needed: int, most: int | None = None) -> int:
    """The length to compile for: `needed` rounded up to 32, 40, 48, 56, 64, 80, …, four to each doubling; `most` at
    most."""
    step = max(SMALLEST, 1 << (needed - 1).bit_length()) // 8
    size = max(SMALLEST, -(-needed // step) * step)
    return size if most is None else min(size, most)


def keys_of(seed: int, count: int, first: int = 0) -> jax.Array:
    """Random keys of prompts `first`, `first` + 1, …: what is drawn for one follows from `seed` and its place alone."""
    key = jax.random.key(seed)
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(first, first + count))
