"""How much of a text stands in passages word for word: retrieval that finds the text itself measures memory."""

from collections.abc import Iterable

import numpy as np

from retrieval.analyzer import words

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
