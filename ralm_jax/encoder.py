"""An encoder: texts' tokens in, vectors out, by the recipe that its checkpoint states."""

import functools
import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from ralm_jax import checkpoint
from ralm_jax.config import ConfigFile
from ralm_jax.errors import RalmError
from ralm_jax.hub import locate
from ralm_jax.model import Model, config_file, load_model, matmul_precision, warn_of_overflow
from ralm_jax.models import CROSS_ENCODERS, ENCODERS
from ralm_jax.models.cross_encoder import states_pair_head
from ralm_jax.models.encoder import POOLING
from ralm_jax.settings import AttentionName
from ralm_jax.sharding import on_mesh, own_mesh
from ralm_jax.text import parse_json, read_object, write_text

log = logging.getLogger("ralm")

Pooling = Literal["cls", "mean"]
UNLIMITED = 1 << 30  # tokens of a text where nothing but the positions limits it


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
    return vectors / jnp.maximum(jnp.linalg.norm(vectors, axis=1, keepdims=True), 1e-12) if normalize else vectors


def load_encoder(
    model: str,
    *,
    pooling: Pooling | None = None,
    normalize: bool | None = None,
    dtype: str = "float32",
    mesh: Mesh | None = None,
    attention: AttentionName = "auto",
) -> Encoder:
    """Loads an encoder onto a mesh (default: all devices of this process share the batch).

    Args:
        model: a folder with config.json and weights, or a Hugging Face id.
        pooling, normalize: None for what the checkpoint states: sentence-transformers' files, or the classes of DPR and
            Contriever. A checkpoint that states nothing is pooled by the mean, with a warning.
        dtype: of parameters and activations.
        attention: how it is computed (`ralm_jax.attention`).

    Raises:
        UsageError: no such model, or an attention that these devices do not have.
        RalmError: the model cannot be loaded exactly; the message says why.
    """
    root = locate(model)
    path = transformer_folder(root)
    stated, normalized, longest = stated_recipe(root)
    whole = checkpoint.there(path) and states_pair_head(config_file(path))  # Orbax restores all, the head too
    loaded = load_model(model, path, CROSS_ENCODERS if whole else ENCODERS, dtype, mesh or own_mesh(), attention)
    warn_of_overflow(loaded)
    if pooling is None and stated is None:
        log.warning("%s: does not say how to pool hidden states; taking their mean", model)
    recipe = Recipe(
        pooling=pooling or stated or "mean",
        normalize=normalized if normalize is None else normalize,
        max_tokens=min(longest, loaded.config.max_positions),
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


def stated_recipe(root: Path) -> tuple[Pooling | None, bool, int]:
    """Pooling (None where it is not stated), normalisation and longest text that the files in `root` state.

    Raises:
        RalmError: another pooling than by [CLS] or mean.
    """
    listed = dict(modules(root))
    config = ConfigFile.read(transformer_folder(root))
    contriever = config.values.get("architectures") == ["Contriever"]
    dpr = config.values.get("model_type") == "dpr"
    pooling: Pooling | None = "cls" if dpr else "mean" if contriever else None
    if "Pooling" in listed:
        pooling = stated_pooling(ConfigFile.read(root / listed["Pooling"]))
    path = transformer_folder(root) / "sentence_bert_config.json"
    longest = ConfigFile(read_object(path), str(path)).integer("max_seq_length", UNLIMITED)
    return pooling, "Normalize" in listed, longest


def stated_pooling(file: ConfigFile) -> Pooling:
    """The pooling of a sentence-transformers model."""
    stated = file.values.get("pooling_mode")  # a name or a list of names; in older files a flag for each
    flags = [
        re.sub(r"pooling_mode_(\w+?)_tokens?", r"\1", key)
        for key, on in file.values.items()
        if key.startswith("pooling_mode_") and on is True
    ]
    modes = [stated] if isinstance(stated, str) else stated or flags or ["mean"]
    for pooling in get_args(Pooling):
        if modes == [pooling]:
            return pooling
    raise file.unsupported("pooling", modes, ", ".join(POOLING))


def write_recipe(folder: Path, pooling: Pooling, normalize: bool, max_tokens: int) -> None:
    """States the recipe of the encoder in `folder` as sentence-transformers does."""
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), *([("Normalize", "2_Normalize")] if normalize else [])]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(kinds)
    ]
    (folder / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{mode}": mode.startswith(pooling) for mode in ("cls_token", "mean_tokens")}
    write_text(str(folder / "modules.json"), json.dumps(listed, indent=2) + "\n")
    write_text(str(folder / "1_Pooling" / "config.json"), json.dumps(modes, indent=2) + "\n")
    if max_tokens != UNLIMITED:
        limits = {"max_seq_length": max_tokens, "do_lower_case": False}
        write_text(str(folder / "sentence_bert_config.json"), json.dumps(limits) + "\n")
