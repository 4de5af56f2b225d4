"""Exact search by inner product over vectors on disk, sharded over a mesh or by FAISS: the same hits from either.

Vectors stream through in blocks. A block gives more candidates than are wanted, by float32 products; the candidates'
scores are then taken in float64 and rounded, so that they depend on nothing but the two vectors, and equal vectors tie.
What a block left behind is certain to be worse, by the error bound of a float32 product; where it is not, the block is
asked again for twice as many.
"""

import functools
from collections import defaultdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ralm_jax.errors import UsageError
from ralm_jax.settings import DenseSearch
from ralm_jax.sharding import place
from ralm_jax.storage import Array
from retrieval.retriever import Hits

AXES = ("data", "fsdp", "tensor")  # all devices of a mesh share the vectors
BLOCK_BYTES = defaultdict(lambda: 1 << 32, cpu=1 << 28)  # of a block and its scores, on a device
KEPT_BYTES = defaultdict(lambda: 1 << 35, cpu=1 << 30)  # of vectors that stay on a device from search to search
QUERIES = 256  # at once; few are padded to FEW
FEW = 16
MARGIN = 16  # candidates of a block beyond those that are wanted


class Candidates(NamedTuple):
    """The best of a block by float32 scores, best first.

    Attributes:
        scores: (Q, C) float32, -inf for none.
        rows: (Q, C) rows of the block.
        vectors: (Q, C, D) theirs.
        rest: (Q,) no row beyond them has a higher float32 score.
        longest: (Q,) the largest norm of a vector of the block, again and again.
    """

    scores: np.ndarray
    rows: np.ndarray
    vectors: np.ndarray
    rest: np.ndarray
    longest: np.ndarray


def layout(count: int, dimension: int, devices: int) -> tuple[int, bool]:
    """Rows a block, a multiple of `devices`; and whether the vectors stay on the devices from search to search."""
    whole, backend = -(-count // devices), jax.default_backend()
    rows = min(whole, max(1, BLOCK_BYTES[backend] // row_bytes(dimension)))
    return rows * devices, 2 * whole * dimension <= KEPT_BYTES[backend]


def row_bytes(dimension: int) -> int:
    """Of a vector as stored and in float32, and of its scores."""
    return 6 * dimension + 4 * QUERIES


def search_bytes(count: int, dimension: int, devices: int) -> int:
    """Memory of a device that a search takes."""
    block, keep = layout(count, dimension, devices)
    return (block * row_bytes(dimension) + (2 * count * dimension if keep else 0)) // devices


class ExactSearch:
    """Searches an array of vectors.

    Attributes:
        count, dimension: N and D.
        block: rows a block.
    """

    def __init__(self, vectors: Array, mesh: Mesh, backend: DenseSearch = "jax"):
        """
        Args:
            vectors: (N, D) bfloat16; a vector of zeros is never a hit.

        Raises:
            UsageError: `backend` is "faiss", which is not installed.
        """
        self._vectors, self._mesh, self._backend = vectors, mesh, backend
        self._sharding = NamedSharding(mesh, PartitionSpec(AXES))
        if backend == "faiss":
            import_faiss()
        self.count, self.dimension = vectors.shape
        self.block, self._keep = layout(self.count, self.dimension, mesh.size if backend == "jax" else 1)
        self._kept: dict[int, Any] = {}

    def search(self, queries: np.ndarray, k: int, allowed: np.ndarray) -> Hits:
        """The best `k` rows of each query by float32 score, ties to the lower row.

        Args:
            queries: (Q, D) float32.
            allowed: (N,) bool, the rows that may be hits.

        Raises:
            RalmError: the vectors are damaged.
        """
        hits = Hits(np.full((len(queries), k), -1, np.int64), np.full((len(queries), k), -np.inf, np.float32))
        size = FEW if len(queries) <= FEW else QUERIES
        for first in range(0, self.count, self.block):
            block = self._block(first)
            usable = np.zeros(self.block, bool)
            usable[: self.count - first] = allowed[first : first + self.block]
            usable = self._placed(usable)
            for start in range(0, len(queries), size):
                part = slice(start, start + size)
                here = Hits(hits.rows[part], hits.scores[part])
                hits.rows[part], hits.scores[part] = self._improve(here, first, block, usable, queries[part], size)
        return Hits(hits.rows, np.where(hits.rows >= 0, hits.scores, np.float32(0)))

    def _improve(self, hits: Hits, first: int, block: Any, usable: Any, queries: np.ndarray, size: int) -> Hits:
        """`hits` with those of the block that begins at row `first`."""
        k, count = hits.rows.shape[1], len(queries)
        query = np.zeros((size, self.dimension), np.float32)
        query[:count] = queries
        wanted = k + MARGIN
        while True:
            if self._backend == "faiss":
                padded = faiss_candidates(block, usable, query, wanted)
            else:
                padded = jax_candidates(block, usable, query, wanted, self._mesh)
            found = Candidates._make(np.asarray(part)[:count] for part in padded)
            # twice the bound of a float32 product's error, whatever the order of its sum: enough for rounding as well
            error = self.dimension * 2.0**-23 * np.linalg.norm(queries, axis=1).astype(np.float64) * found.longest
            better = merge(hits, first, queries, found, error)
            if ((found.rest == -np.inf) | (better.scores[:, -1] > found.rest + error)).all():
                return better
            wanted *= 2

    def _block(self, first: int) -> Any:
        """The block that begins at row `first`, on the devices; the last is filled up with zeros."""
        if first in self._kept:
            return self._kept[first]
        if self._backend == "faiss" or self._sharding.is_fully_addressable:
            block = self._placed(self._rows(first, self.block))
        else:  # every process reads what its devices hold

            def part(index: Any) -> np.ndarray:
                start, stop, _ = index[0].indices(self.block)
                return self._rows(first + start, stop - start)

            block = jax.make_array_from_callback((self.block, self.dimension), self._sharding, part)
        if self._keep:
            self._kept[first] = block
        return block

    def _rows(self, first: int, count: int) -> np.ndarray:
        """`count` vectors from row `first` on, zeros after the last."""
        values = self._vectors[min(first, self.count) : min(first + count, self.count)]
        missing = count - len(values)
        return np.pad(values, ((0, missing), (0, 0))) if missing else values

    def _placed(self, array: np.ndarray) -> Any:
        return array if self._backend == "faiss" else place(array, self._sharding)


@functools.partial(jax.jit, static_argnums=(3, 4))
def jax_candidates(
    block: jax.Array, usable: jax.Array, queries: jax.Array, wanted: int, mesh: Mesh
) -> tuple[jax.Array, ...]:
    """The fields of `Candidates`, on every device: products and top k a device, then the top k of all devices."""

    def of_a_device(
        block: jax.Array, usable: jax.Array, queries: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        wide = block.astype(jnp.float32)
        products = jnp.einsum("qd,nd->qn", queries, wide, precision=jax.lax.Precision.HIGHEST)
        products = jnp.where((usable & (wide != 0).any(axis=1))[None], products, -jnp.inf)
        width = min(wanted, len(block))
        scores, rows = jax.lax.top_k(products, width)
        # the least is the last; as a slice it would keep XLA's CPU compiler from its fast top k (20 times slower)
        rest = jnp.full((len(queries), 1), -jnp.inf) if width == len(block) else scores.min(axis=1, keepdims=True)
        longest = jax.lax.pmax(jnp.sqrt((wide**2).sum(axis=1).max()), AXES)
        return scores, rows + jax.lax.axis_index(AXES) * len(block), rest, longest

    whole, split, apart = PartitionSpec(), PartitionSpec(AXES), PartitionSpec(None, AXES)
    scores, rows, rests, longest = jax.shard_map(
        of_a_device, mesh=mesh, in_specs=(split, split, whole), out_specs=(apart, apart, apart, whole)
    )(block, usable, queries)
    width = min(wanted, scores.shape[1])
    best, places = jax.lax.top_k(scores, width)
    rest = rests.max(axis=1)
    if width < scores.shape[1]:
        rest = jnp.maximum(rest, best.min(axis=1))
    rows = jnp.take_along_axis(rows, places, axis=1)
    found = best, rows, block[rows], rest, jnp.full(len(queries), longest)
    return jax.lax.with_sharding_constraint(found, NamedSharding(mesh, whole))


def faiss_candidates(block: np.ndarray, usable: np.ndarray, queries: np.ndarray, wanted: int) -> Candidates:
    """The same by FAISS's flat index."""
    wide = block.astype(np.float32)
    rows = np.flatnonzero(usable & (wide != 0).any(axis=1))
    index = import_faiss().IndexFlatIP(block.shape[1])
    index.add(wide[rows])
    width, count = min(wanted, len(rows)), len(queries)
    scores, places = np.zeros((count, 0), np.float32), np.zeros((count, 0), np.int64)
    if width:  # there are as many rows as are asked for, so that FAISS never answers -1
        scores, places = index.search(queries, width)
    rest = scores[:, -1] if width < len(rows) else np.full(count, -np.inf, np.float32)
    longest = np.sqrt((wide**2).sum(axis=1).max())
    found = rows[places]
    return Candidates(scores, found, block[found], rest, np.full(count, longest))


def import_faiss() -> Any:
    """
    Raises:
        UsageError: FAISS is not installed.
    """
    try:
        import faiss
    except ImportError:
        raise UsageError("FAISS is not installed: pip install 'ralm-jax[faiss]', or search with jax") from None
    return faiss


def merge(hits: Hits, first: int, queries: np.ndarray, found: Candidates, error: np.ndarray) -> Hits:
    """The best of `hits` and of the candidates of the block at row `first`, by float64 products rounded to float32.

    Args:
        error: (Q,) by how much a candidate's score may be wrong; those that cannot get in are not looked at.
    """
    scores = np.full(found.rows.shape, -np.inf, np.float32)
    which, place = np.nonzero((found.scores > -np.inf) & (found.scores + error[:, None] >= hits.scores[:, -1:]))
    vectors = found.vectors[which, place].astype(np.float64)
    scores[which, place] = np.einsum("cd,cd->c", queries[which].astype(np.float64), vectors)
    rows = np.where(scores > -np.inf, found.rows + first, -1)
    all_rows = np.concatenate([hits.rows, rows], axis=1)
    all_scores = np.concatenate([hits.scores, scores], axis=1)
    order = np.lexsort((all_rows, -all_scores))[:, : hits.rows.shape[1]]
    return Hits(np.take_along_axis(all_rows, order, axis=1), np.take_along_axis(all_scores, order, axis=1))
