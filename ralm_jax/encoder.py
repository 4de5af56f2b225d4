"""An encoder: texts' tokens in, vectors out, by the recipe that its checkpoint states."""

import functools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from ralm_jax.config import ConfigFile
from ralm_jax.errors import RalmError
from ralm_jax.hub import locate
from ralm_jax.model import Model, load_model, matmul_precision
from ralm_jax.models import ENCODERS
from ralm_jax.models.encoder import POOLING
from ralm_jax.sharding import on_mesh
from ralm_jax.text import parse_json, read_object

log = logging.getLogger("ralm")

Pooling = Literal["cls", "mean"]


@dataclass(frozen=True)
class Recipe:
    """From hidden states to a text's vector.

    Attributes:
        pooling: "cls", the first token's hidden state, or "mean" over all of them.
        normalize: to length 1.
        max_tokens: of a text, special tokens included.
    """

    pooling: Pooling
    normalize: bool
    max_tokens: int


@dataclass(frozen=True)
class Encoder(Model):
    """A BERT or RoBERTa and its recipe."""

    recipe: Recipe

    def hidden(self, tokens: Int[Array, "B T"], valid: Bool[Array, "B T"] | None = None) -> Float[Array, "B T D"]:
        """Hidden states of the last layer; `valid` marks real tokens where there is padding.

        Raises:
            UsageError: more tokens than the encoder has positions.
        """
        with on_mesh(self.mesh):
            return hidden_states(self.graphdef, self.state, tokens, valid)

    def embed(self, tokens: Int[Array, "B T"], valid: Bool[Array, "B T"] | None = None) -> Float[Array, "B D"]:
        """Float32 vectors of texts, by the recipe; as `hidden`."""
        with on_mesh(self.mesh):
            return text_vectors(self.graphdef, self.state, tokens, valid, self.recipe.pooling, self.recipe.normalize)


@functools.partial(jax.jit, static_argnums=0)
def hidden_states(graphdef: nnx.GraphDef, state: nnx.State, tokens: jax.Array, valid: jax.Array | None) -> jax.Array:
    with matmul_precision(jax.tree.leaves(state)[0].dtype):
        return nnx.merge(graphdef, state)(tokens, valid)


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def text_vectors(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    tokens: jax.Array,
    valid: jax.Array | None,
    pooling: Pooling,
    normalize: bool,
) -> jax.Array:
    hidden = hidden_states(graphdef, state, tokens, valid).astype(jnp.float32)
    vectors = POOLING[pooling](hidden, valid)
    return vectors / jnp.linalg.norm(vectors, axis=1, keepdims=True) if normalize else vectors


def load_encoder(
    model: str,
    *,
    pooling: Pooling | None = None,
    normalize: bool | None = None,
    dtype: str = "float32",
    mesh: Mesh | None = None,
) -> Encoder:
    """Loads an encoder onto a mesh (default: all devices share the batch).

    Args:
        model: a folder with config.json and weights, or a Hugging Face id.
        pooling, normalize: None for what the checkpoint states: sentence-transformers' files, or the classes of DPR and
            Contriever. A checkpoint that states nothing is pooled by the mean, with a warning.
        dtype: of parameters and activations.

    Raises:
        UsageError: no such model.
        RalmError: the model cannot be loaded exactly; the message says why.
    """
    root = locate(model)
    stated, normalized, longest = stated_recipe(root)
    loaded = load_model(model, transformer_folder(root), ENCODERS, dtype, mesh)
    if pooling is None and stated is None:
        log.warning("%s: does not say how to pool hidden states; taking their mean", model)
    recipe = Recipe(
        pooling=pooling or stated or "mean",
        normalize=normalized if normalize is None else normalize,
        max_tokens=min(longest or loaded.config.max_positions, loaded.config.max_positions),
    )
    return Encoder(**vars(loaded), recipe=recipe)


# --- what checkpoints state ---


def transformer_folder(root: Path) -> Path:
    """Where the encoder itself lies: `root`, or the folder that a sentence-transformers model keeps it in."""
    named = [path for kind, path in modules(root) if kind == "Transformer"]
    return root / named[0] if named else root


def modules(root: Path) -> list[tuple[str, str]]:
    """Class and folder of each module of a sentence-transformers model; empty if `root` is none.

    Raises:
        RalmError: modules.json is damaged, or a module is of a kind that is not supported.
    """
    file = root / "modules.json"
    if not file.exists():
        return []
    content = parse_json(file.read_bytes(), str(file))
    try:
        found = [(str(entry["type"]).split(".")[-1], str(entry["path"])) for entry in content]
    except (TypeError, KeyError):
        raise RalmError(f"{file}: expected a list of modules with type and path") from None
    for kind, _ in found:
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise RalmError(f"{file}: modules of type {kind} are not supported")
    return found


def stated_recipe(root: Path) -> tuple[Pooling | None, bool, int | None]:
    """Pooling, normalisation and longest text that the files in `root` state; None for what they do not.

    Raises:
        RalmError: another pooling than by [CLS] or mean.
    """
    listed = dict(modules(root))
    config = ConfigFile.read(transformer_folder(root))
    classes = " ".join(config.values.get("architectures") or [])
    pooling: Pooling | None = "cls" if "DPR" in classes else "mean" if "Contriever" in classes else None
    if "Pooling" in listed:
        pooling = stated_pooling(ConfigFile.read(root / listed["Pooling"]))
    longest = read_object(transformer_folder(root) / "sentence_bert_config.json").get("max_seq_length")
    return pooling, "Normalize" in listed, longest


def stated_pooling(file: ConfigFile) -> Pooling:
    """The pooling of a sentence-transformers model."""
    modes = {key for key, on in file.values.items() if key.startswith("pooling_mode") and on is True}
    known: dict[str, Pooling] = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}
    if len(modes) != 1 or not modes <= set(known):
        raise file.unsupported("pooling", sorted(modes), "one of " + ", ".join(known))
    return known[modes.pop()]
