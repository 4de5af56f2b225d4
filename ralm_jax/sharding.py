"""The mesh, and the rules that place every parameter and activation on it by logical axis names.

Mesh axes are `(data, fsdp, tensor)`. A batch is split over `data` and `fsdp`; parameters over `fsdp` and `tensor`.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ralm_jax.errors import UsageError

BATCH_AXES = ("data", "fsdp")

RULES = (
    ("layers", None),
    ("position", None),
    ("head_dim", None),
    ("word", None),
    ("token_type", None),
    ("pooled", None),
    ("label", None),
    ("embed", "fsdp"),
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("mlp", "tensor"),
    ("vocab", "tensor"),
    ("batch", BATCH_AXES),
)


def make_mesh(data: int | None = None, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """A mesh over this job's devices; `data` takes what `fsdp` and `tensor` leave.

    Raises:
        UsageError: `fsdp` and `tensor` do not divide the devices, or more devices are asked for than there are.
    """
    devices = jax.device_count()
    if data is None:
        if fsdp * tensor < 1 or devices % (fsdp * tensor):
            raise UsageError(f"fsdp={fsdp} times tensor={tensor} does not divide the {devices} devices here")
        data = devices // (fsdp * tensor)
    if not 1 <= data * fsdp * tensor <= devices:
        raise UsageError(f"mesh data={data}, fsdp={fsdp}, tensor={tensor} does not fit the {devices} devices here")
    used = jax.devices()[: data * fsdp * tensor]
    return jax.make_mesh(
        (data, fsdp, tensor), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3, devices=used
    )


@contextmanager
def on_mesh(mesh: Mesh) -> Iterator[None]:
    """Runs a block with `mesh` as the current mesh and `RULES` as the meaning of logical axis names."""
    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        yield


def abstract_model(make: Callable[[], nnx.Module], mesh: Mesh) -> tuple[Any, nnx.State]:
    """The graph definition and the state of `make()` as shapes, dtypes and shardings: nothing is allocated."""
    with on_mesh(mesh):
        graphdef, state = nnx.get_abstract_model(make, mesh)
    return graphdef, state


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Holds the activation `x` to the placement that `RULES` give its logical `axes`; outside a mesh, `x` itself."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    rules = dict(RULES)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*(axis and rules[axis] for axis in axes)))


def batch_multiple(mesh: Mesh) -> int:
    """The number that a batch must be a multiple of: the devices that share it."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def shard_batch(mesh: Mesh, array: np.ndarray | jax.Array) -> jax.Array:
    """Places `array` (batch first) on the devices that share the batch."""
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(BATCH_AXES)))
