"""What a checkpoint is to the rest of the program, and what all checkpoints in folders share.

A source lists every tensor's name, shape and dtype from the headers alone, and reads any slice of one as NumPy.
Headers are checked in full before a byte of a tensor is read.
"""

import abc
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np

from ralm_jax.errors import RalmError
from ralm_jax.text import parse_json

Index = tuple[slice, ...]

SAMPLE_BYTES = 1 << 14  # a fingerprint reads so much at the start, in the middle and at the end of every tensor

FLOATS: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


class TensorInfo(NamedTuple):
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it: F32, BF16, …
    file: str  # for messages
    stored: str = ""  # the file's own word for it, if another: Q4_1, …


class TensorSource(Protocol):
    """Tensors by Hugging Face name."""

    tensors: dict[str, TensorInfo]

    def read(self, name: str, index: Index) -> np.ndarray:
        """The slice `index` of tensor `name`, in the dtype that it is stored in; perhaps still on disk."""

    def fingerprint(self) -> str:
        """A hash of names, shapes and samples of every tensor; reading all of a large model would take minutes."""


class Span(NamedTuple):
    """Bytes of a file."""

    start: int
    length: int


class StoredTensor(NamedTuple):
    """A tensor of a file: `spans` hold its numbers one after another; `transposed` where they are those of its
    transpose."""

    dtype: str
    shape: tuple[int, ...]
    spans: tuple[Span, ...]
    transposed: bool = False


def sampled_hash(path: Path, spans: Iterable[tuple[int, int]]) -> bytes:
    """SHA-256 over the size of a file, what lies in front of its first tensor, and samples of each tensor; `spans`
    are the tensors' first bytes and lengths."""
    digest = hashlib.sha256(str(path.stat().st_size).encode())
    ordered = sorted(spans)
    with path.open("rb") as file:
        digest.update(file.read(ordered[0][0] if ordered else -1))
        for start, length in ordered:
            for place in (0, (length - SAMPLE_BYTES) // 2, length - SAMPLE_BYTES):
                file.seek(start + max(0, place))
                digest.update(file.read(min(SAMPLE_BYTES, length)))
    return digest.digest()


class FolderSource(abc.ABC):
    """A folder's weights in one file, STEM.SUFFIX, or in the shards that STEM.SUFFIX.index.json names.

    Raises:
        RalmError: a missing, truncated or malformed file; an index that does not fit its shards.
    """

    file_name: str

    def __init__(self, folder: Path):
        paths, index = self.files(folder)
        self._paths = {path.name: path for path in paths}
        self._entries: dict[str, StoredTensor] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for path in paths:
            for name, entry in self.header(path).items():
                if name in self.tensors:
                    raise RalmError(
                        f"{path}: {name} is also in {self.tensors[name].file}; each tensor must be in one file"
                    )
                self._entries[name] = entry
                self.tensors[name] = TensorInfo(entry.shape, entry.dtype, path.name)
        if index is not None:
            check_index(folder, index, {name: info.file for name, info in self.tensors.items()})

    @classmethod
    def there(cls, folder: Path) -> bool:
        return any((folder / name).exists() for name in (cls.file_name, f"{cls.file_name}.index.json"))

    @staticmethod
    @abc.abstractmethod
    def header(path: Path) -> dict[str, StoredTensor]:
        """The tensors of a file by Hugging Face name; the data is left alone.

        Raises:
            RalmError: not a whole file of the format.
        """

    @staticmethod
    def indexed_name(key: str) -> str:
        """The Hugging Face name of a tensor that the index calls `key`."""
        return key

    @classmethod
    def files(cls, folder: Path) -> tuple[list[Path], dict[str, str] | None]:
        """The files and, if there is one, the index: tensor name -> file name."""
        single, index_path = folder / cls.file_name, folder / f"{cls.file_name}.index.json"
        if not index_path.exists():
            return [single], None
        content = parse_json(index_path.read_bytes(), str(index_path))
        index = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
            raise RalmError(f"{index_path}: not an index of shards (expected weight_map: tensor -> file)")
        files = sorted(set(index.values()))
        if single.exists() and files != [single.name]:
            raise RalmError(
                f"{folder}: {single.name} lies beside an index of {len(files)} other files, and one of the two is "
                "stale; move one away"
            )
        missing = [file for file in files if not (folder / file).is_file()]
        if missing:
            raise RalmError(f"{folder}: {len(missing)} of {len(files)} shards are missing: {', '.join(missing[:5])}")
        return [folder / file for file in files], {cls.indexed_name(key): file for key, file in index.items()}

    def read(self, name: str, index: Index) -> np.ndarray:
        entry, path = self._entries[name], self._paths[self.tensors[name].file]
        dtype = FLOATS[entry.dtype]
        shape = entry.shape[::-1] if entry.transposed else entry.shape
        # mapped anew each time: pages of a mapping that stays open count as memory, up to the whole file
        parts = [
            np.memmap(path, dtype, "r", offset=span.start, shape=(span.length // np.dtype(dtype).itemsize,))
            for span in entry.spans
        ]
        values = (parts[0] if len(parts) == 1 else np.concatenate(parts)).reshape(shape)
        return (values.T if entry.transposed else values)[index]

    def fingerprint(self) -> str:
        spans: dict[str, list[Span]] = {file: [] for file in self._paths}
        for name, entry in self._entries.items():
            spans[self.tensors[name].file] += entry.spans
        hashes = (sampled_hash(self._paths[file], found) for file, found in spans.items())
        return hashlib.sha256(b"".join(hashes)).hexdigest()


def check_index(folder: Path, index: dict[str, str], found: dict[str, str]) -> None:
    """Refuses an index that places a tensor elsewhere than the shards do. One that names a tensor too many is fine: a
    tied head is often dropped from the shards alone, and a tensor that is needed will be missed."""
    differing = sorted(name for name in found if found[name] != index.get(name))
    if differing:
        name = differing[0]
        raise RalmError(
            f"{folder}: the index is stale, {len(differing)} tensors differ: for {name} it says "
            f"{index.get(name, 'nothing')}, but the tensor is in {found[name]}"
        )
