"""A model in another format: Hugging Face's folder, or Orbax for pods."""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ralm_jax import checkpoint, weights
from ralm_jax.encoder import stated_recipe, transformer_folder, write_recipe
from ralm_jax.errors import UsageError
from ralm_jax.hub import TOKENIZER_FILES, locate
from ralm_jax.model import DTYPES, abstract, config_file, family_of, load_model
from ralm_jax.models import ENCODERS, families_for
from ralm_jax.models.cross_encoder import TRAINED_WITH
from ralm_jax.sharding import make_mesh
from ralm_jax.sources import open_source
from ralm_jax.sources.base import FLOATS
from ralm_jax.sources.gguf import open_gguf
from ralm_jax.tokenizer import load_tokenizer

Format = Literal["hf", "orbax"]
SHARD_BYTES = 1 << 30
KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", TRAINED_WITH)


def convert(model: str, out: str, to: Format, dtype: str | None = None) -> None:
    """Writes `model`, with its tokenizer, to the folder `out`.

    Args:
        model: as `load_reader` takes it; an encoder or cross-encoder too.
        to: "hf", config.json and safetensors as transformers reads them, with no more than a shard of 1 GB in memory;
            or "orbax", which each device of a mesh reads its own part of.
        dtype: "float32", "bfloat16" or "float16"; None for as it is stored.

    Raises:
        UsageError: no such model, or `out` has something in it.
        RalmError: the model cannot be loaded exactly, or `out` cannot be written.
    """
    root, folder = locate(model), Path(out).expanduser()
    path = transformer_folder(root)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{out}: exists and is not an empty folder; choose another")
    file = config_file(path)
    recipe = stated_recipe(root) if family_of(file, families_for(file))[0].config.model_type in ENCODERS else None
    tokenizer = load_tokenizer(model) if path.is_file() and has_tokenizer(path) else None  # may be refused: before work

    if to == "hf" and not checkpoint.there(path):
        convert_tensors(path, folder, dtype)
    else:
        loaded = load_model(model, path, families_for(file), dtype or stored_dtype(path), make_mesh(data=1))
        if to == "hf":
            loaded.save(folder)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            checkpoint.save(folder, loaded.state)
            weights.write_config(folder, loaded.config)

    keep_stated(folder / "config.json", file.values)
    if tokenizer is not None:
        tokenizer.save(folder)
    for name in (*TOKENIZER_FILES, "generation_config.json"):
        if (path / name).is_file():
            shutil.copyfile(path / name, folder / name)
    if recipe is not None and recipe[0] is not None:
        write_recipe(folder, recipe[0], *recipe[1:])


def convert_tensors(path: Path, folder: Path, dtype: str | None) -> None:
    """From any source to safetensors, tensor by tensor."""
    file = config_file(path)
    family, config = family_of(file, families_for(file))
    source = open_source(path)
    _, state = abstract(family, config, make_mesh(data=1))
    entries = {
        weights.hf_name(family, entry.wanted): entry
        for entry in weights.match(family, state, config, source, str(path))
    }
    sizes = {
        name: math.prod(entry.wanted.shape) * made_dtype(source.tensors[entry.name].dtype, dtype).itemsize
        for name, entry in entries.items()
    }

    def read(name: str) -> np.ndarray:
        stored = source.read(entries[name].name, ())
        return weights.cast(stored, made_dtype(source.tensors[entries[name].name].dtype, dtype), name)

    weights.write_hf(folder, config, sizes, read, SHARD_BYTES)


def stored_dtype(path: Path) -> str:
    """The dtype that all tensors share; float32 where they do not."""
    if checkpoint.there(path):
        return checkpoint.dtype(path)
    found = {info.dtype for info in open_source(path).tensors.values() if info.dtype in FLOATS}
    name = np.dtype(FLOATS[found.pop()]).name if len(found) == 1 else "float32"
    return name if name in DTYPES else "float32"


def made_dtype(stored: str, wanted: str | None) -> np.dtype:
    return np.dtype(FLOATS[stored] if wanted is None else DTYPES[wanted])


def has_tokenizer(path: Path) -> bool:
    return open_gguf(path).get("tokenizer.ggml.model") is not None


def keep_stated(path: Path, values: Mapping[str, Any]) -> None:
    """Keeps in a new config.json what no model here needs: the ids of special tokens, which generation needs, and what
    a reranker was trained with."""
    kept = {key: values[key] for key in KEPT if key in values}
    path.write_text(json.dumps(json.loads(path.read_text()) | kept, indent=2) + "\n", encoding="utf-8")
