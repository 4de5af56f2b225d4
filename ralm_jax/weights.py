"""From a checkpoint's tensors to a reader's parameters and back, by one strict key table a family.

Every parameter is filled exactly once and every checkpoint key is used or on the family's list of keys to ignore;
whatever is wrong is reported together, before memory is spent. Tensors then stream: each device gets its own slice of
one layer's tensor at a time, so that the host never holds more than about one tensor.
"""

import functools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx

from ralm_jax.config import ReaderConfig
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.sources import Index, TensorSource

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Key:
    """One row of a key table: a tensor of the checkpoint and the parameter, or equal parts, that it fills.

    `pattern` is in einops' notation, from the checkpoint's layout to the parameter's; empty where they are the same.
    With several `paths` its right side begins with the axis that counts them. `{}` in `name` runs over the layers.
    """

    name: str
    paths: str | tuple[str, ...]
    pattern: str = ""
    prefixed: bool = True  # stands under the family's prefix in Hugging Face's files

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.paths,) if isinstance(self.paths, str) else self.paths

    def layout(self, rank: int) -> "Layout":
        if self.pattern:
            return Layout.parse(self.pattern)
        axes = tuple(f"a{i}" for i in range(rank))
        return Layout(tuple((axis,) for axis in axes), axes)


@dataclass(frozen=True)
class Layout:
    """A parsed pattern: axes of the checkpoint's tensor (each a group of names) and of the parameter."""

    stored: tuple[tuple[str, ...], ...]
    wanted: tuple[str, ...]

    @classmethod
    @functools.cache
    def parse(cls, pattern: str) -> "Layout":
        left, right = pattern.split("->")
        groups = tuple(tuple(group.strip("()").split()) for group in re.findall(r"\([^)]*\)|\S+", left))
        return cls(groups, tuple(right.split()))

    @property
    def forward(self) -> str:
        stored = " ".join(f"({' '.join(group)})" for group in self.stored)
        return f"{stored} -> {' '.join(self.wanted)}"

    @property
    def backward(self) -> str:
        return " -> ".join(reversed(self.forward.split(" -> ")))

    def stored_shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        return tuple(math.prod(sizes[name] for name in group) for group in self.stored)

    def stored_index(self, sizes: dict[str, int], index: dict[str, slice]) -> Index:
        """The slice of the stored tensor that holds the slices `index` of the named axes.

        Axes that are merged in the checkpoint can be cut only where the cut is one contiguous range.
        """
        slices = []
        for group in self.stored:
            start, length, whole = 0, 1, True
            for name in group:
                low, high, _ = index[name].indices(sizes[name])
                if length > 1 and (low, high) != (0, sizes[name]):
                    whole = False
                start, length = start * sizes[name] + low, length * (high - low)
            if not whole:
                raise RalmError(f"cannot cut {group} of a stored tensor into contiguous slices; use another mesh")
            slices.append(slice(start, start + length))
        return tuple(slices)


@dataclass(frozen=True)
class Family:
    """What makes a model family: configuration, module and checkpoint keys (without `prefix`)."""

    config: type[ReaderConfig]
    model: type[nnx.Module]
    prefix: str  # of all keys but the head's, in Hugging Face's files; base models are saved without it
    keys: tuple[Key, ...]
    tied: tuple[str, str]  # embedding and head, by key; tied readers may have either or both
    ignored: tuple[str, ...]  # patterns of keys that carry no weights


def flat_state(state: nnx.State) -> dict[str, nnx.Param]:
    """Parameters by dotted path."""
    return {".".join(str(part) for part in path): leaf for path, leaf in nnx.to_flat_state(state)}


@dataclass(frozen=True)
class Entry:
    """A tensor of the checkpoint, matched: the key-table row, its layer, and the file's own name for it."""

    key: Key
    layer: int | None
    name: str


def expected(family: Family, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, Key, int | None, tuple]]:
    """Name (without prefix), row, layer and shape of every tensor that a model with parameters `shapes` needs."""
    for key in family.keys:
        if key.parts[0] not in shapes:
            continue
        layered = "{}" in key.name
        shape = shapes[key.parts[0]]
        own = shape[1:] if layered else shape
        layout = key.layout(len(own))
        stored = layout.stored_shape(axis_sizes(key, layout, own))
        for layer in range(shape[0]) if layered else (None,):
            yield key.name.format(layer), key, layer, stored


def axis_sizes(key: Key, layout: Layout, shape: tuple[int, ...]) -> dict[str, int]:
    """The sizes of the named axes, given one part's shape without the layer axis."""
    whole = (len(key.parts), *shape) if len(key.parts) > 1 else shape
    return dict(zip(layout.wanted, whole, strict=True))


def match(family: Family, state: nnx.State, config: ReaderConfig, source: TensorSource, where: str) -> list[Entry]:
    """Pairs every parameter with a tensor of `source`.

    Raises:
        RalmError: parameters without a tensor, tensors without a parameter, wrong shapes, dtypes that are not
            floats, tied weights that differ. All problems are in one message.
    """
    available: dict[str, str] = {}
    for name in source.tensors:
        bare = name.removeprefix(family.prefix)
        if bare in available:
            raise RalmError(f"{where}: both {name} and {available[bare]} are there; one must go")
        available[bare] = name

    wrong: list[str] = []
    embedding, head = family.tied
    if config.tie_word_embeddings and head in available:
        if embedding not in available:
            available[embedding] = available.pop(head)
        elif not same_tensor(source, available[embedding], available.pop(head)):
            wrong.append(f"{embedding} and {head} differ, but the configuration ties them (tie_word_embeddings)")

    entries, missing = [], []
    for name, key, layer, shape in expected(family, {path: leaf.shape for path, leaf in flat_state(state).items()}):
        own = available.pop(name, None)
        if own is None:
            missing.append(f"{name} is missing (expected shape {list(shape)})")
            continue
        info = source.tensors[own]
        if info.shape != shape:
            wrong.append(f"{own} in {info.file} has shape {list(info.shape)}, expected {list(shape)}")
        elif info.dtype not in FLOAT_DTYPES:
            wrong.append(f"{own} in {info.file} is {info.dtype}, expected one of {', '.join(FLOAT_DTYPES)}")
        entries.append(Entry(key, layer, own))
    unknown = [
        f"{own} in {source.tensors[own].file} is unknown to {config.model_type}"
        for bare, own in available.items()
        if not any(re.fullmatch(pattern, bare) for pattern in family.ignored)
    ]
    if missing or wrong or unknown:
        told = "; ".join(some(kind) for kind in (missing, wrong, unknown) if kind)
        raise RalmError(f"{where}: the weights do not fit: {told}")
    return entries


def some(problems: list[str], count: int = 4) -> str:
    """The first few of a list, and how many more there are."""
    more = [f"and {len(problems) - count} more of the kind"] if len(problems) > count else []
    return "; ".join(problems[:count] + more)


def same_tensor(source: TensorSource, first: str, second: str) -> bool:
    """Whether two tensors hold the same numbers; compared in slabs of rows."""
    a, b = source.tensors[first], source.tensors[second]
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    count = a.shape[0]
    slab = max(1, (1 << 24) // max(1, math.prod(a.shape[1:])))
    slabs = ((slice(start, min(start + slab, count)),) for start in range(0, count, slab))
    return all(np.array_equal(source.read(first, rows), source.read(second, rows)) for rows in slabs)


@functools.partial(jax.jit, donate_argnums=0)
def put_layer(stack: jax.Array, layer: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, layer, index, 0)


def load(family: Family, state: nnx.State, config: ReaderConfig, source: TensorSource, where: str) -> nnx.State:
    """Fills the abstract `state` (shapes, dtypes, shardings) from `source`.

    Args:
        where: the checkpoint's name, for messages.

    Raises:
        RalmError: the checkpoint does not fit; see `match`.
    """
    entries = match(family, state, config, source, where)
    abstract = flat_state(state)
    filled: dict[str, jax.Array] = {}
    for entry in entries:
        for part, path in enumerate(entry.key.parts):
            leaf = abstract[path].get_value()
            if entry.layer is None:
                filled[path] = read_part(source, entry, part, leaf.shape, leaf.dtype, leaf.sharding)
                continue
            spec = jax.sharding.PartitionSpec(*leaf.sharding.spec[1:])
            sharding = jax.sharding.NamedSharding(leaf.sharding.mesh, spec)
            layer = read_part(source, entry, part, leaf.shape[1:], leaf.dtype, sharding)
            if path not in filled:
                filled[path] = jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
            filled[path] = put_layer(filled[path], layer, jnp.int32(entry.layer))
    leaves = {path: leaf.replace(filled[".".join(map(str, path))]) for path, leaf in nnx.to_flat_state(state)}
    return nnx.from_flat_state(leaves)


def read_part(
    source: TensorSource, entry: Entry, part: int, shape: tuple[int, ...], dtype: Any, sharding: Any
) -> jax.Array:
    """Part `part` of a tensor as an array on the devices; each device's slice is read by itself."""
    layout = entry.key.layout(len(shape))
    sizes = axis_sizes(entry.key, layout, shape)
    several = len(entry.key.parts) > 1

    def read(index: Index | None) -> np.ndarray:
        index = index or ()
        wanted = (slice(part, part + 1), *index) if several else index
        by_name = dict(zip(layout.wanted, wanted, strict=True))
        stored = source.read(entry.name, layout.stored_index(sizes, by_name))
        cut = {name: len(range(*by_name[name].indices(size))) for name, size in sizes.items()}
        values = rearrange(stored, layout.forward, **cut)
        return np.ascontiguousarray(values[0] if several else values).astype(dtype, copy=False)

    return jax.make_array_from_callback(shape, sharding, read)


def export(family: Family, state: nnx.State) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of the Hugging Face checkpoint, by name, one at a time."""
    leaves = flat_state(state)
    for name, key, layer, _ in expected(family, {path: leaf.shape for path, leaf in leaves.items()}):
        values = [leaves[path].get_value() for path in key.parts]
        arrays = [np.asarray(value if layer is None else value[layer]) for value in values]
        layout = key.layout(arrays[0].ndim)
        whole = np.stack(arrays) if len(arrays) > 1 else arrays[0]
        stored = np.ascontiguousarray(rearrange(whole, layout.backward, **axis_sizes(key, layout, arrays[0].shape)))
        yield (family.prefix if key.prefixed else "") + name, stored


def save(folder: Path, family: Family, config: ReaderConfig, state: nnx.State, shard_bytes: int = 5 << 30) -> None:
    """Writes `config.json` and safetensors, in shards of about `shard_bytes`, as transformers reads them.

    Raises:
        UsageError: `folder` holds a checkpoint already.
    """
    from safetensors.numpy import save_file

    if any(folder.glob("*.safetensors")) or (folder / "config.json").exists():
        raise UsageError(f"{folder}: holds a checkpoint already; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_hf(), indent=2) + "\n", encoding="utf-8")

    total = sum(leaf.get_value().nbytes for leaf in flat_state(state).values())
    count = max(1, -(-total // shard_bytes))
    names = (
        [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)] if count > 1 else ["model.safetensors"]
    )
    index: dict[str, str] = {}
    shard: dict[str, np.ndarray] = {}
    written = 0  # bytes in this and all earlier shards
    for name, tensor in export(family, state):
        current = names[min(written // shard_bytes, count - 1)]
        if shard and index[next(iter(shard))] != current:
            save_file(shard, folder / index[next(iter(shard))], metadata={"format": "pt"})
            shard = {}
        shard[name], index[name] = tensor, current
        written += tensor.nbytes
    save_file(shard, folder / index[next(iter(shard))], metadata={"format": "pt"})
    if count > 1:
        content = {"metadata": {"total_size": total}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
