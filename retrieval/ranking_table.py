"""The RankingTable: a trained reranker's scores of the passages of a RetrievalTable."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ralm_jax.errors import RalmError
from ralm_jax.score_table import ROWS_A_CHUNK, Scores
from ralm_jax.storage import Folder

KIND = "ranking"
CHUNK_PAIRS = 4096


@dataclass(frozen=True)
class RankingTable:
    """A complete table in memory. J strides, the first of which has no passage.

    Attributes:
        rows: (J, k) int64 passages, those of the RetrievalTable; -1 for none.
        scores: (J, k) float32 scores f(prefix, passage) of eq. 7; -inf where there is no passage.
        settings: what it was made with.
        about: where reranker, retrieval and text lay.
        origin: where the table lies.
    """

    rows: np.ndarray
    scores: np.ndarray
    settings: dict[str, Any]
    about: dict[str, Any]
    origin: str

    def values(self, scores: Scores, location: str) -> np.ndarray:
        """(J, k) float32: our scores of the passages of `scores`, which may have fewer strides and passages.

        Args:
            location: of the ScoreTable, for messages.

        Raises:
            RalmError: `scores` is of another text, or of other passages.
        """
        strides, k = scores.passages.shape
        rows = self.rows[1 : 1 + strides, :k]
        same_text = self.settings["text_sha256"] == scores.settings.get("text_sha256", self.settings["text_sha256"])
        if not same_text or not np.array_equal(rows, scores.passages):
            raise RalmError(
                f"{self.origin}: ranks other passages than {location} has; both must be of the same text and retrieval "
                f"({self.about['retrieved']} here), for at least as many strides and passages"
            )
        return self.scores[1 : 1 + strides, :k]


class RankingWriter:
    """The table on disk, written a chunk of strides at a time."""

    def __init__(self, folder: Folder, rows: np.ndarray):
        """`rows` (J, k) are known before anything is ranked, and written now."""
        strides, k = rows.shape
        folder.write("rows", rows, (min(ROWS_A_CHUNK, strides), k), "int64", -2)
        chunk = min(strides, max(1, CHUNK_PAIRS // k))
        self._scores = folder.array("scores", rows.shape, (chunk, k), "float32", np.nan)

    def missing(self) -> list[range]:
        """The chunks that have yet to be ranked."""
        return self._scores.missing(~np.isnan(self._scores[:]).any(axis=1))

    def write(self, strides: range, scores: np.ndarray) -> None:
        """Writes one chunk: `scores` (n, k)."""
        self._scores[strides.start : strides.stop] = scores


def open_ranking(location: str) -> RankingTable:
    """A complete table.

    Raises:
        UsageError: there is no RankingTable at `location`.
        RalmError: it is not complete, or damaged.
    """
    folder = Folder.open(location, KIND)
    if not {"rows", "scores"} <= set(folder.manifest["arrays"]):
        raise RalmError(f"{location}: nothing is ranked yet; repeat the command `ralm rerank` with --resume")
    rows, scores = folder.read("rows"), folder.read("scores")
    missing = int((np.isnan(scores) | (rows < -1)).any(axis=1).sum())
    if missing or "retrieved" not in folder.about:
        raise RalmError(
            f"{location}: not complete, {missing} of {len(rows)} strides are missing; repeat the command `ralm rerank` "
            "with --resume"
        )
    return RankingTable(rows, scores, folder.settings, folder.about, location)
