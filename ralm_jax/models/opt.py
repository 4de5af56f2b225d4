"""OPT (Zhang et al., 2022): learned positions after two unused rows, ReLU; the 350M model normalises after each
sublayer and has embeddings narrower than its hidden states."""

import dataclasses
from typing import Any, Self

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ralm_jax.attention import Valid
from ralm_jax.config import ConfigFile, ReaderConfig, equal_heads
from ralm_jax.keys import HEAD, Family, Key, from_heads, linear, norm, to_heads
from ralm_jax.layers import ACTIVATIONS, Linear, Memory, Positions
from ralm_jax.stack import Decoder, scan_layers

POSITION_OFFSET = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class OPTConfig(ReaderConfig):
    word_size: int  # of embeddings; other than D only in the 350M model
    pre_norm: bool
    bias: bool

    model_type = "opt"
    architecture = "OPTForCausalLM"
    hf_keys = {
        "vocab_size": "vocab_size", "hidden_size": "hidden_size", "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads", "mlp_size": "ffn_dim", "max_positions": "max_position_embeddings",
        "activation": "activation_function", "tie_word_embeddings": "tie_word_embeddings",
        "word_size": "word_embed_proj_dim", "pre_norm": "do_layer_norm_before", "bias": "enable_bias",
    }  # fmt: skip

    @classmethod
    def from_hf(cls, file: ConfigFile) -> Self:
        hidden = file.integer("hidden_size")
        for key, only in (("layer_norm_elementwise_affine", True), ("_remove_final_layer_norm", False)):
            if file.flag(key, only) != only:
                raise file.unsupported(key, not only, str(only).lower())
        return cls(
            **cls.stated(file, tie_word_embeddings=True, word_size=hidden, bias=True),
            **equal_heads(file, hidden, file.integer("num_attention_heads")),
            activation=file.choice("activation_function", ACTIVATIONS),
            norm_epsilon=1e-5,  # the family has no setting for it
        )

    @classmethod
    def sized(cls, num_layers: int, num_heads: int, hidden_size: int, **changes: int | bool) -> Self:
        values: dict[str, Any] = {
            "vocab_size": 50272, "hidden_size": hidden_size, "num_layers": num_layers, "num_heads": num_heads,
            "num_kv_heads": num_heads, "head_dim": hidden_size // num_heads, "mlp_size": 4 * hidden_size,
            "max_positions": 2048, "activation": "relu", "norm_epsilon": 1e-5, "tie_word_embeddings": True,
            "word_size": hidden_size, "pre_norm": True, "bias": True,
        }  # fmt: skip
        return cls(**values | changes)


class OPT(Decoder):
    def __init__(self, config: OPTConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        narrow = config.word_size != config.hidden_size
        word, embed = {"word": config.word_size}, {"embed": config.hidden_size}
        super().__init__(
            config,
            order="pre" if config.pre_norm else "post",
            final_norm=config.pre_norm,
            qkv_bias=config.bias,
            out_bias=config.bias,
            mlp_bias=config.bias,
            word=word if narrow else None,
            rngs=rngs,
            dtype=dtype,
        )
        self.positions = Positions(
            config.max_positions, config.hidden_size, offset=POSITION_OFFSET, rngs=rngs, dtype=dtype
        )
        self.project_in = Linear(word, embed, bias=False, rngs=rngs, dtype=dtype) if narrow else None
        self.project_out = Linear(embed, word, bias=False, rngs=rngs, dtype=dtype) if narrow else None

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        valid: Valid | None = None,
        memory: Memory | None = None,
        *,
        remat: bool = False,
    ) -> Float[Array, "B T D"]:
        begin = None if memory is None else memory.begin
        x = self.embed(tokens)
        x = x if self.project_in is None else self.project_in(x)
        x = scan_layers(self.layers, x + self.positions(valid, tokens.shape, begin), valid, memory=memory, remat=remat)
        x = x if self.norm is None else self.norm(x)
        return x if self.project_out is None else self.project_out(x)


FAMILY = Family(
    name="OPT",
    config=OPTConfig,
    model=OPT,
    prefixes=("model.decoder.", "decoder."),
    keys=(
        Key("embed_tokens.weight", "embed.table"),
        Key("embed_positions.weight", "positions.table"),
        *linear("project_in", "project_in"),
        *norm("layers.{}.self_attn_layer_norm", "layers.attention_norm"),
        *to_heads("layers.{}.self_attn.q_proj", "layers.attention.q"),
        *to_heads("layers.{}.self_attn.k_proj", "layers.attention.k"),
        *to_heads("layers.{}.self_attn.v_proj", "layers.attention.v"),
        *from_heads("layers.{}.self_attn.out_proj", "layers.attention.o"),
        *norm("layers.{}.final_layer_norm", "layers.mlp_norm"),
        *linear("layers.{}.fc1", "layers.mlp.up"),
        *linear("layers.{}.fc2", "layers.mlp.down"),
        *norm("final_layer_norm", "norm"),
        *linear("project_out", "project_out"),
        *HEAD,
    ),
    ignored=(),
    variants="all sizes, 350M's post-norm and projections among them",
    sizes={
        "opt-125m": OPTConfig.sized(12, 12, 768),
        "opt-350m": OPTConfig.sized(24, 16, 1024, word_size=512, pre_norm=False),
        "opt-1.3b": OPTConfig.sized(24, 32, 2048),
        "opt-2.7b": OPTConfig.sized(32, 32, 2560),
        "opt-6.7b": OPTConfig.sized(32, 32, 4096),
        "opt-13b": OPTConfig.sized(40, 40, 5120),
        "opt-30b": OPTConfig.sized(48, 56, 7168),
        "opt-66b": OPTConfig.sized(64, 72, 9216),
    },
    tied=("embed_tokens.weight", "lm_head.weight"),
)
