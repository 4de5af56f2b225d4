"""Figures of a training run: for people, in metrics.csv, and for TensorBoard."""

import csv
import io
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ralm_jax import processes
from ralm_jax.errors import RalmError
from ralm_jax.settings import TrainSettings
from ralm_jax.text import write_text

METRICS, TENSORBOARD = "metrics.csv", "tensorboard"


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
