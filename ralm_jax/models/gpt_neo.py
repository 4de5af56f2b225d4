"""GPT-Neo (Black et al., 2021): GPT-2 whose layers take turns between all of the past and its last tokens, and whose
attention scores are not scaled."""

import dataclasses
from typing import Any, Self

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ralm_jax.attention import Valid
from ralm_jax.config import ConfigFile, ReaderConfig, equal_heads
from ralm_jax.keys import HEAD, Family, Key, from_heads, linear, norm, to_heads
from ralm_jax.layers import ACTIVATIONS, Memory, Positions
from ralm_jax.stack import Decoder, scan_layers

LAYER_KINDS = ("global", "local")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTNeoConfig(ReaderConfig):
    local_window: int  # tokens that a local layer sees, its own included
    layer_kinds: tuple[str, ...]

    model_type = "gpt_neo"
    architecture = "GPTNeoForCausalLM"
    hf_keys = {
        "vocab_size": "vocab_size", "hidden_size": "hidden_size", "num_layers": "num_layers", "num_heads": "num_heads",
        "mlp_size": "intermediate_size", "max_positions": "max_position_embeddings",
        "activation": "activation_function", "norm_epsilon": "layer_norm_epsilon",
        "tie_word_embeddings": "tie_word_embeddings", "local_window": "window_size",
    }  # fmt: skip

    @classmethod
    def from_hf(cls, file: ConfigFile) -> Self:
        hidden, heads = file.integer("hidden_size"), file.integer("num_heads")
        return cls(
            **cls.stated(file, mlp_size=4 * hidden, tie_word_embeddings=True),
            **equal_heads(file, hidden, heads),
            activation=file.choice("activation_function", ACTIVATIONS, "gelu_new"),
            layer_kinds=layer_kinds(file),
        )

    def to_hf(self) -> dict[str, Any]:
        kinds = list(self.layer_kinds)
        return super().to_hf() | {"attention_types": [[kinds, 1]], "attention_layers": kinds}

    @classmethod
    def sized(cls, num_layers: int, num_heads: int, hidden_size: int) -> Self:
        return cls(
            vocab_size=50257, hidden_size=hidden_size, num_layers=num_layers, num_heads=num_heads,
            num_kv_heads=num_heads, head_dim=hidden_size // num_heads, mlp_size=4 * hidden_size, max_positions=2048,
            activation="gelu_new", norm_epsilon=1e-5, tie_word_embeddings=True, local_window=256,
            layer_kinds=LAYER_KINDS * (num_layers // 2),
        )  # fmt: skip


def layer_kinds(file: ConfigFile) -> tuple[str, ...]:
    """The kind of every layer: `attention_types` is a list of [kinds, repetitions].

    Raises:
        RalmError: not such a list, another kind, or not one for every layer.
    """
    types, count = file.values.get("attention_types"), file.integer("num_layers")
    try:
        repeated = [(tuple(some), int(times)) for some, times in types]  # type: ignore[union-attr]
    except (TypeError, ValueError):
        repeated = []
    fits = sum(len(some) * times for some, times in repeated) == count and all(times > 0 for _, times in repeated)
    kinds = tuple(kind for some, times in repeated for kind in some * times) if fits else ()
    if not kinds or any(kind not in LAYER_KINDS for kind in kinds):
        raise file.unsupported("attention_types", types, f"{' or '.join(LAYER_KINDS)} for each of {count} layers")
    return kinds


class GPTNeo(Decoder):
    def __init__(self, config: GPTNeoConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        super().__init__(config, qkv_bias=False, scale=1.0, rngs=rngs, dtype=dtype)
        self.positions = Positions(config.max_positions, config.hidden_size, rngs=rngs, dtype=dtype)
        seen = {"global": config.max_positions, "local": config.local_window}
        self.seen = tuple(seen[kind] for kind in config.layer_kinds)

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        valid: Valid | None = None,
        memory: Memory | None = None,
        *,
        remat: bool = False,
    ) -> Float[Array, "B T D"]:
        begin = None if memory is None else memory.begin
        x = self.embed(tokens) + self.positions(valid, tokens.shape, begin)
        windows = jnp.array(self.seen, jnp.int32)
        return self.norm(
            scan_layers(self.layers, x, valid, lambda heads: heads, each=(windows,), memory=memory, remat=remat)
        )


FAMILY = Family(
    name="GPT-Neo",
    config=GPTNeoConfig,
    model=GPTNeo,
    prefixes=("transformer.",),
    keys=(
        Key("wte.weight", "embed.table"),
        Key("wpe.weight", "positions.table"),
        *norm("h.{}.ln_1", "layers.attention_norm"),
        *to_heads("h.{}.attn.attention.q_proj", "layers.attention.q"),
        *to_heads("h.{}.attn.attention.k_proj", "layers.attention.k"),
        *to_heads("h.{}.attn.attention.v_proj", "layers.attention.v"),
        *from_heads("h.{}.attn.attention.out_proj", "layers.attention.o"),
        *norm("h.{}.ln_2", "layers.mlp_norm"),
        *linear("h.{}.mlp.c_fc", "layers.mlp.up"),
        *linear("h.{}.mlp.c_proj", "layers.mlp.down"),
        *norm("ln_f", "norm"),
        *HEAD,
    ),
    ignored=(r"h\.\d+\.attn\.attention\.(bias|masked_bias)",),  # causal masks, stored as buffers
    variants="global and local layers",
    sizes={"gpt-neo-1.3b": GPTNeoConfig.sized(24, 16, 2048), "gpt-neo-2.7b": GPTNeoConfig.sized(32, 20, 2560)},
    tied=("wte.weight", "lm_head.weight"),
    narrow=True,
)
