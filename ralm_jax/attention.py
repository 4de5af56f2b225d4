"""Self-attention with grouped key/value heads, causal or not.

Queries go in blocks of 128 rows, each against its own prefix of the keys: half of the T x T products are masked away
by causality, and most of those are never formed. Heads lead (B, K, G*t, H), so that each block is one plain matrix
product a key/value head.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

BLOCK = 128
MAX_BLOCKS = 32  # the blocks are unrolled: very long windows take larger ones, to keep compilation short

IMPLEMENTATIONS = ("auto", "xla")


class Past(NamedTuple):
    """Keys and values of P tokens that came before, in a layer; with a leading axis L, in all layers.

    Attributes:
        keys, values: B K P H, heads first, as they are read.
        valid: B P, the real tokens; the others are padding, or room that is not taken yet.
    """

    keys: jax.Array
    values: jax.Array
    valid: jax.Array


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    scale: float,
    valid: Bool[Array, "B T"] | None = None,
    causal: bool = True,
    window: Int[Array, ""] | None = None,
    past: Past | None = None,
    impl: str = "auto",
) -> Float[Array, "B T N H"]:
    """softmax(scale * q k^T) v over a query's past or over everything; query head n reads key/value head n // (N // K).

    Scores and softmax are float32. Rows without a single valid key give finite numbers (never NaN), which nobody reads.

    Args:
        valid: real tokens, for batches with padding; None if every token is real.
        causal: a query sees itself and what is before it; False for encoders.
        window: it sees the last so many of these; None for all. An array, so that the layers of a scan may differ.
        past: what came before the T tokens; every query sees it, as far as `window` reaches.
        impl: "xla", or "auto" for the best that the device has.

    Raises:
        ValueError: `impl` is not one of `IMPLEMENTATIONS`.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"attention {impl!r} is not one of {', '.join(IMPLEMENTATIONS)}")
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    block = max(BLOCK, -(-length // MAX_BLOCKS))

    queries = (q * scale).reshape(batch, length, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)  # B K G T H
    keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)  # B K S H
    outputs = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        rows, seen = stop - start, stop if causal else length
        query = queries[:, :, :, start:stop].reshape(batch, kv_heads, group * rows, head_dim)
        scores = jnp.einsum("bkth,bksh->bkts", query, keys[:, :, :seen], preferred_element_type=jnp.float32)
        distance = jnp.arange(start, stop)[None, :, None] - jnp.arange(seen)[None, None, :]
        mask = distance >= 0 if causal else jnp.ones_like(distance, bool)
        if window is not None:
            mask = mask & (distance < window)
        if valid is not None:
            mask = mask & valid[:, None, :seen]
        if past is not None:
            before = jnp.einsum("bkth,bkph->bktp", query, past.keys, preferred_element_type=jnp.float32)
            scores = jnp.concatenate([before, scores], axis=3)
            mask = jnp.concatenate(
                [past_mask(past.valid, start, stop, window), jnp.broadcast_to(mask, (batch, *mask.shape[1:]))], axis=2
            )
        mask = jnp.tile(mask, (1, group, 1))[:, None]  # (B or 1) 1 (G t) S
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
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


def past_mask(valid: Bool[Array, "B P"], start: int, stop: int, window: Int[Array, ""] | None) -> Bool[Array, "B t P"]:
    """What queries `start` … `stop`, counted after the past, see of it."""
    mask = jnp.broadcast_to(valid[:, None], (valid.shape[0], stop - start, valid.shape[1]))
    if window is None:
        return mask
    from_end = (valid.sum(axis=1, keepdims=True) - jnp.cumsum(valid, axis=1))[:, None]  # B 1 P: 0 for the last one
    return mask & (from_end + 1 + jnp.arange(start, stop)[None, :, None] < window)
