"""Perplexity with its denominators, and differences with their intervals (NumPy only)."""

import math
from dataclasses import dataclass

import numpy as np

from ralm_jax.errors import UsageError
from ralm_jax.score_table import Scores


@dataclass(frozen=True)
class Perplexity:
    """How well a text was predicted.

    Attributes:
        nll: summed negative log-likelihood of the scored tokens, in nats.
        tokens: denominator of token_ppl: all tokens of the text, the unscored first one among them, as in the paper's
            code.
        scored_tokens: tokens that nll sums over.
        words: denominator of word_ppl: spaces of the raw text.
        strides: windows scored, the first one included.
        strides_without_passage: those of them that had no passage in front.
    """

    nll: float
    tokens: int
    scored_tokens: int
    words: int
    strides: int
    strides_without_passage: int

    @property
    def token_ppl(self) -> float | None:
        return perplexity(self.nll, self.tokens)

    @property
    def word_ppl(self) -> float | None:
        """None for a text without spaces."""
        return perplexity(self.nll, self.words)


def perplexity(nll: float, count: int) -> float | None:
    """exp(nll / count); None where that is not a finite number."""
    if count < 1 or nll / count > math.log(1e300):
        return None
    return math.exp(nll / count)


def text_perplexity(scores: Scores, chosen: np.ndarray) -> Perplexity:
    """The perplexity of the text when stride j is predicted with candidate `chosen[j]` in front."""
    target = scores.target[np.arange(len(chosen)), chosen]
    nll = -(scores.first_window.sum(dtype=np.float64) + np.nansum(target, dtype=np.float64))
    return Perplexity(
        nll=float(nll),
        tokens=scores.about["tokens"],
        scored_tokens=len(scores.first_window) + int((~np.isnan(target)).sum()),
        words=scores.about["words"],
        strides=1 + len(chosen),
        strides_without_passage=1 + int((chosen == 0).sum()),
    )


@dataclass(frozen=True)
class PairedDifference:
    """How much better or worse one choice of passages predicts the strides than another.

    Attributes:
        mean: NLL by the first less NLL by the second, in nats a token; below 0 where the first is better.
        low, high: its 95% interval.
        strides, tokens: what it is over: all after the first window, which has no passage in either.
        block, resamples: of the bootstrap.
    """

    mean: float
    low: float
    high: float
    strides: int
    tokens: int
    block: int
    resamples: int


def paired_difference(
    scores: Scores, a: np.ndarray, b: np.ndarray, *, resamples: int = 10_000, seed: int = 0, block: int | None = None
) -> PairedDifference:
    """The difference between predicting stride j with candidate `a[j]` and with `b[j]` in front.

    The interval is by a moving-block bootstrap (Künsch, 1989), as neighbouring strides share prefixes and passages:
    runs of `block` strides are drawn with replacement, as many as make up the text.

    Args:
        a, b: (J,) candidates, as policies of `ralm_jax.ranking` choose them.
        block: None for the square root of the number of strides.

    Raises:
        UsageError: the text has no stride after its first window, or `block` does not fit.
    """
    strides = len(scores.target)
    block = max(1, math.isqrt(strides)) if block is None else block
    if not 1 <= block <= strides:
        raise UsageError(
            f"a bootstrap in blocks of {block} needs as many strides after the first window, not {strides}"
        )
    first, second = (scores.target[np.arange(strides), chosen].astype(np.float64) for chosen in (a, b))
    counts = (~np.isnan(first)).sum(axis=1)
    gains = np.nansum(second - first, axis=1)
    total, tokens = (np.concatenate([[0], np.cumsum(column)]) for column in (gains, counts))
    total, tokens = total[block:] - total[:-block], tokens[block:] - tokens[:-block]  # of each run
    rng, drawn = np.random.default_rng(seed), -(-strides // block)
    means = np.empty(resamples)
    for i in range(resamples):
        runs = rng.integers(len(total), size=drawn)
        means[i] = total[runs].sum() / tokens[runs].sum()
    low, high = np.percentile(means, [2.5, 97.5])
    return PairedDifference(
        float(gains.sum() / counts.sum()), float(low), float(high), strides, int(counts.sum()), block, resamples
    )
