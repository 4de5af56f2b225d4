"""Pods of TPUs that need not be there: libtpu compiles for them on any machine."""

import re
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, SingleDeviceSharding

from ralm_jax.errors import RalmError, UsageError, first_line
from ralm_jax.sharding import on_mesh

GENERATIONS = ("v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x")  # asked of libtpu, which does not list what it knows
ONE_DEVICE_A_CHIP = {"v4": {"chip_config_name": "megacore"}}  # as jobs have it; libtpu's default is a device a core
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class Pod:
    """
    Attributes:
        devices: for meshes and compilation.
        memory: bytes of a device that a program and its arguments can have.
    """

    devices: list[jax.Device]
    memory: int


def open_pod(name: str) -> Pod:
    """The pod of a topology such as v5p:2x2x4 or v5e:4x8: a generation, and chips along each axis.

    Raises:
        UsageError: libtpu knows no such topology.
    """
    if not re.fullmatch(r"\w+:\d+(x\d+){1,2}", name):
        raise UsageError(f"topology {name!r}: expected such as v5p:2x2x4 or v5e:4x8")
    try:
        devices = topology_devices(name)
    except jax.errors.JaxRuntimeError as error:
        reason = error_text(error)
        if "Invalid TPU external name" in reason:
            reason = f"libtpu {metadata.version('libtpu')} knows {', '.join(filter(is_known, GENERATIONS))}"
        raise UsageError(f"topology {name}: {reason}") from None
    return Pod(devices, device_memory(devices[0]))


def topology_devices(name: str) -> list[jax.Device]:
    options: dict[str, Any] = ONE_DEVICE_A_CHIP.get(name.partition(":")[0], {})
    return topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices


def is_known(generation: str) -> bool:
    try:
        return bool(topology_devices(f"{generation}:2x2x1"))
    except jax.errors.JaxRuntimeError:
        return False


class TooLarge(Exception):
    """A program does not fit.

    Attributes:
        needs: bytes a device that it would take, as the compiler estimates; within some hundredths of what compiling
            it for a larger device gives.
        memory: bytes that there are.
    """

    def __init__(self, text: str):
        """
        Raises:
            RalmError: `text`, the compiler's, does not tell.
        """
        sizes = [float(size) * UNITS[unit] for size, unit in re.findall(r"([\d.]+)([KMGT])\b", text)]
        if len(sizes) < 2:
            raise RalmError(f"libtpu {metadata.version('libtpu')} does not say how much memory there is: {text}")
        self.needs, self.memory = map(int, sizes[:2])


def device_memory(device: jax.Device) -> int:
    """Bytes of `device` that programs can have: the compiler tells when it refuses one that takes far too much."""
    huge = jax.ShapeDtypeStruct((1 << 45,), jnp.int8, sharding=SingleDeviceSharding(device))
    try:
        compiled(jax.jit(jnp.negative).lower(huge))
    except TooLarge as refusal:
        return refusal.memory
    raise RalmError(f"libtpu {metadata.version('libtpu')} finds room for anything")


def compile_for(mesh: Mesh, step: Any, args: tuple[Any, ...]) -> dict[str, int]:
    """Bytes a device, by part, that what `jax.jit` made needs beside its arguments on the devices of `mesh`.

    Args:
        args: shapes in place of arrays.

    Raises:
        TooLarge: it does not fit.
        RalmError: the compiler fails in another way.
    """
    with on_mesh(mesh):
        lowered = step.lower(*args)
    needs = compiled(lowered).memory_analysis()
    return {
        "outputs": needs.output_size_in_bytes - needs.alias_size_in_bytes,
        "temporaries": needs.temp_size_in_bytes,
        "program": needs.generated_code_size_in_bytes,
    }


def compiled(lowered: Any) -> Any:
    """As `compile_for`."""
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if "RESOURCE_EXHAUSTED" in text and re.search(r"\bhbm\b", text, re.IGNORECASE):
            raise TooLarge(error_text(error)) from None
        raise RalmError(f"the TPU compiler fails: {error_text(error)}") from None


def error_text(error: BaseException) -> str:
    """The first line of what libtpu says, without the kind of its error."""
    return re.sub(r"^[A-Z_]+: ", "", first_line(error))
