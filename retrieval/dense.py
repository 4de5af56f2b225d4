"""Dense retrieval: passages and queries are vectors, and the best passages have the largest inner product.

`build_dense_index` writes bfloat16 vectors shard by shard; `DenseIndex` searches them exactly (`retrieval.exact`). Two
encoders, one for passages and one for queries, make it DPR (Karpukhin et al., 2020) or Dragon; one for both makes it
Contriever, Spider or a sentence-transformers model.
"""

import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from ralm_jax import processes
from ralm_jax.encoder import Pooling
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.settings import DenseSearch, IfExists, at_least
from ralm_jax.sharding import make_mesh
from ralm_jax.storage import Array, Folder, check_disk, megabytes
from ralm_jax.tokenizer import Tokenizer
from retrieval.corpus import Passage, Passages
from retrieval.embedder import Embedder, load_embedder
from retrieval.exact import ExactSearch, search_bytes
from retrieval.retriever import KIND, Hits, index_fingerprint, new_index, store_passages

log = logging.getLogger("ralm")

SHARD = defaultdict(lambda: 16384, cpu=2048)  # passages that a killed run can lose


def build_dense_index(
    passages: Iterable[Passage],
    location: str,
    encoder: str,
    query_encoder: str | None = None,
    *,
    pooling: Pooling | None = None,
    dtype: str = "float32",
    mesh: Mesh | None = None,
    source: dict[str, Any] | None = None,
    if_exists: IfExists = "refuse",
    progress: bool | None = None,
    announce: Callable[[str], None] = log.info,
) -> "DenseIndex":
    """Encodes `passages` (title and text) into the folder `location`, shard by shard, on all devices of `mesh`.

    Of several processes, each encodes shards of its own on its own devices.

    Args:
        encoder: of passages; a model as `load_embedder` takes it.
        query_encoder: of queries; None for the same one.
        pooling: of both; None for what they state.
        dtype: of their parameters and activations; vectors are bfloat16 always.
        mesh: of devices of this process; None for all of them.
        source: where the passages come from (`corpus.describe_corpus`), for whoever looks at the index later.
        progress: show a progress bar; None for "if there is a terminal".
        announce: is told what the vectors will take, before they are made.

    Raises:
        UsageError: `location` is taken and `if_exists` refuses, or not a local folder; no such encoder; or encoders of
            different dimensions.
        RalmError: there are no passages, a row of the corpus is broken, the disk is too small, or what is there to be
            resumed was made from another corpus or in another way.
    """
    embedder = load_embedder(encoder, pooling=pooling, dtype=dtype, mesh=mesh)
    asker = load_embedder(query_encoder, pooling=pooling, dtype=dtype, mesh=mesh) if query_encoder else embedder
    if asker.dimension != embedder.dimension:
        raise UsageError(
            f"{query_encoder}: makes vectors of {asker.dimension} numbers, {encoder} of {embedder.dimension}; they do "
            "not belong together"
        )
    settings = {
        "engine": "dense", "dimension": embedder.dimension, "encoder": embedder.settings,
        "query_encoder": asker.settings,
    }  # fmt: skip
    folder, passages = new_index(location, passages, settings, if_exists)

    def store() -> None:
        store_passages(folder, passages)
        folder.about.update(encoder=embedder.location, query_encoder=asker.location, source=source or {})
        folder.write_manifest()

    processes.once(store)
    stored = Passages.open(Path(location).expanduser() / "passages.arrow")
    shard, shape = SHARD[jax.default_backend()], (len(stored), embedder.dimension)
    vectors = folder.array("vectors", shape, (min(shard, len(stored)), embedder.dimension), "bfloat16", np.nan)
    missing = processes.once(vectors.unwritten)
    left, own = sum(map(len, missing)), processes.own_share(missing)
    ours, done = sum(map(len, own)), len(stored) - left
    processes.once(lambda: check_room(location, shape, left, make_mesh().size, announce))
    disable = processes.bar_hidden(progress)
    with tqdm(total=done + ours, initial=done, unit=" passages", disable=disable) as bar:
        for rows in own:
            vectors[rows.start : rows.stop] = passage_vectors(embedder, stored.contents(rows)).astype("bfloat16")
            bar.update(len(rows))
    if embedder.cut:
        log.warning("%s: %d of %d passages were too long for it and were cut", encoder, embedder.cut, ours)
    processes.wait()
    return DenseIndex.open(location, mesh=mesh, asker=asker)


def check_room(location: str, shape: tuple[int, int], left: int, devices: int, announce: Callable[[str], None]) -> None:
    """Says what the vectors take, before they are made.

    Raises:
        RalmError: the disk does not have it.
    """
    count, dimension = shape
    disk = 2 * count * dimension
    announce(
        f"{location}: {count:,} vectors of {dimension:,} bfloat16 numbers, {megabytes(disk)} on disk; a search takes "
        f"{megabytes(search_bytes(count, dimension, devices))} of a device; {left:,} are to be encoded"
    )
    check_disk(location, 2 * left * dimension)


def passage_vectors(embedder: Embedder, texts: Sequence[str]) -> np.ndarray:
    """(n, D) float32; zeros where there is no text, which `ExactSearch` never finds."""
    vectors = np.zeros((len(texts), embedder.dimension), np.float32)
    filled = [i for i, text in enumerate(texts) if text.strip()]
    if filled:
        vectors[filled] = embedder.embed([texts[i] for i in filled])
    return vectors


@dataclass(frozen=True)
class DenseIndex:
    """An index folder, opened. Nothing is loaded before the first search.

    Attributes:
        fingerprint: of the corpus, the encoders, and how they are used.
    """

    location: str
    passages: Passages
    settings: dict[str, Any]
    about: dict[str, Any]
    vectors: Array
    mesh: Mesh | None
    search_by: DenseSearch

    @classmethod
    def open(
        cls,
        location: str,
        *,
        mesh: Mesh | None = None,
        search_by: DenseSearch = "jax",
        asker: Embedder | None = None,
    ) -> "DenseIndex":
        """The index at `location`.

        Args:
            mesh: for queries and vectors; default: all devices of this process for queries, all of the job for vectors.
            search_by: the same hits from either.
            asker: the embedder of queries, if it is loaded already.

        Raises:
            UsageError: there is no index at `location`.
            RalmError: it is not complete, or damaged.
        """
        folder = Folder.open(location, KIND)
        vectors = folder.stored("vectors") if "vectors" in folder.manifest["arrays"] else None
        missing = [] if vectors is None else vectors.unwritten()
        if vectors is None or missing or "corpus" not in folder.about:
            left = f", {sum(map(len, missing)):,} of {vectors.shape[0]:,} passages are missing" if vectors else ""
            raise RalmError(f"{location}: the index is not finished{left}; repeat the command with --resume")
        passages = Passages.open(Path(location).expanduser() / "passages.arrow")
        index = cls(location, passages, folder.settings, folder.about, vectors, mesh, search_by)
        if asker is not None:
            vars(index)["asker"] = asker
        return index

    @property
    def fingerprint(self) -> str:
        return index_fingerprint(self.settings, self.about)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.asker.tokenizer

    @functools.cached_property
    def asker(self) -> Embedder:
        """The embedder of queries.

        Raises:
            UsageError: it has gone.
            RalmError: another one is in its place.
        """
        made, where = self.settings["query_encoder"], self.about["query_encoder"]
        embedder = load_embedder(where, pooling=made.get("pooling"), dtype=made.get("dtype", "float32"), mesh=self.mesh)
        if embedder.settings != made:
            raise RalmError(
                f"{self.location}: {where} is not the query encoder that the index was made for; bring that one back, "
                "or index again with --overwrite"
            )
        return embedder

    @functools.cached_property
    def exact(self) -> ExactSearch:
        return ExactSearch(self.vectors, self.mesh or make_mesh(), self.search_by)

    def search(self, queries: Sequence[str], k: int, excluded: frozenset[str] = frozenset()) -> Hits:
        """The best `k` passages of each query; none for a query without text.

        Args:
            excluded: titles that are left out inside the search, so that k hits remain where there are k.

        Raises:
            UsageError: `k` is below 1, or the query encoder has gone, or there is no FAISS.
            RalmError: the index is damaged, or the query encoder is another one.
        """
        at_least(1, k=k)
        hits = Hits(np.full((len(queries), k), -1, np.int64), np.zeros((len(queries), k), np.float32))
        asked = [i for i, query in enumerate(queries) if query.strip()]
        if asked:
            allowed = ~self.passages.titled(excluded) if excluded else np.ones(len(self.passages), bool)
            before = self.asker.cut
            vectors = self.asker.embed([queries[i] for i in asked])
            if self.asker.cut > before:
                log.warning("%d of %d queries were too long and were cut", self.asker.cut - before, len(asked))
            hits.rows[asked], hits.scores[asked] = self.exact.search(vectors, k, allowed)
        return hits
