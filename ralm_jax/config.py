"""Model configurations: frozen dataclasses, read from a Hugging Face `config.json`."""

import abc
import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from ralm_jax.errors import RalmError
from ralm_jax.settings import AttentionName
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
            raise RalmError(f"{folder}: no config.json there; a model folder needs one") from None
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
        value = self._get(key, default, (int, float))
        if not 0 < value < sys.float_info.max:
            raise self.unsupported(key, value, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
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
class ModelConfig(abc.ABC):
    """What every model has. Letters as everywhere in the project: V, D, L, N, K, H, F."""

    vocab_size: int  # V
    hidden_size: int  # D
    num_layers: int  # L
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    mlp_size: int  # F
    max_positions: int  # tokens that a window may have
    activation: str
    norm_epsilon: float
    attention: AttentionName = "auto"  # how it is computed, which no file states

    model_type = ""  # Hugging Face's name of the family
    architecture = ""  # Hugging Face's class
    hf_keys: ClassVar[dict[str, str]] = {}  # what `config.json` calls our fields

    @classmethod
    @abc.abstractmethod
    def from_hf(cls, file: ConfigFile) -> Self:
        """The configuration that `file` states."""

    @property
    def position_kind(self) -> str:
        """How the model knows where a token is, in words."""
        return "learned positions"

    @classmethod
    def stated(cls, file: ConfigFile, **defaults: Any) -> dict[str, Any]:
        """The numbers and flags of `hf_keys` that `file` states; without one of `defaults` it must state them."""
        kinds: dict[Any, Callable[..., Any]] = {int: file.integer, float: file.number, bool: file.flag}
        fields = {field.name: kinds[field.type] for field in dataclasses.fields(cls) if field.type in kinds}
        return {name: fields[name](key, defaults.get(name)) for name, key in cls.hf_keys.items() if name in fields}

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` that transformers reads back as this configuration."""
        stated = {key: getattr(self, name) for name, key in self.hf_keys.items()}
        return {"architectures": [self.architecture], "model_type": self.model_type, **stated}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReaderConfig(ModelConfig):
    """What every decoder-only reader has."""

    tie_word_embeddings: bool

    learned_positions = True  # a window longer than `max_positions` is impossible, not just unwise


def equal_heads(file: ConfigFile, hidden_size: int, num_heads: int) -> dict[str, Any]:
    """Heads with keys and values of their own that share the hidden size evenly.

    Raises:
        RalmError: they cannot.
    """
    if hidden_size % num_heads:
        raise RalmError(f"{file.origin}: {num_heads} heads do not divide a hidden size of {hidden_size}")
    return {"num_kv_heads": num_heads, "head_dim": hidden_size // num_heads}
