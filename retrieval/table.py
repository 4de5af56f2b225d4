"""The RetrievalTable: for every stride, the rows and scores of its passages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ralm_jax.errors import RalmError
from ralm_jax.storage import Folder
from ralm_jax.text import Text
from ralm_jax.tokenizer import Tokenizer
from ralm_jax.windows import Schedule
from retrieval.retriever import Hits

KIND = "retrieval"
CHUNK = 2048  # strides


@dataclass(frozen=True)
class RetrievalTable:
    """A complete table in memory. J strides, the first of which has no passage.

    Attributes:
        begins: (J,) first target token of each stride, `begin_location` in the paper's JSON.
        ends: (J,) one past the last, `end_location`.
        rows: (J, k) int64 passages, best first; -1 for none.
        scores: (J, k) float32.
        settings: what it was made with; of an imported file, its hash.
        about: where index and text lay; empty for an imported file.
        origin: where the table lies.
        futures: the text of each stride, which an imported file states.
        characters: (J, 2) int64, where in the text each stride begins and ends; None for an imported file.
    """

    begins: np.ndarray
    ends: np.ndarray
    rows: np.ndarray
    scores: np.ndarray
    settings: dict[str, Any]
    about: dict[str, Any]
    origin: str
    futures: Sequence[str] = ()
    characters: np.ndarray | None = None

    @property
    def k(self) -> int:
        return self.rows.shape[1]

    def check_schedule(self, schedule: Schedule, hint: str) -> None:
        """Refuses to be read as the retrieval of another schedule.

        Args:
            hint: what `schedule` was made with, for the message.

        Raises:
            RalmError: the strides are not those of `schedule`; the first difference is named.
        """
        count = min(len(schedule), len(self.begins))
        differs = (self.begins[:count] != schedule.targets[:count]) | (self.ends[:count] != schedule.ends[:count])
        if differs.any():
            j = int(differs.argmax())
            raise RalmError(
                f"{self.origin}: stride {j} is tokens {self.begins[j]} to {self.ends[j]} here, but "
                f"{schedule.targets[j]} to {schedule.ends[j]} by {hint}; use the text, tokenizer, window and stride "
                "that it was retrieved with"
            )
        if len(self.begins) < len(schedule):
            raise RalmError(
                f"{self.origin}: has {len(self.begins)} strides, the text has {len(schedule)}; retrieve for the whole "
                "text, or score fewer with --limit-strides"
            )

    def check_text(self, text: Text, tokens: np.ndarray, tokenizer: Tokenizer, advice: str = "") -> None:
        """Refuses to be read as the retrieval of another text.

        Args:
            advice: what else can be done with another tokenizer.

        Raises:
            RalmError: the table was made for another text, or with another tokenizer.
        """
        self.check_fingerprint("text", text)
        self.check_fingerprint("tokenizer", tokenizer, advice)
        for j, future in enumerate(self.futures):
            # older versions of transformers drop spaces in front of punctuation when they decode
            if future and "".join(future.split()) != "".join(
                tokenizer.decode(tokens[self.begins[j] : self.ends[j]]).split()
            ):
                raise RalmError(
                    f"{self.origin}: stride {j} is {future[:40]!r}, which {text.origin} does not have there"
                )

    def check_fingerprint(self, name: str, ours: Text | Tokenizer, advice: str = "") -> None:
        """
        Raises:
            RalmError: the table was made with another one.
        """
        if self.settings.get(f"{name}_sha256", ours.fingerprint) != ours.fingerprint:
            made = self.about.get(name, "another one")
            raise RalmError(f"{self.origin}: was retrieved with the {name} of {made}, not of {ours.origin}{advice}")

    def stride_characters(self) -> np.ndarray:
        """`characters`, if they are known.

        Raises:
            RalmError: it does not say at which characters its strides begin.
        """
        if self.characters is None:
            raise RalmError(
                f"{self.origin}: does not say at which characters its strides begin; retrieve anew with `ralm retrieve`"
            )
        return self.characters


class RetrievalWriter:
    """The table on disk, written a chunk of strides at a time."""

    def __init__(self, folder: Folder, characters: np.ndarray, k: int):
        strides = len(characters)
        folder.write("characters", characters, characters.shape, "int64", -1)
        self._begins = folder.array("begins", (strides,), (CHUNK,), "int64", -1)
        self._ends = folder.array("ends", (strides,), (CHUNK,), "int64", -1)
        self._rows = folder.array("rows", (strides, k), (CHUNK, k), "int64", -2)
        self._scores = folder.array("scores", (strides, k), (CHUNK, k), "float32", np.nan)

    def missing(self) -> list[range]:
        """The chunks that have yet to be retrieved."""
        return self._begins.missing(written(self._begins[:], self._ends[:], self._rows[:], self._scores[:]))

    def write(self, strides: range, begins: np.ndarray, ends: np.ndarray, hits: Hits) -> None:
        rows = slice(strides.start, strides.stop)
        self._rows[rows], self._scores[rows] = hits.rows, hits.scores
        self._begins[rows], self._ends[rows] = begins, ends


def written(begins: np.ndarray, ends: np.ndarray, rows: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """(J,) bool: the strides that stand in all four arrays."""
    return (begins >= 0) & (ends >= 0) & (rows >= -1).all(axis=1) & ~np.isnan(scores).any(axis=1)


def open_retrieval(location: str) -> RetrievalTable:
    """A complete table.

    Raises:
        UsageError: there is no RetrievalTable at `location`.
        RalmError: it is not complete, or damaged.
    """
    folder = Folder.open(location, KIND)
    begins, ends, rows, scores = (folder.read(name) for name in ("begins", "ends", "rows", "scores"))
    missing = int((~written(begins, ends, rows, scores)).sum())
    if missing or "index" not in folder.about:
        raise RalmError(
            f"{location}: not complete, {missing} of {len(begins)} strides are missing; repeat the "
            "retrieval command with --resume"
        )
    characters = folder.read("characters") if "characters" in folder.manifest["arrays"] else None
    return RetrievalTable(begins, ends, rows, scores, folder.settings, folder.about, location, characters=characters)
