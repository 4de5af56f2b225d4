"""A decoder-only reader: embed, scan over stacked layers, norm, head. Families fill in the parts."""

import abc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ralm_jax.layers import Linear
from ralm_jax.sharding import constrain


def stacked(make_layer: Callable[[nnx.Rngs], nnx.Module], num_layers: int, rngs: nnx.Rngs) -> nnx.Module:
    """`num_layers` layers as one module whose parameters have a leading "layers" axis."""

    @nnx.split_rngs(splits=num_layers)
    @nnx.vmap(in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def make(layer_rngs: nnx.Rngs) -> nnx.Module:
        return make_layer(layer_rngs)

    return make(rngs)


def scan_layers(layers: nnx.Module, x: Float[Array, "B T D"], *args: Any, remat: bool = False) -> Float[Array, "B T D"]:
    """Runs `x` through stacked layers in order: one compiled body, whatever the depth.

    Args:
        args: passed to every layer after `x`.
        remat: recompute a layer's activations in the backward pass instead of keeping them.
    """
    graphdef, state = nnx.split(layers)

    def body(x: jax.Array, layer: nnx.State) -> tuple[jax.Array, None]:
        return constrain(nnx.merge(graphdef, layer)(x, *args), "batch", None, None), None

    return jax.lax.scan(jax.checkpoint(body) if remat else body, x, state)[0]


class Decoder(nnx.Module):
    """Base of the families: `hidden` is theirs, the head is here."""

    embed: Any
    head: Linear | None

    @abc.abstractmethod
    def hidden(self, tokens: Int[Array, "B T"], valid: Bool[Array, "B T"] | None = None) -> Float[Array, "B T D"]:
        """Hidden states after the final norm; `valid` marks real tokens where there is padding."""

    def logits(self, hidden: Float[Array, "B R D"]) -> Float[Array, "B R V"]:
        """Float32 logits of any positions' hidden states."""
        if self.head is None:
            return self.embed.logits(hidden)
        return jnp.tensordot(hidden, self.head.kernel[...], axes=1, preferred_element_type=jnp.float32)

    def __call__(self, tokens: Int[Array, "B T"], valid: Bool[Array, "B T"] | None = None) -> Float[Array, "B T V"]:
        return self.logits(self.hidden(tokens, valid))
