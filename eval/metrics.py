"""Perplexity with its denominators (NumPy only)."""

import math
from dataclasses import dataclass

import numpy as np

from ralm_jax import ranking
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
    """The perplexity of the text when stride j is predicted with candidate `chosen[j]` in front; or, of the (J, s)
    log-probabilities of a mixture, with all its passages."""
    if chosen.ndim == 2:
        target, chosen = chosen, ranking.first(scores)
    else:
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
