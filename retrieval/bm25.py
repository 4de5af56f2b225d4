"""Embedded BM25 with Lucene's numbers: `bm25s` keeps the index, `bm25_search` searches it.

score(q, d) = sum over query terms of idf(t) * tf / (tf + k1 (1 - b + b |d| / avgdl)), idf(t) = ln(1 + (N - n + 0.5) /
(n + 0.5)). Lucene keeps |d| in one byte, so lengths above 40 are coarser; the average is exact. N and the average count
passages that have any term at all.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ralm_jax.errors import RalmError
from ralm_jax.settings import at_least
from ralm_jax.storage import Folder
from ralm_jax.text import writing
from retrieval import analyzer
from retrieval.bm25_search import Postings, Queries, can_slide, postings_to_touch, search_postings
from retrieval.corpus import Passage, Passages, write_passages
from retrieval.retriever import KIND, Hits, index_fingerprint, new_index

K1, B = 0.9, 0.4  # Pyserini's defaults, and the paper's


def quantised_length(length: int) -> int:
    """A passage's length as Lucene's one-byte norm gives it back (`SmallFloat.intToByte4`): exact to 40, then with
    three bits after the leading one."""
    rest = max(0, length - 24)
    shift = max(0, rest.bit_length() - 4)
    return length - rest + (rest >> shift << shift)


def build_index(
    passages: Iterable[Passage],
    location: str,
    *,
    k1: float = K1,
    b: float = B,
    quantise_lengths: bool = True,
    source: dict[str, Any] | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
) -> "BM25Index":
    """Indexes `passages` (title and text) into the folder `location`.

    Args:
        quantise_lengths: lengths as coarse as Lucene's, for the same scores.
        source: where the passages come from (`corpus.describe_corpus`), for whoever looks at the index later.
        progress: show a progress bar; None for "if there is a terminal".

    Raises:
        UsageError: `location` is taken and `overwrite` is not set, or it is not an index, or not a local folder.
        RalmError: there are no passages, or a row of the corpus is broken.
    """
    settings = {
        "engine": "bm25", "analyzer": analyzer.NAME, "analyzer_version": analyzer.VERSION,
        "k1": k1, "b": b, "quantise_lengths": quantise_lengths,
    }  # fmt: skip
    folder, passages = new_index(location, passages, settings, "overwrite" if overwrite else "refuse", resumable=False)
    root = Path(location).expanduser()

    vocabulary: dict[str, int] = {}
    digest = sha256()
    terms, lengths = [], []
    everything = tqdm(
        write_passages(passages, root / "passages.arrow"),
        unit=" passages", disable=None if progress is None else not progress,
    )  # fmt: skip
    for passage in everything:
        digest.update(passage.identity)
        found = [vocabulary.setdefault(term, len(vocabulary)) for term in analyzer.analyze(passage.contents)]
        terms.append(np.array(found, np.int32))
        lengths.append(len(found))

    scores = score_matrix(terms, np.array(lengths), len(vocabulary), k1, b, quantise_lengths)
    index = bm25s_index(scores, vocabulary, k1, b)
    with writing(root / "bm25"):
        index.save(root / "bm25", show_progress=False)
    data = scores["data"]
    folder.about.update(passages=len(lengths), terms=len(vocabulary), corpus=digest.hexdigest(), source=source or {})
    folder.about["score_range"] = [float(data.min()), float(data.max())] if len(data) else [0.0, 0.0]
    folder.write_manifest()
    return BM25Index.open(location)


def score_matrix(
    terms: list[np.ndarray], lengths: np.ndarray, num_terms: int, k1: float, b: float, quantise: bool
) -> dict[str, Any]:
    """The scores of all (passage, term) pairs, by term: the CSC matrix that `bm25s` stores, by Lucene's steps."""
    count = len(lengths)
    keys = np.concatenate(terms).astype(np.int64) * count + np.repeat(np.arange(count), lengths)
    pairs, frequencies = np.unique(keys, return_counts=True)
    columns, rows = pairs // count, pairs % count

    not_empty = max(1, int((lengths > 0).sum()))
    average = np.float32(lengths.sum() / not_empty)
    distinct, inverse = np.unique(lengths, return_inverse=True)
    counted = np.array([quantised_length(int(n)) if quantise else n for n in distinct], np.float32)
    one, k1_, b_ = np.float32(1), np.float32(k1), np.float32(b)
    norms = one / (k1_ * ((one - b_) + b_ * counted / max(average, one)))

    matches = np.bincount(columns, minlength=num_terms)
    idf = np.log(1 + (not_empty - matches + 0.5) / (matches + 0.5)).astype(np.float32)
    weight = idf[columns]
    data = weight - weight / (one + frequencies.astype(np.float32) * norms[inverse[rows]])
    indptr = np.concatenate([[0], np.cumsum(matches)])
    return {
        "data": data.astype(np.float32), "indices": rows.astype(np.int32), "indptr": indptr.astype(np.int64),
        "num_docs": count,
    }  # fmt: skip


def bm25s_index(scores: dict[str, Any], vocabulary: dict[str, int], k1: float, b: float) -> Any:
    """A `bm25s.BM25` with our scores; whatever reads `bm25s` indexes reads what it saves."""
    import bm25s

    index = bm25s.BM25(method="lucene", k1=k1, b=b)
    index.scores, index.vocab_dict = scores, vocabulary
    index.unique_token_ids_set, index.nonoccurrence_array = set(vocabulary.values()), None
    return index


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
        if "passages" not in folder.about:
            raise RalmError(f"{location}: the index was not finished; build it again with --overwrite")
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
            UsageError: `k` is below 1.
        """
        at_least(1, k=k)
        wanted = self._terms(queries)
        allowed = ~self.passages.titled(excluded) if excluded else np.zeros(0, bool)
        rows = np.full((len(queries), k), -1, np.int64)
        scores = np.zeros((len(queries), k), np.float32)
        whole, changed = postings_to_touch(self.postings.indptr, *wanted)
        sliding = changed < whole and can_slide(wanted, *self.about["score_range"])
        search_postings(self.postings, len(self.passages), wanted, allowed, rows, scores, sliding=sliding)
        return Hits(rows, scores)

    def _terms(self, queries: Sequence[str]) -> Queries:
        """The known terms of each query."""
        ids: list[int] = []
        counts: list[int] = []
        pointers = [0]
        for query in queries:
            found: dict[int, int] = {}
            for term in analyzer.analyze(query):
                number = self.vocabulary.get(term)
                if number is not None:
                    found[number] = found.get(number, 0) + 1
            ids += sorted(found)
            counts += [found[number] for number in sorted(found)]
            pointers.append(len(ids))
        return Queries(np.array(ids, np.int64), np.array(counts, np.float64), np.array(pointers, np.int64))
