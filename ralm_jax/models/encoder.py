"""BERT (Devlin et al., 2019) and RoBERTa (Liu et al., 2019): post-norm encoders that see both sides of a token.

One architecture, two key layouts: RoBERTa counts positions from after its padding token's id and has no token types
worth the name. Contriever, Spider, DPR, Dragon and MiniLM are BERTs.
"""

import dataclasses
from typing import Any, Self

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from ralm_jax.config import ConfigFile, ModelConfig, equal_heads
from ralm_jax.errors import RalmError
from ralm_jax.keys import Family, Key, from_heads, linear, norm, to_heads
from ralm_jax.layers import ACTIVATIONS, Block, Dropout, Embedding, LayerNorm, Positions
from ralm_jax.stack import scan_layers, stacked


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertConfig(ModelConfig):
    token_types: int
    position_offset: int = 0  # unused rows in front of the first position

    model_type = "bert"
    architecture = "BertModel"
    hf_keys = {
        "vocab_size": "vocab_size", "hidden_size": "hidden_size", "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads", "mlp_size": "intermediate_size",
        "max_positions": "max_position_embeddings", "activation": "hidden_act", "norm_epsilon": "layer_norm_eps",
        "token_types": "type_vocab_size",
    }  # fmt: skip

    @classmethod
    def from_hf(cls, file: ConfigFile) -> Self:
        file.choice("position_embedding_type", ("absolute",), "absolute")
        if file.values.get("projection_dim"):  # of DPR
            raise file.unsupported("projection_dim", file.values["projection_dim"], "0")
        for key in ("is_decoder", "add_cross_attention"):
            if file.flag(key, False):
                raise file.unsupported(key, True, "false")
        hidden, heads = file.integer("hidden_size"), file.integer("num_attention_heads")
        return cls(
            **cls.stated(file),
            **equal_heads(file, hidden, heads),
            activation=file.choice("hidden_act", ACTIVATIONS, "gelu"),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RobertaConfig(BertConfig):
    model_type = "roberta"
    architecture = "RobertaModel"

    @classmethod
    def from_hf(cls, file: ConfigFile) -> Self:
        config = super().from_hf(file)
        padding = file.values.get("pad_token_id", 1)
        if not isinstance(padding, int) or not 0 <= padding < config.max_positions - 1:
            raise RalmError(f"{file.origin}: 'pad_token_id' is {padding!r}, but positions are counted from it")
        offset = padding + 1
        return dataclasses.replace(config, position_offset=offset, max_positions=config.max_positions - offset)

    def to_hf(self) -> dict[str, Any]:
        rows = self.max_positions + self.position_offset
        return super().to_hf() | {"max_position_embeddings": rows, "pad_token_id": self.position_offset - 1}


class Bert(nnx.Module):
    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        features = config.hidden_size
        self.embed = Embedding(config.vocab_size, features, axes=("vocab", "embed"), rngs=rngs, dtype=dtype)
        self.positions = Positions(
            config.max_positions, features, offset=config.position_offset, rngs=rngs, dtype=dtype
        )
        self.types = Embedding(config.token_types, features, axes=("token_type", "embed"), rngs=rngs, dtype=dtype)
        self.norm = LayerNorm(features, config.norm_epsilon, rngs=rngs, dtype=dtype)
        self.layers = stacked(
            lambda rngs: Block(config, order="post", causal=False, rngs=rngs, dtype=dtype), config.num_layers, rngs
        )

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        valid: Bool[Array, "B T"] | None = None,
        types: Int[Array, "B T"] | None = None,
        dropout: Dropout | None = None,
    ) -> Float[Array, "B T D"]:
        """Hidden states of the last layer.

        Args:
            valid: real tokens, where there is padding.
            types: which of two texts a token is of; None for all 0, and so it is where the model has one type.
            dropout: of the embeddings and of what attention and MLP add, for training. Attention's weights have none.
        """
        if types is None or self.types.table.shape[0] == 1:
            types = jnp.zeros_like(tokens)
        x = self.norm(self.embed(tokens) + self.positions(valid, tokens.shape) + self.types(types))
        return scan_layers(self.layers, x if dropout is None else dropout(x, 0), valid, dropout=dropout)


def cls_pool(hidden: Float[Array, "B T D"], valid: Bool[Array, "B T"] | None = None) -> Float[Array, "B D"]:
    """The first real token's hidden state, which is that of [CLS] or <s>."""
    if valid is None:
        return hidden[:, 0]
    return jnp.take_along_axis(hidden, valid.argmax(axis=1)[:, None, None], axis=1)[:, 0]


def mean_pool(hidden: Float[Array, "B T D"], valid: Bool[Array, "B T"] | None = None) -> Float[Array, "B D"]:
    """The mean of the real tokens' hidden states."""
    if valid is None:
        return hidden.mean(axis=1)
    weights = valid.astype(hidden.dtype)[:, :, None]
    return (hidden * weights).sum(axis=1) / jnp.maximum(weights.sum(axis=1), 1)


POOLING = {"cls": cls_pool, "mean": mean_pool}

KEYS = (
    Key("embeddings.word_embeddings.weight", "embed.table"),
    Key("embeddings.position_embeddings.weight", "positions.table"),
    Key("embeddings.token_type_embeddings.weight", "types.table"),
    *norm("embeddings.LayerNorm", "norm"),
    *to_heads("encoder.layer.{}.attention.self.query", "layers.attention.q"),
    *to_heads("encoder.layer.{}.attention.self.key", "layers.attention.k"),
    *to_heads("encoder.layer.{}.attention.self.value", "layers.attention.v"),
    *from_heads("encoder.layer.{}.attention.output.dense", "layers.attention.o"),
    *norm("encoder.layer.{}.attention.output.LayerNorm", "layers.attention_norm"),
    *linear("encoder.layer.{}.intermediate.dense", "layers.mlp.up"),
    *linear("encoder.layer.{}.output.dense", "layers.mlp.down"),
    *norm("encoder.layer.{}.output.LayerNorm", "layers.mlp_norm"),
)

# what stands on top of the encoder in pre-training, classification and DPR; and buffers
HEADS = (r"pooler\..*", r"cls\..*", r"lm_head\..*", r"classifier\..*", r"embeddings\.(position_ids|token_type_ids)")

BERT_BASE = BertConfig(
    vocab_size=30522, hidden_size=768, num_layers=12, num_heads=12, num_kv_heads=12, head_dim=64, mlp_size=3072,
    max_positions=512, activation="gelu", norm_epsilon=1e-12, token_types=2,
)  # fmt: skip

BERT = Family(
    name="BERT",
    config=BertConfig,
    model=Bert,
    prefixes=("", "bert.", "question_encoder.bert_model.", "ctx_encoder.bert_model."),
    keys=KEYS,
    ignored=HEADS,
    variants="plain, Contriever, Spider, DPR, Dragon, sentence-transformers",
    sizes={"bert-base": BERT_BASE},
)

ROBERTA_BASE = RobertaConfig(
    vocab_size=50265, hidden_size=768, num_layers=12, num_heads=12, num_kv_heads=12, head_dim=64, mlp_size=3072,
    max_positions=512, activation="gelu", norm_epsilon=1e-5, token_types=1, position_offset=2,
)  # fmt: skip

ROBERTA = Family(
    name="RoBERTa",
    config=RobertaConfig,
    model=Bert,
    prefixes=("", "roberta."),
    keys=KEYS,
    ignored=HEADS,
    variants="with a classification head or without (the head is not read)",
    sizes={"roberta-base": ROBERTA_BASE},
)
