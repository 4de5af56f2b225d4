"""The two ways in which BM25 scores a batch of queries, over postings by term (CSC): from scratch, and sliding.

Both give the same hits to the last bit. Scores are sums of float32 numbers in float64, rounded to float32 at the end as
Lucene's are, so that equal passages tie exactly; ties go to the lower row.

The queries of neighbouring strides share most of their terms (28 of 32 tokens at stride 4). Sliding keeps one
accumulator a passage from query to query, adds the postings of terms that enter and takes away those of terms that
leave. That is exact because float32 numbers within 2^28 of one another add up in float64 without rounding; `can_slide`
sees to it. The best k are found by bounds on blocks of passages: a block whose bound is below the k-th best score so
far is not looked at, and the hits of the query before give a first such score.
"""

from typing import NamedTuple

import numba
import numpy as np

SHIFT = 5
BLOCK = 1 << SHIFT  # passages that share a bound


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
    kernel = slide if sliding else from_scratch
    kernel(*postings, num_docs, *queries, allowed, threads, rows, scores)


def can_slide(queries: Queries, smallest: float, largest: float) -> bool:
    """Whether every sum of the scores of two neighbouring queries is exact in float64.

    Args:
        smallest, largest: of the postings' scores.
    """
    if not 0 < smallest <= largest:
        return False
    unit = float(np.spacing(np.float32(smallest)))  # all scores are multiples of it
    counts = np.add.reduceat(queries.counts, queries.pointers[:-1]) if len(queries.terms) else np.zeros(1)
    return bool(2 * counts.max(initial=0) * largest < unit * 2.0**53)


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
def insert(rows, scores, found, row, score):  # type: ignore[no-untyped-def]
    """Puts a passage into its place among the `found` best of (k,) `rows` and `scores`; how many there are then."""
    k = len(rows)
    if found == k and (score < scores[k - 1] or (score == scores[k - 1] and row > rows[k - 1])):
        return found
    place = min(found, k - 1)
    while place > 0 and (score > scores[place - 1] or (score == scores[place - 1] and row < rows[place - 1])):
        scores[place] = scores[place - 1]
        rows[place] = rows[place - 1]
        place -= 1
    scores[place] = score
    rows[place] = row
    return min(found + 1, k)


@numba.njit(parallel=True, cache=True)
def from_scratch(  # type: ignore[no-untyped-def]
    indptr, indices, data, num_docs, terms, counts, pointers, allowed, threads, out_rows, out_scores
):
    """Each thread has one accumulator a passage and looks only at passages that match."""
    for thread in numba.prange(threads):
        sums = np.zeros(num_docs, np.float64)
        touched = np.empty(num_docs, np.int64)
        for query in range(thread, len(out_rows), threads):
            matches = 0
            for position in range(pointers[query], pointers[query + 1]):
                term, count = terms[position], counts[position]
                for posting in range(indptr[term], indptr[term + 1]):
                    row = indices[posting]
                    if allowed.size and not allowed[row]:
                        continue
                    if sums[row] == 0.0:
                        touched[matches] = row
                        matches += 1
                    sums[row] += count * data[posting]
            found = 0
            for i in range(matches):
                row = touched[i]
                score = np.float32(sums[row])
                sums[row] = 0.0
                found = insert(out_rows[query], out_scores[query], found, row, score)


@numba.njit(parallel=True, cache=True)
def slide(  # type: ignore[no-untyped-def]
    indptr, indices, data, num_docs, terms, counts, pointers, allowed, threads, out_rows, out_scores
):
    """Each thread slides over a run of queries."""
    queries, k = out_rows.shape
    blocks = (num_docs + BLOCK - 1) // BLOCK
    for thread in numba.prange(threads):
        sums = np.zeros(num_docs, np.float64)
        bounds = np.zeros(blocks, np.float64)  # at least the largest sum of each block
        first, stop = queries * thread // threads, queries * (thread + 1) // threads
        for query in range(first, stop):
            old, old_stop = (pointers[query - 1], pointers[query]) if query > first else (0, 0)
            new, new_stop = pointers[query], pointers[query + 1]
            while old < old_stop or new < new_stop:
                term, change, old, new = next_change(terms, counts, old, old_stop, new, new_stop)
                if change == 0:
                    continue
                begin, end = indptr[term], indptr[term + 1]
                if allowed.size:
                    for posting in range(begin, end):
                        row = indices[posting]
                        if allowed[row]:
                            sums[row] += change * data[posting]
                            bounds[row >> SHIFT] = max(bounds[row >> SHIFT], sums[row])
                elif change < 0:  # no bound rises
                    for posting in range(begin, end):
                        sums[indices[posting]] += change * data[posting]
                else:
                    for posting in range(begin, end):
                        row = indices[posting]
                        sums[row] += change * data[posting]
                        bounds[row >> SHIFT] = max(bounds[row >> SHIFT], sums[row])

            rows, scores = out_rows[query], out_scores[query]
            threshold = np.float32(0.0)  # the k-th best score is not below it
            if query > first and out_rows[query - 1, k - 1] >= 0:
                threshold = np.float32(sums[out_rows[query - 1, 0]])
                for place in range(1, k):
                    threshold = min(threshold, np.float32(sums[out_rows[query - 1, place]]))
            found = 0
            for block in range(blocks):
                if bounds[block] <= 0.0 or np.float32(bounds[block]) < threshold:
                    continue
                largest = 0.0
                for row in range(block * BLOCK, min(num_docs, (block + 1) * BLOCK)):
                    total = sums[row]
                    largest = max(largest, total)
                    score = np.float32(total)
                    if total > 0.0 and score >= threshold:
                        found = insert(rows, scores, found, row, score)
                        if found == k:
                            threshold = max(threshold, scores[k - 1])
                bounds[block] = largest
