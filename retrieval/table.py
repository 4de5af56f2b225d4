"""The RetrievalTable: for every stride, the rows and scores of its passages; and the paper's JSON, read and written."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ralm_jax.errors import RalmError, UsageError
from ralm_jax.storage import Folder
from ralm_jax.text import Text, write_text
from ralm_jax.tokenizer import Tokenizer
from ralm_jax.windows import Schedule
from retrieval.bm25 import Hits
from retrieval.corpus import Passage, Passages

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
        settings: what it was made with; empty for an imported file.
        about: where index and text lay; empty for an imported file.
        origin: where the table lies.
    """

    begins: np.ndarray
    ends: np.ndarray
    rows: np.ndarray
    scores: np.ndarray
    settings: dict[str, Any]
    about: dict[str, Any]
    origin: str

    @property
    def k(self) -> int:
        return self.rows.shape[1]

    def check_schedule(self, schedule: Schedule, hint: str) -> None:
        """
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


class RetrievalWriter:
    """The table on disk, written a chunk of strides at a time."""

    def __init__(self, folder: Folder, strides: int, k: int):
        self.strides = strides
        self._begins = folder.array("begins", (strides,), (CHUNK,), "int64", -1)
        self._ends = folder.array("ends", (strides,), (CHUNK,), "int64", -1)
        self._rows = folder.array("rows", (strides, k), (CHUNK, k), "int64", -1)
        self._scores = folder.array("scores", (strides, k), (CHUNK, k), "float32", 0)
        self.chunk = CHUNK

    def missing(self) -> list[range]:
        """The chunks that have yet to be retrieved."""
        done = self._begins[:] >= 0
        chunks = [range(i, min(i + CHUNK, self.strides)) for i in range(0, self.strides, CHUNK)]
        return [chunk for chunk in chunks if not done[chunk.start]]

    def write(self, strides: range, begins: np.ndarray, ends: np.ndarray, hits: Hits) -> None:
        rows = slice(strides.start, strides.stop)
        self._rows[rows], self._scores[rows], self._ends[rows] = hits.rows, hits.scores, ends
        self._begins[rows] = begins  # last: its presence says that the chunk is done


def open_retrieval(location: str) -> RetrievalTable:
    """A complete table.

    Raises:
        UsageError: there is no RetrievalTable at `location`.
        RalmError: it is not complete, or damaged.
    """
    folder = Folder.open(location, KIND)
    begins, ends, rows, scores = (folder.read(name) for name in ("begins", "ends", "rows", "scores"))
    missing = int((begins < 0).sum())
    if missing or "index" not in folder.about:
        raise RalmError(
            f"{location}: not complete, {missing} of {len(begins)} strides are missing; repeat the "
            "retrieval command with --resume"
        )
    return RetrievalTable(begins, ends, rows, scores, folder.settings, folder.about, location)


# --- the paper's JSON ---


def read_json(path: str) -> tuple[RetrievalTable, Passages]:
    """The file that the paper's code writes: a list, one object a stride, with the passages' texts inside.

    Raises:
        UsageError: there is no such file.
        RalmError: not such a list; the entry and the field are named.
    """
    try:
        entries = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except ValueError as error:
        raise RalmError(f"{path}: not JSON ({error})") from None
    if not isinstance(entries, list) or not entries:
        raise RalmError(f"{path}: expected a list with an object a stride")
    numbers: dict[Passage, int] = {}
    begins, ends, hits = [], [], []
    for i, entry in enumerate(entries):
        try:
            begins.append(int(entry["begin_location"]))
            ends.append(int(entry["end_location"]))
            documents = [
                (Passage("", document.get("title") or "", document["text"]), float(document.get("score", 0)))
                for document in entry["retrieved_docs"]
            ]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RalmError(f"{path}: entry {i} is not a stride of a retrieval file ({error!r})") from None
        hits.append([(numbers.setdefault(passage, len(numbers)), score) for passage, score in documents])
    k = max(1, *map(len, hits))
    rows, scores = np.full((len(hits), k), -1, np.int64), np.zeros((len(hits), k), np.float32)
    for j, found in enumerate(hits):
        rows[j, : len(found)] = [row for row, _ in found]
        scores[j, : len(found)] = [score for _, score in found]
    table = RetrievalTable(np.array(begins), np.array(ends), rows, scores, {}, {}, path)
    return table, Passages.of([passage._replace(id=str(i)) for passage, i in numbers.items()])


def stride_queries(tokens: np.ndarray, begins: np.ndarray, query_length: int, tokenizer: Tokenizer) -> list[str]:
    """The query of every stride: the text of the last `query_length` tokens strictly before its target (section 3.2);
    empty for the first."""
    return [tokenizer.decode(tokens[max(0, begin - query_length) : begin]) for begin in begins]


def write_json(path: str, table: RetrievalTable, passages: Passages, text: Text, tokenizer: Tokenizer) -> None:
    """Writes the table, made for `text` and `tokenizer`, as the file that the paper's `eval_lm.py` reads.

    Raises:
        RalmError: the file cannot be written.
    """
    tokens = tokenizer.encode(text.content)
    queries = stride_queries(tokens, table.begins, table.settings["query_length"], tokenizer)
    entries = []
    for j, (begin, end) in enumerate(zip(table.begins.tolist(), table.ends.tolist(), strict=True)):
        found = table.rows[j] >= 0
        documents = zip(passages.contents(table.rows[j][found]), table.scores[j][found].tolist(), strict=True)
        entries.append(
            {
                "begin_location": begin,
                "end_location": end,
                "future": tokenizer.decode(tokens[begin:end]),
                "query": queries[j],
                "retrieved_docs": [{"text": contents, "score": score} for contents, score in documents],
            }
        )
    write_text(path, json.dumps(entries, indent=4, allow_nan=False) + "\n")
