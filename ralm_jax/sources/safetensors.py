"""Weights as safetensors."""

import json
from pathlib import Path
from typing import Any

from ralm_jax.errors import RalmError
from ralm_jax.sources.base import FolderSource, Span, StoredTensor


class SafetensorsSource(FolderSource):
    file_name = "model.safetensors"

    @staticmethod
    def header(path: Path) -> dict[str, StoredTensor]:
        return read_header(path)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name; the data is left alone.

    Raises:
        RalmError: a header that is cut off, oversized, not JSON, with a key twice, or whose offsets leave holes,
            overlap or do not match shapes and file size.
    """
    from safetensors import SafetensorError, safe_open

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in entries if keys.count(key) > 1)
            raise ValueError(f"{twice} appears twice in the header")
        return entries

    try:
        with safe_open(path, framework="np"):  # checks lengths, offsets and file size
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length), object_pairs_hook=unique)
    except (SafetensorError, OSError, ValueError) as error:
        raise RalmError(f"{path}: not a whole safetensors file ({error}); fetch it again") from None
    header.pop("__metadata__", None)
    entries = {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        entries[name] = StoredTensor(entry["dtype"], tuple(entry["shape"]), (Span(8 + length + start, stop - start),))
    return entries
