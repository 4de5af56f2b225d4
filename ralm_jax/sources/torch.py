"""Weights as PyTorch pickles, for repositories that have nothing else; PyTorch must be installed to read them."""

import functools
import hashlib
import importlib
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ralm_jax.errors import RalmError, first_line
from ralm_jax.sources.base import FolderSource, Index, StoredTensor, sampled_hash


class TorchSource(FolderSource):
    """Tensors only (`weights_only`), memory-mapped.

    Raises:
        RalmError: PyTorch is not installed, or a file is not one of its checkpoints.
    """

    file_name = "pytorch_model.bin"

    @staticmethod
    def header(path: Path) -> dict[str, StoredTensor]:
        return {name: StoredTensor(dtype_name(tensor), tuple(tensor.shape), ()) for name, tensor in load(path).items()}

    def read(self, name: str, index: Index) -> np.ndarray:
        tensor = load(self._paths[self.tensors[name].file])[name][index].contiguous()
        if dtype_name(tensor) == "BF16":
            bits = importlib.import_module("torch").int16
            return tensor.view(bits).numpy().view(ml_dtypes.bfloat16)
        return tensor.numpy().copy()

    def fingerprint(self) -> str:
        """Over the checksums that the archives keep of their tensors."""
        digest = hashlib.sha256()
        for path in self._paths.values():
            if not zipfile.is_zipfile(path):
                digest.update(sampled_hash(path, [(0, path.stat().st_size)]))
                continue
            with zipfile.ZipFile(path) as archive:
                kept = sorted((entry.filename, entry.CRC, entry.file_size) for entry in archive.infolist())
            digest.update(repr(kept).encode())
        return digest.hexdigest()


def load(path: Path) -> dict[str, Any]:
    """The tensors of a pickle, left on disk until they are read; those of PyTorch before 1.6 are read and kept."""
    return loaded(path, mmap=True) if zipfile.is_zipfile(path) else kept(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=1)
def kept(path: Path, _time: int) -> dict[str, Any]:
    return loaded(path, mmap=False)


def loaded(path: Path, *, mmap: bool) -> dict[str, Any]:
    """
    Raises:
        RalmError: PyTorch is not installed, or what is there is more than a dictionary of plain tensors.
    """
    try:
        torch = importlib.import_module("torch")  # not a dependency: only who has it can read its pickles
    except ImportError:
        raise RalmError(
            f"{path}: a PyTorch pickle, which only PyTorch reads; install torch, or convert the model to safetensors"
        ) from None
    try:
        with warnings.catch_warnings(action="ignore"):  # of old protocols
            content = torch.load(path, map_location="cpu", mmap=mmap, weights_only=True)
    except (RuntimeError, ValueError, OSError, EOFError, pickle.UnpicklingError) as error:
        raise RalmError(f"{path}: not a checkpoint that PyTorch loads as plain weights ({first_line(error)})") from None
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) and value.layout is torch.strided
        for name, value in content.items()
    ):
        raise RalmError(f"{path}: not a dictionary of plain tensors by name")
    return {name: value.detach() for name, value in content.items()}


def dtype_name(tensor: Any) -> str:
    """As safetensors spells it."""
    names = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    name = str(tensor.dtype).removeprefix("torch.")
    return names.get(name, name)
