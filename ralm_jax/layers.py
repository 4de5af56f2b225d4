"""The parts that every family is made of: parameters with logical axes, projections, norms, attention, MLPs.

Letters, here and everywhere: B batch, T query length, S key length, D model, F feed-forward, N heads, K key/value
heads, H head dim, V vocabulary, L layers. A module computes in the dtype of its parameters; norms, softmax and
logits are float32.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ralm_jax.attention import Past, Valid, attend
from ralm_jax.config import ModelConfig
from ralm_jax.errors import UsageError
from ralm_jax.rope import token_positions
from ralm_jax.sharding import constrain, parts_of

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


def parameter(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], dtype: DTypeLike, *, init: str = "normal"
) -> nnx.Param:
    """One tensor: shape, logical axes, dtype and initialisation ("normal", "zeros" or "ones") in one record.

    A vocabulary that the current mesh cannot cut into equal parts has rows of zeros after its last, which
    `stored_shape` leaves out; key/value heads that it cannot cut lie whole on every device (`shared_out` parts them).
    """
    padding = [(0, -size % parts_of(axis) if axis == "vocab" else 0) for axis, size in zip(axes, shape, strict=True)]
    whole = [axis == "kv_heads" and size % parts_of(axis) > 0 for axis, size in zip(axes, shape, strict=True)]
    placed = tuple(None if one else axis for axis, one in zip(axes, whole, strict=True))
    initializer = {
        "normal": nnx.initializers.normal(0.02),
        "zeros": nnx.initializers.zeros_init(),
        "ones": nnx.initializers.ones_init(),
    }[init]
    value = initializer(rngs.params(), shape, dtype)
    if not any(after for _, after in padding):
        return nnx.Param(value, out_sharding=placed)
    return nnx.Param(jnp.pad(value, padding), out_sharding=placed, unpadded=shape)


def stored_shape(leaf: nnx.Variable) -> tuple[int, ...]:
    """The shape of a parameter without what pads its vocabulary: that of checkpoints, whatever the mesh."""
    return leaf.get_metadata().get("unpadded", leaf.get_value().shape)


def broadcast_over(values: jax.Array, x: jax.Array) -> jax.Array:
    """`values` (a parameter over the last axes of `x`) with leading axes: ranks never promote silently."""
    return values.reshape((1,) * (x.ndim - values.ndim) + values.shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dropout:
    """Sets each number to 0 with probability `rate` and scales up the others, so that means stay.

    The draws follow from `key` and from the `site` in the model alone.
    """

    rate: float = dataclasses.field(metadata={"static": True})
    key: jax.Array

    def __call__(self, x: jax.Array, site: int) -> jax.Array:
        kept = jax.random.bernoulli(jax.random.fold_in(self.key, site), 1 - self.rate, x.shape)
        return jnp.where(kept, x / (1 - self.rate), 0)

    def split(self, count: int) -> "Dropout":
        """One for each of `count` layers, stacked."""
        return Dropout(self.rate, jax.random.split(self.key, count))


class Memory:
    """What a decoder knows of the tokens before its input: it reads their keys and values, and leaves those of the
    input here. It lives while a function is traced, and a layer has one of its own.

    Attributes:
        past: of the tokens before, for each of several equal parts of the batch, so that short rows need not have the
            room of long ones: row i is of part i % len(past). None if there are none.
        new: keys (B K H T) and values (B K T H) of the input, once it has gone through; of all layers with L first.
    """

    def __init__(self, past: Sequence[Past] | None = None):
        self.past = past
        self.new: tuple[jax.Array, jax.Array]

    @property
    def begin(self) -> Int[Array, "B 1"] | None:
        """Tokens that came before."""
        if self.past is None:
            return None
        return interleaved([part.valid.sum(axis=1, keepdims=True) for part in self.past])


def part_rows(x: jax.Array, parts: int, axis: int = 0) -> list[jax.Array]:
    """The rows, along `axis`, of each of `parts` equal parts: every `parts`-th one. Rows of a part are on the devices
    that share the batch as all rows are."""
    shape = (*x.shape[:axis], -1, parts, *x.shape[axis + 1 :])
    return [jax.lax.index_in_dim(x.reshape(shape), part, axis + 1, keepdims=False) for part in range(parts)]


def interleaved(parts: Sequence[jax.Array]) -> jax.Array:
    """The batch of which `part_rows` gives `parts`."""
    return jnp.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:])


class Linear(nnx.Module):
    """y = x W + b over one or more axes: (..., *inputs) -> (..., *outputs)."""

    def __init__(
        self,
        inputs: dict[str, int],
        outputs: dict[str, int],
        *,
        bias: bool,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
    ):
        """`inputs` and `outputs` map logical axis names to sizes, in order."""
        sizes = (*inputs.values(), *outputs.values())
        self.contracted = len(inputs)
        self.kernel = parameter(rngs, sizes, (*inputs, *outputs), dtype)
        self.bias = parameter(rngs, tuple(outputs.values()), tuple(outputs), dtype, init="zeros") if bias else None

    def __call__(self, x: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
        """`dtype` is that of the sums and of the result, if not the parameters' own."""
        y = jnp.tensordot(x, self.kernel[...], axes=self.contracted, preferred_element_type=dtype)
        return y if self.bias is None else y + broadcast_over(self.bias[...], y).astype(y.dtype)


class Embedding(nnx.Module):
    """A table of vectors; `logits` uses it as a tied head."""

    def __init__(self, rows: int, features: int, *, axes: tuple[str, str], rngs: nnx.Rngs, dtype: DTypeLike):
        self.rows = axes[0]
        self.table = parameter(rngs, (rows, features), axes, dtype)

    def __call__(self, ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        table = constrain(self.table[...], self.rows, None)  # else the partitioner gathers the rows as well
        return constrain(jnp.take(table, ids, axis=0), "batch", None, None)

    def logits(self, x: Float[Array, "B R D"]) -> Float[Array, "B R V"]:
        return jnp.einsum("brd,vd->brv", x, self.table[...], preferred_element_type=jnp.float32)


class LayerNorm(nnx.Module):
    """Layer normalisation with scale and bias, computed in float32."""

    def __init__(self, features: int, epsilon: float, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.epsilon = epsilon
        self.scale = parameter(rngs, (features,), ("embed",), dtype, init="ones")
        self.bias = parameter(rngs, (features,), ("embed",), dtype, init="zeros")

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(axis=-1, keepdims=True)
        normed = centred * jax.lax.rsqrt((centred**2).mean(axis=-1, keepdims=True) + self.epsilon)
        scale, bias = (broadcast_over(p[...], x).astype(jnp.float32) for p in (self.scale, self.bias))
        return (normed * scale + bias).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation in float32; casts back first, then scales, as Hugging Face's Llama does."""

    def __init__(self, features: int, epsilon: float, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.epsilon = epsilon
        self.scale = parameter(rngs, (features,), ("embed",), dtype, init="ones")

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt((wide**2).mean(axis=-1, keepdims=True) + self.epsilon)
        return normed.astype(x.dtype) * broadcast_over(self.scale[...], x)


class Positions(nnx.Module):
    """Learned positions: a vector for every place, counted from the first real token of a sequence or
    document."""

    def __init__(self, count: int, features: int, *, offset: int = 0, rngs: nnx.Rngs, dtype: DTypeLike):
        """`offset` rows stand before that of the first place, as OPT and RoBERTa store it."""
        self.count, self.offset = count, offset
        self.table = parameter(rngs, (offset + count, features), ("position", "embed"), dtype)

    def __call__(
        self, valid: Valid | None, shape: tuple[int, ...], begin: Int[Array, "B 1"] | None = None
    ) -> Float[Array, "B T D"]:
        """As `token_positions`.

        Raises:
            UsageError: more tokens than places.
        """
        if shape[1] > self.count:
            raise UsageError(f"{shape[1]} tokens are more than this model's {self.count} positions")
        table = constrain(self.table[...], "position", None)
        rows = jnp.take(table, token_positions(valid, shape, begin) + self.offset, axis=0)
        return constrain(rows, "batch", None, None)


class Attention(nnx.Module):
    """Self-attention with K key/value heads for N query heads; queries and keys rotated where asked for."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        bias: bool,
        out_bias: bool,
        scale: float,
        causal: bool,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
    ):
        embed, heads = {"embed": config.hidden_size}, {"heads": config.num_heads, "head_dim": config.head_dim}
        kv_heads = {"kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
        self.q = Linear(embed, heads, bias=bias, rngs=rngs, dtype=dtype)
        self.k = Linear(embed, kv_heads, bias=bias, rngs=rngs, dtype=dtype)
        self.v = Linear(embed, kv_heads, bias=bias, rngs=rngs, dtype=dtype)
        self.o = Linear(heads, embed, bias=out_bias, rngs=rngs, dtype=dtype)
        self.scale, self.causal, self.impl = scale, causal, config.attention

    def __call__(
        self,
        x: Float[Array, "B T D"],
        valid: Valid | None = None,
        rotate: Callable[[jax.Array], jax.Array] = lambda heads: heads,
        window: Int[Array, ""] | None = None,
        *,
        memory: Memory | None = None,
    ) -> Float[Array, "B T D"]:
        q, k, v = rotate(self.q(x)), rotate(self.k(x)), self.v(x)
        q, k, v = constrain(q, "batch", None, "heads", None), shared_out(k), shared_out(v)
        how: dict[str, Any] = {"scale": self.scale, "causal": self.causal, "window": window, "impl": self.impl}
        if memory is not None:
            memory.new = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
        if memory is None or memory.past is None:
            return self.o(attend(q, k, v, valid=valid, **how))
        given = [part_rows(x, len(memory.past)) for x in (q, k, v, *([] if valid is None else [valid]))]
        heads = [
            attend(q, k, v, valid=rest[0] if rest else None, past=past, **how)
            for past, q, k, v, *rest in zip(memory.past, *given, strict=True)
        ]
        return self.o(interleaved(heads))


def shared_out(x: Float[Array, "B S K H"]) -> Float[Array, "B S _ H"]:
    """Keys or values, each head on the devices of its queries: where the mesh cuts queries into parts that do not
    divide the K heads, such as more than K, every head is repeated until they do."""
    heads = x.shape[2]
    x = jnp.repeat(x, math.lcm(heads, parts_of("kv_heads")) // heads, axis=2)
    return constrain(x, "batch", None, "kv_heads", None)


class MLP(nnx.Module):
    """down(act(up x)), or down(act(gate x) * up x) where `gated`."""

    def __init__(self, config: ModelConfig, *, gated: bool, bias: bool, rngs: nnx.Rngs, dtype: DTypeLike):
        embed, mlp = {"embed": config.hidden_size}, {"mlp": config.mlp_size}
        self.activation = config.activation
        self.gate = Linear(embed, mlp, bias=bias, rngs=rngs, dtype=dtype) if gated else None
        self.up = Linear(embed, mlp, bias=bias, rngs=rngs, dtype=dtype)
        self.down = Linear(mlp, embed, bias=bias, rngs=rngs, dtype=dtype)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        act = ACTIVATIONS[self.activation]
        hidden = act(self.up(x)) if self.gate is None else act(self.gate(x)) * self.up(x)
        return self.down(hidden)


class Block(nnx.Module):
    """One layer of any family: attention and MLP, each with a norm and a residual connection."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        norm: type[LayerNorm] | type[RMSNorm] = LayerNorm,
        order: Literal["pre", "post", "parallel"] = "pre",
        qkv_bias: bool = True,
        out_bias: bool = True,
        mlp_bias: bool = True,
        gated: bool = False,
        scale: float | None = None,
        causal: bool = True,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
    ):
        """
        Args:
            order: "pre" is x + f(norm(x)), "post" is norm(x + f(x)), each for attention, then for the MLP; "parallel"
                is x + attention(norm(x)) + mlp(norm(x)) with one norm.
            scale: of attention scores; None for 1 / sqrt(H).
        """
        scale = config.head_dim**-0.5 if scale is None else scale
        self.order = order
        self.attention_norm = norm(config.hidden_size, config.norm_epsilon, rngs=rngs, dtype=dtype)
        self.attention = Attention(
            config, bias=qkv_bias, out_bias=out_bias, scale=scale, causal=causal, rngs=rngs, dtype=dtype
        )
        second = order != "parallel"
        self.mlp_norm = norm(config.hidden_size, config.norm_epsilon, rngs=rngs, dtype=dtype) if second else None
        self.mlp = MLP(config, gated=gated, bias=mlp_bias, rngs=rngs, dtype=dtype)

    def __call__(
        self, x: Float[Array, "B T D"], *attention: Any, dropout: Dropout | None = None, memory: Memory | None = None
    ) -> Float[Array, "B T D"]:
        """`attention` and `memory` are what `Attention` takes after `x`; `dropout` falls on what attention and MLP
        add."""
        drop = dropout or (lambda added, site: added)
        if self.mlp_norm is None:
            normed = self.attention_norm(x)
            return x + drop(self.attention(normed, *attention, memory=memory), 0) + drop(self.mlp(normed), 1)
        if self.order == "post":
            x = self.attention_norm(x + drop(self.attention(x, *attention, memory=memory), 0))
            return self.mlp_norm(x + drop(self.mlp(x), 1))
        x = x + drop(self.attention(self.attention_norm(x), *attention, memory=memory), 0)
        return x + drop(self.mlp(self.mlp_norm(x)), 1)
