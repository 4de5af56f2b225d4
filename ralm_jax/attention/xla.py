"""Attention in plain XLA, for every device: short inputs in unrolled blocks, long ones in loops over blocks.

Up to 4,096 queries go in blocks of 128 rows, each against its own prefix of the keys: half of the T x T products are
masked away by causality, and most of those are never formed. Heads lead (B, K, G*t, H), so that each block is one plain
matrix product a key/value head. Beyond that there would be too many blocks to unroll, or blocks that grow with T.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

Valid = Bool[Array, "B T"] | Int[Array, "B T"]  # real tokens, or the document of each; as `ralm_jax.attention.attend`

BLOCK = 128
MAX_BLOCKS = 32  # the blocks are unrolled: no more of them, to keep compilation short
LONG_BLOCK = 512  # rows and columns of a block in a loop

MASKED = float(jnp.finfo(jnp.float32).min)


class Past(NamedTuple):
    """Keys and values of P tokens that came before, in a layer; with a leading axis L, in all layers.

    Attributes:
        keys: B K H P, and
        values: B K P H, so that both products read them in the order in which they lie.
        valid: B P, the real tokens; the others are padding, or room that is not taken yet.
    """

    keys: jax.Array
    values: jax.Array
    valid: jax.Array


def attend_xla(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    scale: float,
    valid: Valid | None,
    causal: bool,
    window: Int[Array, ""] | None,
    past: Past | None,
) -> Float[Array, "B T N H"]:
    """As `ralm_jax.attention.attend`; memory grows with T, not with its square."""
    way = in_blocks if q.shape[1] <= BLOCK * MAX_BLOCKS else in_loops
    return way(q * scale, k, v, valid=valid, causal=causal, window=window, past=past)


def in_blocks(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    valid: Valid | None,
    causal: bool,
    window: Int[Array, ""] | None,
    past: Past | None,
) -> Float[Array, "B T N H"]:
    """Unrolled blocks of `BLOCK` scaled queries, each against all the keys that it may see."""
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads

    queries = q.reshape(batch, length, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)  # B K G T H
    keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)  # B K S H
    outputs = []
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        rows, seen = stop - start, stop if causal else length
        query = queries[:, :, :, start:stop].reshape(batch, kv_heads, group * rows, head_dim)
        scores = jnp.einsum("bkth,bksh->bkts", query, keys[:, :, :seen], preferred_element_type=jnp.float32)
        distance = jnp.arange(start, stop)[None, :, None] - jnp.arange(seen)[None, None, :]
        mask = distance >= 0 if causal else jnp.ones_like(distance, bool)
        if window is not None:
            mask = mask & (distance < window)
        if valid is not None:
            mask = mask & readable(valid[:, start:stop], valid[:, :seen])
        if past is not None:
            before = jnp.einsum("bkth,bkhp->bktp", query, past.keys, preferred_element_type=jnp.float32)
            scores = jnp.concatenate([before, scores], axis=3)
            mask = jnp.concatenate(
                [past_mask(past.valid, start, stop, window), jnp.broadcast_to(mask, (batch, *mask.shape[1:]))], axis=2
            )
        mask = jnp.tile(mask, (1, group, 1))[:, None]  # (B or 1) 1 (G t) S
        scores = jnp.where(mask, scores, MASKED)
        # the maximum cancels, so no gradient; dividing after the product touches (t, H) numbers instead of (t, S)
        weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
        total = weights.sum(axis=-1, keepdims=True)
        weights = weights.astype(v.dtype)
        output = jnp.einsum(
            "bkts,bksh->bkth", weights[..., -seen:], values[:, :, :seen], preferred_element_type=jnp.float32
        )
        if past is not None:
            output += jnp.einsum(
                "bktp,bkph->bkth", weights[..., :-seen], past.values, preferred_element_type=jnp.float32
            )
        outputs.append((output / total).astype(v.dtype).reshape(batch, kv_heads, group, rows, head_dim))
    merged = jnp.concatenate(outputs, axis=3)  # B K G T H
    return merged.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, head_dim)


def readable(queries: Shaped[Array, "B t"], keys: Shaped[Array, "B s"]) -> Bool[Array, "B _ s"]:
    """Which keys a query may see for what `Valid` says of both: real ones, or those of its own document."""
    return keys[:, None] if keys.dtype == bool else queries[:, :, None] == keys[:, None]


def past_mask(valid: Bool[Array, "B P"], start: int, stop: int, window: Int[Array, ""] | None) -> Bool[Array, "B t P"]:
    """What queries `start` … `stop`, counted after the past, see of it."""
    mask = jnp.broadcast_to(valid[:, None], (valid.shape[0], stop - start, valid.shape[1]))
    if window is None:
        return mask
    return mask & (jnp.arange(start, stop)[None, :, None] - past_places(valid)[:, None] < window)


def past_places(valid: Bool[Array, "B P"]) -> Int[Array, "B P"]:
    """Where they stand, counted from the first token after them: -1 for the last one; padding counts for nothing."""
    return jnp.cumsum(valid, axis=1) - valid.sum(axis=1, keepdims=True) - 1


def in_loops(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    valid: Valid | None,
    causal: bool,
    window: Int[Array, ""] | None,
    past: Past | None,
) -> Float[Array, "B T N H"]:
    """Block after block of scaled queries meets block after block of keys; the softmax goes along (Rabe and Staats,
    2021), and what the backward pass needs of a block is computed again there."""
    batch, length, heads, head_dim = q.shape
    kv_heads, dtype = k.shape[2], v.dtype
    valid = jnp.ones((batch, length), bool) if valid is None else valid
    documents = None if valid.dtype == bool else blocks(valid)
    places = jnp.broadcast_to(jnp.arange(length), (batch, length))
    before = 0
    if past is not None:
        before = past.valid.shape[1]
        k = jnp.concatenate([past.keys.transpose(0, 3, 1, 2), k], axis=1)
        v = jnp.concatenate([past.values.transpose(0, 2, 1, 3), v], axis=1)
        valid = jnp.concatenate([past.valid, valid], axis=1)
        places = jnp.concatenate([past_places(past.valid), places], axis=1)

    # in float32, so that their gradients, which every block adds to, are summed in it; products are of `dtype`
    q, k, v = (blocks(x.astype(jnp.float32)) for x in (q, k, v))
    queries = q.reshape(*q.shape[:3], kv_heads, heads // kv_heads, head_dim).transpose(0, 1, 3, 4, 2, 5)  # n B K G t H
    keys, values = k.transpose(0, 1, 3, 2, 4), v.transpose(0, 1, 3, 2, 4)  # m B K s H
    starts = LONG_BLOCK * jnp.arange(len(queries))
    columns = (LONG_BLOCK * jnp.arange(len(keys)) - before, keys, values, blocks(places), blocks(valid))

    def rows(block: tuple[jax.Array, jax.Array, jax.Array | None]) -> jax.Array:
        start, query, own_documents = block
        own = start + jnp.arange(LONG_BLOCK)
        state = (jnp.full(query.shape[:-1], MASKED), jnp.zeros(query.shape[:-1]), jnp.zeros(query.shape))

        def meet(state: Any, column: Any) -> tuple[Any, None]:
            first, key, value, there, real = column
            distance = own[None, :, None] - there[:, None]  # B t s
            mask = jnp.broadcast_to(readable(real if own_documents is None else own_documents, real), distance.shape)
            seen = jnp.array(True)  # whether any query of the block can see any key of this one
            if causal:
                mask, seen = mask & (distance >= 0), first < start + LONG_BLOCK
            if window is not None:
                mask = mask & (distance < window)
                if past is None:  # whose padding brings the rest nearer
                    seen = seen & (start - first - LONG_BLOCK + 1 < window)

            def add(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
                highest, total, output = state
                scores = jnp.einsum(
                    "bkgth,bksh->bkgts", query.astype(dtype), key.astype(dtype), preferred_element_type=jnp.float32
                )
                scores = jnp.where(mask[:, None, None], scores, MASKED)
                # it cancels, so no gradient
                top = jax.lax.stop_gradient(jnp.maximum(highest, scores.max(axis=-1)))
                weights, kept = jnp.exp(scores - top[..., None]), jnp.exp(highest - top)
                added = jnp.einsum(
                    "bkgts,bksh->bkgth", weights.astype(dtype), value.astype(dtype), preferred_element_type=jnp.float32
                )
                return top, total * kept + weights.sum(axis=-1), output * kept[..., None] + added

            return jax.lax.cond(seen, add, lambda state: state, state), None

        (_, total, output), _ = jax.lax.scan(jax.checkpoint(meet, prevent_cse=False), state, columns)
        return (output / total[..., None]).astype(dtype)

    out = jax.lax.map(jax.checkpoint(rows, prevent_cse=False), (starts, queries, documents))
    return out.transpose(1, 0, 4, 2, 3, 5).reshape(batch, -1, heads, head_dim)[:, :length]


def blocks(x: Array) -> Array:
    """B S ... as n B s ... with s = `LONG_BLOCK`, padded at the end with zeros."""
    count = math.ceil(x.shape[1] / LONG_BLOCK)
    padded = jnp.pad(x, ((0, 0), (0, count * LONG_BLOCK - x.shape[1]), *((0, 0) for _ in x.shape[2:])))
    return padded.reshape(x.shape[0], count, LONG_BLOCK, *x.shape[2:]).swapaxes(0, 1)
