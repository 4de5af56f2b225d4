"""Windows that a reader learns from: documents as tokens, cut into pieces that have room in a window.

Several pieces may share a window. None sees another, and positions begin anew at each, so nothing leaks from one
document into another.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

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


class Piece(NamedTuple):
    """Tokens that stand together in a window: a document, or a part of one that is longer.

    Attributes:
        tokens: (n + 1,) int32, what is read, and the label after each.
        learned: (n,) bool, the labels that count.
    """

    tokens: np.ndarray
    learned: np.ndarray


@dataclass(frozen=True)
class Windows:
    """Windows of `length` tokens, padded where their pieces end.

    Attributes:
        pieces: that they are made of.
        rows: the numbers of each window's pieces.
        length: T, tokens that a window reads.
        marked: whether its batches have `documents`.
    """

    pieces: Sequence[Piece]
    rows: Sequence[Sequence[int]]
    length: int
    marked: bool

    def __len__(self) -> int:
        return len(self.rows)

    def __call__(self, row: int) -> Batch:
        """Window `row`, without the batch axis."""
        pieces = [self.pieces[number] for number in self.rows[row]]
        numbers = [np.full(len(piece.learned), number, np.int32) for number, piece in enumerate(pieces, 1)]

        def padded(parts: Sequence[np.ndarray]) -> np.ndarray:
            joined = np.concatenate(parts)
            return np.pad(joined, (0, self.length - len(joined)))

        return Batch(
            padded([piece.tokens[:-1] for piece in pieces]),
            padded([piece.tokens[1:] for piece in pieces]),
            padded([piece.learned.astype(np.float32) for piece in pieces]),
            padded(numbers) if self.marked else None,
        )

    def spread(self, limit: int) -> "Windows":
        """At most `limit` of the windows, evenly spread."""
        kept = np.linspace(0, len(self) - 1, min(limit, len(self))).round().astype(np.int64)
        return replace(self, rows=[self.rows[row] for row in kept])

    @property
    def padding(self) -> float:
        """Share of the windows that is padding."""
        filled = sum(len(self.pieces[number].learned) for row in self.rows for number in row)
        return 1 - filled / (len(self) * self.length)

    @property
    def fingerprint(self) -> str:
        digest = sha256(self.length.to_bytes(8, "little"))
        for row in self.rows:
            digest.update(len(row).to_bytes(8, "little"))
            for tokens, learned in (self.pieces[number] for number in row):
                digest.update(len(tokens).to_bytes(8, "little") + tokens.tobytes() + learned.tobytes())
        return digest.hexdigest()


def make_windows(sets: Iterable[Sequence[Piece]], length: int, *, together: bool) -> list[Windows]:
    """Windows of each of several sets of pieces, which share none, in the order of their first pieces.

    Batches have `documents` where any window of any of the sets has several pieces: without, all of them run the
    program that needs no mask.

    Args:
        together: put several pieces into a window, as `pack` does; otherwise each has one of its own.
    """
    sets = list(sets)
    packed = [
        pack([len(piece.learned) for piece in pieces], length) if together else [[n] for n in range(len(pieces))]
        for pieces in sets
    ]
    marked = any(len(row) > 1 for rows in packed for row in rows)
    return [Windows(pieces, rows, length, marked) for pieces, rows in zip(sets, packed, strict=True)]


def pack(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Best-fit decreasing (Ding et al., 2024, "Fewer truncations improve language modeling"): from the largest on,
    each of `sizes` goes where it leaves the least room of `length`.

    Returns:
        the numbers in each window, in order; windows are in the order of their first.
    """
    windows: list[list[int]] = []
    rooms: list[int] = []  # that windows have, ascending, each once
    having: defaultdict[int, list[list[int]]] = defaultdict(list)  # windows by their room
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        place = bisect_left(rooms, sizes[number])
        if place < len(rooms):
            room = rooms[place]
            window = having[room].pop()
            if not having[room]:
                del rooms[place]
        else:
            room, window = length, []
            windows.append(window)
        window.append(number)
        room -= sizes[number]
        if not having[room]:
            insort(rooms, room)
        having[room].append(window)
    return sorted(sorted(window) for window in windows)


def cut(documents: Iterable[str], tokenizer: Tokenizer, length: int) -> list[Piece]:
    """Pieces of at most `length` tokens of all documents, in order; what a tokenizer puts behind a text ends each
    document.

    Every token of a document is the label of one piece; but the first where no BOS stands in front of it. A BOS stands
    in front of every piece.

    Raises:
        RalmError: there is nothing to predict in them, or the tokenizer puts several tokens in front of a text.
    """
    bos = np.array([] if tokenizer.bos is None else [tokenizer.bos], np.int32)
    end = np.array(tokenizer.suffix, np.int32)
    first = 1 - len(bos)  # of a document's tokens, that can be predicted
    pieces = []
    for document in documents:
        tokens = np.concatenate([tokenizer.encode(document), end])
        for start in range(first, len(tokens), length):
            piece = np.concatenate([bos, tokens[start - first : start + length]])
            pieces.append(Piece(piece, np.broadcast_to(True, len(piece) - 1)))
    if not pieces:
        raise RalmError("there is nothing to predict in the documents: name others with --text or --data")
    return pieces


def split(pieces: Sequence[Piece], held_out: float) -> tuple[Sequence[Piece], Sequence[Piece]]:
    """Pieces to train on, and the share `held_out` of them that comes last.

    Raises:
        RalmError: nothing is left on one of the sides.
    """
    border = round((1 - held_out) * len(pieces))
    training, held = pieces[:border], pieces[border:]
    if not training or (held_out and not held):
        raise RalmError(
            f"the documents' {len(pieces)} pieces leave {len(training)} to train on and {len(held)} held out; name "
            "more text, or change --held-out"
        )
    return training, held
