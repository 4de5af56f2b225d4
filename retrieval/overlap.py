"""How much of a text stands in passages word for word: retrieval that finds the text itself measures memory."""

from collections import deque
from collections.abc import Iterable

import numpy as np

from retrieval.analyzer import placed_words, words

OVERLAP_WORDS = 13  # the run length of GPT-3's and The Pile's contamination checks


def overlap(text: str, passages: Iterable[str], run: int = OVERLAP_WORDS) -> float:
    """The share of the text's words that stand in a run of `run` words which a passage has too, from 0 to 1.

    Case and punctuation do not count; a character is a word where a language writes no spaces.
    """
    own = words(text)
    runs: dict[tuple[str, ...], list[int]] = {}
    for i in range(len(own) - run + 1):
        runs.setdefault(tuple(own[i : i + run]), []).append(i)
    covered = np.zeros(len(own), bool)
    for passage in passages:
        found = words(passage)
        for i in range(len(found) - run + 1):
            for start in runs.get(tuple(found[i : i + run]), ()):
                covered[start : start + run] = True
    return float(covered.mean()) if own else 0.0


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
