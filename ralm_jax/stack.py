"""Stacked layers under one scan, and the decoder-only reader that they make: embed, layers, norm, head."""

import abc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ralm_jax.attention import Valid
from ralm_jax.config import ReaderConfig
from ralm_jax.layers import Block, Dropout, Embedding, LayerNorm, Linear, Memory, RMSNorm
from ralm_jax.sharding import constrain


def stacked(make_layer: Callable[[nnx.Rngs], nnx.Module], num_layers: int, rngs: nnx.Rngs) -> nnx.Module:
    """`num_layers` layers as one module whose parameters have a leading "layers" axis."""

    @nnx.split_rngs(splits=num_layers)
    @nnx.vmap(in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def make(layer_rngs: nnx.Rngs) -> nnx.Module:
        return make_layer(layer_rngs)

    return make(rngs)


def scan_layers(
    layers: nnx.Module,
    x: Float[Array, "B T D"],
    *args: Any,
    each: tuple[jax.Array, ...] = (),
    dropout: Dropout | None = None,
    memory: Memory | None = None,
    remat: bool = False,
) -> Float[Array, "B T D"]:
    """Runs `x` through stacked layers in order: one compiled body, whatever the depth.

    Args:
        args: passed to every layer after `x`.
        each: arrays (L, ...), of which every layer is passed its own part after `args`.
        dropout: of which every layer is passed its own, by name, if there is one.
        memory: of all layers; each is passed its own, by name, if there is one.
        remat: recompute a layer's activations in the backward pass instead of keeping them.
    """
    graphdef, state = nnx.split(layers)
    dropouts = dropout and dropout.split(jax.tree.leaves(state)[0].shape[0])

    past = None if memory is None else memory.past

    def body(x: jax.Array, layer: tuple[nnx.State, tuple[jax.Array, ...], Any, Any]) -> tuple[jax.Array, Any]:
        state, own, dropout, heads = layer
        named: dict[str, Any] = {} if dropout is None else {"dropout": dropout}
        if memory is not None:
            parts = past and [part._replace(keys=k, values=v) for part, (k, v) in zip(past, heads, strict=True)]
            named["memory"] = Memory(parts)
        x = constrain(nnx.merge(graphdef, state)(x, *args, *own, **named), "batch", None, None)
        return x, None if memory is None else named["memory"].new

    heads = None if past is None else [(part.keys, part.values) for part in past]
    x, new = jax.lax.scan(jax.checkpoint(body) if remat else body, x, (state, each, dropouts, heads))
    if memory is not None:
        memory.new = new
    return x


class Decoder(nnx.Module):
    """Base of the readers: embedding, stacked blocks, final norm and head; `hidden` is theirs."""

    def __init__(
        self,
        config: ReaderConfig,
        *,
        norm: type[LayerNorm] | type[RMSNorm] = LayerNorm,
        final_norm: bool = True,
        word: dict[str, int] | None = None,
        head_bias: bool = False,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        **block: Any,
    ):
        """
        Args:
            norm: of the blocks, and after them if `final_norm`.
            word: axis and size of embeddings and of the head's input, if not those of the hidden states.
            block: what `Block` takes.
        """
        self.vocab_size = config.vocab_size
        word = word or {"embed": config.hidden_size}
        ((axis, size),) = word.items()
        self.embed = Embedding(config.vocab_size, size, axes=("vocab", axis), rngs=rngs, dtype=dtype)
        self.layers = stacked(
            lambda rngs: Block(config, norm=norm, **block, rngs=rngs, dtype=dtype), config.num_layers, rngs
        )
        self.norm: Any = norm(config.hidden_size, config.norm_epsilon, rngs=rngs, dtype=dtype) if final_norm else None
        vocab = {"vocab": config.vocab_size}
        tied = config.tie_word_embeddings
        self.head = None if tied else Linear(word, vocab, bias=head_bias, rngs=rngs, dtype=dtype)

    @abc.abstractmethod
    def hidden(
        self,
        tokens: Int[Array, "B T"],
        valid: Valid | None = None,
        memory: Memory | None = None,
        *,
        remat: bool = False,
    ) -> Float[Array, "B T D"]:
        """Hidden states after the final norm; `valid` marks real tokens where there is padding, or numbers the
        documents of a window, as for `attend`; `memory` has what came before `tokens`; `remat` as for `scan_layers`."""

    def logits(self, hidden: Float[Array, "B R D"]) -> Float[Array, "B R V"]:
        """Float32 logits of any positions' hidden states; -inf for what pads the vocabulary."""
        logits = self.embed.logits(hidden) if self.head is None else self.head(hidden, jnp.float32)
        logits = constrain(logits, "batch", None, "vocab")
        padding = jnp.arange(logits.shape[2])[None, None] >= self.vocab_size
        return logits if logits.shape[2] == self.vocab_size else jnp.where(padding, -jnp.inf, logits)

    def __call__(self, tokens: Int[Array, "B T"], valid: Valid | None = None) -> Float[Array, "B T V"]:
        return self.logits(self.hidden(tokens, valid))
