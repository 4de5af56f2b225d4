"""Weights as PyTorch pickles, for repositories that have nothing else; PyTorch must be installed to read them."""

import hashlib
import importlib
import pickle
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ralm_jax.errors import RalmError, first_line
from ralm_jax.sources.base import Entry, FolderSource, Index


class TorchSource(FolderSource):
    """Tensors only (`weights_only`), memory-mapped.

    Raises:
        RalmError: PyTorch is not installed, or a file is not one of its checkpoints.
    """

    file_name = "pytorch_model.bin"

    @staticmethod
    def header(path: Path) -> dict[str, Entry]:
        return {name: Entry(dtype_name(tensor), tuple(tensor.shape), ()) for name, tensor in load(path).items()}

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
            with zipfile.ZipFile(path) as archive:
                kept = sorted((entry.filename, entry.CRC, entry.file_size) for entry in archive.infolist())
            digest.update(repr(kept).encode())
        return digest.hexdigest()


def load(path: Path) -> dict[str, Any]:
    """The tensors of a pickle, left on disk until they are read."""
    try:
        torch = importlib.import_module("torch")  # not a dependency: only who has it can read its pickles
    except ImportError:
        raise RalmError(
            f"{path}: a PyTorch pickle, which only PyTorch reads; install torch, or convert the model to safetensors"
        ) from None
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, ValueError, OSError, EOFError, pickle.UnpicklingError) as error:
        raise RalmError(f"{path}: not a checkpoint that PyTorch loads as plain weights ({first_line(error)})") from None
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise RalmError(f"{path}: not a dictionary of tensors")
    return content


def dtype_name(tensor: Any) -> str:
    """As safetensors spells it."""
    names = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    name = str(tensor.dtype).removeprefix("torch.")
    return names.get(name, name)
