"""Ranking policies: pure functions of a ScoreTable that choose one candidate for every stride.

Each takes `Scores` and returns (J,) integers: 0 for "no passage", i for the i-th retrieved passage. Where a stride has
no passage, every policy returns 0.
"""

from collections.abc import Callable

import numpy as np

from ralm_jax.errors import UsageError
from ralm_jax.score_table import Scores

Policy = Callable[[Scores], np.ndarray]


def none(scores: Scores) -> np.ndarray:
    """Never a passage: the plain language model."""
    return np.zeros(len(scores.passages), np.int64)


def first(scores: Scores) -> np.ndarray:
    """The retriever's first passage (section 5)."""
    return np.minimum(scores.num_passages, 1)


def random(scores: Scores, seed: int = 0) -> np.ndarray:
    """Any of the stride's passages, with equal chances; the same ones for the same seed."""
    draws = np.random.default_rng(seed).random(len(scores.passages))
    return np.where(scores.num_passages > 0, 1 + (draws * scores.num_passages).astype(np.int64), 0)


def best(values: np.ndarray, scores: Scores) -> np.ndarray:
    """The passage with the highest of `values` (J, k); the higher-ranked one of equals, 0 where there is none."""
    if not values.shape[1]:
        return none(scores)
    masked = np.where(scores.passages >= 0, values, -np.inf)
    return np.where(scores.num_passages > 0, 1 + masked.argmax(axis=1), 0)


def zero_shot(scores: Scores, tokens: int = 16) -> np.ndarray:
    """The passage under which the last `tokens` prefix tokens are most probable (section 6.1, eq. 6).

    Raises:
        UsageError: the table keeps fewer past tokens than `tokens`.
    """
    kept = scores.past.shape[2]
    if not 1 <= tokens <= kept:
        raise UsageError(
            f"zero-shot reranking by {tokens} tokens needs a table scored with --past {tokens} or more; "
            f"this one has {kept}"
        )
    return best(scores.past[:, 1:, kept - tokens :].sum(axis=2, dtype=np.float64), scores)


def predictive(scores: Scores, values: np.ndarray) -> np.ndarray:
    """The passage that a trained reranker scores highest (section 6.2, eq. 7); `values` (J, k) are its scores."""
    return best(values, scores)


def oracle(scores: Scores, k: int | None = None) -> np.ndarray:
    """The passage, among the first `k`, under which the target itself is most probable: the bound of any reranking.

    Raises:
        UsageError: `k` is below 1.
    """
    if k is not None and k < 1:
        raise UsageError(f"the oracle chooses among at least 1 passage, not {k}")
    values = np.asarray(np.nansum(scores.target[:, 1:], axis=2, dtype=np.float64))
    if k is not None:
        values[:, k:] = -np.inf
    return best(values, scores)
