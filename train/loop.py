"""A training loop for any loss: float32 state on a mesh, one compiled step, checkpoints, and exact resumption.

Batch, learning rate and random numbers of a step are functions of the seed and the step alone. A run that is resumed
from its last checkpoint therefore does what it would have done; SIGTERM, which announces that a machine is taken away,
makes one. Of several processes each makes all of a batch and places what is on its devices; the first writes.
"""

import csv
import functools
import io
import itertools
import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ralm_jax import processes
from ralm_jax.errors import RalmError, UsageError, first_line
from ralm_jax.model import DTYPES
from ralm_jax.settings import IfExists, TrainSettings
from ralm_jax.sharding import AXES, batch_multiple, on_mesh, shard_batch
from ralm_jax.storage import Folder
from ralm_jax.text import write_text
from train.optim import learning_rate, make_optimizer

KIND = "training run"
CHECKPOINTS, METRICS, TENSORBOARD = "checkpoints", "metrics.csv", "tensorboard"
BEST_BY = "held_out_loss"
UNFINISHED = ".orbax-checkpoint-tmp"  # behind the step, while Orbax writes its checkpoint

Batch = Any  # a pytree of arrays with a leading axis of examples
LossFn = Callable[[Any, Batch, jax.Array], tuple[jax.Array, jax.Array]]


class Terminated(RalmError):
    """SIGTERM stopped a run, which can go on from there."""

    exit_code = 128 + signal.SIGTERM


class State(NamedTuple):
    """What a step changes: parameters and optimiser state in float32, and the steps that are done."""

    params: Any
    optimizer: Any
    step: Any


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        params: a pytree of arrays on `mesh`, with the names of `train.optim.DECAYED`.
        loss: of (params, batch, key), the sum of the examples' losses and the sum of their weights. Parameters come in
            the dtype of the computation.
        batches: the batches from a step to the last, NumPy; every one the same shapes.
        evaluate: figures of (params) on held-out examples; the lowest `BEST_BY` makes the best checkpoint. None where
            nothing is held out: then it is the last.
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


def first_state(params: Any, optimizer: optax.GradientTransformation) -> State:
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    return State(wide, optimizer.init(wide), jnp.zeros((), jnp.int32))


def abstract_state(params: Any, optimizer: optax.GradientTransformation, mesh: Mesh) -> State:
    """`new_state` as shapes, dtypes and shardings; nothing is allocated, and `params` may be such as well."""
    shardings = jax.tree.map(lambda x: x.sharding, params)
    replicated = NamedSharding(mesh, PartitionSpec())
    shapes = jax.eval_shape(functools.partial(first_state, optimizer=optimizer), params)
    kept = optax.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        shapes.optimizer,
        shardings,
        transform_non_params=lambda _: replicated,
    )
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        State(shardings, kept, replicated),
    )


def new_state(params: Any, optimizer: optax.GradientTransformation, mesh: Mesh) -> State:
    """The state before the first step. What the optimiser keeps of a parameter lies where the parameter does."""
    shardings = jax.tree.map(lambda x: x.sharding, abstract_state(params, optimizer, mesh))
    with on_mesh(mesh):
        return jax.jit(functools.partial(first_state, optimizer=optimizer), out_shardings=shardings)(params)


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


class CompleteSteps:
    """Orbax's names of checkpoints. What is not a whole checkpoint is passed over, and so neither restored nor deleted,
    whatever it is called: Orbax takes any folder with a number for one, and saves none of an earlier step."""

    def __init__(self, names: Any):
        self._names = names

    def build_name(self, step: int) -> str:
        return self._names.build_name(step)

    def find_all(self, folder: Any) -> Any:
        return (found for found in self._names.find_all(folder) if is_complete(Path(found.path)))

    def find_step(self, folder: Any, step: int) -> Any:
        return self._names.find_step(folder, step)


def is_complete(checkpoint: Path) -> bool:
    """Whether Orbax has come to the end of writing it, which it says last."""
    try:
        about = json.loads((checkpoint / "_CHECKPOINT_METADATA").read_text(encoding="utf-8"))
        return bool(about["commit_timestamp_nsecs"]) and (checkpoint / "default" / "_METADATA").is_file()
    except (OSError, ValueError, KeyError, TypeError):
        return False


class Checkpoints:
    """The last two checkpoints and the best; unfinished ones do not count."""

    def __init__(self, folder: Path, *, fresh: bool):
        import orbax.checkpoint as ocp
        from orbax.checkpoint.checkpoint_managers import preservation_policy as keep

        self._ocp, self._folder = ocp, folder.absolute()
        best = keep.BestN(get_metric_fn=lambda figures: -figures[BEST_BY], n=1, keep_checkpoints_without_metrics=False)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=keep.AnyPreservationPolicy([keep.LatestN(2), best]),
            best_fn=lambda figures: figures[BEST_BY],
            best_mode="min",
            step_name_format=CompleteSteps(ocp.path.step.standard_name_format()),
        )
        self._manager = ocp.CheckpointManager(
            self._folder, options=options, item_handlers=ocp.StandardCheckpointHandler()
        )
        processes.once(self._remove_unfinished)
        if fresh:
            for step in self._manager.all_steps():
                self._manager.delete(step)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: object) -> None:
        self._manager.close()

    def _remove_unfinished(self) -> None:
        """Removes what a killed run was writing; Orbax's own clean-up takes everything whose name looks like that."""
        for path in self._folder.glob(f"*{UNFINISHED}"):
            if path.name.removesuffix(UNFINISHED).isdecimal():
                shutil.rmtree(path, ignore_errors=True)

    def finish(self) -> None:
        """Waits until all that was saved is on disk, in every process."""
        self._manager.wait_until_finished()
        processes.wait()

    def latest(self) -> int | None:
        return self._manager.latest_step()

    def best(self) -> int:
        self._manager.wait_until_finished()
        return self._manager.best_step()

    def save(self, step: int, state: State, figures: Mapping[str, float]) -> None:
        """Goes on in the background; the state may be donated meanwhile.

        Raises:
            RalmError: something else is where the checkpoint goes.
        """
        where = self._folder / str(step)
        if where.exists() and not is_complete(where):
            raise RalmError(f"{where}: is in the way and not a whole checkpoint; move it elsewhere and add --resume")
        self._manager.save(step, args=self._ocp.args.StandardSave(named(state)), metrics=dict(figures) or None)

    def restore(self, step: int, state: State) -> State:
        """The checkpoint of `step`, placed as `state` is; a vocabulary may be padded for another mesh.

        Raises:
            RalmError: it is damaged, or of other parameters.
        """
        self._manager.wait_until_finished()
        wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        where = self._folder / str(step)
        try:
            stored = {name: tuple(x.shape) for name, x in self._manager.item_metadata(step).items()}
            known = {name: x.shape for name, x in named(wanted).items()}
            fits = beside_vocabulary(state, stored) == beside_vocabulary(state, known)
            # where it is not strict, Orbax cuts off or fills up with zeros
            found = self._manager.restore(step, args=self._ocp.args.StandardRestore(named(wanted), strict=not fits))
        except Exception as error:  # Orbax raises whatever its stores do
            raise RalmError(
                f"{where}: cannot be restored ({first_line(error)}); delete it to go on before it"
            ) from None
        return jax.tree.unflatten(jax.tree.structure(state), [found[name] for name in named(state)])


def named(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by their paths."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def beside_vocabulary(state: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Of the `shapes` of `named(state)`, all but the size of a vocabulary, which is padded to what a mesh needs."""
    kept = dict(shapes)
    variables = jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    for name, leaf in zip(named(state), variables, strict=True):
        axes = leaf.get_metadata("out_sharding") if isinstance(leaf, nnx.Variable) else ()
        if "vocab" in axes and name in kept:
            kept[name] = tuple(size for axis, size in zip(axes, kept[name], strict=True) if axis != "vocab")
    return kept


class Metrics:
    """Figures of every step in metrics.csv, and for TensorBoard where tensorboardX is installed, by process 0."""

    TRAINED = ("loss", "learning_rate", "gradient_norm", "seconds", "data_wait")

    def __init__(self, root: Path, done: int | None, announce: Callable[[str], None], settings: TrainSettings):
        self._path, self._settings, self._writes = root / METRICS, settings, processes.first()
        self._announce = announce if self._writes else lambda line: None
        self._columns: list[str] = []
        self._rows: list[dict[str, Any]] = []
        self._since, self._waited, self._recent = time.perf_counter(), 0.0, list[dict[str, Any]]()
        self._board = tensorboard(root / TENSORBOARD, done) if self._writes else None
        if self._writes and done is not None and self._path.exists():
            with self._path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                kept = list(itertools.takewhile(lambda row: int(row["step"]) <= done, reader))
                self._columns = list(reader.fieldnames or ())
            write_text(str(self._path), self._lines(kept, header=True))

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *error: object) -> None:
        self.flush()
        if self._board is not None:
            self._board.close()

    def waited(self, seconds: float) -> None:
        """The step that runs was kept waiting for data so long."""
        self._waited += seconds

    def trained(self, step: int, told: Mapping[str, Any]) -> None:
        """One step's figures; waits until the device has them. `seconds` is since the step before was told, and
        `data_wait` what of it went by waiting for data, be it for the step after.

        Raises:
            RalmError: the loss is not finite.
        """
        row = {name: float(value) for name, value in told.items()}
        now = time.perf_counter()
        row |= {"seconds": now - self._since, "data_wait": self._waited}
        self._since, self._waited = now, 0.0
        if not np.isfinite(row["loss"]) or not np.isfinite(row["gradient_norm"]):
            raise RalmError(f"step {step}: the loss is not finite; try a lower --learning-rate, or float32")
        self._recent.append(row)
        if step % self._settings.log_every == 0 or step == self._settings.steps:
            loss, seconds, wait = (sum(row[name] for row in self._recent) for name in ("loss", "seconds", "data_wait"))
            count = len(self._recent)
            self._announce(
                f"step {step:,} of {self._settings.steps:,}: loss {loss / count:.4f}, {seconds / count:.2f} s a step, "
                f"{wait / seconds:.1%} of it waiting for data"
            )
            self._recent.clear()
            self.flush()
        self._add(step, row)  # and perhaps the evaluation after the step

    def evaluated(self, step: int, figures: Mapping[str, float]) -> None:
        """Held-out figures after a step; all rows are on disk afterwards."""
        if not self._columns:
            self._columns = ["step", *self.TRAINED, *figures]
            if self._writes:
                write_text(str(self._path), self._lines([], header=True))
        if figures:
            self._announce(f"step {step:,}, held out: " + ", ".join(f"{name} {x:.4f}" for name, x in figures.items()))
        self._add(step, figures)
        self.flush()
        self._since, self._waited = time.perf_counter(), 0.0

    def flush(self) -> None:
        if self._rows and self._writes:
            with self._path.open("a", newline="", encoding="utf-8") as file:
                file.write(self._lines(self._rows))
        self._rows.clear()

    def _add(self, step: int, figures: Mapping[str, float]) -> None:
        if self._rows and self._rows[-1]["step"] == step:
            self._rows[-1] |= figures
        else:
            self._rows.append({"step": step, **figures})
        if self._board is not None:
            for name, value in figures.items():
                self._board.add_scalar(name, value, step)

    def _lines(self, rows: Iterable[Mapping[str, Any]], *, header: bool = False) -> str:
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, self._columns, lineterminator="\n")
        if header:
            writer.writeheader()
        writer.writerows(rows)
        return buffer.getvalue()


def tensorboard(folder: Path, done: int | None) -> Any:
    """A writer of TensorBoard's files, which hides what an earlier run wrote after step `done`; None without
    tensorboardX."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=0 if done is None else done + 1)
