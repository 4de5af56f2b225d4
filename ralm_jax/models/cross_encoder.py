"""BERT and RoBERTa with Hugging Face's head for sequence classification and one label: a score for a pair of texts."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from ralm_jax.config import ConfigFile
from ralm_jax.keys import Family, linear
from ralm_jax.layers import Dropout, Linear
from ralm_jax.models.encoder import BERT, KEYS, Bert, BertConfig, RobertaConfig, cls_pool

TRAINED_WITH = "ralm"  # what of a pair a reranker reads, in its config.json
ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertPairConfig(BertConfig):
    architecture = "BertForSequenceClassification"

    def to_hf(self) -> dict[str, Any]:
        return super().to_hf() | ONE_LABEL


@dataclasses.dataclass(frozen=True, kw_only=True)
class RobertaPairConfig(RobertaConfig):
    architecture = "RobertaForSequenceClassification"

    def to_hf(self) -> dict[str, Any]:
        return super().to_hf() | ONE_LABEL


def states_pair_head(file: ConfigFile) -> bool:
    """Whether a config.json is that of a sequence classifier with one label, as cross-encoders are saved."""
    classes, labels = file.values.get("architectures") or [], file.values.get("id2label")
    count = len(labels) if isinstance(labels, dict) else file.values.get("num_labels", 2)
    return count == 1 and any(str(name).endswith("ForSequenceClassification") for name in classes)


class PooledBert(Bert):
    """With the pooler that BERT has from pre-training, and that a new head starts from."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        super().__init__(config, rngs=rngs, dtype=dtype)
        size = config.hidden_size
        self.dense = Linear({"embed": size}, {"pooled": size}, bias=True, rngs=rngs, dtype=dtype)


class PairBert(PooledBert):
    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        super().__init__(config, rngs=rngs, dtype=dtype)
        self.out = Linear({"pooled": config.hidden_size}, {"label": 1}, bias=True, rngs=rngs, dtype=dtype)

    def scores(
        self,
        tokens: Int[Array, "B T"],
        types: Int[Array, "B T"],
        valid: Bool[Array, "B T"],
        dropout: Dropout | None = None,
    ) -> Float[Array, "B"]:
        """Float32 scores of pairs; the arguments are those of `Bert`. Dropout also falls on what `out` reads."""
        first = cls_pool(self(tokens, valid, types, dropout), valid)
        pooled = jnp.tanh(self.dense(first))
        if dropout is not None:
            pooled = dropout(pooled, 1)
        return self.out(pooled, jnp.float32)[:, 0]


IGNORED = (r"cls\..*", r"lm_head\..*", r"embeddings\.(position_ids|token_type_ids)")

POOLER = linear("pooler.dense", "dense")

BERT_PAIR = Family(
    name="BERT",
    config=BertPairConfig,
    model=PairBert,
    prefixes=("bert.", ""),
    keys=(
        *KEYS,
        *POOLER,
        *linear("classifier", "out", prefixed=False),
    ),
    ignored=IGNORED,
    variants="classifiers of pairs with one label, as sentence-transformers' cross-encoders are",
    sizes={},
)

POOLED_BERT = dataclasses.replace(
    BERT, model=PooledBert, keys=(*KEYS, *POOLER), ignored=(*IGNORED, r"classifier\..*"), sizes={}
)

ROBERTA_PAIR = Family(
    name="RoBERTa",
    config=RobertaPairConfig,
    model=PairBert,
    prefixes=("roberta.", ""),
    keys=(
        *KEYS,
        *linear("classifier.dense", "dense", prefixed=False),
        *linear("classifier.out_proj", "out", prefixed=False),
    ),
    ignored=(*IGNORED, r"pooler\..*"),
    variants="classifiers of pairs with one label",
    sizes={},
)
