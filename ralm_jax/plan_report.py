"""What `ralm plan` is asked and answers. Nothing heavy is imported here."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ralm_jax.settings import AttentionName

Task = Literal["score", "finetune", "encode"]
ComputeDType = Literal["bfloat16", "float32"]


@dataclass(frozen=True)
class Request:
    """What is asked; None for what is to be chosen.

    Attributes:
        window: tokens.
        batch_size: windows a step, of all devices.
        mesh: sizes of its axes.
    """

    model: str
    topology: str
    task: Task
    window: int | None = None
    batch_size: int | None = None
    mesh: dict[str, int] | None = None
    dtype: ComputeDType = "bfloat16"
    attention: AttentionName = "auto"


@dataclass(frozen=True)
class Plan:
    """What is answered.

    Attributes:
        request: with what was chosen.
        parameters: of the model.
        devices: of the topology.
        memory: GiB of a device that a program and its arguments can have.
        largest: whether no larger batch fits, to an eighth.
        fits: whether the compiler could place it.
        gib: what a device needs, by part; where it does not fit, by estimate.
        flops: multiplications and additions a token in matrix products; what is computed again does not count.
    """

    request: Request
    parameters: int
    devices: int
    memory: float
    largest: bool
    fits: bool
    gib: dict[str, float]
    flops: float

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Plan":
        stated = {field.name: content[field.name] for field in dataclasses.fields(cls)}
        return cls(**stated | {"request": Request(**content["request"])})

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"total": self.total, "lacking": self.lacking}

    @property
    def total(self) -> float:
        """GiB that a device needs."""
        return sum(self.gib.values())

    @property
    def lacking(self) -> float:
        """GiB that a device has too few."""
        return 0.0 if self.fits else max(0.0, self.total - self.memory)

    def lines(self) -> Iterator[str]:
        """The table that is printed."""
        asked = self.request
        facts = {
            "model": f"{asked.model}, {self.parameters:,} parameters",
            "topology": f"{asked.topology}, {self.devices:,} devices of {self.memory:.2f} GiB",
            "task": f"{asked.task}, windows of {asked.window:,} tokens, {asked.dtype}, attention {asked.attention}",
            "mesh": mesh_text(asked.mesh or {}),
            "batch": f"{asked.batch_size:,} windows{', the most that fit' if self.largest else ''}",
            "FLOPs a token": f"{self.flops:.3g}",
            "fits": "yes" if self.fits else f"no: about {self.lacking:.2f} GiB a device too much",
        }
        yield from (f"{name:18}{value}" for name, value in facts.items())
        yield f"\n{'':18}GiB a device"
        yield from (f"{name:18}{size:12.2f}" for name, size in (self.gib | {"together": self.total}).items())


def mesh_text(sizes: Mapping[str, int]) -> str:
    """As `--mesh` takes it."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())
