"""Orbax checkpoints of a model's parameters: restored onto any mesh, each device reading its own part."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from ralm_jax.errors import RalmError, first_line
from ralm_jax.sources.base import sampled_hash
from ralm_jax.weights import flat_state, some

FOLDER = "orbax"  # inside a model's folder, beside its config.json and tokenizer


def there(folder: Path) -> bool:
    return (folder / FOLDER).is_dir()


def checkpointer() -> Any:
    import orbax.checkpoint as ocp  # takes a second to import

    return ocp.StandardCheckpointer()


def save(folder: Path, state: nnx.State) -> None:
    """Writes the parameters of `state` to `folder`."""
    arrays = {path: leaf.get_value() for path, leaf in flat_state(state).items()}
    with checkpointer() as orbax:
        orbax.save((folder / FOLDER).absolute(), arrays)


def metadata(folder: Path) -> dict[str, Any]:
    """Shapes and dtypes by parameter.

    Raises:
        RalmError: the checkpoint is damaged.
    """
    path = (folder / FOLDER).absolute()
    with checkpointer() as orbax:
        try:
            found = orbax.metadata(path).item_metadata
        except Exception as error:  # Orbax raises whatever its stores do
            raise RalmError(f"{path}: not a whole Orbax checkpoint ({first_line(error)})") from None
    if found is None or not found.tree:
        raise RalmError(f"{path}: not a whole Orbax checkpoint (no parameters)")
    return found.tree


def dtype(folder: Path) -> str:
    """Of the parameters."""
    return str(np.dtype(next(iter(metadata(folder).values())).dtype))


def restore(folder: Path, state: nnx.State) -> nnx.State:
    """Fills the abstract `state` (shapes, dtypes, shardings) from `folder`.

    Raises:
        RalmError: it is damaged, or holds other parameters.
    """
    path = (folder / FOLDER).absolute()
    check(folder, state)
    wanted = {name: leaf.get_value() for name, leaf in flat_state(state).items()}
    with checkpointer() as orbax:
        try:
            arrays = orbax.restore(path, wanted)
        except Exception as error:
            raise RalmError(f"{path}: not a whole Orbax checkpoint ({first_line(error)})") from None
    leaves = {path: leaf.replace(arrays[".".join(map(str, path))]) for path, leaf in nnx.to_flat_state(state)}
    return nnx.from_flat_state(leaves)


def check(folder: Path, state: nnx.State) -> None:
    """Refuses a checkpoint of other parameters than those of the abstract `state`.

    Raises:
        RalmError: naming all that is wrong.
    """
    wanted, found = {name: leaf.get_value() for name, leaf in flat_state(state).items()}, metadata(folder)
    wrong = [f"{name} is missing" for name in wanted.keys() - found.keys()]
    wrong += [f"{name} is unknown" for name in found.keys() - wanted.keys()]
    wrong += [
        f"{name} has shape {list(found[name].shape)}, expected {list(wanted[name].shape)}"
        for name in wanted.keys() & found.keys()
        if tuple(found[name].shape) != wanted[name].shape
    ]
    if wrong:
        raise RalmError(f"{folder}: the weights do not fit: {some(sorted(wrong))}")


def fingerprint(folder: Path) -> str:
    """Over the names of the checkpoint's files and samples of each."""
    path, digest = (folder / FOLDER).absolute(), hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file():
            digest.update(f"{file.relative_to(path)}".encode() + sampled_hash(file, [(0, file.stat().st_size)]))
    return digest.hexdigest()
