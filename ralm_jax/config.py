"""Reader configurations: frozen dataclasses, read from a Hugging Face `config.json`."""

import abc
import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from ralm_jax.errors import RalmError
from ralm_jax.text import parse_json


class ConfigFile:
    """The contents of a `config.json`, with errors that name the file and the key.

    Values are asked for by kind. Without a default the file must state them; null counts as not stated, as it does in
    Hugging Face's classes.
    """

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
            values = parse_json(path.read_bytes(), str(path))
        except FileNotFoundError:
            raise RalmError(f"{folder}: no config.json there; a reader folder needs one") from None
        if not isinstance(values, dict):
            raise RalmError(f"{path}: expected a JSON object, found {type(values).__name__}")
        return cls(values, str(path))

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number above 0."""
        value = self._get(key, default, int)
        if value < 1:
            raise self.unsupported(key, value, "1 or more")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        value = float(self._get(key, default, (int, float)))
        if not 0 < value < math.inf:
            raise self.unsupported(key, value, "a number above 0")
        return value

    def flag(self, key: str, default: bool) -> bool:
        return self._get(key, default, bool)

    def choice(self, key: str, options: Iterable[str], default: str | None = None) -> str:
        """One of `options`."""
        value = self._get(key, default, str)
        if value not in options:
            raise self.unsupported(key, value, ", ".join(options))
        return value

    def section(self, key: str) -> "ConfigFile":
        """The object under `key`; empty if there is none."""
        return ConfigFile(self._get(key, {}, dict), f"{self.origin}: {key}")

    def _get(self, key: str, default: Any, kind: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise RalmError(f"{self.origin}: {key!r} is missing")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise RalmError(f"{self.origin}: {key!r} is {value!r}, of the wrong type")
        return value

    def unsupported(self, key: str, value: Any, allowed: str) -> RalmError:
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
