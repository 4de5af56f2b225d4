"""Retrieval inside one long document: its chunks of 300 words, or a few-shot task's examples, ranked by a question."""

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from eval.long_metrics import Kind
from ralm_jax.errors import UsageError
from retrieval import analyzer
from retrieval.bm25 import K1, B
from retrieval.bm25_build import quantised_length
from retrieval.corpus import cut_words
from retrieval.embedder import Embedder

DOCUMENTS = 256  # of which what was computed is kept: other questions, windows and numbers of chunks ask again
WORDS = 300  # a chunk (Retrieval meets Long Context, section 3.3)
STARTS: dict[Kind, re.Pattern] = {  # of the examples that a few-shot task's document consists of
    "class": re.compile(r"^(?=Question: )", re.MULTILINE),
    "dialogue": re.compile(r"^(?=Dialogue: )", re.MULTILINE),
}


def pieces_of(kind: Kind, document: str) -> tuple[str, ...]:
    """What is searched: the worked examples of a few-shot task, otherwise chunks."""
    if kind in STARTS:
        return tuple(piece.strip("\n") for piece in STARTS[kind].split(document) if piece.strip())
    return tuple(cut_words(document, WORDS))


class Ranker(Protocol):
    """
    Attributes:
        identity: all that its scores depend on, for manifests.
        cut: questions and pieces so far that were too long for it, and were cut.
    """

    identity: dict[str, Any]

    @property
    def cut(self) -> int: ...

    def scores(self, query: str, pieces: tuple[str, ...]) -> np.ndarray:
        """How relevant each piece is to `query`; higher is more."""
        ...


def best_first(scores: np.ndarray, top: int) -> list[int]:
    """The numbers of the `top` pieces, most relevant first; of equals, the earlier in the document."""
    return [int(i) for i in np.argsort(-scores, kind="stable")[:top]]


class BM25Ranker:
    """BM25 with Lucene's numbers, as `retrieval.bm25` computes it, over the pieces of one document."""

    cut = 0

    def __init__(self) -> None:
        self.identity = {"engine": "bm25", "analyzer": analyzer.NAME, "analyzer_version": analyzer.VERSION,
                         "k1": K1, "b": B}  # fmt: skip

    def scores(self, query: str, pieces: tuple[str, ...]) -> np.ndarray:
        """float64, 0 where no term of the query is in a piece."""
        counts, lengths = term_counts(pieces)
        filled = max(1, int(np.count_nonzero(lengths)))  # Lucene counts passages that have any term
        average = max(1.0, lengths.sum() / filled)
        norms = K1 * (1 - B + B * np.array([quantised_length(int(length)) for length in lengths]) / average)
        total = np.zeros(len(pieces))
        for term, times in Counter(analyzer.analyze(query)).items():
            frequency = np.array([own[term] for own in counts], float)
            matches = np.count_nonzero(frequency)
            idf = np.log(1 + (filled - matches + 0.5) / (matches + 0.5))
            total += times * idf * frequency / (frequency + norms)
        return total


@lru_cache(DOCUMENTS)
def term_counts(pieces: tuple[str, ...]) -> tuple[list[Counter[str]], np.ndarray]:
    """The terms of each piece with their number, and its length in terms."""
    counts = [Counter(analyzer.analyze(piece)) for piece in pieces]
    return counts, np.array([own.total() for own in counts], np.int64)


class DenseRanker:
    """The dot product of the vectors of question and piece, by one encoder or by one for each."""

    def __init__(self, passages: Embedder, queries: Embedder | None = None):
        """
        Raises:
            UsageError: the vectors of the two encoders are not of one length.
        """
        self.passages, self.queries = passages, queries or passages
        if self.queries.dimension != passages.dimension:
            raise UsageError(
                f"vectors of {passages.location} have {passages.dimension} numbers, those of {self.queries.location} "
                f"{self.queries.dimension}: they are no pair of encoders"
            )
        self.identity = {"engine": "dense", "encoder": passages.settings, "query_encoder": self.queries.settings}
        self._embed = lru_cache(DOCUMENTS)(passages.embed)

    def scores(self, query: str, pieces: tuple[str, ...]) -> np.ndarray:
        return self._embed(pieces) @ self.queries.embed([query])[0]

    @property
    def cut(self) -> int:
        own = self.queries.cut if self.queries is not self.passages else 0
        return self.passages.cut + own


def chosen(ranker: Ranker, question: str, pieces: Sequence[str], top: int) -> list[int]:
    return best_first(ranker.scores(question, tuple(pieces)), top) if pieces else []
