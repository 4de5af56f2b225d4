"""LLaMA 1 and 2 (Touvron et al., 2023) and whatever shares their architecture: RMSNorm, rotary positions, gated MLP,
grouped key/value heads; linear position interpolation where the configuration asks for it."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from ralm_jax.config import ConfigFile, ReaderConfig
from ralm_jax.keys import Family, Key
from ralm_jax.layers import ACTIVATIONS, MLP, Attention, RMSNorm
from ralm_jax.rope import rotary_phases, rotate_half, token_positions
from ralm_jax.stack import Decoder, scan_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(ReaderConfig):
    rope_theta: float
    rope_factor: float  # linear position interpolation; 1 for none
    attention_bias: bool
    mlp_bias: bool

    model_type = "llama"
    learned_positions = False

    @classmethod
    def from_hf(cls, file: ConfigFile) -> Self:
        hidden, heads = file.integer("hidden_size"), file.integer("num_attention_heads")
        kv_heads = file.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise file.unsupported("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads = {heads}")
        head_dim = file.integer("head_dim", hidden // heads or 1)
        if head_dim % 2:
            raise file.unsupported("head_dim", head_dim, "an even number")
        theta, factor = rope_settings(file)
        return cls(
            vocab_size=file.integer("vocab_size"),
            hidden_size=hidden,
            num_layers=file.integer("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            mlp_size=file.integer("intermediate_size"),
            max_positions=file.integer("max_position_embeddings"),
            activation=file.choice("hidden_act", ACTIVATIONS, "silu"),
            norm_epsilon=file.number("rms_norm_eps"),
            tie_word_embeddings=file.flag("tie_word_embeddings", False),
            rope_theta=theta,
            rope_factor=factor,
            attention_bias=file.flag("attention_bias", False),
            mlp_bias=file.flag("mlp_bias", False),
        )

    def to_hf(self) -> dict[str, Any]:
        scaling = None if self.rope_factor == 1 else {"rope_type": "linear", "factor": self.rope_factor}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.mlp_size,
            "max_position_embeddings": self.max_positions,
            "hidden_act": self.activation,
            "rms_norm_eps": self.norm_epsilon,
            "tie_word_embeddings": self.tie_word_embeddings,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
        }


ROPE_TYPES = ("default", "linear")


def rope_settings(file: ConfigFile) -> tuple[float, float]:
    """Base and interpolation factor: transformers 5 writes `rope_parameters`, older files `rope_theta` and
    `rope_scaling` (with `type` before `rope_type`).

    Raises:
        RalmError: a scaling other than linear, a linear one without factor, or a rotation of only some dimensions.
    """
    settings = file.section("rope_parameters" if file.values.get("rope_parameters") else "rope_scaling")
    kind = settings.choice("rope_type" if "rope_type" in settings.values else "type", ROPE_TYPES, "default")
    for place in (file, settings):
        if place.number("partial_rotary_factor", 1.0) != 1:
            raise place.unsupported("partial_rotary_factor", place.values["partial_rotary_factor"], "1")
    theta = settings.number("rope_theta", file.number("rope_theta", 10000.0))
    return theta, settings.number("factor") if kind == "linear" else 1.0


class Block(nnx.Module):
    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        bias, scale = config.attention_bias, config.head_dim**-0.5
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_epsilon, rngs=rngs, dtype=dtype)
        self.attention = Attention(config, bias=bias, out_bias=bias, scale=scale, rngs=rngs, dtype=dtype)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_epsilon, rngs=rngs, dtype=dtype)
        self.mlp = MLP(config, gated=True, bias=config.mlp_bias, rngs=rngs, dtype=dtype)

    def __call__(self, x: jax.Array, valid: jax.Array | None, rotate: Callable[[jax.Array], jax.Array]) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), valid, rotate)
        return x + self.mlp(self.mlp_norm(x))


class Llama(Decoder):
    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        super().__init__(config, Block, RMSNorm, rngs=rngs, dtype=dtype)
        self.head_dim, self.theta, self.factor = config.head_dim, config.rope_theta, config.rope_factor

    def hidden(self, tokens: Int[Array, "B T"], valid: Bool[Array, "B T"] | None = None) -> Float[Array, "B T D"]:
        phases = rotary_phases(token_positions(valid, tokens.shape), self.head_dim, self.theta, self.factor)
        return self.norm(scan_layers(self.layers, self.embed(tokens), valid, partial(rotate_half, phases=phases)))


# Linear stores (out, in). Hugging Face files hold query and key rows in rotate-half order already.
FAMILY = Family(
    config=LlamaConfig,
    model=Llama,
    prefix="model.",
    keys=(
        Key("embed_tokens.weight", "embed.table"),
        Key("layers.{}.input_layernorm.weight", "layers.attention_norm.scale"),
        *(
            key
            for name in "qkv"
            for key in (
                Key(f"layers.{{}}.self_attn.{name}_proj.weight", f"layers.attention.{name}.kernel", "(n h) d -> d n h"),
                Key(f"layers.{{}}.self_attn.{name}_proj.bias", f"layers.attention.{name}.bias", "(n h) -> n h"),
            )
        ),
        Key("layers.{}.self_attn.o_proj.weight", "layers.attention.o.kernel", "d (n h) -> n h d"),
        Key("layers.{}.self_attn.o_proj.bias", "layers.attention.o.bias"),
        Key("layers.{}.post_attention_layernorm.weight", "layers.mlp_norm.scale"),
        *(
            key
            for name in ("gate", "up", "down")
            for key in (
                Key(f"layers.{{}}.mlp.{name}_proj.weight", f"layers.mlp.{name}.kernel", "o i -> i o"),
                Key(f"layers.{{}}.mlp.{name}_proj.bias", f"layers.mlp.{name}.bias"),
            )
        ),
        Key("norm.weight", "norm.scale"),
        Key("lm_head.weight", "head.kernel", "v d -> d v", prefixed=False),
    ),
    tied=("embed_tokens.weight", "lm_head.weight"),
    ignored=(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),  # computed from rope_theta
)
