"""Rotary position embeddings (Su et al., 2021), in the half-split layout of Llama and the interleaved one of GPT-J.

Linear position interpolation (Chen et al., 2023) divides the frequencies by a factor. Phases are float32 whatever the
model computes in: at position 30,000 a bfloat16 phase is off by whole turns.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rotary_phases(
    positions: Int[Array, "B T"], head_dim: int, theta: float, factor: float = 1.0
) -> tuple[Float[Array, "B T 1 P"], Float[Array, "B T 1 P"]]:
    """Cosines and sines of the angles of every position and pair (P = H / 2), with an axis for the heads."""
    # float32 and in this order, as transformers has it: other roundings differ by 1e-3 radians at position 32,768
    frequencies = 1.0 / (theta ** (jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)) / factor
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies[None, None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate_half(
    x: Float[Array, "B T N H"], phases: tuple[Float[Array, "B T 1 P"], Float[Array, "B T 1 P"]]
) -> Float[Array, "B T N H"]:
    """Turns each pair (x[i], x[i + H/2]) by its phase."""
    cos, sin = phases
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def rotate_interleaved(
    x: Float[Array, "B T N H"], phases: tuple[Float[Array, "B T 1 P"], Float[Array, "B T 1 P"]]
) -> Float[Array, "B T N H"]:
    """Turns each pair (x[2 i], x[2 i + 1]) of the first 2 P dimensions by its phase; the rest stay as they are."""
    cos, sin = phases
    rotated = 2 * cos.shape[-1]
    pairs = x[..., :rotated].astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([turned.reshape(*x.shape[:-1], rotated).astype(x.dtype), x[..., rotated:]], axis=-1)


def token_positions(valid: Array | None, shape: tuple[int, ...], begin: Array | None = None) -> jax.Array:
    """The position of every token of a batch, counted from its first real one, so that padding on either side
    changes nothing, or from the first of its document.

    Args:
        valid: (B, T) marks real tokens; None means that all are. Integers number documents, each in one run.
        begin: (B, 1) tokens that came before.
    """
    places = jnp.broadcast_to(jnp.arange(shape[1])[None, :], shape)
    if valid is None:
        positions = places
    elif valid.dtype == bool:
        positions = jnp.maximum(jnp.cumsum(valid, axis=1) - 1, 0)
    else:
        begins = jnp.pad(valid[:, 1:] != valid[:, :-1], ((0, 0), (1, 0)))
        positions = places - jax.lax.cummax(jnp.where(begins, places, 0), axis=1)
    return positions if begin is None else positions + begin
