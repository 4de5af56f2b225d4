"""Orbax checkpoints of a model's parameters: restored onto any mesh, each device reading its own part."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import tensorstore as ts
from flax import nnx

from ralm_jax.errors import RalmError, first_line
from ralm_jax.layers import stored_shape
from ralm_jax.sources.base import Index, sampled_hash
from ralm_jax.weights import cast, flat_state, padded_array, some, stored_shapes, unpadded, within

FOLDER = "orbax"  # inside a model's folder, beside its config.json and tokenizer
DRIVERS = {".zarray": "zarr", "zarr.json": "zarr3"}  # by the file that describes an array
MEND = "copy it again, or convert the model anew"


def there(folder: Path) -> bool:
    return (folder / FOLDER).is_dir()


def save(folder: Path, state: nnx.State) -> None:
    """Writes the parameters of `state` to `folder`."""
    import orbax.checkpoint as ocp  # takes a second to import

    arrays = {path: unpadded(leaf) for path, leaf in flat_state(state).items()}
    with ocp.StandardCheckpointer() as orbax:
        orbax.save((folder / FOLDER).absolute(), arrays)


def opened(folder: Path) -> dict[str, ts.TensorStore]:
    """The stored parameters by name, unread: Zarr arrays, in a database (OCDBT) unless Orbax was told otherwise.

    Orbax itself reads in an event loop that it closes when the first read fails; the others, as they end, then print
    pages of errors that nobody can catch.

    Raises:
        RalmError: the checkpoint is damaged.
    """
    path = (folder / FOLDER).absolute()
    files = {"driver": "file", "path": f"{path}/"}
    with reading(path):
        database = (path / "manifest.ocdbt").exists()
        store = ts.KvStore.open({"driver": "ocdbt", "base": files} if database else files).result()
        keys = [key.decode().rpartition("/") for key in store.list().result()]
    stores = {}
    for name, _, file in keys:
        if file in DRIVERS:
            spec = {"driver": DRIVERS[file], "fill_missing_data_reads": False}
            with reading(path, name):
                stores[name] = ts.open(spec, kvstore=store / f"{name}/", open=True).result()
    if not stores:
        raise RalmError(f"{path}: not a whole Orbax checkpoint (no parameters); {MEND}")
    return stores


@contextmanager
def reading(path: Path, name: str = "") -> Iterator[None]:
    """
    Raises:
        RalmError: the checkpoint at `path`, or its parameter `name`, cannot be read within.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        what = f"{name} cannot be read: " if name else ""
        raise RalmError(f"{path}: not a whole Orbax checkpoint ({what}{first_line(error)}); {MEND}") from None


def dtype(folder: Path) -> str:
    """Of the parameters."""
    return str(next(iter(opened(folder).values())).dtype.numpy_dtype)


def restore(folder: Path, state: nnx.State) -> nnx.State:
    """Fills the abstract `state` (shapes, dtypes, shardings) from `folder`.

    Raises:
        RalmError: it is damaged, or holds other parameters.
    """
    path, stores = (folder / FOLDER).absolute(), check(folder, state)

    def read(name: str, parameter: nnx.Param) -> jax.Array:
        leaf, shape = parameter.get_value(), stored_shape(parameter)
        indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        stored = {str(index): index for index in (within(within(index, leaf.shape), shape) for index in indices)}
        # all at once, so that a chunk that several devices share is decoded once
        parts = {key: stores[name][index].read() for key, index in stored.items()}

        def part(index: Index) -> np.ndarray:
            with reading(path, name):
                values = parts[str(index)].result()
            return values if values.dtype == leaf.dtype else cast(values, leaf.dtype, name)

        return padded_array(leaf, shape, part)

    wanted = flat_state(state)
    with ThreadPoolExecutor() as pool:
        arrays = dict(zip(wanted, pool.map(read, wanted.keys(), wanted.values()), strict=True))
    leaves = {path: leaf.replace(arrays[".".join(map(str, path))]) for path, leaf in nnx.to_flat_state(state)}
    return nnx.from_flat_state(leaves)


def check(folder: Path, state: nnx.State) -> dict[str, ts.TensorStore]:
    """The stored parameters, which are those of the abstract `state`.

    Raises:
        RalmError: naming all that is wrong.
    """
    wanted, found = stored_shapes(state), opened(folder)
    wrong = [f"{name} is missing" for name in wanted.keys() - found.keys()]
    wrong += [f"{name} is unknown" for name in found.keys() - wanted.keys()]
    wrong += [
        f"{name} has shape {list(found[name].shape)}, expected {list(wanted[name])}"
        for name in wanted.keys() & found.keys()
        if tuple(found[name].shape) != wanted[name]
    ]
    if wrong:
        raise RalmError(f"{folder}: the weights do not fit: {some(sorted(wrong))}")
    return found


def fingerprint(folder: Path) -> str:
    """Over the names of the checkpoint's files and samples of each."""
    path, digest = (folder / FOLDER).absolute(), hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file():
            digest.update(f"{file.relative_to(path)}".encode() + sampled_hash(file, [(0, file.stat().st_size)]))
    return digest.hexdigest()
