"""The mesh, and the rules that place every parameter and activation on it by logical axis names.

Mesh axes are `(data, fsdp, tensor)`. A batch is split over `data` and `fsdp`; parameters over `fsdp` and `tensor`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ralm_jax.errors import UsageError

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")

RULES: dict[str, Any] = {
    "layers": None,
    "position": None,
    "head_dim": None,
    "word": None,
    "token_type": None,
    "pooled": None,
    "label": None,
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "batch": BATCH_AXES,
}


def make_mesh(
    data: int | None = None, fsdp: int = 1, tensor: int = 1, *, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh over `devices` (default: all of this job); `data` takes what `fsdp` and `tensor` leave.

    Raises:
        UsageError: `fsdp` and `tensor` do not divide the devices, or more devices are asked for than there are.
    """
    devices = jax.devices() if devices is None else devices
    if data is None:
        if fsdp * tensor < 1 or len(devices) % (fsdp * tensor):
            raise UsageError(f"fsdp={fsdp} times tensor={tensor} does not divide the {len(devices)} devices here")
        data = len(devices) // (fsdp * tensor)
    if not 1 <= data * fsdp * tensor <= len(devices):
        raise UsageError(f"mesh data={data}, fsdp={fsdp}, tensor={tensor} does not fit the {len(devices)} devices here")
    used = devices[: data * fsdp * tensor]
    return jax.make_mesh((data, fsdp, tensor), AXES, axis_types=(AxisType.Auto,) * 3, devices=used)


def parse_mesh(text: str) -> dict[str, int]:
    """What `make_mesh` takes, of text such as "data=2,fsdp=4,tensor=1"; an axis that is left out has the size that
    `make_mesh` gives it.

    Raises:
        UsageError: another axis, one that is named twice, or a size that is not 1 or more.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (piece.strip() for piece in part.partition("="))
        if axis not in AXES or axis in sizes or not size.isdecimal() or int(size) < 1:
            raise UsageError(f"mesh {text!r}: expected such as data=2,fsdp=4,tensor=1, each of {', '.join(AXES)} once")
        sizes[axis] = int(size)
    return sizes


@contextmanager
def on_mesh(mesh: Mesh) -> Iterator[None]:
    """Runs a block with `mesh` as the current mesh and `RULES` as the meaning of logical axis names."""
    with jax.set_mesh(mesh), nnx.logical_axis_rules(tuple(RULES.items())):
        yield


def abstract_model(make: Callable[[], nnx.Module], mesh: Mesh) -> tuple[Any, nnx.State]:
    """The graph definition and the state of `make()` as shapes, dtypes and shardings: nothing is allocated.

    Raises:
        UsageError: a parameter that the mesh cannot cut into equal parts.
    """
    with on_mesh(mesh):
        graphdef, state = nnx.get_abstract_model(make, mesh)
    check_divisible(state, mesh)
    return graphdef, state


def check_divisible(state: nnx.State, mesh: Mesh) -> None:
    """
    Raises:
        UsageError: naming the first parameter of the abstract `state` that `mesh` cannot cut into equal parts, and the
            next smaller size of the mesh's axis with which all can be cut.
    """
    cut: dict[str, list[tuple[str, str, int]]] = {}  # by axis of the mesh: parameters, with axis and size
    for path, leaf in nnx.to_flat_state(state):
        for axis, size in zip(leaf.get_metadata("out_sharding"), leaf.get_value().shape, strict=True):
            if axis and RULES[axis]:
                cut.setdefault(RULES[axis], []).append((".".join(map(str, path)), axis, size))
    for name, parameters in cut.items():
        parts, common = mesh.shape[name], math.gcd(*(size for _, _, size in parameters))
        for parameter, axis, size in parameters:
            if size % parts:
                works = max(n for n in range(1, parts) if common % n == 0)
                raise UsageError(
                    f"{parameter}: {name}={parts} does not divide its axis {axis!r} of {size}; the next smaller size "
                    f"that works is {name}={works}"
                )


def parts_of(axis: str) -> int:
    """Into how many parts the current mesh cuts the logical `axis` of a parameter; 1 outside a mesh."""
    mesh, name = jax.sharding.get_abstract_mesh(), RULES[axis]
    return 1 if mesh.empty or name is None else mesh.shape[name]


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Holds the activation `x` to the placement that `RULES` give its logical `axes`; outside a mesh, `x` itself."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*(axis and RULES[axis] for axis in axes)))


def batch_multiple(mesh: Mesh) -> int:
    """The number that a batch must be a multiple of: the devices that share it."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def own_mesh() -> Mesh:
    """All devices of this process, sharing the batch: for models so small that processes need not share them."""
    return make_mesh(devices=jax.local_devices())


def shard_batch(mesh: Mesh, array: np.ndarray | jax.Array) -> jax.Array:
    """Places `array` (batch first), which all processes have whole, on the devices that share the batch."""
    return place(array, NamedSharding(mesh, PartitionSpec(BATCH_AXES)))


def place(array: np.ndarray | jax.Array, sharding: NamedSharding) -> jax.Array:
    """Places `array`, which all processes have whole; each places what is on its own devices."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(place(whole(jax.random.key_data(array)), sharding))
    return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])


def replicated(tree: Any, mesh: Mesh) -> Any:
    """`tree` with every array whole on every device; itself where this process has all of it."""
    if all(leaf.is_fully_addressable for leaf in jax.tree.leaves(tree)):
        return tree
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))(tree)


def whole(array: Any) -> np.ndarray:
    """All of `array`, of which other processes may have parts; then all have to ask for it."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
