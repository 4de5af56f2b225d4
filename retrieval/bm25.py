"""Embedded BM25 with Lucene's numbers: `bm25s` keeps the index, `bm25_search` searches it.

score(q, d) = sum over query terms of idf(t) * tf / (tf + k1 (1 - b + b |d| / avgdl)), idf(t) = ln(1 + (N - n + 0.5) /
(n + 0.5)). Lucene keeps |d| in one byte, so lengths above 40 are coarser; the average is exact. N and the average count
passages that have any term at all.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numba
import numpy as np
from tqdm import tqdm

from ralm_jax.errors import RalmError, UsageError
from ralm_jax.settings import IfExists, at_least
from ralm_jax.storage import Folder
from ralm_jax.text import writing
from retrieval import analyzer
from retrieval.bm25_build import SAMPLE, check_room, in_parts, merge_parts, refuse_in_worker, write_parts
from retrieval.bm25_search import Postings, Queries, can_slide, postings_to_touch, search_postings
from retrieval.corpus import Passage, Passages
from retrieval.retriever import KIND, Hits, index_fingerprint, new_index, store_passages

log = logging.getLogger("ralm")

K1, B = 0.9, 0.4  # Pyserini's defaults, and the paper's


def build_index(
    passages: Iterable[Passage],
    location: str,
    *,
    k1: float = K1,
    b: float = B,
    quantise_lengths: bool = True,
    source: dict[str, Any] | None = None,
    if_exists: IfExists = "refuse",
    progress: bool | None = None,
    announce: Callable[[str], None] = log.info,
) -> "BM25Index":
    """Indexes `passages` (title and text) into the folder `location`, part by part, several parts at once.

    Parts are made by processes; they import a script that calls this, which needs its `if __name__ == "__main__":`.

    Args:
        quantise_lengths: lengths as coarse as Lucene's, for the same scores.
        source: where the passages come from (`corpus.describe_corpus`), for whoever looks at the index later.
        progress: show a progress bar; None for "if there is a terminal".
        announce: is told what the index will take, before it is made.

    Raises:
        UsageError: `location` is taken and `if_exists` refuses, or it is not an index, or not a local folder; or a
            script without that line called this again in a process of its own.
        RalmError: there are no passages, a row of the corpus is broken, the disk is too small, or what is there to be
            resumed was made from another corpus or in another way.
    """
    refuse_in_worker()
    settings = {
        "engine": "bm25", "analyzer": analyzer.NAME, "analyzer_version": analyzer.VERSION,
        "k1": k1, "b": b, "quantise_lengths": quantise_lengths,
    }  # fmt: skip
    folder, passages = new_index(location, passages, settings, if_exists)
    root = Path(location).expanduser()
    parts = root / "parts"
    if if_exists != "resume" or "corpus" not in folder.about:  # parts of a corpus that nobody wrote down
        remove_parts(parts)
    starts: list[int] = []
    stored = store_passages(folder, in_parts(passages, starts))
    if "terms" in folder.about:
        return BM25Index.open(location)
    for array in (root / "bm25").glob("*.npy"):  # of the index that is overwritten, or of a build that was killed
        array.unlink()
    folder.about["source"] = source or {}
    folder.write_manifest()

    rows = [range(*part) for part in pairwise([*starts, len(stored)])]
    wanted = {parts / f"{part.start}-{part.stop}.npz": part for part in rows}
    missing = {path: part for path, part in wanted.items() if not path.exists()}
    there = sum(path.stat().st_size for path in wanted.keys() - missing.keys())
    check_room(location, len(stored), stored.contents(rows[0][:SAMPLE]), there, announce)
    with writing(parts):
        parts.mkdir(exist_ok=True)
    left = sum(map(len, missing.values()))
    with tqdm(total=left, unit=" passages", disable=None if progress is None else not progress) as bar:
        write_parts(root / "passages.arrow", missing, numba.get_num_threads(), bar.update)
    folder.about.update(merge_parts(list(wanted), root / "bm25", k1, b, quantise_lengths))
    folder.write_manifest()
    remove_parts(parts)
    return BM25Index.open(location)


def remove_parts(folder: Path) -> None:
    """Removes what a build writes and nobody needs after it."""
    for path in (*folder.glob("[0-9]*.npz"), *folder.glob("*.tmp")):
        path.unlink()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


@dataclass(frozen=True)
class BM25Index:
    """An index folder, opened: postings and passages are memory-mapped.

    Attributes:
        fingerprint: of the corpus and of how it was indexed.
    """

    location: str
    passages: Passages
    settings: dict[str, Any]
    about: dict[str, Any]
    postings: Postings
    vocabulary: dict[str, int]

    @classmethod
    def open(cls, location: str) -> "BM25Index":
        """The index at `location`.

        Raises:
            UsageError: there is no index at `location`.
            RalmError: it is not complete, damaged, or made by another version of the analyser.
        """
        import bm25s

        folder = Folder.open(location, KIND)
        made = (folder.settings.get("analyzer"), folder.settings.get("analyzer_version"))
        if made != (analyzer.NAME, analyzer.VERSION):
            raise RalmError(
                f"{location}: indexed with analyser {made[0]} {made[1]}, queries would use {analyzer.NAME} "
                f"{analyzer.VERSION}; index the corpus again"
            )
        if "terms" not in folder.about:
            raise RalmError(f"{location}: the index was not finished; repeat the command with --resume")
        root = Path(location).expanduser()
        try:
            stored = bm25s.BM25.load(root / "bm25", mmap=True)
        except (OSError, ValueError, KeyError) as error:
            raise RalmError(f"{location}: the index is damaged ({error}); build it again with --overwrite") from None
        passages = Passages.open(root / "passages.arrow")
        postings = Postings(*(stored.scores[name] for name in Postings._fields))
        return cls(location, passages, folder.settings, folder.about, postings, stored.vocab_dict)

    @property
    def fingerprint(self) -> str:
        return index_fingerprint(self.settings, self.about)

    @property
    def tokenizer(self) -> None:
        return None

    def search(self, queries: Sequence[str], k: int, excluded: frozenset[str] = frozenset()) -> Hits:
        """The best `k` passages of each query, on all cores; fewer where fewer match.

        Args:
            excluded: titles that are left out inside the search, so that k hits remain where there are k.

        Raises:
            UsageError: `k` is below 1, or so many hits do not fit into memory.
        """
        at_least(1, k=k)
        wanted = self._terms(queries)
        allowed = ~self.passages.titled(excluded) if excluded else np.zeros(0, bool)
        width = min(k, len(self.passages))
        rows = np.full((len(queries), width), -1, np.int64)
        scores = np.zeros((len(queries), width), np.float32)
        whole, changed = postings_to_touch(self.postings.indptr, *wanted)
        sliding = changed < whole and can_slide(wanted, *self.about.get("score_range", (0.0, 0.0)))
        search_postings(self.postings, len(self.passages), wanted, allowed, rows, scores, sliding=sliding)
        rest = (0, 0), (0, k - width)
        try:
            return Hits(np.pad(rows, rest, constant_values=-1), np.pad(scores, rest))
        except (MemoryError, ValueError):  # more than there is, and more than NumPy counts
            raise UsageError(f"k is {k:,}: so many hits do not fit into memory") from None

    def _terms(self, queries: Sequence[str]) -> Queries:
        """The known terms of each query."""
        known, size = self.vocabulary, len(self.vocabulary)
        numbers = [[known[term] for term in analyzer.analyze(query) if term in known] for query in queries]
        keys = np.repeat(np.arange(len(queries)) * size, [len(found) for found in numbers])
        keys += np.fromiter(chain.from_iterable(numbers), np.int64, len(keys))
        pairs, counts = np.unique(keys, return_counts=True)
        pointers = np.searchsorted(pairs, np.arange(len(queries) + 1) * size)
        return Queries(pairs % max(1, size), counts.astype(np.float64), pointers)
