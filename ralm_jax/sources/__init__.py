"""Where a model's tensors come from: files in a folder, or a GGUF file."""

from pathlib import Path

from ralm_jax.errors import RalmError
from ralm_jax.sources.base import FolderSource, TensorSource
from ralm_jax.sources.gguf import GGUFSource, open_gguf
from ralm_jax.sources.msgpack import MsgpackSource
from ralm_jax.sources.safetensors import SafetensorsSource
from ralm_jax.sources.torch import TorchSource

FORMATS: tuple[type[FolderSource], ...] = (SafetensorsSource, MsgpackSource, TorchSource)  # in order of preference


def open_source(path: Path) -> TensorSource:
    """The weights of a model folder or .gguf file.

    Raises:
        RalmError: there are none, or they are damaged.
    """
    if path.is_file():
        return GGUFSource(open_gguf(path))
    source = next((format for format in FORMATS if format.there(path)), None)
    if source is None:
        raise RalmError(f"{path}: no weights there ({', '.join(format.file_name for format in FORMATS)})")
    return source(path)
