"""The ScoreTable: for every stride and every candidate, the log-probability of its target and past tokens.

Candidate 0 is "no passage"; candidate i is the i-th retrieved passage. The first window of a text is scored once,
without passage. Everything that the papers report is a pure function of this table (`ralm_jax.ranking`).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ralm_jax.errors import RalmError
from ralm_jax.storage import Array, Folder

KIND = "scores"


@dataclass(frozen=True)
class Scores:
    """A complete table in memory. J strides after the first window, k passages, p past and s target tokens.

    Attributes:
        first_window: (n,) float32 log-probabilities of the first window's tokens after the first.
        past: (J, 1 + k, p) float32, of the p tokens before each target.
        target: (J, 1 + k, s) float32; NaN after the end of a shorter last stride, and where there is no passage.
        passages: (J, k) int64 rows of the corpus, -1 for none.
        settings: what the table was made with.
        about: what is known of the text: tokens, words, overlap with the passages.
    """

    first_window: np.ndarray
    past: np.ndarray
    target: np.ndarray
    passages: np.ndarray
    settings: dict[str, Any]
    about: dict[str, Any]

    @property
    def num_passages(self) -> np.ndarray:
        """(J,) how many passages each stride has."""
        return (self.passages >= 0).sum(axis=1)


class ScoreTable:
    """The table on disk, written a chunk of strides at a time."""

    def __init__(self, folder: Folder, strides: int, passages: int, past: int, stride: int, first: int, chunk: int):
        columns = past + stride
        self.folder, self.past = folder, past
        rows = max(strides, 1)
        self._first: Array = folder.array("first_window", (max(first, 1),), (max(first, 1),), "float32", np.nan)
        self._log_probs: Array = folder.array(
            "log_probs", (rows, 1 + passages, columns), (chunk, 1 + passages, columns), "float32", np.nan
        )
        self._passages: Array = folder.array(
            "passages", (rows, max(passages, 1)), (chunk, max(passages, 1)), "int64", -1
        )
        self.strides, self.chunk = strides, self._log_probs.chunk

    def missing(self) -> list[range]:
        """The chunks of strides that have yet to be scored."""
        if not self.strides:
            return []
        done = ~np.isnan(self._log_probs[:, 0, self.past])
        chunks = [range(i, min(i + self.chunk, self.strides)) for i in range(0, self.strides, self.chunk)]
        return [chunk for chunk in chunks if not done[chunk.start]]

    def first_window_missing(self) -> bool:
        return bool(np.isnan(self._first[:]).any())

    def write_first_window(self, log_probs: np.ndarray) -> None:
        self._first[:] = log_probs

    def write(self, strides: range, log_probs: np.ndarray, passages: np.ndarray) -> None:
        """Writes one chunk: log_probs (n, 1 + k, p + s), passages (n, k)."""
        rows = slice(strides.start, strides.stop)
        if passages.shape[1]:
            self._passages[rows] = passages
        self._log_probs[rows] = log_probs  # last: its presence says that the chunk is done


def open_scores(location: str) -> Scores:
    """A complete table.

    Raises:
        UsageError: there is no ScoreTable at `location`.
        RalmError: it is not complete yet, or damaged.
    """
    folder = Folder.open(location, KIND)
    settings, about = folder.settings, folder.about
    first, log_probs = folder.read("first_window"), folder.read("log_probs")
    strides, k, past = settings["strides"], settings["k"], settings["past"]
    log_probs = log_probs[:strides]
    missing = int(np.isnan(log_probs[:, 0, past]).sum())
    if missing or np.isnan(first).any() or "tokens" not in about:
        raise RalmError(
            f"{location}: not complete, {missing} of {strides} strides are missing; "
            "repeat the scoring command with --resume"
        )
    passages = folder.read("passages")[:strides, :k]
    return Scores(first, log_probs[:, :, :past], log_probs[:, :, past:], passages, settings, about)
