"""What a retriever is: queries in, rows of a corpus out. BM25, Lucene, dense vectors and their fusion are some."""

import json
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from ralm_jax.errors import RalmError, UsageError
from ralm_jax.settings import DenseSearch, Exclusion, IfExists
from ralm_jax.storage import Folder
from ralm_jax.text import writing
from ralm_jax.tokenizer import Tokenizer
from retrieval.corpus import Passage, PassageRows, Passages, write_passages

KIND = "index"


class Hits(NamedTuple):
    """What a search finds, best first; ties go to the lower row.

    Attributes:
        rows: (Q, k) int64 passages, -1 after the last hit.
        scores: (Q, k) float32, 0 after the last hit.
    """

    rows: np.ndarray
    scores: np.ndarray


class Retriever(Protocol):
    """What finds passages."""

    @property
    def location(self) -> str:
        """Where it is."""

    @property
    def passages(self) -> PassageRows:
        """What the rows of its hits are."""

    @property
    def settings(self) -> dict[str, Any]:
        """How it works; `engine` names it."""

    @property
    def about(self) -> dict[str, Any]:
        """What it was made from; `source` describes the corpus."""

    @property
    def fingerprint(self) -> str:
        """Changes when corpus, engine or its settings do."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of its queries; None if it has none."""

    def search(self, queries: Sequence[str], k: int, excluded: frozenset[str] = frozenset()) -> Hits:
        """The best `k` passages of each query, titles in `excluded` left out; fewer where fewer match."""


def index_fingerprint(settings: dict[str, Any], about: dict[str, Any]) -> str:
    """SHA-256 of how an index was made, and of the passages."""
    return sha256(json.dumps([settings, about["corpus"]], sort_keys=True).encode()).hexdigest()


def open_index(location: str, *, dense_search: DenseSearch = "jax") -> Retriever:
    """The index at `location`, by the engine that made it; a folder of Lucene's own, and "lucene:NAME" for a prebuilt
    index of Pyserini's, are opened as well.

    Args:
        dense_search: by what vectors are searched, if it has any.

    Raises:
        UsageError: there is none.
        RalmError: it is not complete, damaged, or of an engine or analyser that is not here.
    """
    from retrieval.lucene import PREBUILT, LuceneIndex

    if location.startswith(PREBUILT) or any(Path(location).expanduser().glob("segments_*")):
        return LuceneIndex.open(location)
    engine = Folder.open(location, KIND).settings.get("engine")
    if engine == "bm25":
        from retrieval.bm25 import BM25Index

        return BM25Index.open(location)
    if engine == "lucene":
        return LuceneIndex.open(location)
    if engine == "dense":
        from retrieval.dense import DenseIndex

        return DenseIndex.open(location, search_by=dense_search)
    if engine == "rrf":
        from retrieval.hybrid import FusedIndex

        return FusedIndex.open(location, dense_search=dense_search)
    raise RalmError(f"{location}: an index of the engine {engine!r}, which is not here")


def new_index(
    location: str, passages: Iterable[Passage], settings: dict[str, Any], if_exists: IfExists, *, resumable: bool = True
) -> tuple[Folder, Iterator[Passage]]:
    """The folder of an index to be built, and its passages; a corpus that cannot be read leaves no folder behind.

    Raises:
        UsageError: `location` is taken and `if_exists` refuses, or it is not an index, or not a local folder.
        RalmError: there are no passages, or the first row is broken, or what is there was made in another way.
    """
    if "://" in location:
        raise UsageError(f"{location}: an index is memory-mapped and must lie on a local disk")
    passages = iter(passages)
    first = next(passages, None)
    if first is None:
        raise RalmError("the corpus has no passages")
    return Folder.create(location, KIND, settings, if_exists, resumable=resumable), chain([first], passages)


def store_passages(folder: Folder, passages: Iterable[Passage]) -> Passages:
    """Writes the passages into the index's folder, and what they are into its manifest.

    Raises:
        RalmError: there are others already, and what was made of them would be mixed with theirs.
    """
    path = Path(folder.location).expanduser() / "passages.arrow"
    part = path.with_name(f"{path.name}.part")
    digest, count = sha256(), 0
    try:
        for passage in write_passages(passages, part):
            digest.update(passage.identity)
            count += 1
        corpus = digest.hexdigest()
        if folder.about.get("corpus", corpus) != corpus:
            raise RalmError(f"{folder.location}: was made from another corpus and cannot be resumed; add --overwrite")
        with writing(path):
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    folder.about.update(passages=count, corpus=corpus)
    return Passages.open(path)


def look_up(
    retriever: Retriever, queries: Sequence[str], k: int, excluded: frozenset[str] = frozenset()
) -> list[dict[str, Any]]:
    """A search with the passages themselves: rows {"query", "hits": [{"id", "score", "title", "text"}]}."""
    hits = retriever.search(queries, min(k, len(retriever.passages)), excluded)
    rows = []
    for query, found, scores in zip(queries, hits.rows, hits.scores, strict=True):
        passages = zip(retriever.passages.rows(found[found >= 0]), scores.tolist(), strict=False)
        listed = [{"id": p.id, "score": score, "title": p.title, "text": p.text} for p, score in passages]
        rows.append({"query": query, "hits": listed})
    return rows


def search(
    retriever: Retriever, queries: Sequence[str], k: int, excluded: frozenset[str], exclusion: Exclusion
) -> Hits:
    """The hits of every query, `excluded` titles left out inside the search or, as the paper's code does it, dropped
    from the first max(100, 4 k) hits, so that fewer than k may remain."""
    if not excluded or exclusion == "inside":
        return retriever.search(queries, k, excluded)
    deep = retriever.search(queries, max(100, 4 * k))
    keep = deep.rows >= 0
    keep[keep] = ~retriever.passages.titled(excluded, deep.rows[keep])
    return first_kept(deep, keep, k)


def first_kept(hits: Hits, keep: np.ndarray, k: int) -> Hits:
    """The first `k` hits of each query for which `keep` (Q, ≥ k) holds."""
    order = np.argsort(~keep, axis=1, kind="stable")[:, :k]  # those kept first, in their order
    kept = np.take_along_axis(keep, order, axis=1)
    rows = np.where(kept, np.take_along_axis(hits.rows, order, axis=1), -1)
    return Hits(rows, np.where(kept, np.take_along_axis(hits.scores, order, axis=1), 0).astype(np.float32))
