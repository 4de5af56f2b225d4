"""A reader: a frozen language model, loaded strictly and placed on a mesh."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from ralm_jax import weights
from ralm_jax.config import ConfigFile, ReaderConfig
from ralm_jax.hub import locate
from ralm_jax.keys import Family
from ralm_jax.models import FAMILIES
from ralm_jax.sharding import abstract_model, make_mesh, on_mesh
from ralm_jax.sources import GGUFSource, SafetensorsSource, TensorSource, gguf_config, open_gguf

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclass(frozen=True)
class Reader:
    """A model's definition and parameters, ready for any jit: pass `graphdef` as a static argument, `state` as data."""

    name: str
    family: Family
    config: ReaderConfig
    graphdef: nnx.GraphDef
    state: nnx.State
    mesh: Mesh
    dtype: str
    fingerprint: str  # of the weights

    def logits(self, tokens: Int[Array, "B T"], valid: Bool[Array, "B T"] | None = None) -> Float[Array, "B T V"]:
        """Float32 logits of every position, for checks and small inputs; scoring never forms these."""
        with on_mesh(self.mesh):
            return all_logits(self.graphdef, self.state, tokens, valid)

    def save(self, folder: Path) -> None:
        """Writes the reader as a Hugging Face folder (without tokenizer)."""
        weights.save(folder, self.family, self.config, self.state)


def matmul_precision(dtype: DTypeLike) -> Any:
    """Float32 means float32: TPUs and GPUs would otherwise round the factors of a product."""
    return jax.default_matmul_precision("highest" if dtype == jnp.float32 else "default")


@functools.partial(jax.jit, static_argnums=0)
def all_logits(graphdef: nnx.GraphDef, state: nnx.State, tokens: jax.Array, valid: jax.Array | None) -> jax.Array:
    with matmul_precision(jax.tree.leaves(state)[0].dtype):
        return nnx.merge(graphdef, state)(tokens, valid)


def read_config(path: Path) -> tuple[Family, ReaderConfig]:
    """The family and configuration of a model folder or .gguf file.

    Raises:
        RalmError: no configuration, a family that is not supported, or a value that no reader here implements.
    """
    file = gguf_config(open_gguf(path)) if path.is_file() else ConfigFile.read(path)
    family = FAMILIES[file.choice("model_type", FAMILIES)]
    return family, family.config.from_hf(file)


def load_reader(model: str, *, dtype: str = "float32", mesh: Mesh | None = None) -> Reader:
    """Loads a reader onto a mesh (default: all devices share the batch).

    Args:
        model: a folder with config.json and safetensors, a llama .gguf file, or a Hugging Face id.
        dtype: of parameters and activations, "float32" or "bfloat16".

    Raises:
        UsageError: no such model.
        RalmError: the model cannot be loaded exactly; the message says why.
    """
    path = locate(model)
    family, config = read_config(path)
    source: TensorSource = GGUFSource(open_gguf(path)) if path.is_file() else SafetensorsSource(path)
    mesh = mesh or make_mesh()
    graphdef, abstract = abstract_reader(family, config, mesh, dtype)
    with on_mesh(mesh):
        state = weights.load(family, abstract, config, source, str(path))
    return Reader(model, family, config, graphdef, state, mesh, dtype, source.fingerprint())


def abstract_reader(
    family: Family, config: ReaderConfig, mesh: Mesh, dtype: str = "float32"
) -> tuple[nnx.GraphDef, nnx.State]:
    """Definition and state of a reader as shapes, dtypes and shardings; nothing is allocated."""
    make: Any = family.model
    return abstract_model(lambda: make(config, rngs=nnx.Rngs(0), dtype=DTYPES[dtype]), mesh)


def random_reader(config: ReaderConfig, *, seed: int = 0, dtype: str = "float32", mesh: Mesh | None = None) -> Reader:
    """A reader with random weights, for tests and benchmarks of any size."""
    family = FAMILIES[config.model_type]
    mesh = mesh or make_mesh()
    graphdef, abstract = abstract_reader(family, config, mesh, dtype)
    make: Any = family.model

    def initial_state() -> nnx.State:
        return nnx.state(make(config, rngs=nnx.Rngs(seed), dtype=DTYPES[dtype]))

    with on_mesh(mesh):
        state = jax.jit(initial_state, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract))()
    return Reader("random", family, config, graphdef, state, mesh, dtype, f"random {seed}")
