"""Ranking policies: pure functions of a ScoreTable that choose one candidate for every stride.

Each takes `Scores` and returns (J,) integers: 0 for "no passage", i for the i-th retrieved passage. Where a stride has
no passage, every policy returns 0. `mixture` goes by all passages at once, and returns log-probabilities instead.
"""

from collections.abc import Callable

import numpy as np

from ralm_jax.errors import RalmError, UsageError
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
    check_past(scores, tokens)
    return best(scores.past[:, 1:, -tokens:].sum(axis=2, dtype=np.float64), scores)


def check_past(scores: Scores, tokens: int) -> None:
    """
    Raises:
        UsageError: the table keeps fewer past tokens than `tokens`.
    """
    kept = scores.past.shape[2]
    if not 1 <= tokens <= kept:
        raise UsageError(
            f"going by the last {tokens} prefix tokens needs a table scored with --past {tokens} or more; this one has "
            f"{kept}"
        )


def zero_shot_by(scores: Scores, ranker: Scores, tokens: int = 16) -> np.ndarray:
    """`zero_shot` by another reader, whose table of the same strides and passages is `ranker` (eq. 6 with another p_φ).

    The vocabularies may differ: strides are the same where they begin at the same character.

    Raises:
        UsageError: `ranker` keeps fewer past tokens than `tokens`.
        RalmError: it has other strides, or other passages.
    """
    count, k = scores.passages.shape
    if not np.array_equal(scores.begins, ranker.begins[:count]):
        raise RalmError(f"{ranker.about['reader']} scored other strides; use `ralm score --strides-of-retrieval`")
    if not np.array_equal(scores.passages, ranker.passages[:count, :k]):
        raise RalmError(f"{ranker.about['reader']} scored other passages; use the same RetrievalTable, and the same k")
    return zero_shot(ranker.first_k(k), tokens)[:count]


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


# --- beyond the paper ---


def mixture(scores: Scores, values: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """(J, s) float64 log-probabilities of the target under all passages, token by token: log sum_i w_i p_i with weights
    w = softmax(values / temperature) (REPLUG: Shi et al., 2023). Without passages, those of "no passage".

    Args:
        values: (J, k), such as the retriever's scores.
    """
    there = np.asarray(scores.passages >= 0)
    weights = log_softmax(np.where(there, values / temperature, -np.inf))
    target = scores.target.astype(np.float64)
    mixed = logsumexp(weights[:, :, None] + np.where(there[:, :, None], target[:, 1:], -np.inf))
    return np.where(np.isnan(target[:, 0]), np.nan, np.where(there.any(axis=1, keepdims=True), mixed, target[:, 0]))


def retrieval_mixture(scores: Scores, temperature: float = 1.0) -> np.ndarray:
    """`mixture` by the retriever's scores, as REPLUG has it.

    Raises:
        UsageError: the table does not keep them.
    """
    if scores.retrieval_scores is None:
        raise UsageError("a mixture goes by the retriever's scores, which this table does not keep; score anew")
    return mixture(scores, scores.retrieval_scores, temperature)


def logsumexp(values: np.ndarray) -> np.ndarray:
    """Over the second axis; -inf where all are."""
    if not values.shape[1]:
        return np.full((len(values), *values.shape[2:]), -np.inf)
    highest = np.nan_to_num(values.max(axis=1, keepdims=True), neginf=0)
    with np.errstate(divide="ignore"):
        return np.squeeze(highest, 1) + np.log(np.exp(values - highest).sum(axis=1))


def log_softmax(values: np.ndarray) -> np.ndarray:
    """(J, k); -inf where the value is."""
    total = logsumexp(values)
    return values - np.where(np.isfinite(total), total, 0)[:, None]


def surprise(scores: Scores, tokens: int = 16) -> np.ndarray:
    """(J,) how badly the last `tokens` prefix tokens were predicted without passage, in nats a token: known before
    anything is retrieved.

    Raises:
        UsageError: as `zero_shot`.
    """
    check_past(scores, tokens)
    return -scores.past[:, 0, -tokens:].mean(axis=1, dtype=np.float64)


def past_gain(scores: Scores, chosen: np.ndarray, tokens: int = 16) -> np.ndarray:
    """(J,) what the chosen passages do for the last `tokens` prefix tokens, in nats a token: known once the window is
    scored, before its target is.

    Raises:
        UsageError: as `zero_shot`.
    """
    check_past(scores, tokens)
    past = scores.past[np.arange(len(chosen)), chosen]
    return (past - scores.past[:, 0])[:, -tokens:].mean(axis=1, dtype=np.float64)


def selective(chosen: np.ndarray, signal: np.ndarray, threshold: float) -> np.ndarray:
    """`chosen` where `signal` (J,) is above the threshold; no passage elsewhere."""
    return np.where(signal > threshold, chosen, 0)


def selective_curve(
    scores: Scores, chosen: np.ndarray, signal: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What fewer retrievals cost: strides with the highest `signal` (J,) have their chosen passage, the others none.

    Returns:
        how many strides are above each threshold, from 0 to J; the thresholds; and the summed NLL of the targets.
    """
    rows = np.arange(len(chosen))
    gain = np.nansum(scores.target[rows, chosen] - scores.target[:, 0], axis=1, dtype=np.float64)
    order = np.argsort(-signal, kind="stable")
    nll = -np.nansum(scores.target[:, 0], dtype=np.float64) - np.concatenate([[0], np.cumsum(np.asarray(gain)[order])])
    thresholds = np.concatenate([signal[order], [-np.inf]])
    distinct = np.concatenate([[True], thresholds[:-1] > thresholds[1:]])  # equal signals retrieve together
    return np.flatnonzero(distinct), thresholds[distinct], nll[distinct]
