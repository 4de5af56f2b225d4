"""What readers and encoders have in common: a family's module with weights, loaded strictly and placed on a mesh."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from ralm_jax import checkpoint, processes, weights
from ralm_jax.attention import check_device
from ralm_jax.config import ConfigFile, ModelConfig
from ralm_jax.keys import Family
from ralm_jax.settings import AttentionName
from ralm_jax.sharding import abstract_model, make_mesh, on_mesh
from ralm_jax.sources import open_source
from ralm_jax.sources.gguf import gguf_config, open_gguf

log = logging.getLogger("ralm")

WEIGHTS_SHARE = 0.6  # of a device's memory; the rest is for what is computed
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


@dataclass(frozen=True)
class Model:
    """A model's definition and parameters, ready for any jit: pass `graphdef` as a static argument, `state` as data."""

    name: str
    family: Family
    config: ModelConfig
    graphdef: nnx.GraphDef
    state: nnx.State
    mesh: Mesh
    dtype: str
    fingerprint: str  # of the weights

    def save(self, folder: Path) -> None:
        """Writes the model as a Hugging Face folder (without tokenizer)."""
        weights.save(folder, self.family, self.config, self.state)


def matmul_precision(dtype: DTypeLike) -> Any:
    """Float32 means float32: TPUs and GPUs would otherwise round the factors of a product."""
    return jax.default_matmul_precision("highest" if dtype == jnp.float32 else "default")


def config_file(path: Path) -> ConfigFile:
    """The configuration of a model folder or .gguf file, in Hugging Face's terms.

    Raises:
        RalmError: there is none, or it is damaged.
    """
    return gguf_config(open_gguf(path)) if path.is_file() else ConfigFile.read(path)


def family_of(file: ConfigFile, families: Mapping[str, Family]) -> tuple[Family, ModelConfig]:
    """The family and configuration of a model.

    Raises:
        RalmError: a family that is not one of `families`, or a value that no model here implements.
    """
    family = families[file.choice("model_type", families)]
    return family, family.config.from_hf(file)


def load_model(
    name: str,
    path: Path,
    families: Mapping[str, Family],
    dtype: str,
    mesh: Mesh | None,
    attention: AttentionName = "auto",
) -> Model:
    """Loads the model at `path` onto a mesh (default: `fitting_mesh`).

    Raises:
        UsageError: its attention cannot be computed so on these devices.
        RalmError: the model cannot be loaded exactly; the message says why.
    """
    model = unloaded_model(name, path, families, dtype, mesh, attention)
    with on_mesh(model.mesh):
        if checkpoint.there(path):
            state = checkpoint.restore(path, model.state)
        else:
            state = weights.load(model.family, model.state, model.config, open_source(path), str(path))
    return replace(model, state=state)


def unloaded_model(
    name: str,
    path: Path,
    families: Mapping[str, Family],
    dtype: str,
    mesh: Mesh | None,
    attention: AttentionName = "auto",
) -> Model:
    """What `load_model` would load, with shapes in place of the parameters.

    Raises:
        UsageError: as `load_model`.
        RalmError: no configuration or weights, or such as cannot be read.
    """
    family, config = family_of(config_file(path), families)
    mesh = mesh or fitting_mesh(family, config, dtype)
    check_device(attention, mesh.devices.flat[0].platform, DTYPES[dtype], config.head_dim)
    config = replace(config, attention=attention)
    graphdef, state = abstract(family, config, mesh, dtype)
    there = checkpoint.there(path)
    fingerprint = checkpoint.fingerprint(path) if there else open_source(path).fingerprint()
    return Model(name, family, config, graphdef, state, mesh, dtype, fingerprint)


def fitting_mesh(family: Family, config: ModelConfig, dtype: str) -> Mesh:
    """All devices share the batch if a device has room for the weights; else `tensor` is the smallest power of two, up
    to the heads, with which it has."""
    room = processes.once(lambda: (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit"))
    if room is None:  # the platform does not say
        return make_mesh()
    leaves = jax.tree.leaves(abstract(family, config, make_mesh(data=1), dtype)[1])
    size, tensor = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves), 1
    while size / tensor > WEIGHTS_SHARE * room and math.gcd(config.num_heads, len(jax.devices())) % (2 * tensor) == 0:
        tensor *= 2
    return make_mesh(tensor=tensor)


def warn_of_overflow(model: Model) -> None:
    if model.dtype == "float16" and model.family.narrow:
        log.warning(
            "%s: activations of %s are known to overflow float16; bfloat16 is safe", model.name, model.family.name
        )


def abstract(family: Family, config: ModelConfig, mesh: Mesh, dtype: str = "float32") -> tuple[nnx.GraphDef, nnx.State]:
    """Definition and state of a model as shapes, dtypes and shardings; nothing is allocated."""
    make: Any = family.model
    return abstract_model(lambda: make(config, rngs=nnx.Rngs(0), dtype=DTYPES[dtype]), mesh)


def random_model(
    family: Family, config: ModelConfig, *, seed: int = 0, dtype: str = "float32", mesh: Mesh | None = None
) -> Model:
    """A model with random weights, for tests and benchmarks of any size."""
    mesh = mesh or make_mesh()
    graphdef, state = abstract(family, config, mesh, dtype)
    make: Any = family.model

    def initial_state() -> nnx.State:
        return nnx.state(make(config, rngs=nnx.Rngs(seed), dtype=DTYPES[dtype]))

    with on_mesh(mesh):
        state = jax.jit(initial_state, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, state))()
    return Model("random", family, config, graphdef, state, mesh, dtype, f"random {seed}")
