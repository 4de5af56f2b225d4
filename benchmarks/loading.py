"""Loading: how much host memory does a large sharded checkpoint take on its way to the devices?

    python benchmarks/loading.py                    2 GB of float32 safetensors onto 8 CPU devices
    python benchmarks/loading.py --format msgpack   the same as one Flax file
    python benchmarks/loading.py --quick --json out.json

The checkpoint is a random Llama, written by program. CPU devices keep their arrays in host memory: what loading adds is
the peak of resident memory less what was resident before and less the model itself. The bound is 1.2 times the largest
tensor and 300 MB; `ratio` is the bound over what was added.
"""

import json
import os
import resource
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
from processes import run_apart

DEVICES = 8


@dataclass(frozen=True)
class Options:
    """Peak memory of loading a large checkpoint."""

    layers: int = 26
    """Layers of the random Llama; 26 make 2 GB."""
    shard_mb: int = 400
    """Megabytes a shard."""
    format: Literal["safetensors", "msgpack"] = "safetensors"
    """Of the checkpoint."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the loaded parameters."""
    quick: bool = False
    """Two layers."""
    json: str | None = None
    """Also write the figures to this file."""


def write_checkpoint(folder: str, layers: int, shard_mb: int, format: str) -> dict[str, Any]:
    """Random tensors of a Llama, a shard at a time; how large they are."""
    import flax.serialization

    from ralm_jax import weights
    from ralm_jax.model import abstract
    from ralm_jax.models import FAMILIES, SIZES
    from ralm_jax.sharding import make_mesh

    config = replace(
        SIZES["llama-7b"], num_layers=layers, hidden_size=1280, num_heads=20, num_kv_heads=20, head_dim=64,
        mlp_size=3456, vocab_size=32000,
    )  # fmt: skip
    _, state = abstract(FAMILIES["llama"], config, make_mesh(data=1))
    tensors = weights.hf_tensors(FAMILIES["llama"], state)
    rng = np.random.default_rng(0)
    sizes = {name: 4 * int(np.prod(wanted.shape)) for name, wanted in tensors.items()}

    def read(name: str) -> np.ndarray:
        return rng.standard_normal(tensors[name].shape, np.float32)

    if format == "safetensors":
        weights.write_hf(Path(folder), config, sizes, read, shard_mb << 20)
    else:
        tree: dict[str, Any] = {}
        for name in tensors:
            own, places = tree, name.split(".")[:-1]
            for place in places:
                own = own.setdefault(place, {})
            values = read(name)
            norm, embedding = values.ndim == 1, "embed" in name
            own["scale" if norm else "embedding" if embedding else "kernel"] = values if embedding else values.T
        Path(folder).mkdir()
        (Path(folder) / "flax_model.msgpack").write_bytes(flax.serialization.msgpack_serialize(tree))
        weights.write_config(Path(folder), config)
    return {"checkpoint_mb": sum(sizes.values()) / 1e6, "largest_tensor_mb": max(sizes.values()) / 1e6}


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def load(folder: str, dtype: str) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    from ralm_jax.reader import load_reader
    from ralm_jax.sharding import make_mesh

    mesh = make_mesh(data=1, fsdp=4, tensor=2)
    jax.jit(lambda x: x + 1)(jnp.ones(8)).block_until_ready()
    before, started = resident_mb(), time.perf_counter()
    reader = load_reader(folder, dtype=dtype, mesh=mesh)
    jax.block_until_ready(reader.state)
    seconds = time.perf_counter() - started
    model = sum(shard.data.nbytes for leaf in jax.tree.leaves(reader.state) for shard in leaf.addressable_shards)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return {"before_mb": before, "model_mb": model / 1e6, "peak_mb": peak, "seconds": seconds}


def main() -> None:
    options = tyro.cli(Options, config=(tyro.conf.FlagCreatePairsOff,))
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    layers = 2 if options.quick else options.layers
    with tempfile.TemporaryDirectory() as place:
        folder = str(Path(place) / "checkpoint")
        figures = run_apart(write_checkpoint, folder, layers, options.shard_mb, options.format)
        figures |= run_apart(load, folder, options.dtype)
    figures["added_mb"] = figures["peak_mb"] - figures["before_mb"] - figures["model_mb"]
    figures["bound_mb"] = 1.2 * figures["largest_tensor_mb"] + 300
    figures["ratio"] = figures["bound_mb"] / max(figures["added_mb"], 1e-9)
    figures |= {"format": options.format, "dtype": options.dtype, "devices": DEVICES}

    print(f"{options.format}, {figures['checkpoint_mb']:,.0f} MB onto {DEVICES} CPU devices as {options.dtype}")
    for name, key in (
        ("largest tensor", "largest_tensor_mb"),
        ("model on the devices", "model_mb"),
        ("resident before", "before_mb"),
        ("resident at the peak", "peak_mb"),
        ("added by loading", "added_mb"),
        ("bound", "bound_mb"),
    ):
        print(f"{name:<22}{figures[key]:>9,.0f} MB")
    print(f"ratio {figures['ratio']:.2f}; {figures['seconds']:.1f} s")
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
