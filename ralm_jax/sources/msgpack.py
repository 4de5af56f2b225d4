"""Weights as Flax's msgpack, which many repositories of GPT-2, GPT-J, OPT and BERT have.

The file is walked without reading an array: its tree of dictionaries is small, and every array is an extension value
(Flax's type 1) of shape, dtype and bytes. Flax calls a weight `kernel` (and stores its transpose), `scale` or
`embedding`.
"""

import math
import mmap
import struct
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from ralm_jax.errors import RalmError
from ralm_jax.sources.base import FLOATS, FolderSource, Span, StoredTensor

ARRAY = 1  # flax.serialization's extension type
CHUNKED = "__msgpack_chunked_array__"  # how Flax writes an array of more than 1 GB
SMALL = 1024  # bytes that a key, a number or an array's header may take

DTYPES = {np.dtype(dtype).name: name for name, dtype in FLOATS.items()}

Keys = tuple[str, ...]


class MsgpackSource(FolderSource):
    file_name = "flax_model.msgpack"

    @staticmethod
    def header(path: Path) -> dict[str, StoredTensor]:
        return read_tree(path)

    @staticmethod
    def indexed_name(key: str) -> str:
        return torch_name(tuple(key.split("/")))


def torch_name(path: Keys) -> str:
    """Hugging Face's name of a Flax parameter."""
    last = {"kernel": "weight", "scale": "weight", "embedding": "weight"}.get(path[-1], path[-1])
    return ".".join((*path[:-1], last))


def read_tree(path: Path) -> dict[str, StoredTensor]:
    """The arrays of a msgpack file by Hugging Face name.

    Raises:
        RalmError: it is cut off, or not a tree of arrays.
    """
    leaves: dict[Keys, Any] = {}
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            end = walk(data, 0, (), leaves)
            if end != len(data):
                raise ValueError(f"{end} bytes of {len(data)} make a tree")
        entries = joined_chunks(leaves)
    except (
        OSError,
        ValueError,
        IndexError,
        KeyError,
        TypeError,
        RecursionError,
        struct.error,
        msgpack.UnpackException,
    ) as error:
        told = str(error) or type(error).__name__
        raise RalmError(f"{path}: not a whole file of Flax parameters ({told}); fetch it again") from None
    tensors: dict[str, StoredTensor] = {}
    for place, entry in entries.items():
        name, transposed = torch_name(place), place[-1] == "kernel"
        if name in tensors:
            raise RalmError(f"{path}: two parameters are {name}; remove one")
        shape = entry.shape[::-1] if transposed else entry.shape
        tensors[name] = StoredTensor(entry.dtype, shape, entry.spans, transposed)
    return tensors


def walk(data: mmap.mmap, start: int, place: Keys, leaves: dict[Keys, Any]) -> int:
    """Collects what lies at `start` under its path `place`, and returns where it ends."""
    if place in leaves:
        raise ValueError(f"{'/'.join(place)} is there twice")
    extension = extension_at(data, start)
    if extension is not None:
        leaves[place] = array_entry(data, extension)
        return sum(extension)
    if not is_map(data[start]):
        leaves[place], start = small_value(data, start)
        return start
    unpacker = unpacker_at(data, start)
    count = unpacker.read_map_header()
    start += unpacker.tell()
    for _ in range(count):
        key, start = small_value(data, start)
        start = walk(data, start, (*place, str(key)), leaves)
    return start


def unpacker_at(data: mmap.mmap, start: int) -> msgpack.Unpacker:
    unpacker = msgpack.Unpacker(strict_map_key=False)
    unpacker.feed(data[start : start + SMALL])
    return unpacker


def small_value(data: mmap.mmap, start: int) -> tuple[Any, int]:
    """The key, number or None at `start`, and where it ends."""
    unpacker = unpacker_at(data, start)
    return unpacker.unpack(), start + unpacker.tell()


def is_map(byte: int) -> bool:
    return 0x80 <= byte <= 0x8F or byte in (0xDE, 0xDF)


def extension_at(data: mmap.mmap, start: int) -> Span | None:
    """The payload of Flax's array at `start`; None if there is something else."""
    sizes = {0xC7: ">B", 0xC8: ">H", 0xC9: ">I"}  # of the payload's length
    byte = data[start]
    if byte in sizes:
        (length,) = struct.unpack_from(sizes[byte], data, start + 1)
        header = 2 + struct.calcsize(sizes[byte])
    elif 0xD4 <= byte <= 0xD8:
        length, header = 1 << (byte - 0xD4), 2
    else:
        return None
    if data[start + header - 1] != ARRAY:
        raise ValueError(f"a value of extension type {data[start + header - 1]}")
    if start + header + length > len(data):
        raise ValueError("cut off")
    return Span(start + header, length)


def array_entry(data: mmap.mmap, payload: Span) -> StoredTensor:
    """The array whose shape, dtype and bytes are in `payload`."""
    unpacker = unpacker_at(data, payload.start)
    if unpacker.read_array_header() != 3:
        raise ValueError("an array of other than three parts")
    shape, name = tuple(unpacker.unpack()), unpacker.unpack()
    length = math.prod(shape) * np.dtype(FLOATS.get(DTYPES.get(name, ""), name)).itemsize
    start = payload.start + unpacker.tell()
    start += {0xC4: 2, 0xC5: 3, 0xC6: 5}[data[start]]  # the header of the bytes themselves
    if not all(isinstance(size, int) and size >= 0 for size in shape) or start + length != sum(payload):
        raise ValueError(f"an array of shape {shape} and dtype {name} in {payload.length} bytes")
    return StoredTensor(DTYPES.get(name, name), shape, (Span(start, length),))


def joined_chunks(leaves: dict[Keys, Any]) -> dict[Keys, StoredTensor]:
    """The arrays, with those that were cut into chunks as one."""
    entries = {
        place: leaf for place, leaf in leaves.items() if isinstance(leaf, StoredTensor) and "chunks" not in place
    }
    for *place, last in leaves:
        if last != CHUNKED:
            continue
        own = {key[len(place) :]: leaf for key, leaf in leaves.items() if list(key[: len(place)]) == place}
        numbered = ({int(key[1]): own[key] for key in own if key[0] == kind} for kind in ("shape", "chunks"))
        sizes, chunks = ([found[i] for i in range(len(found))] for found in numbered)
        if sum(math.prod(chunk.shape) for chunk in chunks) != math.prod(sizes):
            raise ValueError(f"chunks of {'/'.join(place)} are missing")
        spans = tuple(span for chunk in chunks for span in chunk.spans)
        entries[tuple(place)] = StoredTensor(chunks[0].dtype, tuple(sizes), spans)
    return entries
