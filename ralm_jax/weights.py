"""From a checkpoint's tensors to a reader's parameters and back, by the family's key table (`ralm_jax.keys`).

Every parameter is filled exactly once and every checkpoint key is used or on the family's list of keys to ignore;
whatever is wrong is reported together, before memory is spent. Tensors then stream: each device gets its own slice of
one layer's tensor at a time, so that the host never holds more than about one tensor.
"""

import functools
import json
import logging
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx

from ralm_jax.config import ModelConfig
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.keys import Family, Wanted, wanted_tensors
from ralm_jax.layers import stored_shape
from ralm_jax.sources.base import FLOATS, Index, TensorSource

log = logging.getLogger("ralm")


def flat_state(state: nnx.State) -> dict[str, nnx.Param]:
    """Parameters by dotted path."""
    return {".".join(str(part) for part in path): leaf for path, leaf in nnx.to_flat_state(state)}


def stored_shapes(state: nnx.State) -> dict[str, tuple[int, ...]]:
    """Shapes of parameters by dotted path, as a checkpoint has them."""
    return {path: stored_shape(leaf) for path, leaf in flat_state(state).items()}


@dataclass(frozen=True)
class Match:
    """A tensor of the checkpoint, matched: what it is, and the file's own name for it."""

    wanted: Wanted
    name: str


def match(family: Family, state: nnx.State, config: ModelConfig, source: TensorSource, where: str) -> list[Match]:
    """Pairs every parameter with a tensor of `source`.

    Raises:
        RalmError: parameters without a tensor, tensors without a parameter, wrong shapes, dtypes that are not
            floats, tied weights that differ. All problems are in one message.
    """
    try:
        available = family.bare_names(source.tensors)
    except RalmError as error:
        raise RalmError(f"{where}: {error}") from None

    wrong: list[str] = []
    if family.tied and getattr(config, "tie_word_embeddings", False) and family.tied[1] in available:
        embedding, head = family.tied
        if embedding not in available:
            available[embedding] = available.pop(head)
        elif not same_tensor(source, available[embedding], available.pop(head)):
            wrong.append(f"{embedding} and {head} differ, but the configuration ties them (tie_word_embeddings)")

    entries, missing = [], []
    for wanted in wanted_tensors(family, stored_shapes(state)):
        own = available.pop(wanted.name, None)
        own = available.pop(wanted.alias, None) if own is None else own  # both are there: the alias is unknown
        if own is None:
            missing.append(f"{wanted.name} is missing (expected shape {list(wanted.shape)})")
            continue
        info = source.tensors[own]
        if info.shape != wanted.shape:
            wrong.append(f"{own} in {info.file} has shape {list(info.shape)}, expected {list(wanted.shape)}")
        elif info.dtype not in FLOATS:
            wrong.append(f"{own} in {info.file} is {info.dtype}, expected one of {', '.join(FLOATS)}")
        entries.append(Match(wanted, own))
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


def load(family: Family, state: nnx.State, config: ModelConfig, source: TensorSource, where: str) -> nnx.State:
    """Fills the abstract `state` (shapes, dtypes, shardings) from `source`.

    Args:
        where: the checkpoint's name, for messages.

    Raises:
        RalmError: the checkpoint does not fit; see `match`.
    """
    entries = match(family, state, config, source, where)
    abstract, shapes = flat_state(state), stored_shapes(state)
    filled: dict[str, jax.Array] = {}
    for entry in entries:
        for part, path in enumerate(entry.wanted.key.parts):
            leaf = abstract[path].get_value()
            if entry.wanted.layer is None:
                filled[path] = read_part(source, entry, part, shapes[path], leaf)
                continue
            spec = jax.sharding.PartitionSpec(*leaf.sharding.spec[1:])
            sharding = jax.sharding.NamedSharding(leaf.sharding.mesh, spec)
            one = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=sharding)
            layer = read_part(source, entry, part, shapes[path][1:], one)
            if path not in filled:
                filled[path] = jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
            filled[path] = put_layer(filled[path], layer, jnp.int32(entry.wanted.layer))
    leaves = {path: leaf.replace(filled[".".join(map(str, path))]) for path, leaf in nnx.to_flat_state(state)}
    return nnx.from_flat_state(leaves)


def read_part(
    source: TensorSource, entry: Match, part: int, shape: tuple[int, ...], leaf: jax.ShapeDtypeStruct
) -> jax.Array:
    """Part `part` of a tensor, of `shape`, as an array on the devices, padded to that of `leaf`; each device's slice is
    read by itself."""
    key = entry.wanted.key
    layout = key.layout(len(shape))
    sizes = key.sizes(layout, shape)
    several = len(key.parts) > 1

    def read(index: Index) -> np.ndarray:
        wanted = (slice(part, part + 1), *index) if several else index
        by_name = dict(zip(layout.wanted, wanted, strict=True))
        stored = source.read(entry.name, layout.stored_index(sizes, by_name))
        cut = {name: len(range(*by_name[name].indices(size))) for name, size in sizes.items()}
        values = rearrange(stored, layout.forward, **cut)
        return cast(values[0] if several else values, leaf.dtype, entry.name)

    return padded_array(leaf, shape, read)


def within(index: Index, shape: tuple[int, ...]) -> Index:
    """What of the slices `index` lies within `shape`."""
    return tuple(slice(*part.indices(size)) for part, size in zip(index, shape, strict=True))


def padded_array(leaf: jax.ShapeDtypeStruct, shape: tuple[int, ...], read: Callable[[Index], np.ndarray]) -> jax.Array:
    """The array of an abstract `leaf` whose first rows, of `shape`, are read slice by slice; zeros behind them."""

    def part(index: Index | None) -> np.ndarray:
        wanted = within(index or (slice(None),) * len(shape), leaf.shape)
        values = read(within(wanted, shape))
        lengths = (one.stop - one.start for one in wanted)
        missing = [(0, length - size) for length, size in zip(lengths, values.shape, strict=True)]
        return np.pad(values, missing) if any(after for _, after in missing) else values

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, part)


def cast(values: np.ndarray, dtype: Any, name: str) -> np.ndarray:
    """A copy of `values` in another dtype; a warning says where that makes infinities."""
    with np.errstate(over="ignore"):
        made = np.array(values, dtype, order="C")
    if made.dtype == np.float16 and np.isinf(made).any() and not np.isinf(values).any():
        log.warning("%s: has numbers that float16 cannot hold and that become infinite; bfloat16 is safe", name)
    return made


def unpadded(leaf: nnx.Param) -> jax.Array:
    """A parameter as checkpoints have it."""
    value, shape = leaf.get_value(), stored_shape(leaf)
    return value if value.shape == shape else value[tuple(slice(size) for size in shape)]


def stored_tensor(wanted: Wanted, leaves: dict[str, nnx.Param]) -> np.ndarray:
    """The tensor of the checkpoint, from the parameters `leaves`."""
    values = [unpadded(leaves[path]) for path in wanted.key.parts]
    arrays = [np.asarray(value if wanted.layer is None else value[wanted.layer]) for value in values]
    layout = wanted.key.layout(arrays[0].ndim)
    whole = np.stack(arrays) if len(arrays) > 1 else arrays[0]
    sizes = wanted.key.sizes(layout, arrays[0].shape)
    return np.ascontiguousarray(rearrange(whole, layout.backward, **sizes))


def save(folder: Path, family: Family, config: ModelConfig, state: nnx.State, shard_bytes: int = 5 << 30) -> None:
    """Writes a model as a Hugging Face folder.

    Raises:
        UsageError: `folder` holds a checkpoint already.
    """
    leaves = flat_state(state)
    tensors = hf_tensors(family, state)
    sizes = {
        name: math.prod(wanted.shape) * leaves[wanted.key.parts[0]].get_value().dtype.itemsize
        for name, wanted in tensors.items()
    }
    write_hf(folder, config, sizes, lambda name: stored_tensor(tensors[name], leaves), shard_bytes)


def hf_tensors(family: Family, state: nnx.State) -> dict[str, Wanted]:
    """The tensors of the Hugging Face checkpoint of `state`, which may be abstract, by full name."""
    return {hf_name(family, wanted): wanted for wanted in wanted_tensors(family, stored_shapes(state))}


def hf_name(family: Family, wanted: Wanted) -> str:
    return (family.prefixes[0] if wanted.key.prefixed else "") + wanted.name


def write_hf(
    folder: Path,
    config: ModelConfig,
    sizes: dict[str, int],
    read: Callable[[str], np.ndarray],
    shard_bytes: int = 5 << 30,
) -> None:
    """Writes `config.json` and safetensors as transformers reads them, holding a shard at a time.

    Args:
        sizes: of the tensors, in bytes.
        read: gives a tensor.

    Raises:
        UsageError: `folder` holds a checkpoint already.
    """
    from huggingface_hub import split_state_dict_into_shards_factory
    from safetensors.numpy import save_file

    if any(folder.glob("*.safetensors")) or (folder / "config.json").exists():
        raise UsageError(f"{folder}: holds a checkpoint already; choose another folder")
    split = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=lambda size: size,
        get_storage_id=lambda size: None,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    folder.mkdir(parents=True, exist_ok=True)
    for file, names in split.filename_to_tensors.items():
        save_file({name: read(name) for name in names}, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    write_config(folder, config)
    for file in split.filename_to_tensors:  # which the library keeps to its owner
        shutil.copymode(folder / "config.json", folder / file)


def write_config(folder: Path, config: ModelConfig) -> None:
    (folder / "config.json").write_text(json.dumps(config.to_hf(), indent=2) + "\n", encoding="utf-8")
