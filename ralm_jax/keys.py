"""Key tables: which tensor of a checkpoint is which parameter, in what layout. One table a family, both directions."""

import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from flax import nnx

from ralm_jax.config import ModelConfig
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.sources.base import Index


@dataclass(frozen=True)
class Key:
    """One row of a key table: a tensor of the checkpoint and the parameter, or equal parts, that it fills.

    Attributes:
        name: the checkpoint's name without the family's prefix; `{}` runs over the layers.
        paths: the parameter's dotted path, or one a part.
        pattern: in einops' notation, from the checkpoint's layout to the parameter's; empty where they are the same.
            With several paths its right side begins with the axis that counts them.
        prefixed: the family's prefix stands in front of it in Hugging Face's files.
        alias: another name that some files have for it.
    """

    name: str
    paths: str | tuple[str, ...]
    pattern: str = ""
    prefixed: bool = True
    alias: str = ""

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.paths,) if isinstance(self.paths, str) else self.paths

    def layout(self, rank: int) -> "Layout":
        """The layout of a parameter of `rank` axes (without that of the layers)."""
        if self.pattern:
            return Layout.parse(self.pattern)
        axes = tuple(f"a{i}" for i in range(rank))
        return Layout(tuple((axis,) for axis in axes), axes)

    def sizes(self, layout: "Layout", shape: tuple[int, ...]) -> dict[str, int]:
        """The sizes of the layout's axes, given one part's shape without the layer axis."""
        whole = (len(self.parts), *shape) if len(self.parts) > 1 else shape
        return dict(zip(layout.wanted, whole, strict=True))


def linear(name: str, path: str, *, prefixed: bool = True) -> tuple[Key, Key]:
    """Rows of a `Linear`, which PyTorch stores as (out, in)."""
    return (
        Key(f"{name}.weight", f"{path}.kernel", "o i -> i o", prefixed),
        Key(f"{name}.bias", f"{path}.bias", prefixed=prefixed),
    )


def to_heads(name: str, path: str) -> tuple[Key, Key]:
    """Rows of a query, key or value projection."""
    return (
        Key(f"{name}.weight", f"{path}.kernel", "(n h) d -> d n h"),
        Key(f"{name}.bias", f"{path}.bias", "(n h) -> n h"),
    )


def from_heads(name: str, path: str) -> tuple[Key, Key]:
    """Rows of an attention's output projection."""
    return Key(f"{name}.weight", f"{path}.kernel", "d (n h) -> n h d"), Key(f"{name}.bias", f"{path}.bias")


def norm(name: str, path: str) -> tuple[Key, Key]:
    """Rows of a norm; checkpoints that came from TensorFlow call scale and bias gamma and beta."""
    return (
        Key(f"{name}.weight", f"{path}.scale", alias=f"{name}.gamma"),
        Key(f"{name}.bias", f"{path}.bias", alias=f"{name}.beta"),
    )


HEAD = (
    Key("lm_head.weight", "head.kernel", "v d -> d v", prefixed=False),
    Key("lm_head.bias", "head.bias", prefixed=False),
)


@dataclass(frozen=True)
class Layout:
    """A parsed pattern: axes of the checkpoint's tensor (each a group of names) and of the parameter."""

    stored: tuple[tuple[str, ...], ...]
    wanted: tuple[str, ...]

    @classmethod
    @functools.cache
    def parse(cls, pattern: str) -> "Layout":
        left, right = pattern.split("->")
        groups = tuple(tuple(group.strip("()").split()) for group in re.findall(r"\([^)]*\)|\S+", left))
        return cls(groups, tuple(right.split()))

    @property
    def forward(self) -> str:
        """From the checkpoint's tensor to the parameter, for einops."""
        stored = " ".join(f"({' '.join(group)})" for group in self.stored)
        return f"{stored} -> {' '.join(self.wanted)}"

    @property
    def backward(self) -> str:
        return " -> ".join(reversed(self.forward.split(" -> ")))

    def stored_shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        return tuple(math.prod(sizes[name] for name in group) for group in self.stored)

    def stored_index(self, sizes: dict[str, int], index: dict[str, slice]) -> Index:
        """The slice of the stored tensor that holds the slices `index` of the named axes.

        Raises:
            UsageError: axes that are merged in the checkpoint are cut so that the cut is not one contiguous range.
        """
        slices = []
        for group in self.stored:
            start, length, whole = 0, 1, True
            for name in group:
                low, high, _ = index[name].indices(sizes[name])
                if length > 1 and (low, high) != (0, sizes[name]):
                    whole = False
                start, length = start * sizes[name] + low, length * (high - low)
            if not whole:
                raise UsageError(f"a mesh that cuts {group} of a tensor into slices that do not lie together")
            slices.append(slice(start, start + length))
        return tuple(slices)


@dataclass(frozen=True)
class Family:
    """What makes a model family.

    Attributes:
        name: what people call it.
        config: its configuration class; `config.model_type` is Hugging Face's name of the family.
        model: its module.
        prefixes: in front of the keys of a checkpoint; the first is written. Base models are saved without any.
        keys: the key table.
        ignored: patterns of keys that carry no weights of this model.
        variants: what of the family is supported, for people.
        sizes: configurations of published models, by name.
        tied: embedding and head of a reader, by key; checkpoints of tied ones may have either or both.
        narrow: whether its activations are known to overflow float16.
    """

    name: str
    config: type[ModelConfig]
    model: type[nnx.Module]
    prefixes: tuple[str, ...]
    keys: tuple[Key, ...]
    ignored: tuple[str, ...]
    variants: str
    sizes: Mapping[str, ModelConfig]
    tied: tuple[str, str] | None = None
    narrow: bool = False

    def bare_names(self, names: Iterable[str]) -> dict[str, str]:
        """The names of a checkpoint's tensors, by their names without its prefix.

        Raises:
            RalmError: a tensor is there with the prefix and without.
        """
        names = list(names)
        prefix = next((p for p in self.prefixes if p and any(name.startswith(p) for name in names)), "")
        found: dict[str, str] = {}
        for name in names:
            bare = name.removeprefix(prefix)
            if bare in found:
                raise RalmError(f"both {name} and {found[bare]} are there; remove one")
            found[bare] = name
        return found


@dataclass(frozen=True)
class Wanted:
    """A tensor that a model needs of a checkpoint: its name without prefix, its row, its layer, its stored shape."""

    name: str
    key: Key
    layer: int | None
    shape: tuple[int, ...]

    @property
    def alias(self) -> str:
        return self.key.alias.format(self.layer)


def wanted_tensors(family: Family, shapes: dict[str, tuple[int, ...]]) -> Iterator[Wanted]:
    """Every tensor that a model with parameters of `shapes` (by dotted path) needs."""
    for key in family.keys:
        if key.parts[0] not in shapes:
            continue
        layered = "{}" in key.name
        shape = shapes[key.parts[0]]
        own = shape[1:] if layered else shape
        layout = key.layout(len(own))
        stored = layout.stored_shape(key.sizes(layout, own))
        for layer in range(shape[0]) if layered else (None,):
            yield Wanted(key.name.format(layer), key, layer, stored)
