"""Checkpoints of a training run (Orbax): whole ones only, the last two and the best."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from ralm_jax import processes
from ralm_jax.errors import RalmError, first_line
from train.state import State

BEST_BY = "held_out_loss"
UNFINISHED = ".orbax-checkpoint-tmp"  # behind the step, while Orbax writes its checkpoint


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
