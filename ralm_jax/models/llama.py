"""LLaMA 1 and 2 (Touvron et al., 2023) and whatever shares their architecture: RMSNorm, rotary positions, gated MLP,
grouped key/value heads; linear position interpolation where the configuration asks for it."""

import dataclasses
from functools import partial
from typing import Any, Self

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ralm_jax.attention import Valid
from ralm_jax.config import ConfigFile, ReaderConfig
from ralm_jax.keys import HEAD, Family, Key, from_heads, linear, to_heads
from ralm_jax.layers import ACTIVATIONS, Memory, RMSNorm
from ralm_jax.rope import rotary_phases, rotate_half, token_positions
from ralm_jax.stack import Decoder, scan_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(ReaderConfig):
    rope_theta: float
    rope_factor: float  # linear position interpolation; 1 for none
    attention_bias: bool
    mlp_bias: bool

    model_type = "llama"
    architecture = "LlamaForCausalLM"
    hf_keys = {
        "vocab_size": "vocab_size", "hidden_size": "hidden_size", "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim",
        "mlp_size": "intermediate_size", "max_positions": "max_position_embeddings", "activation": "hidden_act",
        "norm_epsilon": "rms_norm_eps", "tie_word_embeddings": "tie_word_embeddings",
        "attention_bias": "attention_bias", "mlp_bias": "mlp_bias",
    }  # fmt: skip
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
        stated = cls.stated(
            file, num_kv_heads=heads, head_dim=head_dim, tie_word_embeddings=False, attention_bias=False, mlp_bias=False
        )
        activation = file.choice("hidden_act", ACTIVATIONS, "silu")
        return cls(**stated, activation=activation, rope_theta=theta, rope_factor=factor)

    def to_hf(self) -> dict[str, Any]:
        scaling = None if self.rope_factor == 1 else {"rope_type": "linear", "factor": self.rope_factor}
        return super().to_hf() | {"rope_theta": self.rope_theta, "rope_scaling": scaling}

    @property
    def position_kind(self) -> str:
        scaling = f"linear scaling by {self.rope_factor:g}" if self.rope_factor != 1 else "no scaling"
        return f"rotary positions, base {self.rope_theta:,.0f}, {scaling}"

    @classmethod
    def sized(cls, num_layers: int, num_heads: int, hidden_size: int, mlp_size: int, **changes: float) -> Self:
        values: dict[str, Any] = {
            "vocab_size": 32000, "hidden_size": hidden_size, "num_layers": num_layers, "num_heads": num_heads,
            "num_kv_heads": num_heads, "head_dim": hidden_size // num_heads, "mlp_size": mlp_size,
            "max_positions": 4096, "activation": "silu", "norm_epsilon": 1e-5, "tie_word_embeddings": False,
            "rope_theta": 10000.0, "rope_factor": 1.0, "attention_bias": False, "mlp_bias": False,
        }  # fmt: skip
        return cls(**values | changes)


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


class Llama(Decoder):
    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        bias, mlp_bias = config.attention_bias, config.mlp_bias
        super().__init__(
            config, norm=RMSNorm, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias, gated=True, rngs=rngs, dtype=dtype
        )
        self.head_dim, self.theta, self.factor = config.head_dim, config.rope_theta, config.rope_factor

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        valid: Valid | None = None,
        memory: Memory | None = None,
        *,
        remat: bool = False,
    ) -> Float[Array, "B T D"]:
        begin = None if memory is None else memory.begin
        phases = rotary_phases(token_positions(valid, tokens.shape, begin), self.head_dim, self.theta, self.factor)
        rotate = partial(rotate_half, phases=phases)
        return self.norm(scan_layers(self.layers, self.embed(tokens), valid, rotate, memory=memory, remat=remat))


# Hugging Face files hold query and key rows in rotate-half order already.
FAMILY = Family(
    name="Llama",
    config=LlamaConfig,
    model=Llama,
    prefixes=("model.",),
    keys=(
        Key("embed_tokens.weight", "embed.table"),
        Key("layers.{}.input_layernorm.weight", "layers.attention_norm.scale"),
        *to_heads("layers.{}.self_attn.q_proj", "layers.attention.q"),
        *to_heads("layers.{}.self_attn.k_proj", "layers.attention.k"),
        *to_heads("layers.{}.self_attn.v_proj", "layers.attention.v"),
        *from_heads("layers.{}.self_attn.o_proj", "layers.attention.o"),
        Key("layers.{}.post_attention_layernorm.weight", "layers.mlp_norm.scale"),
        *linear("layers.{}.mlp.gate_proj", "layers.mlp.gate"),
        *linear("layers.{}.mlp.up_proj", "layers.mlp.up"),
        *linear("layers.{}.mlp.down_proj", "layers.mlp.down"),
        Key("norm.weight", "norm.scale"),
        *HEAD,
    ),
    ignored=(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),  # computed from rope_theta
    variants="1, 2 and their like: grouped key/value heads, tied or not, biases, linear rope scaling",
    sizes={
        "llama-7b": LlamaConfig.sized(32, 32, 4096, 11008, max_positions=2048, norm_epsilon=1e-6),
        "llama-13b": LlamaConfig.sized(40, 40, 5120, 13824, max_positions=2048, norm_epsilon=1e-6),
        "llama-33b": LlamaConfig.sized(60, 52, 6656, 17920, max_positions=2048, norm_epsilon=1e-6),
        "llama-65b": LlamaConfig.sized(80, 64, 8192, 22016, max_positions=2048, norm_epsilon=1e-5),
        "llama2-7b": LlamaConfig.sized(32, 32, 4096, 11008),
        "llama2-13b": LlamaConfig.sized(40, 40, 5120, 13824),
        "llama2-70b": LlamaConfig.sized(80, 64, 8192, 28672, num_kv_heads=8),
        # Proprietary (Xu et al., 2023): 48 layers, hidden size 8,192, rotary, 4K and 43 billion parameters are known;
        # heads, vocabulary and MLP are chosen to match. For shapes and memory, not for weights.
        "gpt-43b": LlamaConfig.sized(48, 64, 8192, 21888, vocab_size=256000),
    },
    tied=("embed_tokens.weight", "lm_head.weight"),
    narrow=True,
)
