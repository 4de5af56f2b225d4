"""The ScoreTable: for every stride and every candidate, the log-probability of its target and past tokens.

Candidate 0 is "no passage"; candidate i is the i-th retrieved passage. The first window of a text is scored once,
without passage. Everything that the papers report is a pure function of this table (`ralm_jax.ranking`).
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ralm_jax.errors import RalmError

if TYPE_CHECKING:
    from ralm_jax.storage import Folder

KIND = "scores"
ROWS_A_CHUNK = 1 << 16  # of arrays that are written once


@dataclass(frozen=True)
class Scores:
    """A complete table in memory. J strides after the first window, k passages, p past and s target tokens.

    Attributes:
        first_window: (n,) float32 log-probabilities of the first window's tokens after the first.
        past: (J, 1 + k, p) float32, of the p tokens before each target.
        target: (J, 1 + k, s) float32; NaN after the end of a shorter last stride, and where there is no passage.
        passages: (J, k) int64 rows of the corpus, -1 for none.
        token_ends: (L,) int64, one past the last character of each token of the text up to the last scored one.
        begins: (J,) int64, the character at which each stride begins.
        retrieval_scores: (J, k) float32, the retriever's; None in a table of before they were kept.
        settings: what the table was made with.
        about: what is known of the text: tokens, words, overlap with the passages.
    """

    first_window: np.ndarray
    past: np.ndarray
    target: np.ndarray
    passages: np.ndarray
    token_ends: np.ndarray
    begins: np.ndarray
    settings: dict[str, Any]
    about: dict[str, Any]
    retrieval_scores: np.ndarray | None = None

    @property
    def num_passages(self) -> np.ndarray:
        """(J,) how many passages each stride has."""
        return (self.passages >= 0).sum(axis=1)

    def first_k(self, k: int) -> "Scores":
        """The table of the first `k` passages alone; `about` stays that of all."""
        past, target, passages = self.past[:, : 1 + k], self.target[:, : 1 + k], self.passages[:, :k]
        retrieval = None if self.retrieval_scores is None else self.retrieval_scores[:, :k]
        return replace(
            self,
            past=past,
            target=target,
            passages=passages,
            retrieval_scores=retrieval,
            settings=self.settings | {"k": k},
        )


class ScoreTable:
    """The table on disk, written a chunk of strides at a time."""

    def __init__(
        self,
        folder: "Folder",
        *,
        passages: np.ndarray,
        retrieval_scores: np.ndarray,
        token_ends: np.ndarray,
        begins: np.ndarray,
        past: int,
        stride: int,
        first: int,
        chunk: int,
    ):
        """
        Args:
            passages, retrieval_scores: (J, k), as in `Scores`; known before anything is scored, and written now.
            token_ends, begins: (L,) and (J,), as in `Scores`; likewise.
            past, stride: p and s.
            first: scored tokens of the first window.
            chunk: strides a chunk, if the table is new.
        """
        self.past = past
        whole = {"passages": passages, "token_ends": token_ends, "begins": begins, "retrieval_scores": retrieval_scores}
        for name, values in whole.items():
            rows = (min(ROWS_A_CHUNK, max(1, len(values))), *(max(1, size) for size in values.shape[1:]))
            dtype, fill = ("int64", -2) if values.dtype.kind == "i" else ("float32", np.nan)
            folder.write(name, values, rows, dtype, fill)
        shape = (len(passages), 1 + passages.shape[1], past + stride)
        self._first = folder.array("first_window", (first,), (first,), "float32", np.nan)
        self._log_probs = folder.array("log_probs", shape, (chunk, *shape[1:]), "float32", np.nan)

    def missing(self) -> list[range]:
        """The chunks of strides that have yet to be scored."""
        return self._log_probs.missing(~np.isnan(self._log_probs[:, 0, 0]))

    def first_window_missing(self) -> bool:
        return bool(np.isnan(self._first[:]).any())

    def write_first_window(self, log_probs: np.ndarray) -> None:
        """`log_probs` (n,)."""
        self._first[:] = log_probs

    def write(self, strides: range, log_probs: np.ndarray) -> None:
        """Writes one chunk: `log_probs` (n, 1 + k, p + s)."""
        self._log_probs[strides.start : strides.stop] = log_probs


def open_scores(location: str) -> Scores:
    """A complete table.

    Raises:
        UsageError: there is no ScoreTable at `location`.
        RalmError: it is not complete yet, or damaged.
    """
    from ralm_jax.storage import Folder  # needs TensorStore; what is done with scores needs NumPy alone

    folder = Folder.open(location, KIND)
    past = folder.settings["past"]
    if not {"log_probs", "first_window"} <= set(folder.manifest["arrays"]):
        raise RalmError(f"{location}: nothing is scored yet; repeat the scoring command with --resume")
    first, log_probs = folder.read("first_window"), folder.read("log_probs")
    passages, token_ends = folder.read("passages"), folder.read("token_ends")
    if "begins" in folder.manifest["arrays"]:
        begins = folder.read("begins")
    else:  # a table of before strides could be another tokenizer's
        begins = token_ends[len(first) + folder.settings["stride"] * np.arange(len(passages))]
    retrieval = folder.read("retrieval_scores") if "retrieval_scores" in folder.manifest["arrays"] else None
    incomplete = np.isnan(log_probs[:, 0, 0]) | (passages < -1).any(axis=1)
    missing = int((incomplete if retrieval is None else incomplete | np.isnan(retrieval).any(axis=1)).sum())
    if missing or np.isnan(first).any() or (token_ends < 0).any() or (begins < 0).any() or "tokens" not in folder.about:
        raise RalmError(
            f"{location}: not complete, {missing} of {len(log_probs)} strides are missing; repeat the scoring command "
            "with --resume"
        )
    return Scores(
        first_window=first,
        past=log_probs[:, :, :past],
        target=log_probs[:, :, past:],
        passages=passages,
        token_ends=token_ends,
        begins=begins,
        settings=folder.settings,
        about=folder.about,
        retrieval_scores=retrieval,
    )
