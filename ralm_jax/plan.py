"""Will it fit: the step that would run on a pod of TPUs, compiled for one that need not be there.

What is compiled are the functions that run, on shapes placed on a mesh of the pod's devices (`ralm_jax.pod`). Whether
they fit, the compiler decides; where they do not, it estimates what they would need.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from ralm_jax.config import ModelConfig
from ralm_jax.encoder import text_vectors, transformer_folder
from ralm_jax.errors import UsageError
from ralm_jax.hub import locate
from ralm_jax.keys import Family
from ralm_jax.model import WEIGHTS_SHARE, abstract, config_file, family_of
from ralm_jax.models import ENCODERS, READERS, SIZES
from ralm_jax.plan_report import ComputeDType, Plan, Request, Task, mesh_text
from ralm_jax.pod import Pod, TooLarge, compile_for, open_pod
from ralm_jax.scoring import label_log_probs, logits_rows
from ralm_jax.settings import StrideSettings, WindowSettings
from ralm_jax.sharding import BATCH_AXES, batch_multiple, make_mesh
from ralm_jax.weights import stored_shapes

GIB = 1 << 30
LABELS = WindowSettings().past + StrideSettings().stride  # of a window that `ralm score` scores
MAX_TENSOR = 8  # chips that share a layer's products: with more, they mostly wait for one another's sums


@dataclass(frozen=True)
class Work:
    """A step of a task: what a `Maker` makes a program of."""

    family: Family
    config: ModelConfig
    mesh: Mesh
    window: int
    batch_size: int
    dtype: ComputeDType

    def rows(self, length: int, dtype: DTypeLike = jnp.int32) -> jax.ShapeDtypeStruct:
        """Rows of so many numbers, one a window, on the devices that share the batch."""
        sharding = NamedSharding(self.mesh, PartitionSpec(BATCH_AXES))
        return jax.ShapeDtypeStruct((self.batch_size, length), dtype, sharding=sharding)


class Program(NamedTuple):
    """What is compiled.

    Attributes:
        step: what `jax.jit` made.
        args: shapes in place of arrays.
        parts: what stays in memory of `args`, by name.
    """

    step: Any
    args: tuple[Any, ...]
    parts: dict[str, Any]

    def given(self) -> dict[str, int]:
        """Bytes a device of each of the parts."""
        return {name: sum(map(device_bytes, jax.tree.leaves(part))) for name, part in self.parts.items()}


def device_bytes(x: jax.ShapeDtypeStruct) -> int:
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return math.prod(shape) * jnp.dtype(x.dtype).itemsize


Maker = Callable[[Work], Program]


def score_program(work: Work) -> Program:
    """`ralm score`, where most windows are full."""
    graphdef, state = abstract(work.family, work.config, work.mesh, work.dtype)
    inputs = work.rows(work.window), work.rows(LABELS), work.rows(LABELS)
    rows = logits_rows(work.config.vocab_size, work.batch_size // batch_multiple(work.mesh))
    return Program(label_log_probs, (graphdef, state, *inputs, rows), {"weights": state, "inputs": inputs})


def encode_program(work: Work) -> Program:
    """Vectors of texts that are as long as a window."""
    graphdef, state = abstract(work.family, work.config, work.mesh, work.dtype)
    inputs = work.rows(work.window), work.rows(work.window, jnp.bool_)
    return Program(text_vectors, (graphdef, state, *inputs, "mean", True), {"weights": state, "inputs": inputs})


MAKERS: dict[str, Maker] = {"score": score_program, "encode": encode_program}  # training is `train.causal`'s


@dataclass(frozen=True)
class Trials:
    """A model's task on a pod, with one mesh and batch or another."""

    pod: Pod
    family: Family
    config: ModelConfig
    window: int
    dtype: ComputeDType
    make: Maker
    announce: Callable[[str], None]

    def program(self, sizes: dict[str, int], batch_size: int) -> Program:
        """
        Raises:
            UsageError: the model cannot be cut for such a mesh, or the batch.
        """
        mesh = make_mesh(**sizes, devices=self.pod.devices)
        if batch_size % batch_multiple(mesh):
            share = f"the {batch_multiple(mesh)} parts of mesh {mesh_text(sizes)}"
            raise UsageError(f"a batch of {batch_size} cannot be shared by {share}")
        return self.make(Work(self.family, self.config, mesh, self.window, batch_size, self.dtype))

    def needs(self, sizes: dict[str, int], batch_size: int) -> "Needs":
        """What a device needs."""
        program = self.program(sizes, batch_size)
        self.announce(f"compiling for {mesh_text(sizes)}: {batch_size:,} windows of {self.window:,} tokens")
        given, fits = program.given(), True
        try:
            beside = compile_for(make_mesh(**sizes, devices=self.pod.devices), program.step, program.args)
        except TooLarge as refusal:
            beside, fits = {"temporaries": max(0, refusal.needs - sum(given.values()))}, False
        return Needs(fits, {name: size / GIB for name, size in (given | beside).items()})


class Needs(NamedTuple):
    """GiB of a device by part, and whether it has them."""

    fits: bool
    gib: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.gib.values())


def make_plan(request: Request, makers: Mapping[str, Maker], announce: Callable[[str], None]) -> Plan:
    """Compiles until it knows.

    Args:
        makers: of tasks' programs.
        announce: is told of every compilation, which may take a minute.

    Raises:
        UsageError: no such model or topology, or sizes that do not go together.
        RalmError: the model's configuration cannot be read, or the compiler fails.
    """
    family, config = configuration(request.model, request.task)
    config = dataclasses.replace(config, attention=request.attention)
    pod = open_pod(request.topology)
    window = request.window or default_window(config, request.task)
    trials = Trials(pod, family, config, window, request.dtype, makers[request.task], announce)
    given = request.mesh and [dict(make_mesh(**request.mesh, devices=pod.devices).shape)]
    for sizes in given or fitting_meshes(trials, request):
        batch_size = request.batch_size or smallest_batch(sizes)
        needs = trials.needs(sizes, batch_size)
        if needs.fits:
            break
    most = needs.fits and request.batch_size is None
    if most:
        batch_size, needs = largest_batch(trials, sizes, needs)
    _, state = abstract(family, config, make_mesh(data=1))
    return Plan(
        request=dataclasses.replace(request, window=window, batch_size=batch_size, mesh=sizes),
        parameters=sum(math.prod(shape) for shape in stored_shapes(state).values()),
        devices=len(pod.devices),
        memory=pod.memory / GIB,
        largest=most,
        fits=needs.fits,
        gib=needs.gib,
        flops=token_flops(config, stored_shapes(state), window, request.task),
    )


def configuration(model: str, task: Task) -> tuple[Family, ModelConfig]:
    """The family and configuration of a named size, of a folder or its config.json, or of a Hugging Face id.

    Raises:
        UsageError: no such model, or one of the wrong kind.
        RalmError: as `family_of`.
    """
    families, kind = (ENCODERS, "an encoder") if task == "encode" else (READERS, "a reader")
    path = Path(model).expanduser()
    if model in SIZES and not path.exists():
        config = SIZES[model]
        if config.model_type not in families:
            raise UsageError(f"{model}: --task {task} needs {kind}")
        return families[config.model_type], config
    root = locate(str(path.parent) if path.name == "config.json" else model, weights=False)
    return family_of(config_file(transformer_folder(root)), families)


def default_window(config: ModelConfig, task: Task) -> int:
    """What `ralm score` takes by default; else all positions."""
    return min(StrideSettings().window, config.max_positions) if task == "score" else config.max_positions


def smallest_batch(sizes: Mapping[str, int]) -> int:
    """A window for each of the devices that share a batch."""
    return math.prod(sizes[axis] for axis in BATCH_AXES)


def fitting_meshes(trials: Trials, request: Request) -> Iterator[dict[str, int]]:
    """The meshes to try: those of `candidates` that the model can be cut for and whose devices have room for what they
    are given, and where it is a frozen model, for something beside; if there are none, the one whose devices are given
    least.

    Raises:
        UsageError: the model can be cut for none, or none can share the batch.
    """
    room = trials.pod.memory * (1 if request.task == "finetune" else WEIGHTS_SHARE)
    given: list[tuple[int, dict[str, int]]] = []
    refusals: list[UsageError] = []
    for sizes in candidates(len(trials.pod.devices), request.task):
        try:
            program = trials.program(sizes, request.batch_size or smallest_batch(sizes))
        except UsageError as error:
            refusals.append(error)
            continue
        given.append((sum(program.given().values()), sizes))
        if given[-1][0] < room:
            yield sizes
    if not given:
        raise refusals[0]
    least, sizes = min(given, key=lambda known: known[0])
    if least >= room:
        yield sizes


def candidates(devices: int, task: Task) -> Iterator[dict[str, int]]:
    """Meshes, the quickest first.

    A frozen model is held by as few devices as can hold it, by `tensor` before `fsdp`, which moves weights instead of
    sums; the other devices have copies and share the batch. Training state is spread over all devices: by `fsdp` alone,
    and where a window a device is too much, by `tensor` too.
    """
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    shares = [n for n in divisors if n <= MAX_TENSOR]
    if task == "finetune":
        yield from ({"data": 1, "fsdp": devices // tensor, "tensor": tensor} for tensor in shares)
        return
    for holding in divisors:
        for tensor in reversed(shares):
            if holding % tensor == 0:
                yield {"data": devices // holding, "fsdp": holding // tensor, "tensor": tensor}


def largest_batch(trials: Trials, sizes: dict[str, int], smallest: Needs) -> tuple[int, Needs]:
    """The largest batch that fits on a mesh of such sizes, to an eighth, and what it needs.

    Args:
        smallest: what the smallest batch needs.
    """
    each, low, high = smallest_batch(sizes), (1, smallest), None
    while (n := next_trial(low, high, trials.pod.memory / GIB)) is not None:
        needs = trials.needs(sizes, n * each)
        if needs.fits:
            low = n, needs
        else:
            high = n, needs
    return low[0] * each, low[1]


def next_trial(low: tuple[int, Needs], high: tuple[int, Needs] | None, room: float) -> int | None:
    """A number between the highest that is known to fit and the lowest that is known not to; None if they are closer
    than an eighth. It is a little less than where the line through both crosses `room`."""
    if high is None:
        return 16 * low[0]
    step, between = max(1, low[0] // 8), high[0] - low[0]
    if between <= step:
        return None
    used, needed = low[1].total, high[1].total
    share = (room - used) / (needed - used) if needed > room else 0.5
    return low[0] + min(max(int(0.97 * share * between), step), between - 1)


def token_flops(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], window: int, task: Task) -> float:
    """Multiplications and additions a token of a full window in matrix products, of the backward pass too if it trains.
    They follow from the `shapes` of the parameters: XLA counts the layers of a scan once."""
    sizes = {path: math.prod(shape) for path, shape in shapes.items()}
    kernels = sum(size for path, size in sizes.items() if path.endswith("kernel") and not path.startswith("head."))
    pairs = window if task == "encode" else window / 2  # that a token is part of, of queries and keys
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * pairs
    rows = {"encode": 0.0, "score": LABELS / window, "finetune": 1.0}[task]  # of logits
    head = rows * sizes.get("head.kernel", sizes["embed.table"])
    return 2 * (kernels + attention + head) * (3 if task == "finetune" else 1)
