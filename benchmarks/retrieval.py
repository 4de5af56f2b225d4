"""BM25 over a large corpus with the queries of neighbouring strides: ours against `bm25s` itself, and Lucene.

    python benchmarks/retrieval.py                       1,000,000 passages
    python benchmarks/retrieval.py --lucene              with Lucene (the extra lucene, and a JDK)
    python benchmarks/retrieval.py --quick --json out.json

Corpus and queries are made by program: words from a Zipf distribution whose head is cut off as stop words cut it, and
the lengths of Wikipedia passages of at most 100 words. A query is 24 words of a running text of the same distribution,
3 words further each time, as 32 tokens at stride 4 are. All sides take the same queries on as many threads, each in a
process of its own, from texts on: ours sliding and from scratch, `bm25s` with its numba backend and our analyser
on the same postings, Lucene. `ratio` is ours, as `ralm retrieve` chooses, over `bm25s`.
"""

import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

HERE = str(Path(__file__).resolve().parent)
sys.path[:] = [HERE, *(place for place in sys.path if place != HERE)]
from processes import run_apart  # noqa: E402

sys.path.remove(HERE)  # this file has the name of a package that it measures

K = 16
QUERY_WORDS, STRIDE_WORDS = 24, 3
VOCABULARY = 400_000
BATCH = 2048  # queries a search, as `ralm retrieve` has them


@dataclass(frozen=True)
class Options:
    """Queries a second of BM25 over a large corpus."""

    passages: int = 1_000_000
    """Passages of the corpus."""
    queries: int = 60_000
    """Queries of consecutive strides; WikiText-103's test text has as many at stride 4."""
    lucene: bool = False
    """Index and search with Lucene as well."""
    quick: bool = False
    """20,000 passages and 2,000 queries."""
    json: str | None = None
    """Also write the figures to this file."""


def word(rank: int) -> str:
    """A made-up word for each rank, which no stemmer touches."""
    letters = ""
    while True:
        rank, letter = divmod(rank, 20)
        letters += "bcdfghjklmnpqrtvwxz"[letter % 19] + "ao"[letter // 19]
        if not rank:
            return letters + "k"


def ranks(rng: np.random.Generator, count: int) -> np.ndarray:
    """Ranks of words: Zipf-Mandelbrot, p(r) ~ 1 / (r + 60)^1.07."""
    weights = np.cumsum(1 / (np.arange(VOCABULARY) + 60.0) ** 1.07)
    return np.searchsorted(weights, rng.random(count) * weights[-1])


def corpus(count: int) -> Iterator[Any]:
    from retrieval.corpus import Passage

    rng, words = np.random.default_rng(0), np.array([word(rank) for rank in range(VOCABULARY)], object)
    for start in range(0, count, 10_000):
        lengths = np.clip(rng.normal(58, 12, min(10_000, count - start)), 5, 90).astype(int)  # without stop words
        drawn = words[ranks(rng, lengths.sum())]
        for i, stop in enumerate(np.cumsum(lengths)):
            yield Passage(str(start + i), "", " ".join(drawn[stop - lengths[i] : stop]))


def queries(count: int) -> list[str]:
    text = [word(rank) for rank in ranks(np.random.default_rng(1), QUERY_WORDS + STRIDE_WORDS * count)]
    return [" ".join(text[i * STRIDE_WORDS : i * STRIDE_WORDS + QUERY_WORDS]) for i in range(count)]


def peak_mb(who: int = resource.RUSAGE_SELF) -> float:
    return resource.getrusage(who).ru_maxrss / 1024


def build(folder: str, passages: int) -> dict[str, Any]:
    from retrieval.bm25 import build_index

    started = time.perf_counter()
    index = build_index(corpus(passages), folder, progress=False)
    size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    return {
        "build_seconds": time.perf_counter() - started,
        "index_mb": size / 1e6,
        "postings": len(index.postings.data),
        "build_peak_mb": peak_mb(),
        "build_worker_peak_mb": peak_mb(resource.RUSAGE_CHILDREN),
    }


def ours(folder: str, count: int, sliding: bool | None) -> dict[str, Any]:
    """`sliding` None lets the index choose."""
    import numba

    from retrieval import bm25

    if sliding is not None:
        bm25.postings_to_touch = lambda *_: (1, 0) if sliding else (0, 1)
    index = bm25.BM25Index.open(folder)
    wanted = queries(count)
    for start in (0, 64):  # compiles both ways
        index.search(wanted[start : start + 64], K)
        index.search(wanted[start : start + 64][::-1], K)
    started = time.perf_counter()
    found = [index.search(wanted[i : i + BATCH], K) for i in range(0, count, BATCH)]
    seconds = time.perf_counter() - started
    rows = np.concatenate([hits.rows for hits in found])
    scores = np.concatenate([hits.scores for hits in found])
    return {
        "queries_per_second": count / seconds,
        "peak_mb": peak_mb(),
        "threads": numba.get_num_threads(),
        "rows": rows,
        "scores": scores,
    }


def lucene(folder: str, count: int, passages: int) -> dict[str, Any]:
    from retrieval.lucene import build_index

    started = time.perf_counter()
    index = build_index(corpus(passages), folder, progress=False)
    built, wanted = time.perf_counter() - started, queries(count)
    index.search(wanted[:BATCH], K)  # the JVM compiles
    started = time.perf_counter()
    found = [index.search(wanted[i : i + BATCH], K) for i in range(0, count, BATCH)]
    seconds = time.perf_counter() - started
    scores = np.concatenate([hits.scores for hits in found])
    return {"queries_per_second": count / seconds, "peak_mb": peak_mb(), "scores": scores, "build_seconds": built}


def plain(folder: str, count: int) -> dict[str, Any]:
    import bm25s
    import numba

    from retrieval.analyzer import analyze

    index = bm25s.BM25.load(Path(folder) / "bm25", mmap=True)
    index.backend = "numba"
    index.activate_numba_scorer()
    texts = queries(count)
    options = {"k": K, "show_progress": False, "n_threads": numba.get_num_threads(), "backend_selection": "numba"}

    def terms(texts: list[str]) -> list[list[str]]:
        return [[term for term in analyze(text) if term in index.vocab_dict] for text in texts]

    index.retrieve(terms(texts[:64]), **options)
    started = time.perf_counter()
    found = [index.retrieve(terms(texts[i : i + BATCH]), **options) for i in range(0, count, BATCH)]
    seconds = time.perf_counter() - started
    scores = np.concatenate([result.scores for result in found])
    return {"queries_per_second": count / seconds, "peak_mb": peak_mb(), "scores": scores}


def main() -> None:
    options = tyro.cli(Options, config=(tyro.conf.FlagCreatePairsOff,))
    passages, count = (20_000, 2_000) if options.quick else (options.passages, options.queries)
    with tempfile.TemporaryDirectory() as place:
        folder = str(Path(place) / "index")
        figures: dict[str, Any] = {"passages": passages, "queries": count} | run_apart(build, folder, passages)
        sides = {
            "ours": run_apart(ours, folder, count, None),
            "ours, sliding": run_apart(ours, folder, count, True),
            "ours, from scratch": run_apart(ours, folder, count, False),
            "bm25s": run_apart(plain, folder, count),
        }
        if options.lucene:
            sides["Lucene"] = run_apart(lucene, str(Path(place) / "lucene"), count, passages)
    slid, scratch = sides["ours, sliding"], sides["ours, from scratch"]
    same = all((slid[key] == scratch[key]).all() for key in ("rows", "scores"))
    difference = float(np.abs(np.sort(scratch["scores"]) - np.sort(sides["bm25s"]["scores"])).max())
    figures["threads"] = slid["threads"]
    figures["sliding_equals_from_scratch"] = bool(same)
    figures["largest_score_difference_to_bm25s"] = difference
    figures["sides"] = {name: {k: side[k] for k in ("queries_per_second", "peak_mb")} for name, side in sides.items()}
    if options.lucene:
        figures["lucene_build_seconds"] = sides["Lucene"]["build_seconds"]
        figures["ratio_to_lucene"] = sides["ours"]["queries_per_second"] / sides["Lucene"]["queries_per_second"]
    figures["ratio"] = sides["ours"]["queries_per_second"] / sides["bm25s"]["queries_per_second"]

    print(
        f"{passages:,} passages, {figures['postings']:,} postings: built in {figures['build_seconds']:.0f} s, "
        f"{figures['index_mb']:,.0f} MB, peak memory {figures['build_peak_mb']:,.0f} MB and, of the largest worker, "
        f"{figures['build_worker_peak_mb']:,.0f} MB"
    )
    print(f"{count:,} queries of consecutive strides, k {K}, {figures['threads']} threads")
    print(f"{'':<20}{'queries/s':>12}{'peak memory':>14}")
    for name, side in figures["sides"].items():
        print(f"{name:<20}{side['queries_per_second']:>12,.0f}{side['peak_mb']:>11,.0f} MB")
    print(f"ratio {figures['ratio']:.2f}; sliding gives {'the same' if same else 'OTHER'} hits as from scratch; "
          f"largest score difference to bm25s {difference:.1e}")  # fmt: skip
    if options.lucene:
        print(f"ratio to Lucene {figures['ratio_to_lucene']:.2f}; it built in {figures['lucene_build_seconds']:.0f} s")
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
