"""From passages to BM25's postings, in parts that a killed build keeps, with no more than a part a process in memory.

A part holds the postings of `PART` passages by term, of fewer where their text is long; several are made at once, each
by a process of its own. Parts are then put together by two passes over them: one counts, one writes every posting to
its place. The result is the same to the byte however the passages fall into parts.
"""

import os
import signal
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import current_process, get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import numpy as np

from ralm_jax.errors import RalmError, UsageError
from ralm_jax.storage import check_disk, megabytes
from ralm_jax.text import writing
from retrieval import analyzer
from retrieval.corpus import Passage, Passages

PART, PART_BYTES = 1 << 16, 1 << 26  # passages, and their text; what a process of a killed build can lose
WORKERS = 8  # processes at most: each has a part in memory, and the words that it has seen
SAMPLE = 1000  # passages that the size is guessed from
POSTING_BYTES = 8  # a row and a score
GUARD = '`if __name__ == "__main__":` around what it does'
WORTH_SAYING = 100e6  # bytes of disk that an index takes while it is built


class Part(NamedTuple):
    """The postings of some passages by term, in the order in which terms first occur.

    Attributes:
        terms: UTF-8 with a newline after each.
        indptr: (terms + 1,) int64 where the postings of each term begin.
        rows: int32, counted from the part's first passage.
        frequencies: int32.
        lengths: (passages,) int32, in terms.
    """

    terms: np.ndarray
    indptr: np.ndarray
    rows: np.ndarray
    frequencies: np.ndarray
    lengths: np.ndarray

    @property
    def listed(self) -> list[str]:
        return self.terms.tobytes().decode().split("\n")[:-1]


def part_of(texts: Sequence[str]) -> Part:
    """The postings of `texts`."""
    vocabulary: dict[str, int] = {}
    found = [
        np.array([vocabulary.setdefault(term, len(vocabulary)) for term in analyzer.analyze(text)], np.int64)
        for text in texts
    ]
    lengths = np.array([len(terms) for terms in found], np.int32)
    keys = np.concatenate(found) * len(texts) + np.repeat(np.arange(len(texts)), lengths)
    pairs, frequencies = np.unique(keys, return_counts=True)
    matches = np.bincount(pairs // len(texts), minlength=len(vocabulary))
    return Part(
        np.frombuffer("".join(f"{term}\n" for term in vocabulary).encode(), np.uint8),
        np.concatenate([[0], np.cumsum(matches)]).astype(np.int64),
        (pairs % len(texts)).astype(np.int32),
        frequencies.astype(np.int32),
        lengths,
    )


def in_parts(passages: Iterable[Passage], starts: list[int]) -> Iterator[Passage]:
    """Passes `passages` through, and adds to `starts` the row that each part begins with."""
    room = 0
    for row, passage in enumerate(passages):
        size = len(passage.contents.encode())
        if not starts or row - starts[-1] == PART or size > room:
            starts.append(row)
            room = PART_BYTES
        room -= size
        yield passage


def write_parts(source: Path, parts: Mapping[Path, range], cores: int, done: Callable[[int], object]) -> None:
    """Writes `parts`, by path and rows, of the passages at `source`; a single one without a process for it.

    Args:
        done: is told the passages of each part that is written.

    Raises:
        RalmError: a part cannot be written, or a process died.
    """
    workers = min(WORKERS, cores, len(parts))
    if workers < 2:
        for path, rows in parts.items():
            done(make_part(source, path, rows))
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), begin_worker)  # threads, JAX's too, survive no fork
    try:
        for written in as_completed([pool.submit(make_part, source, path, rows) for path, rows in parts.items()]):
            done(written.result())
    except BrokenProcessPool:
        raise RalmError(
            f"{source}: a process that analysed passages was killed (free some memory, and go on with --resume), or "
            f"could not start (a script that builds an index needs {GUARD})"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def refuse_in_worker() -> None:
    """
    Raises:
        UsageError: this process is a worker that is still importing the script which started it.
    """
    if getattr(current_process(), "_inheriting", False):  # as multiprocessing itself asks
        raise UsageError(f"a script that builds an index is imported by the processes that help it, and needs {GUARD}")


def begin_worker() -> None:
    """Ctrl-C ends a worker without a traceback, and so does the death of its parent."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    parent = parent_process()
    assert parent
    parent.join()
    os._exit(1)


def make_part(source: Path, path: Path, rows: range) -> int:
    """Writes one part; how many passages it has."""
    write_part(path, part_of(Passages.open(source).contents(rows)))
    return len(rows)


def write_part(path: Path, part: Part) -> None:
    """Writes a part, whole or not at all.

    Raises:
        RalmError: it cannot be written.
    """
    unfinished = path.with_suffix(".tmp")
    with writing(path):
        with unfinished.open("wb") as file:
            np.savez(file, **part._asdict())
        unfinished.replace(path)


def read_part(path: Path) -> Part:
    """
    Raises:
        RalmError: it is damaged.
    """
    try:
        with path.open("rb") as file, np.load(file) as stored:
            return Part(*(stored[name] for name in Part._fields))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise RalmError(f"{path}: damaged ({error}); delete this part, and go on with --resume") from None


def merge_parts(parts: Sequence[Path], folder: Path, k1: float, b: float, quantise: bool) -> dict[str, Any]:
    """Writes the whole index to `folder`, as `bm25s` reads it; what is known of it then.

    Scores are float32, by Lucene's steps.

    Raises:
        RalmError: a part is damaged, or there is no room.
    """
    vocabulary: dict[str, int] = {}
    numbers, lengths = [], []  # of each part: its terms' numbers, its passages' lengths
    matches = np.zeros(1 << 16, np.int64)
    for path in parts:
        part = read_part(path)
        own = np.array([vocabulary.setdefault(term, len(vocabulary)) for term in part.listed], np.int64)
        matches = np.pad(matches, (0, max(0, len(vocabulary) - len(matches)) * 2))
        matches[own] += np.diff(part.indptr)
        numbers.append(own)
        lengths.append(part.lengths)
    matches = matches[: len(vocabulary)]

    all_lengths = np.concatenate(lengths)
    not_empty = max(1, int((all_lengths > 0).sum()))
    average = np.float32(all_lengths.sum(dtype=np.int64) / not_empty)
    distinct = np.arange(all_lengths.max() + 1)
    counted = np.array([quantised_length(int(n)) if quantise else n for n in distinct], np.float32)
    one, k1_, b_ = np.float32(1), np.float32(k1), np.float32(b)
    norms = one / (k1_ * ((one - b_) + b_ * counted / max(average, one)))
    idf = np.log(1 + (not_empty - matches + 0.5) / (matches + 0.5)).astype(np.float32)

    indptr = np.concatenate([[0], np.cumsum(matches)]).astype(np.int64)
    smallest, largest, first, place = np.inf, 0.0, 0, indptr[:-1].copy()
    stored = {"data": np.zeros(0, np.float32), "indices": np.zeros(0, np.int32), "indptr": indptr}
    with writing(folder):
        bm25s_index(stored | {"num_docs": len(all_lengths)}, vocabulary, k1, b).save(folder, show_progress=False)
        indices = new_array(folder / "indices.csc.index.npy", "int32", int(indptr[-1]))
        data = new_array(folder / "data.csc.index.npy", "float32", int(indptr[-1]))
        for path, own in zip(parts, numbers, strict=True):
            part = read_part(path)
            terms = np.repeat(own, np.diff(part.indptr))
            places = np.repeat(place[own] - part.indptr[:-1], np.diff(part.indptr)) + np.arange(len(terms))
            weight = idf[terms]
            scores = weight - weight / (one + part.frequencies.astype(np.float32) * norms[part.lengths[part.rows]])
            indices[places], data[places] = part.rows + first, scores
            place[own] += np.diff(part.indptr)
            first += len(part.lengths)
            if len(scores):
                smallest, largest = min(smallest, float(scores.min())), max(largest, float(scores.max()))
    return {"terms": len(vocabulary), "score_range": [smallest, largest] if largest else [0.0, 0.0]}


def new_array(path: Path, dtype: str, count: int) -> np.ndarray:
    """An array mapped to a file that has all its disk: where a full one leaves no room for a page, a write to it kills.

    Raises:
        OSError: there is no room.
    """
    if not count:
        return np.zeros(0, dtype)  # nothing cannot be mapped
    array = np.lib.format.open_memmap(path, "w+", np.dtype(dtype), (count,))
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def bm25s_index(scores: dict[str, Any], vocabulary: dict[str, int], k1: float, b: float) -> Any:
    """A `bm25s.BM25` with our scores; whatever reads `bm25s` indexes reads what it saves."""
    import bm25s

    index = bm25s.BM25(method="lucene", k1=k1, b=b)
    index.scores, index.vocab_dict = scores, vocabulary
    index.unique_token_ids_set, index.nonoccurrence_array = set(vocabulary.values()), None
    return index


def quantised_length(length: int) -> int:
    """A passage's length as Lucene's one-byte norm gives it back (`SmallFloat.intToByte4`): exact to 40, then with
    three bits after the leading one."""
    rest = max(0, length - 24)
    shift = max(0, rest.bit_length() - 4)
    return length - rest + (rest >> shift << shift)


def check_room(location: str, count: int, sample: Sequence[str], there: int, announce: Callable[[str], None]) -> None:
    """Says what the index takes before it is made, if that is much.

    Args:
        there: bytes of the parts that an earlier build left.

    Raises:
        RalmError: the disk does not have it.
    """
    postings = POSTING_BYTES * len(part_of(sample).rows) * count / max(1, len(sample))
    building = 2 * postings  # the parts, and the arrays made of them
    if building >= WORTH_SAYING:
        announce(
            f"{location}: {count:,} passages, about {megabytes(postings)} of postings, and {megabytes(building)} of "
            "disk while it is built"
        )
    check_disk(location, building - there)
