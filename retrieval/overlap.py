"""How much of a text stands in passages word for word: retrieval that finds the text itself measures memory."""

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, islice

import numpy as np

from retrieval.analyzer import placed_words, words

OVERLAP_WORDS = 13  # the run length of GPT-3's and The Pile's contamination checks
PASSAGES_AT_ONCE = 4096


def overlap(text: str, passages: Iterable[str], spans: np.ndarray | None = None, run: int = OVERLAP_WORDS) -> float:
    """The share of the text's words that stand in a run of `run` words which a passage has too, from 0 to 1.

    Case and punctuation do not count; a character is a word where a language writes no spaces. In memory are a few
    numbers for each word that counts, and those of `PASSAGES_AT_ONCE` passages.

    Args:
        spans: (n, 2) ascending characters of the text, first and one past the last: only words in these count, but runs
            may go beyond them.
    """
    counted, starts, hashes = array("q"), array("q"), array("q")  # words, first words of runs, what the runs are
    recent: deque[str] = deque(maxlen=run)
    ahead = iter([(0, len(text))] if spans is None else spans.tolist())
    first, last = next(ahead, (len(text), len(text)))
    for number, (word, begin, end) in enumerate(placed_words(text)):
        recent.append(word)
        while last <= begin and (span := next(ahead, None)):
            first, last = span
        if first < end and begin < last:
            counted.append(number)
        if len(recent) == run and counted and number - counted[-1] < run:
            starts.append(number - run + 1)
            hashes.append(hash(tuple(recent)))
    if not counted:
        return 0.0
    known, inverse = np.unique(np.frombuffer(hashes, np.int64), return_inverse=True)
    shared = np.zeros(len(known) + 1, bool)  # and one for what is not known
    left = iter(passages)
    while some := list(islice(left, PASSAGES_AT_ONCE)):
        found = np.fromiter(chain.from_iterable(run_hashes(passage, run) for passage in some), np.int64)
        at = np.searchsorted(known, found)
        shared[at[np.append(known, 0)[at] == found]] = True
    own = np.frombuffer(starts, np.int64)[shared[inverse]]
    edges = np.searchsorted(np.frombuffer(counted, np.int64), np.stack([own, own + run]))
    depth = np.bincount(edges[0], minlength=len(counted) + 1) - np.bincount(edges[1], minlength=len(counted) + 1)
    return float((np.cumsum(depth)[:-1] > 0).mean())


def run_hashes(text: str, run: int) -> Iterator[int]:
    """A number for every run of `run` words."""
    found = words(text)
    return (hash(tuple(found[i : i + run])) for i in range(len(found) - run + 1))


def shared_spans(text: str, others: Iterable[str], run: int = OVERLAP_WORDS) -> np.ndarray:
    """The characters of `text`, (n, 2): first and one past the last of every run of `run` words that one of `others`
    has too. They ascend. One pass, with no more than the others' runs in memory."""
    theirs: set[tuple[str, ...]] = set()
    for other in others:
        found = words(other)
        theirs.update(tuple(found[i : i + run]) for i in range(len(found) - run + 1))
    spans: list[tuple[int, int]] = []
    recent: deque[tuple[str, int, int]] = deque(maxlen=run)
    for placed in placed_words(text):
        recent.append(placed)
        if len(recent) == run and tuple(word for word, _, _ in recent) in theirs:
            spans.append((recent[0][1], placed[2]))
    return np.array(spans, np.int64).reshape(-1, 2)
