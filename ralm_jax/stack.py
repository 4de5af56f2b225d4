"""A decoder-only reader: embed, scan over stacked layers, norm, head. Families fill in the parts."""

import abc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from ralm_jax.config import ReaderConfig
from ralm_jax.layers import Embedding, Linear
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
    """Base of the families: embedding, stacked blocks, final norm and head; `hidden` is theirs."""

    def __init__(
        self,
        config: ReaderConfig,
        block: Callable[..., nnx.Module],
        norm: Callable[..., nnx.Module],
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
    ):
        hidden, vocab = {"embed": config.hidden_size}, {"vocab": config.vocab_size}
        self.embed = Embedding(config.vocab_size, config.hidden_size, axes=("vocab", "embed"), rngs=rngs, dtype=dtype)
        self.layers = stacked(lambda rngs: block(config, rngs=rngs, dtype=dtype), config.num_layers, rngs)
        self.norm = norm(config.hidden_size, config.norm_epsilon, rngs=rngs, dtype=dtype)
        tied = config.tie_word_embeddings
        self.head = None if tied else Linear(hidden, vocab, bias=False, rngs=rngs, dtype=dtype)

    @abc.abstractmethod
    def hidden(self, tokens: Int[Array, "B T"], valid: Bool[Array, "B T"] | None = None) -> Float[Array, "B T D"]:
        """Hidden states after the final norm; `valid` marks real tokens where there is padding."""

    def logits(self, hidden: Float[Array, "B R D"]) -> Float[Array, "B R V"]:
        """Float32 logits of any positions' hidden states."""
        return self.embed.logits(hidden) if self.head is None else self.head(hidden, jnp.float32)

    def __call__(self, tokens: Int[Array, "B T"], valid: Bool[Array, "B T"] | None = None) -> Float[Array, "B T V"]:
        return self.logits(self.hidden(tokens, valid))
