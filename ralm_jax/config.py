"""Reader configurations: frozen dataclasses, read from a Hugging Face `config.json`."""

import abc
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from ralm_jax.errors import RalmError


class ConfigFile:
    """The contents of a `config.json`, with errors that name the file and the key."""

    def __init__(self, values: Mapping[str, Any], origin: str):
        self.values = values
        self.origin = origin

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads `folder/config.json`.

        Raises:
            RalmError: the file is missing or is not a JSON object.
        """
        path = folder / "config.json"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RalmError(f"{folder}: no config.json there; a reader folder needs one") from None
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise RalmError(f"{path}: not valid JSON ({error})") from None
        if not isinstance(values, dict):
            raise RalmError(f"{path}: expected a JSON object, found {type(values).__name__}")
        return cls(values, str(path))

    def get(self, key: str, default: Any) -> Any:
        """The value of `key`; `default` where the file leaves it out or sets null, as Hugging Face's classes do."""
        value = self.values.get(key)
        return default if value is None else value

    def require(self, key: str) -> Any:
        """The value of `key`, which the file must state.

        Raises:
            RalmError: the key is missing or null.
        """
        value = self.values.get(key)
        if value is None:
            raise RalmError(f"{self.origin}: {key!r} is missing")
        return value

    def refuse(self, key: str, value: Any, allowed: str) -> RalmError:
        """The error for a value that would change the maths in a way that no reader here implements."""
        return RalmError(f"{self.origin}: {key} = {value!r} is not supported (supported: {allowed})")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReaderConfig(abc.ABC):
    """What every decoder-only reader has. Letters as everywhere in the project: V, D, L, N, K, H, F."""

    vocab_size: int  # V
    hidden_size: int  # D
    num_layers: int  # L
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    mlp_size: int  # F
    max_positions: int
    activation: str
    norm_epsilon: float
    tie_word_embeddings: bool

    model_type = ""  # Hugging Face's name of the family
    learned_positions = True  # a window longer than `max_positions` is impossible, not just unwise

    @classmethod
    @abc.abstractmethod
    def from_hf(cls, file: ConfigFile) -> Self:
        """The configuration that `file` states."""

    @abc.abstractmethod
    def to_hf(self) -> dict[str, Any]:
        """The `config.json` that transformers reads back as this configuration."""
