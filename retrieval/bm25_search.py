"""The two ways in which BM25 scores a batch of queries, over postings by term (CSC): from scratch, and sliding.

Both give the same hits to the last bit. Scores are sums of float32 numbers in float64, rounded to float32 at the end as
Lucene's are, so that equal passages tie exactly; ties go to the lower row.

The passages are gone through in tiles whose sums stay in a core's cache, all queries a tile. The queries of
neighbouring strides share most of their terms (28 of 32 tokens at stride 4). Sliding keeps the sums from query to
query, adds the postings of terms that enter and takes away those of terms that leave. That is exact because float32
numbers within 2^28 of one another add up in float64 without rounding; `can_slide` sees to it. From scratch, the sums
begin at zero. The best k are found by bounds on blocks of passages: a block whose bound is not above the k-th best
score so far is not looked at.
"""

from typing import NamedTuple

import numba
import numpy as np

SHIFT = 6
BLOCK = 1 << SHIFT  # passages that share a bound
TILE = 1 << 16  # passages whose sums stay in a core's cache


class Postings(NamedTuple):
    """`bm25s`' index: the passages `indices` and their scores `data` of term t are indptr[t] : indptr[t + 1]."""

    indptr: np.ndarray  # (V + 1,) int64
    indices: np.ndarray  # (P,) int32
    data: np.ndarray  # (P,) float32


class Queries(NamedTuple):
    """The terms of query q, in ascending order, and how often it has them: pointers[q] : pointers[q + 1]."""

    terms: np.ndarray  # int64
    counts: np.ndarray  # float64, so that products are exact
    pointers: np.ndarray  # (Q + 1,) int64


def search_postings(
    postings: Postings, num_docs: int, queries: Queries, allowed: np.ndarray, rows: np.ndarray, scores: np.ndarray,
    *, sliding: bool,
) -> None:  # fmt: skip
    """Fills `rows` and `scores` (Q, k), on all cores.

    Args:
        allowed: (N,) bool, the passages that may be hits; empty for all.
        sliding: go from each query to the next one; each core takes a run of queries.
    """
    threads = min(numba.get_num_threads(), max(1, len(rows)))
    used, terms = np.unique(queries.terms, return_inverse=True)
    score(*postings, num_docs, terms, *queries[1:], used, allowed, sliding, threads, TILE, rows, scores)


def can_slide(queries: Queries, smallest: float, largest: float) -> bool:
    """Whether every sum of the scores of two neighbouring queries is exact in float64.

    Args:
        smallest, largest: of the postings' scores.
    """
    if not 0 < smallest <= largest:
        return False
    unit = float(np.spacing(np.float32(smallest)))  # all scores are multiples of it
    lengths = np.diff(np.append(0, np.cumsum(queries.counts))[queries.pointers])
    return bool(2 * lengths.max(initial=0) * largest < unit * 2.0**53)


@numba.njit(cache=True)
def postings_to_touch(indptr, terms, counts, pointers):  # type: ignore[no-untyped-def]
    """Postings that from-scratch scoring adds, and that sliding adds or takes away."""
    whole, changed = 0, 0
    for query in range(len(pointers) - 1):
        old, new = pointers[max(query - 1, 0)] if query else 0, pointers[query]
        old_stop, new_stop = pointers[query] if query else 0, pointers[query + 1]
        for position in range(new, new_stop):
            whole += indptr[terms[position] + 1] - indptr[terms[position]]
        while old < old_stop or new < new_stop:
            term, change, old, new = next_change(terms, counts, old, old_stop, new, new_stop)
            if change != 0:
                changed += indptr[term + 1] - indptr[term]
    return whole, changed


@numba.njit(inline="always")
def next_change(terms, counts, old, old_stop, new, new_stop):  # type: ignore[no-untyped-def]
    """The next term of two queries' sorted terms, how its count changes, and the places after it."""
    if new == new_stop or (old < old_stop and terms[old] < terms[new]):
        return terms[old], -counts[old], old + 1, new
    if old == old_stop or terms[new] < terms[old]:
        return terms[new], counts[new], old, new + 1
    return terms[new], counts[new] - counts[old], old + 1, new + 1


@numba.njit(inline="always")
def insert(rows, scores, row, score):  # type: ignore[no-untyped-def]
    """Puts a passage that scores more than the last of the best k to its place, behind its equals."""
    place = len(rows) - 1
    while place > 0 and score > scores[place - 1]:
        scores[place] = scores[place - 1]
        rows[place] = rows[place - 1]
        place -= 1
    scores[place] = score
    rows[place] = row


@numba.njit(parallel=True, cache=True, nogil=True)
def score(  # type: ignore[no-untyped-def]
    indptr,
    indices,
    data,
    num_docs,
    terms,
    counts,
    pointers,
    used,
    allowed,
    sliding,
    threads,
    tile,
    out_rows,
    out_scores,
):
    """Each thread goes through a run of queries, tile by tile. `terms` are places in the (U,) terms `used`."""
    queries, k = out_rows.shape
    for thread in numba.prange(threads):
        sums = np.empty(tile, np.float64)
        bounds = np.empty((tile + BLOCK - 1) >> SHIFT, np.float64)  # at least the largest sum of each block
        begins, ends = indptr[used], indptr[used]  # the postings of each term within the tile
        first, stop = queries * thread // threads, queries * (thread + 1) // threads
        for base in range(0, num_docs, tile):
            size = min(tile, num_docs - base)
            for i in range(len(used)):
                begins[i] = ends[i]
                ends[i] += np.searchsorted(indices[ends[i] : indptr[used[i] + 1]], base + size)
            sums[:] = 0.0
            bounds[:] = 0.0
            for query in range(first, stop):
                old, old_stop = (pointers[query - 1], pointers[query]) if query > first else (0, 0)
                new, new_stop = pointers[query], pointers[query + 1]
                if not sliding:
                    sums[:] = 0.0
                    bounds[:] = 0.0
                    old = old_stop
                while old < old_stop or new < new_stop:
                    term, change, old, new = next_change(terms, counts, old, old_stop, new, new_stop)
                    part, values = indices[begins[term] : ends[term]], data[begins[term] : ends[term]]
                    if change < 0:  # no bound rises
                        for i in range(len(part)):
                            sums[np.uint64(part[i] - base)] += change * values[i]
                    elif change > 0:
                        for i in range(len(part)):
                            row = np.uint64(part[i] - base)  # unsigned: Numba then looks for no negative index
                            total = sums[row] + change * values[i]
                            sums[row] = total
                            block = row >> np.uint64(SHIFT)
                            bounds[block] = max(total, bounds[block])

                rows, scores = out_rows[query], out_scores[query]
                for block in range((size + BLOCK - 1) >> SHIFT):
                    if bounds[block] <= scores[k - 1]:
                        continue
                    largest = 0.0
                    for row in range(block << SHIFT, min(size, (block + 1) << SHIFT)):
                        if allowed.size and not allowed[base + row]:
                            continue
                        largest = max(largest, sums[row])
                        if np.float32(sums[row]) > scores[k - 1]:
                            insert(rows, scores, base + row, np.float32(sums[row]))
                    bounds[block] = largest
