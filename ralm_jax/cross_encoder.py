"""A cross-encoder: pairs of a prefix and a passage in, a score for each out. It is the predictive reranker (section
6.2)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int
from tokenizers import models

from ralm_jax import checkpoint
from ralm_jax.config import ConfigFile
from ralm_jax.encoder import transformer_folder
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.hub import locate
from ralm_jax.layers import Dropout
from ralm_jax.model import (
    Model,
    config_file,
    family_of,
    load_model,
    matmul_precision,
    random_model,
    unloaded_model,
    warn_of_overflow,
)
from ralm_jax.models import CROSS_ENCODERS, ENCODERS
from ralm_jax.models.cross_encoder import POOLED_BERT, TRAINED_WITH, states_pair_head
from ralm_jax.settings import AttentionName, RerankSettings
from ralm_jax.sharding import on_mesh, own_mesh
from ralm_jax.sources import open_source
from ralm_jax.tokenizer import Tokenizer, probe

Keep = Literal["end", "start"]
BUCKET = 64  # lengths are multiples of it


@dataclass(frozen=True)
class CrossEncoder(Model):
    """A BERT or RoBERTa with a classification head of one label.

    Attributes:
        trained_with: the `RerankSettings` of its training by name; empty where they are not known.
    """

    trained_with: dict[str, int] = field(default_factory=dict)

    def scores(
        self, tokens: Int[Array, "B T"], types: Int[Array, "B T"], valid: Bool[Array, "B T"]
    ) -> Float[Array, "B"]:
        """Float32 scores of pairs, as `pair_tokens` makes them.

        Raises:
            UsageError: more tokens than the model has positions.
        """
        with on_mesh(self.mesh):
            return compiled_scores(self.graphdef, self.state, tokens, types, valid)

    def check_tokens(self, tokens: np.ndarray) -> None:
        """
        Raises:
            RalmError: it does not know one of them.
        """
        highest, known = tokens.max(initial=0), self.config.vocab_size
        if highest >= known:
            raise RalmError(f"{self.name}: its tokenizer has a token {highest}, it knows {known}")


def pair_scores(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    tokens: Int[Array, "B T"],
    types: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    dropout: Dropout | None = None,
) -> Float[Array, "B"]:
    """Float32 scores f(prefix, passage) of eq. 7, for any jit with a static `graphdef`; `dropout` is for training."""
    with matmul_precision(jax.tree.leaves(state)[0].dtype):
        return nnx.merge(graphdef, state).scores(tokens, types, valid, dropout)


compiled_scores = jax.jit(pair_scores, static_argnums=0)


def load_cross_encoder(
    model: str,
    *,
    dtype: str = "float32",
    mesh: Mesh | None = None,
    attention: AttentionName = "auto",
    new_head_seed: int | None = None,
) -> CrossEncoder:
    """Loads a cross-encoder onto a mesh (default: all devices of this process share the batch).

    Args:
        model: a folder with config.json and weights, or a Hugging Face id.
        dtype: of parameters and activations.
        attention: how it is computed (`ralm_jax.attention`).
        new_head_seed: for a BERT or RoBERTa that has no head of one label: gives it one, drawn by this seed; its first
            layer is BERT's own pooler where there is one, as in transformers.

    Raises:
        UsageError: no such model, or an attention that these devices do not have.
        RalmError: the model cannot be loaded exactly, or has no head and `new_head_seed` is not given.
    """
    mesh = mesh or own_mesh()
    path = transformer_folder(locate(model))
    file = config_file(path)
    if states_pair_head(file):
        loaded = load_model(model, path, CROSS_ENCODERS, dtype, mesh, attention)
    elif new_head_seed is None:
        raise no_head(model, file)
    else:
        families = ENCODERS | ({"bert": POOLED_BERT} if has_pooler(path) else {})
        loaded = with_new_head(load_model(model, path, families, dtype, mesh, attention), new_head_seed)
    warn_of_overflow(loaded)
    return CrossEncoder(**vars(loaded), trained_with=trained_with(file))


def trained_with(file: ConfigFile) -> dict[str, int]:
    """`CrossEncoder.trained_with` as a config.json states it; transformers keeps what it does not know."""
    stated = file.values.get(TRAINED_WITH)
    listed = stated.items() if isinstance(stated, dict) else ()
    known = vars(RerankSettings())
    return {name: value for name, value in listed if name in known and isinstance(value, int) and value > 0}


def unloaded_cross_encoder(model: str, *, dtype: str = "float32") -> CrossEncoder:
    """What `load_cross_encoder` would load, with shapes in place of the parameters: it can be described, not run.

    Raises:
        UsageError: no such model.
        RalmError: its files cannot be read, or it has no head.
    """
    path = transformer_folder(locate(model))
    file = config_file(path)
    if not states_pair_head(file):
        raise no_head(model, file)
    unloaded = unloaded_model(model, path, CROSS_ENCODERS, dtype, None)
    return CrossEncoder(**vars(unloaded), trained_with=trained_with(file))


def no_head(model: str, file: ConfigFile) -> RalmError:
    """
    Raises:
        RalmError: it could not be trained either.
    """
    family_of(file, ENCODERS)
    return RalmError(
        f"{model}: no trained reranker (expected BertForSequenceClassification or RobertaForSequenceClassification "
        "with one label); name another, or train one from it"
    )


def has_pooler(path: Path) -> bool:
    """Whether a checkpoint has the layer that BERT's head begins with; one in Orbax's format has what its model has."""
    return not checkpoint.there(path) and any(
        name.endswith("pooler.dense.weight") for name in open_source(path).tensors
    )


def with_new_head(encoder: Model, seed: int) -> Model:
    """`encoder` with a head; kernels that it lacks are drawn from N(0, 0.02²)."""
    family = CROSS_ENCODERS[encoder.config.model_type]
    config = family.config(**vars(encoder.config))
    made = random_model(family, config, seed=seed, dtype=encoder.dtype, mesh=encoder.mesh)
    leaves = dict(nnx.to_flat_state(made.state)) | dict(nnx.to_flat_state(encoder.state))
    fingerprint = f"{encoder.fingerprint} new head {seed}"
    return Model(
        encoder.name, family, config, made.graphdef, nnx.from_flat_state(leaves), made.mesh, made.dtype, fingerprint
    )


# --- pairs of texts as tokens ---


@dataclass(frozen=True)
class PairFormat:
    """What stands around the two texts of a pair, and the token type of each part."""

    start: tuple[int, ...]
    between: tuple[int, ...]
    end: tuple[int, ...]
    second_type: int  # of the second text and of `end`; all else has 0

    @property
    def specials(self) -> int:
        return len(self.start) + len(self.between) + len(self.end)


def pair_format(tokenizer: Tokenizer) -> PairFormat:
    """The format of the tokenizer's own template for pairs.

    Where it has none, BERT's `[CLS] A [SEP] B [SEP]` with type 1 from B on, and for a BPE RoBERTa's
    `<s> A </s></s> B </s>`, of the special tokens that it puts around one text.
    """
    encoding = probe(tokenizer.backend, pair=True)
    if encoding is None:
        bpe = isinstance(tokenizer.backend.model, models.BPE)
        return PairFormat(tokenizer.prefix, tokenizer.suffix * (2 if bpe else 1), tokenizer.suffix, 0 if bpe else 1)
    own = np.flatnonzero(np.array(encoding.special_tokens_mask) == 0)
    first, second = np.split(own, 2)  # the same text twice
    ids = tuple(encoding.ids)
    return PairFormat(
        ids[: first[0]], ids[first[-1] + 1 : second[0]], ids[second[-1] + 1 :], encoding.type_ids[second[0]]
    )


def pair_tokens(
    tokenizer: Tokenizer,
    prefixes: Sequence[str],
    passages: Sequence[str],
    max_tokens: int,
    prefix_tokens: int,
    keep: Keep = "end",
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, token types (both int32) and real tokens (bool) of n pairs, (n, T): `join_pairs` of `cut_pairs`. A text
    that occurs several times is tokenised once."""
    texts = list(dict.fromkeys([*prefixes, *passages]))
    known = dict(zip(texts, tokenizer.encode_batch(texts), strict=True))
    first, second = [known[text] for text in prefixes], [known[text] for text in passages]
    form = pair_format(tokenizer)
    return join_pairs(form, *cut_pairs(form, first, second, max_tokens, prefix_tokens, keep), max_tokens)


def cut_pairs(
    form: PairFormat,
    prefixes: Sequence[np.ndarray],
    passages: Sequence[np.ndarray],
    max_tokens: int,
    prefix_tokens: int,
    keep: Keep = "end",
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The tokens of pairs' texts, cut so that with the special tokens a pair has at most `max_tokens`.

    The prefix is cut to `prefix_tokens`: to its end, which is nearest to what is predicted, or to its start. The
    passage loses its end where there is no room for all of it.

    Raises:
        UsageError: prefix and special tokens leave a passage no room.
    """
    if not 0 <= prefix_tokens < max_tokens - form.specials:
        raise UsageError(
            f"a prefix of {prefix_tokens} tokens and {form.specials} special tokens leave a passage no room in "
            f"{max_tokens}; use a shorter prefix"
        )
    first = [own[:prefix_tokens] if keep == "start" else own[max(0, len(own) - prefix_tokens) :] for own in prefixes]
    rooms = [max_tokens - form.specials - len(own) for own in first]
    return first, [own[:room] for own, room in zip(passages, rooms, strict=True)]


def join_pairs(
    form: PairFormat, prefixes: Sequence[np.ndarray], passages: Sequence[np.ndarray], max_tokens: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, token types (both int32) and real tokens (bool), (n, T), of pairs as `cut_pairs` gives them.

    T is the longest pair's length, rounded up to a multiple of `BUCKET`, but at most `max_tokens`.
    """
    longest = max((len(a) + len(b) for a, b in zip(prefixes, passages, strict=True)), default=0) + form.specials
    shape = (len(prefixes), min(max_tokens, -(-longest // BUCKET) * BUCKET))
    tokens, types, valid = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, bool)
    for row, (prefix, passage) in enumerate(zip(prefixes, passages, strict=True)):
        ids = np.concatenate([form.start, prefix, form.between, passage, form.end])
        second = len(ids) - len(passage) - len(form.end)
        tokens[row, : len(ids)], types[row, second : len(ids)], valid[row, : len(ids)] = ids, form.second_type, True
    return tokens, types, valid
