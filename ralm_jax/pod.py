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
ENDLESS = {"xla_tpu_max_hbm_size_mib": str(1 << 26)}


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


def device_memory(device: jax.Device) -> int:
    """Bytes of `device` that programs can have; the compiler tells when it refuses one that takes far too much.

    Raises:
        RalmError: it does not tell.
    """
    huge = jax.ShapeDtypeStruct((1 << 45,), jnp.int8, sharding=SingleDeviceSharding(device))
    try:
        jax.jit(jnp.negative).lower(huge).compile()
        text = "it has no end"
    except jax.errors.JaxRuntimeError as error:
        text = error_text(error)
    found = re.search(r"(?:available HBM \(|Used \S+ of )([\d.]+)([MGT])", text)
    if not found:
        raise RalmError(f"libtpu {metadata.version('libtpu')} does not say how much memory a device has: {text}")
    return int(float(found[1]) * {"M": 1 << 20, "G": 1 << 30, "T": 1 << 40}[found[2]])


def compile_for(mesh: Mesh, step: Any, args: tuple[Any, ...], *, endless: bool = False) -> dict[str, int] | None:
    """Compiles what `jax.jit` made for the devices of `mesh`.

    Args:
        args: shapes in place of arrays.
        endless: as if the devices had memory without end.

    Returns:
        Bytes a device that it needs beside its arguments, by part; None if that is more than there is.

    Raises:
        RalmError: the compiler fails in another way.
    """
    with on_mesh(mesh):
        lowered = step.lower(*args)
    try:
        needs = lowered.compile(compiler_options=ENDLESS if endless else None).memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if "RESOURCE_EXHAUSTED" in text and re.search(r"\bhbm\b", text, re.IGNORECASE) and not endless:
            return None
        raise RalmError(f"the TPU compiler fails: {error_text(error)}") from None
    return {
        "outputs": needs.output_size_in_bytes - needs.alias_size_in_bytes,
        "temporaries": needs.temp_size_in_bytes,
        "program": needs.generated_code_size_in_bytes,
    }


def error_text(error: BaseException) -> str:
    """The first line of what libtpu says, without the kind of its error."""
    return re.sub(r"^[A-Z_]+: ", "", first_line(error))
