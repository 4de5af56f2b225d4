"""GPT-J (Wang and Komatsuzaki, 2021): attention and MLP side by side after one norm, rotary positions on the first
dimensions of every head, a head with a bias."""

import dataclasses
from functools import partial
from typing import Self

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ralm_jax.attention import Valid
from ralm_jax.config import ConfigFile, ReaderConfig, equal_heads
from ralm_jax.errors import RalmError
from ralm_jax.keys import HEAD, Family, Key, from_heads, linear, norm, to_heads
from ralm_jax.layers import ACTIVATIONS, Memory
from ralm_jax.rope import rotary_phases, rotate_interleaved, token_positions
from ralm_jax.stack import Decoder, scan_layers

THETA = 10000.0  # the family has no setting for it


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTJConfig(ReaderConfig):
    rotary_dim: int

    model_type = "gptj"
    architecture = "GPTJForCausalLM"
    learned_positions = False
    hf_keys = {
        "vocab_size": "vocab_size", "hidden_size": "n_embd", "num_layers": "n_layer", "num_heads": "n_head",
        "mlp_size": "n_inner", "max_positions": "n_positions", "activation": "activation_function",
        "norm_epsilon": "layer_norm_epsilon", "tie_word_embeddings": "tie_word_embeddings", "rotary_dim": "rotary_dim",
    }  # fmt: skip

    @classmethod
    def from_hf(cls, file: ConfigFile) -> Self:
        hidden = file.integer("n_embd")
        heads = equal_heads(file, hidden, file.integer("n_head"))
        if "rotary_dim" not in file.values:  # null is all of a head
            raise RalmError(f"{file.origin}: 'rotary_dim' is missing")
        stated = cls.stated(file, mlp_size=4 * hidden, tie_word_embeddings=False, rotary_dim=heads["head_dim"])
        if stated["tie_word_embeddings"]:
            raise file.unsupported("tie_word_embeddings", True, "false")
        if stated["rotary_dim"] % 2 or stated["rotary_dim"] > heads["head_dim"]:
            raise file.unsupported("rotary_dim", stated["rotary_dim"], f"an even number up to {heads['head_dim']}")
        return cls(**stated, **heads, activation=file.choice("activation_function", ACTIVATIONS, "gelu_new"))

    @property
    def position_kind(self) -> str:
        return f"rotary positions on {self.rotary_dim} of {self.head_dim} dimensions"


class GPTJ(Decoder):
    def __init__(self, config: GPTJConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        super().__init__(
            config, order="parallel", qkv_bias=False, out_bias=False, head_bias=True, rngs=rngs, dtype=dtype
        )
        self.rotary_dim = config.rotary_dim

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        valid: Valid | None = None,
        memory: Memory | None = None,
        *,
        remat: bool = False,
    ) -> Float[Array, "B T D"]:
        begin = None if memory is None else memory.begin
        phases = rotary_phases(token_positions(valid, tokens.shape, begin), self.rotary_dim, THETA)
        rotate = partial(rotate_interleaved, phases=phases)
        return self.norm(scan_layers(self.layers, self.embed(tokens), valid, rotate, memory=memory, remat=remat))


GPTJ_6B = GPTJConfig(
    vocab_size=50400, hidden_size=4096, num_layers=28, num_heads=16, num_kv_heads=16, head_dim=256, mlp_size=16384,
    max_positions=2048, activation="gelu_new", norm_epsilon=1e-5, tie_word_embeddings=False, rotary_dim=64,
)  # fmt: skip

FAMILY = Family(
    name="GPT-J",
    config=GPTJConfig,
    model=GPTJ,
    prefixes=("transformer.",),
    keys=(
        Key("wte.weight", "embed.table"),
        *norm("h.{}.ln_1", "layers.attention_norm"),
        *to_heads("h.{}.attn.q_proj", "layers.attention.q"),
        *to_heads("h.{}.attn.k_proj", "layers.attention.k"),
        *to_heads("h.{}.attn.v_proj", "layers.attention.v"),
        *from_heads("h.{}.attn.out_proj", "layers.attention.o"),
        *linear("h.{}.mlp.fc_in", "layers.mlp.up"),
        *linear("h.{}.mlp.fc_out", "layers.mlp.down"),
        *norm("ln_f", "norm"),
        *HEAD,
    ),
    ignored=(r"h\.\d+\.attn\.(bias|masked_bias)",),  # causal masks, stored as buffers
    variants="rotary on a part of each head",
    sizes={"gpt-j-6b": GPTJ_6B},
    narrow=True,
)
