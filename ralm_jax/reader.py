"""A reader: a frozen language model, loaded strictly and placed on a mesh."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from ralm_jax.config import ConfigFile, ReaderConfig
from ralm_jax.hub import locate
from ralm_jax.model import (
    Model,
    config_file,
    load_model,
    matmul_precision,
    random_model,
    unloaded_model,
    warn_of_overflow,
)
from ralm_jax.models import READERS
from ralm_jax.settings import AttentionName
from ralm_jax.sharding import on_mesh
from ralm_jax.text import read_object


@dataclass(frozen=True)
class Reader(Model):
    """A decoder-only language model.

    Attributes:
        ends: tokens that end a text.
    """

    config: ReaderConfig
    ends: tuple[int, ...] = ()

    @property
    def identity(self) -> dict[str, Any]:
        """What its log-probabilities depend on, for manifests."""
        return {"weights_sha256": self.fingerprint, "config": self.config.to_hf(), "dtype": self.dtype}

    def logits(self, tokens: Int[Array, "B T"], valid: Bool[Array, "B T"] | None = None) -> Float[Array, "B T V"]:
        """Float32 logits of every position, for checks and small inputs; scoring never forms these."""
        with on_mesh(self.mesh):
            return all_logits(self.graphdef, self.state, tokens, valid)[:, :, : self.config.vocab_size]


@functools.partial(jax.jit, static_argnums=0)
def all_logits(graphdef: nnx.GraphDef, state: nnx.State, tokens: jax.Array, valid: jax.Array | None) -> jax.Array:
    with matmul_precision(jax.tree.leaves(state)[0].dtype):
        return nnx.merge(graphdef, state)(tokens, valid)


def load_reader(
    model: str, *, dtype: str = "float32", mesh: Mesh | None = None, attention: AttentionName = "auto"
) -> Reader:
    """Loads a reader onto a mesh (default: all devices share the batch if each has room for the weights).

    Args:
        model: a folder with config.json and weights (safetensors, Flax's msgpack, Orbax; PyTorch's pickles if it is
            installed), a llama .gguf file, or a Hugging Face id.
        dtype: of parameters and activations, "float32", "bfloat16" or "float16".
        attention: how it is computed (`ralm_jax.attention`).

    Raises:
        UsageError: no such model, or an attention that these devices do not have.
        RalmError: the model cannot be loaded exactly; the message says why.
    """
    path = locate(model)
    ends = end_tokens(path)
    loaded = load_model(model, path, READERS, dtype, mesh, attention)
    warn_of_overflow(loaded)
    return Reader(**vars(loaded), ends=ends)


def end_tokens(path: Path) -> tuple[int, ...]:
    """The tokens that end a text: `eos_token_id` of generation_config.json, else of the configuration.

    Raises:
        RalmError: it is neither a number nor a list of them.
    """
    own = path / "generation_config.json"
    for file in (ConfigFile(read_object(own), str(own)), config_file(path)):
        stated = file.values.get("eos_token_id")
        if stated is not None:
            listed = stated if isinstance(stated, list) else [stated]
            if not all(type(token) is int for token in listed):
                raise file.unsupported("eos_token_id", stated, "a token's number, or a list of them")
            return tuple(listed)
    return ()


def unloaded_reader(model: str, *, dtype: str = "float32") -> Reader:
    """What `load_reader` would load, with shapes in place of the parameters: it can be described, not run.

    Raises:
        UsageError: no such model.
        RalmError: its files cannot be read.
    """
    return Reader(**vars(unloaded_model(model, locate(model), READERS, dtype, None)))


def random_reader(config: ReaderConfig, *, seed: int = 0, dtype: str = "float32", mesh: Mesh | None = None) -> Reader:
    """A reader with random weights, for tests and benchmarks of any size."""
    return Reader(**vars(random_model(READERS[config.model_type], config, seed=seed, dtype=dtype, mesh=mesh)))
