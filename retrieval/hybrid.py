"""Reciprocal-rank fusion of retrievers over one corpus (Cormack, Clarke and Büttcher, 2009).

A passage's score is the sum of 1 / (60 + rank) over the retrievers that have it among their first `depth` hits. A fused
index is a folder with a manifest: which indexes it is made of, and what they were.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ralm_jax.errors import RalmError, UsageError
from ralm_jax.settings import DenseSearch, IfExists, at_least
from ralm_jax.storage import Folder
from retrieval.corpus import PassageRows
from retrieval.retriever import KIND, Hits, Retriever, index_fingerprint, open_index

CONSTANT = 60  # the paper's: how much less the first ranks stand out
DEPTH = 100


def fuse(indexes: Sequence[str], location: str, *, depth: int = DEPTH, if_exists: IfExists = "refuse") -> "FusedIndex":
    """Makes the folder `location` a retriever that fuses `indexes`, which stay where they are.

    Args:
        depth: hits of each that count, and the most that can be asked for.

    Raises:
        UsageError: fewer than two indexes, one that is not there, or `location` is taken.
        RalmError: they are of different corpora.
    """
    at_least(1, depth=depth)
    if len(indexes) < 2:
        raise UsageError("a fusion needs two indexes at least")
    parts = [open_index(index) for index in indexes]
    for part in parts:
        if "corpus" not in part.about:
            raise RalmError(f"{part.location}: does not say what corpus it is of, so it cannot be fused; index it here")
    for part in parts[1:]:
        if part.about["corpus"] != parts[0].about["corpus"]:
            raise RalmError(
                f"{part.location}: is of another corpus than {parts[0].location}; index the same passages for both"
            )
    settings = {
        "engine": "rrf", "constant": CONSTANT, "depth": depth, "parts": [part.settings for part in parts],
        "parts_sha256": [part.fingerprint for part in parts],
    }  # fmt: skip
    folder = Folder.create(location, KIND, settings, if_exists, resumable=False)
    folder.about.update(
        parts=[str(Path(index).expanduser().absolute()) for index in indexes],
        corpus=parts[0].about["corpus"],
        source=parts[0].about["source"],
    )
    folder.write_manifest()
    return FusedIndex.open(location)


@dataclass(frozen=True)
class FusedIndex:
    """Several indexes as one."""

    location: str
    parts: tuple[Retriever, ...]
    settings: dict[str, Any]
    about: dict[str, Any]

    @classmethod
    def open(cls, location: str, *, dense_search: DenseSearch = "jax") -> "FusedIndex":
        """The fused index at `location`.

        Raises:
            UsageError: there is none, or an index that it is made of has gone.
            RalmError: one of these is not what it was, or damaged.
        """
        folder = Folder.open(location, KIND)
        if "parts" not in folder.about:
            raise RalmError(f"{location}: the index was not finished; make it again with --overwrite")
        parts = tuple(open_index(part, dense_search=dense_search) for part in folder.about["parts"])
        for part, made in zip(parts, folder.settings["parts_sha256"], strict=True):
            if part.fingerprint != made:
                raise RalmError(
                    f"{location}: {part.location} is not the index that was fused; fuse again with --overwrite"
                )
        return cls(location, parts, folder.settings, folder.about)

    @property
    def passages(self) -> PassageRows:
        return self.parts[0].passages

    @property
    def fingerprint(self) -> str:
        return index_fingerprint(self.settings, self.about)

    @property
    def tokenizer(self) -> None:
        return None

    def search(self, queries: Sequence[str], k: int, excluded: frozenset[str] = frozenset()) -> Hits:
        """The best `k` passages of each query; titles in `excluded` are left out before ranks are counted.

        Raises:
            UsageError: `k` is below 1, or above the depth to which ranks are known.
        """
        at_least(1, k=k)
        depth = self.settings["depth"]
        if k > depth:
            raise UsageError(
                f"{self.location}: fuses the first {depth} hits of each index and is asked for {k}; fuse again with a "
                "larger --depth"
            )
        return fused([part.search(queries, depth, excluded).rows for part in self.parts], k, self.settings["constant"])


def fused(ranked: Sequence[np.ndarray], k: int, constant: int = CONSTANT) -> Hits:
    """The `k` rows of the highest sums of 1 / (constant + rank), ranks counted from 1; ties to the lower row.

    Args:
        ranked: (Q, depth) rows by each retriever, best first, -1 after the last.
    """
    rows = np.concatenate(ranked, axis=1)
    count = len(rows)
    weights = np.concatenate([1 / (constant + 1 + np.arange(part.shape[1])) for part in ranked])
    query, place = np.nonzero(rows >= 0)
    stride = rows.max(initial=0) + 1
    pairs, which = np.unique(query * stride + rows[query, place], return_inverse=True)
    scores = np.bincount(which, weights[place], minlength=len(pairs)).astype(np.float32)
    query, row = pairs // stride, pairs % stride
    order = np.lexsort((row, -scores, query))
    rank = np.arange(len(order)) - np.searchsorted(query, query)  # `pairs`, and so `query`, are in order
    kept, order = rank < k, order[rank < k]
    hits = Hits(np.full((count, k), -1, np.int64), np.zeros((count, k), np.float32))
    hits.rows[query[kept], rank[kept]], hits.scores[query[kept], rank[kept]] = row[order], scores[order]
    return hits
