"""A process's share of a batch that is spread over the devices of several processes."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ralm_jax.errors import UsageError
from ralm_jax.sharding import BATCH_AXES, batch_multiple


class Share:
    """The rows of a batch that this process supplies and reads: those on its own devices.

    Processes whose devices hold the same rows, because the axis `tensor` spans them, are a group and supply the same.

    Attributes:
        multiple: devices that split a group's rows; their number is a multiple of it.
        groups: that make a batch together, with as many rows each.
        group: this process's.
        leads: whether this process is the first of its group.
    """

    def __init__(self, mesh: Mesh):
        """
        Raises:
            UsageError: processes that have some of their rows in common but not all, or fewer than others.
        """
        self._sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
        blocks = mesh.devices.reshape(batch_multiple(mesh), -1)  # the devices of each block of rows
        held: dict[int, tuple[int, ...]] = {}  # the blocks of each process
        for block, devices in enumerate(blocks):
            for process in {device.process_index for device in devices}:
                held[process] = (*held.get(process, ()), block)
        distinct, own = sorted(set(held.values())), jax.process_index()
        self.multiple = len(distinct[0])
        whole = len({len(some) for some in distinct}) == 1 and len(distinct) * self.multiple == len(blocks)
        if not whole or len(held) != jax.process_count():
            shape = ",".join(f"{axis}={size}" for axis, size in mesh.shape.items())
            raise UsageError(
                f"mesh {shape}: {jax.process_count()} processes cannot share it; take all devices of each, and let the "
                "devices of a process share rows with those of whole other processes or with none"
            )
        self.groups, self.group = len(distinct), distinct.index(held[own])
        self.leads = own == min(process for process, some in held.items() if some == held[own])
        self._blocks = held[own]

    def place(self, rows: np.ndarray) -> jax.Array:
        """The batch of which this process's group supplies `rows`, on the devices that share it."""
        if self.groups == 1 and self._sharding.is_fully_addressable:
            return jax.device_put(rows, self._sharding)
        parts = dict(zip(self._blocks, np.split(rows, self.multiple), strict=True))
        size = len(rows) // self.multiple

        def part(index: Any) -> np.ndarray:
            return parts[(index[0].start or 0) // size]

        return jax.make_array_from_callback((len(rows) * self.groups, *rows.shape[1:]), self._sharding, part)

    def read(self, batch: jax.Array) -> np.ndarray:
        """The rows of this process's group, once they are there."""
        if batch.is_fully_addressable:
            return np.asarray(batch)
        placed = jax.device_put(batch, self._sharding)  # where it is, unless the compiler had other ideas
        parts = {shard.index[0].start or 0: shard.data for shard in placed.addressable_shards}
        return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])
