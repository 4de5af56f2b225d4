"""GPT-2 (Radford et al., 2019): learned positions, pre-norm blocks, tied head."""

import dataclasses
from typing import Self

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ralm_jax.attention import Valid
from ralm_jax.config import ConfigFile, ReaderConfig, equal_heads
from ralm_jax.keys import HEAD, Family, Key, norm
from ralm_jax.layers import ACTIVATIONS, Memory, Positions
from ralm_jax.stack import Decoder, scan_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2Config(ReaderConfig):
    scale_attention: bool

    model_type = "gpt2"
    architecture = "GPT2LMHeadModel"
    hf_keys = {
        "vocab_size": "vocab_size", "hidden_size": "n_embd", "num_layers": "n_layer", "num_heads": "n_head",
        "mlp_size": "n_inner", "max_positions": "n_positions", "activation": "activation_function",
        "norm_epsilon": "layer_norm_epsilon", "tie_word_embeddings": "tie_word_embeddings",
        "scale_attention": "scale_attn_weights",
    }  # fmt: skip

    @classmethod
    def from_hf(cls, file: ConfigFile) -> Self:
        hidden, heads = file.integer("n_embd"), file.integer("n_head")
        if file.flag("scale_attn_by_inverse_layer_idx", False):
            raise file.unsupported("scale_attn_by_inverse_layer_idx", True, "false")
        return cls(
            **cls.stated(file, mlp_size=4 * hidden, tie_word_embeddings=True, scale_attention=True),
            **equal_heads(file, hidden, heads),
            activation=file.choice("activation_function", ACTIVATIONS, "gelu_new"),
        )

    @classmethod
    def sized(cls, num_layers: int, num_heads: int, hidden_size: int) -> Self:
        return cls(
            vocab_size=50257, hidden_size=hidden_size, num_layers=num_layers, num_heads=num_heads,
            num_kv_heads=num_heads, head_dim=hidden_size // num_heads, mlp_size=4 * hidden_size, max_positions=1024,
            activation="gelu_new", norm_epsilon=1e-5, tie_word_embeddings=True, scale_attention=True,
        )  # fmt: skip


class GPT2(Decoder):
    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs, dtype: DTypeLike):
        super().__init__(config, scale=None if config.scale_attention else 1.0, rngs=rngs, dtype=dtype)
        self.positions = Positions(config.max_positions, config.hidden_size, rngs=rngs, dtype=dtype)

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
        return self.norm(scan_layers(self.layers, x, valid, memory=memory, remat=remat))


# Conv1D stores (in, out); query, key and value are fused along the output.
QKV = ("layers.attention.{}.kernel", "layers.attention.{}.bias")

FAMILY = Family(
    name="GPT-2",
    config=GPT2Config,
    model=GPT2,
    prefixes=("transformer.",),
    keys=(
        Key("wte.weight", "embed.table"),
        Key("wpe.weight", "positions.table"),
        *norm("h.{}.ln_1", "layers.attention_norm"),
        Key("h.{}.attn.c_attn.weight", tuple(QKV[0].format(x) for x in "qkv"), "d (three n h) -> three d n h"),
        Key("h.{}.attn.c_attn.bias", tuple(QKV[1].format(x) for x in "qkv"), "(three n h) -> three n h"),
        Key("h.{}.attn.c_proj.weight", "layers.attention.o.kernel", "(n h) d -> n h d"),
        Key("h.{}.attn.c_proj.bias", "layers.attention.o.bias"),
        *norm("h.{}.ln_2", "layers.mlp_norm"),
        Key("h.{}.mlp.c_fc.weight", "layers.mlp.up.kernel"),
        Key("h.{}.mlp.c_fc.bias", "layers.mlp.up.bias"),
        Key("h.{}.mlp.c_proj.weight", "layers.mlp.down.kernel"),
        Key("h.{}.mlp.c_proj.bias", "layers.mlp.down.bias"),
        *norm("ln_f", "norm"),
        *HEAD,
    ),
    tied=("wte.weight", "lm_head.weight"),
    ignored=(r"h\.\d+\.attn\.(bias|masked_bias)",),  # causal masks, stored as buffers
    variants="tied or not",
    sizes={
        "gpt2": GPT2Config.sized(12, 12, 768),
        "gpt2-medium": GPT2Config.sized(24, 16, 1024),
        "gpt2-large": GPT2Config.sized(36, 20, 1280),
        "gpt2-xl": GPT2Config.sized(48, 25, 1600),
    },
)
