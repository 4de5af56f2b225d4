"""A model in another format: Hugging Face's folder, or Orbax for pods."""

import math
import shutil
from pathlib import Path
from typing import Literal

import numpy as np

from ralm_jax import checkpoint, weights
from ralm_jax.errors import UsageError
from ralm_jax.hub import TOKENIZER_FILES, locate
from ralm_jax.model import DTYPES, abstract, config_file, family_of, load_model
from ralm_jax.models import FAMILIES
from ralm_jax.sharding import make_mesh
from ralm_jax.sources import open_source
from ralm_jax.sources.base import FLOATS
from ralm_jax.tokenizer import load_tokenizer

Format = Literal["hf", "orbax"]


def convert(model: str, out: str, to: Format, dtype: str | None = None) -> None:
    """Writes `model`, with its tokenizer, to the folder `out`.

    Args:
        model: as `load_reader` takes it; an encoder too.
        to: "hf", config.json and safetensors as transformers reads them, written a shard at a time without the model
            ever being in memory; or "orbax", which each device of a mesh reads its own part of.
        dtype: "float32", "bfloat16" or "float16"; None for as it is stored.

    Raises:
        UsageError: no such model, or `out` has something in it.
        RalmError: the model cannot be loaded exactly, or `out` cannot be written.
    """
    folder, path = Path(out).expanduser(), locate(model)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{out}: exists and is not an empty folder; choose another")
    if to == "hf" and not checkpoint.there(path):
        convert_tensors(path, folder, dtype)
    else:
        loaded = load_model(model, path, FAMILIES, dtype or stored_dtype(path), None)
        if to == "hf":
            loaded.save(folder)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            checkpoint.save(folder, loaded.state)
            weights.write_config(folder, loaded.config)
    copy_tokenizer(model, path, folder)


def convert_tensors(path: Path, folder: Path, dtype: str | None) -> None:
    """From any source to safetensors, tensor by tensor."""
    family, config = family_of(config_file(path), FAMILIES)
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

    weights.write_hf(folder, config, sizes, read)


def stored_dtype(path: Path) -> str:
    """The dtype that all tensors share; float32 where they do not."""
    if checkpoint.there(path):
        return checkpoint.dtype(path)
    found = {info.dtype for info in open_source(path).tensors.values() if info.dtype in FLOATS}
    name = np.dtype(FLOATS[found.pop()]).name if len(found) == 1 else "float32"
    return name if name in DTYPES else "float32"


def made_dtype(stored: str, wanted: str | None) -> np.dtype:
    return np.dtype(FLOATS[stored] if wanted is None else DTYPES[wanted])


def copy_tokenizer(model: str, path: Path, folder: Path) -> None:
    """The tokenizer's own files, or what a GGUF file says as tokenizer.json; nothing where there is none."""
    if path.is_file():
        load_tokenizer(model).save(folder)
        return
    for name in TOKENIZER_FILES:
        if (path / name).exists():
            shutil.copyfile(path / name, folder / name)
