"""Windows that a reader learns from: documents as tokens, cut into pieces of one fixed length.

A window has text of one document only, and is padded where that ends, so nothing leaks from one document into another.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import numpy as np

from ralm_jax.errors import RalmError, UsageError
from ralm_jax.text import data_suffix, read_rows, read_text, row_text
from ralm_jax.tokenizer import Tokenizer
from retrieval.rows import parquet_rows
from train.causal import Batch


def read_documents(texts: Sequence[str], data: Sequence[str]) -> Iterator[str]:
    """Documents from files.

    Args:
        texts: files that are a document each, as `ralm_jax.text.read_text` reads them.
        data: jsonl or Parquet files, of which every row is one: a string, or an object with "text".

    Raises:
        UsageError: no such file, or `data` of another kind.
        RalmError: a file that cannot be read, or a row that is no text.
    """
    for path in texts:
        yield read_text(path).content
    for path in data:
        file = Path(path).expanduser()
        if data_suffix(file) not in (".jsonl", ".parquet"):
            raise UsageError(f"{path}: --data takes .jsonl and .parquet files; name a text with --text")
        rows = read_rows(file) if data_suffix(file) == ".jsonl" else parquet_rows(file)
        yield from (row_text(row, where) for where, row in rows)


class Examples(Protocol):
    """Windows of `length` tokens, by number."""

    @property
    def length(self) -> int: ...

    def __len__(self) -> int: ...

    def __call__(self, row: int) -> Batch: ...


@dataclass(frozen=True)
class Windows:
    """Every token of every document is the label of one window; but the first of a document where no BOS stands in
    front of it.

    Attributes:
        tokens: (n,) int32, of all documents.
        begins: (W,) the first label of each window.
        ends: (W,) one past its last.
        length: T, tokens that a window reads.
        bos: the token that stands in front of every window; without, there is the token before its first label.
    """

    tokens: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    length: int
    bos: int | None

    def __len__(self) -> int:
        return len(self.begins)

    def __call__(self, row: int) -> Batch:
        """Window `row`, without the batch axis."""
        labels = self.tokens[self.begins[row] : self.ends[row]]
        first = self.tokens[self.begins[row] - 1] if self.bos is None else self.bos
        padding = (0, self.length - len(labels))
        tokens = np.concatenate([[first], labels[:-1]]).astype(np.int32)
        weight = np.ones(len(labels), np.float32)
        return Batch(np.pad(tokens, padding), np.pad(labels, padding), np.pad(weight, padding))

    def only(self, rows: np.ndarray) -> "Windows":
        return replace(self, begins=self.begins[rows], ends=self.ends[rows])

    @property
    def labels(self) -> int:
        """Labels of all windows; the rest of them is padding."""
        return int((self.ends - self.begins).sum())

    @property
    def fingerprint(self) -> str:
        parts = (self.tokens, self.begins, self.ends, np.array([self.length, -1 if self.bos is None else self.bos]))
        return sha256(b"".join(part.tobytes() for part in parts)).hexdigest()


def cut(documents: Iterator[str], tokenizer: Tokenizer, length: int) -> Windows:
    """The windows of all documents, in order; what a tokenizer puts behind a text ends each document.

    Raises:
        RalmError: there is nothing to predict in them, or the tokenizer puts several tokens in front of a text.
    """
    bos, end = tokenizer.bos, np.array(tokenizer.suffix, np.int32)
    first = 1 if bos is None else 0  # of a document's tokens, that can be predicted
    parts, begins, ends, offset = [np.zeros(0, np.int32)], list[int](), list[int](), 0
    for document in documents:
        tokens = np.concatenate([tokenizer.encode(document), end])
        starts = range(offset + first, offset + len(tokens), length)
        begins += starts
        ends += (min(start + length, offset + len(tokens)) for start in starts)
        parts.append(tokens)
        offset += len(tokens)
    if not begins:
        raise RalmError("there is nothing to predict in the documents: name others with --text or --data")
    return Windows(np.concatenate(parts), np.array(begins), np.array(ends), length, bos)


def split(windows: Windows, held_out: float, limit: int) -> tuple[Windows, Windows]:
    """Windows to train on, and the share `held_out` of them that comes last; at most `limit` of these, evenly spread.

    Raises:
        RalmError: nothing is left on one of the sides.
    """
    border = round((1 - held_out) * len(windows))
    training, held = np.arange(border), np.arange(border, len(windows))
    if not len(training) or (held_out and not len(held)):
        raise RalmError(
            f"{len(windows)} windows of {windows.length:,} tokens leave {len(training)} to train on and {len(held)} "
            "held out; name more text, or change --held-out"
        )
    spread = np.linspace(0, len(held) - 1, min(limit, len(held))).round().astype(np.int64)
    return windows.only(training), windows.only(held[spread])
