"""GPT-2 (Radford et al., 2019): learned positions, pre-norm blocks, tied head."""

import dataclasses
from typing import Any, Self

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from ralm_jax.config import ConfigFile, ReaderConfig
from ralm_jax.keys import Family, Key
from ralm_jax.layers import ACTIVATIONS, MLP, Attention, Embedding, LayerNorm
from ralm_jax.rope import token_positions
from ralm_jax.stack import Decoder, scan_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2Config(ReaderConfig):
    scale_attention: bool

    model_type = "gpt2"

    @classmethod
    def from_hf(cls, file: ConfigFile) -> Self:
        hidden, heads = file.integer("n_embd"), file.integer("n_head")
        if hidden % heads:
            raise file.unsupported("n_head", heads, f"a divisor of n_embd = {hidden}")
        if file.flag("scale_attn_by_inverse_layer_idx", False):
            raise file.unsupported("scale_attn_by_inverse_layer_idx", True, "false")
        return cls(
            vocab_size=file.integer("vocab_size"),
            hidden_size=hidden,
            num_layers=file.integer("n_layer"),
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=hidden // heads,
            mlp_size=file.integer("n_inner", 4 * hidden),
            max_positions=file.integer("n_positions"),
            activation=file.choice("activation_function", ACTIVATIONS, "gelu_new"),
            norm_epsilon=file.number("layer_norm_epsilon"),
            tie_word_embeddings=file.flag("tie_word_embeddings", True),
            scale_attention=file.flag("scale_attn_weights", True),
        )

    def to_hf(self) -> dict[str, Any]:
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "n_embd": self.hidden_size,
            "n_layer": self.num_layers,
            "n_head": self.num_heads,
            "n_inner": self.mlp_size,
            "n_positions": self.max_positions,
            "activation_function": self.activation,
            "layer_norm_epsilon": self.norm_epsilon,
            "tie_word_embeddings": self.tie_word_embeddings,
            "scale_attn_weights": self.scale_attention,
        }


class Block(nnx.Module):
    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs, dtype: DTypeLike):
        scale = config.head_dim**-0.5 if config.scale_attention else 1.0
        self.attention_norm = LayerNorm(config.hidden_size, config.norm_epsilon, rngs=rngs, dtype=dtype)
        self.attention = Attention(config, bias=True, out_bias=True, scale=scale, rngs=rngs, dtype=dtype)
        self.mlp_norm = LayerNorm(config.hidden_size, config.norm_epsilon, rngs=rngs, dtype=dtype)
        self.mlp = MLP(config, gated=False, bias=True, rngs=rngs, dtype=dtype)

    def __call__(self, x: jax.Array, valid: jax.Array | None) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), valid)
        return x + self.mlp(self.mlp_norm(x))


class GPT2(Decoder):
    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs, dtype: DTypeLike):
        super().__init__(config, Block, LayerNorm, rngs=rngs, dtype=dtype)
        self.positions = Embedding(
            config.max_positions, config.hidden_size, axes=("position", "embed"), rngs=rngs, dtype=dtype
        )

    def hidden(self, tokens: Int[Array, "B T"], valid: Bool[Array, "B T"] | None = None) -> Float[Array, "B T D"]:
        x = self.embed(tokens) + self.positions(token_positions(valid, tokens.shape))
        return self.norm(scan_layers(self.layers, x, valid))


# Conv1D stores (in, out); query, key and value are fused along the output.
QKV = ("layers.attention.{}.kernel", "layers.attention.{}.bias")

FAMILY = Family(
    config=GPT2Config,
    model=GPT2,
    prefix="transformer.",
    keys=(
        Key("wte.weight", "embed.table"),
        Key("wpe.weight", "positions.table"),
        Key("h.{}.ln_1.weight", "layers.attention_norm.scale"),
        Key("h.{}.ln_1.bias", "layers.attention_norm.bias"),
        Key("h.{}.attn.c_attn.weight", tuple(QKV[0].format(x) for x in "qkv"), "d (three n h) -> three d n h"),
        Key("h.{}.attn.c_attn.bias", tuple(QKV[1].format(x) for x in "qkv"), "(three n h) -> three n h"),
        Key("h.{}.attn.c_proj.weight", "layers.attention.o.kernel", "(n h) d -> n h d"),
        Key("h.{}.attn.c_proj.bias", "layers.attention.o.bias"),
        Key("h.{}.ln_2.weight", "layers.mlp_norm.scale"),
        Key("h.{}.ln_2.bias", "layers.mlp_norm.bias"),
        Key("h.{}.mlp.c_fc.weight", "layers.mlp.up.kernel"),
        Key("h.{}.mlp.c_fc.bias", "layers.mlp.up.bias"),
        Key("h.{}.mlp.c_proj.weight", "layers.mlp.down.kernel"),
        Key("h.{}.mlp.c_proj.bias", "layers.mlp.down.bias"),
        Key("ln_f.weight", "norm.scale"),
        Key("ln_f.bias", "norm.bias"),
        Key("lm_head.weight", "head.kernel", "v d -> d v", prefixed=False),
    ),
    tied=("wte.weight", "lm_head.weight"),
    ignored=(r"h\.\d+\.attn\.(bias|masked_bias)",),  # causal masks, stored as buffers
)
