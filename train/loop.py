"""A training loop for any loss: float32 state on a mesh, one compiled step, checkpoints, and exact resumption.

Batch, learning rate and random numbers of a step are functions of the seed and the step alone. A run that is resumed
from its last checkpoint therefore does what it would have done; SIGTERM, which announces that a machine is taken away,
makes one. Of several processes each makes all of a batch and places what is on its devices; the first writes.
"""

import functools
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ralm_jax import processes
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.model import DTYPES
from ralm_jax.settings import IfExists, TrainSettings
from ralm_jax.sharding import AXES, batch_multiple, on_mesh, shard_batch
from ralm_jax.storage import Folder
from train.checkpoints import Checkpoints
from train.metrics import Metrics
from train.optim import learning_rate, make_optimizer
from train.state import State, new_state

KIND = "training run"
CHECKPOINTS = "checkpoints"  # in the run's folder

Batch = Any  # a pytree of arrays with a leading axis of examples
LossFn = Callable[[Any, Batch, jax.Array], tuple[jax.Array, jax.Array]]


class Terminated(RalmError):
    """SIGTERM stopped a run, which can go on from there."""

    exit_code = 128 + signal.SIGTERM


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        params: a pytree of arrays on `mesh`, with the names of `train.optim.DECAYED`.
        loss: of (params, batch, key), the sum of the examples' losses and the sum of their weights. Parameters come in
            the dtype of the computation.
        batches: the batches from a step to the last, NumPy; every one the same shapes.
        evaluate: figures of (params) on held-out examples; the lowest `checkpoints.BEST_BY` makes the best checkpoint.
            None where nothing is held out: then it is the last.
        identity: what the run is a function of beside its settings; a run is resumed only where it agrees.
        result: the folder in the run's that is written when it is done; overwriting a run removes it first.
    """

    params: Any
    mesh: Mesh
    loss: LossFn
    batches: Callable[[int], Iterable[Batch]]
    evaluate: Callable[[Any], Mapping[str, float]] | None
    identity: dict[str, Any]
    result: str = "model"


def make_step(
    loss: LossFn, optimizer: optax.GradientTransformation, settings: TrainSettings, mesh: Mesh
) -> Callable[[State, Batch], tuple[State, dict[str, jax.Array]]]:
    """The update (state, batch) -> (state, {"loss", "learning_rate", "gradient_norm"}), to be jitted.

    A batch's loss is the sum over its examples by the sum of their weights, however many micro-batches and devices it
    is spread over.
    """
    parts, rate = settings.micro_batches, learning_rate(settings)

    def spread(x: jax.Array) -> jax.Array:
        """(B, ...) -> (parts, B / parts, ...), every part on all devices."""
        split = x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)
        return jax.lax.with_sharding_constraint(split, NamedSharding(mesh, PartitionSpec(None, ("data", "fsdp"))))

    def summed(params: Any, batch: Batch, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        return loss(jax.tree.map(lambda x: x.astype(DTYPES[settings.dtype]), params), batch, key)

    def update(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.key(settings.seed), state.step)

        def add(sums: Any, part: tuple[Batch, jax.Array]) -> tuple[Any, None]:
            examples, number = part
            value = jax.value_and_grad(summed, has_aux=True)
            (total, weight), gradients = value(state.params, examples, jax.random.fold_in(key, number))
            return jax.tree.map(jnp.add, sums, (total, weight, gradients)), None

        zero = jnp.zeros((), jnp.float32)
        start = (zero, zero, jax.tree.map(jnp.zeros_like, state.params))
        (total, weight, gradients), _ = jax.lax.scan(add, start, (jax.tree.map(spread, batch), jnp.arange(parts)))
        weight = jnp.where(weight > 0, weight, 1)  # a batch without labels moves nothing
        gradients = jax.tree.map(lambda x: x / weight, gradients)
        updates, kept = optimizer.update(gradients, state.optimizer, state.params)
        told = {"loss": total / weight, "learning_rate": rate(state.step), "gradient_norm": optax.tree.norm(gradients)}
        return State(optax.apply_updates(state.params, updates), kept, state.step + 1), told

    return update


def compiled_step(task: Task, settings: TrainSettings, state: State) -> Any:
    """`make_step`, compiled once: the state is updated in place and stays where it is."""
    shardings = jax.tree.map(lambda x: x.sharding, state)
    update = make_step(task.loss, make_optimizer(settings), settings, task.mesh)
    return jax.jit(update, donate_argnums=0, out_shardings=(shardings, None))


def train(
    task: Task,
    location: str,
    settings: TrainSettings,
    *,
    if_exists: IfExists = "refuse",
    announce: Callable[[str], None] = print,
) -> Any:
    """Trains, with checkpoints and metrics in the folder `location`. Returns the parameters of the best checkpoint by
    held-out examples, or the last where none are held out.

    Args:
        announce: is told how it goes, a line at a time.

    Raises:
        UsageError: `location` is taken and `if_exists` refuses, or a batch that the devices cannot share.
        RalmError: what is there was made in another way or is damaged; a loss that is not finite.
        Terminated: by SIGTERM, to a process of the job; there is a checkpoint of the last step.
    """
    share = batch_multiple(task.mesh) * settings.micro_batches
    if settings.batch_size % share:
        raise UsageError(
            f"a batch of {settings.batch_size} cannot be shared by {batch_multiple(task.mesh)} devices in "
            f"{settings.micro_batches} micro batches; use a multiple of {share}"
        )
    if "://" in location:
        raise UsageError(f"{location}: training needs a local folder")
    folder = Folder.create(location, KIND, run_settings(settings) | task.identity, if_exists)
    root = Path(location).expanduser()
    if if_exists == "overwrite" and processes.first():
        shutil.rmtree(root / task.result, ignore_errors=True)
    state = new_state(task.params, make_optimizer(settings), task.mesh)
    with Checkpoints(root / CHECKPOINTS, fresh=if_exists != "resume") as checkpoints:
        done = checkpoints.latest()
        if done is not None:
            state = checkpoints.restore(done, state)
        with Metrics(root, done, announce, settings) as metrics, Termination(task.mesh) as termination:
            state = run(task, settings, state, done, checkpoints, metrics, termination)
        best = checkpoints.best() if task.evaluate else settings.steps
        folder.about.update(steps=settings.steps, best=best)
        folder.write_manifest()
        return state.params if best == settings.steps else checkpoints.restore(best, state).params


def run(
    task: Task,
    settings: TrainSettings,
    state: State,
    done: int | None,
    checkpoints: "Checkpoints",
    metrics: "Metrics",
    termination: "Termination",
) -> State:
    """The steps that are left; `done` of them are done, None before the first checkpoint.

    Raises:
        Terminated: by SIGTERM; an evaluation that is due is done first.
    """

    def check(step: int, state: State) -> None:
        figures = {} if task.evaluate is None else {name: float(x) for name, x in task.evaluate(state.params).items()}
        metrics.evaluated(step, figures)
        checkpoints.save(step, state, figures)

    if done is None:
        check(0, state)
    update = compiled_step(task, settings, state)
    batches = iter(task.batches(done or 0))
    pending: tuple[int, dict[str, jax.Array]] | None = None
    for step in range((done or 0) + 1, settings.steps + 1):
        asked = time.perf_counter()
        batch = next(batches)
        metrics.waited(time.perf_counter() - asked)
        terminated = termination.asked()
        with on_mesh(task.mesh):
            placed = jax.tree.map(functools.partial(shard_batch, task.mesh), batch)
            state, told = update(state, placed)
        if pending is not None:  # while the device works on this step
            metrics.trained(*pending)
        pending = (step, told)
        if step % settings.check_every == 0 or step == settings.steps:
            metrics.trained(*pending)
            pending = None
            check(step, state)
        if terminated() and step < settings.steps:
            if pending is not None:
                metrics.trained(*pending)
                checkpoints.save(step, state, {})
            checkpoints.finish()
            raise Terminated(f"stopped by SIGTERM after step {step:,}; --resume goes on from there")
    return state


class Termination:
    """Notices SIGTERM, which may come to one process of several, and has all learn of it in the same step."""

    def __init__(self, mesh: Mesh):
        self._mesh, self._noticed = mesh, False
        self._before: Any = None
        whole = NamedSharding(mesh, PartitionSpec())
        self._any = jax.jit(lambda noticed: noticed.any(), out_shardings=whole)

    def __enter__(self) -> "Termination":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._notice)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _notice(self, *_: Any) -> None:
        self._noticed = True

    def asked(self) -> Callable[[], bool]:
        """Whether a process had been asked to stop by now; the devices tell when they have come so far."""
        noticed = self._noticed
        if processes.count() == 1:
            return lambda: noticed
        each = NamedSharding(self._mesh, PartitionSpec(AXES))
        told = self._any(jax.make_array_from_callback((self._mesh.size,), each, lambda _: np.array([noticed])))
        return lambda: bool(told)


def run_settings(settings: TrainSettings) -> dict[str, Any]:
    """What decides the result; how often it is looked at does not."""
    return {"training": {name: value for name, value in vars(settings).items() if name != "log_every"}}
