"""Differences between strategies and their intervals."""

import numpy as np
import pytest

from eval.metrics import paired_difference, text_perplexity
from ralm_jax.errors import UsageError
from ralm_jax.score_table import Scores


def table(target):
    """A table with the target log-probabilities (J, 1 + k, s) and nothing else of interest."""
    strides, candidates, _ = target.shape
    return Scores(
        first_window=np.full(3, -1, np.float32),
        past=np.zeros((strides, candidates, 0), np.float32),
        target=target.astype(np.float32),
        passages=np.zeros((strides, candidates - 1), np.int64),
        token_ends=np.arange(4),
        begins=np.arange(strides),
        settings={},
        about={"tokens": 4, "words": 1},
    )


def noisy(strides, gain, seed=0, runs=1):
    """One passage that gains `gain` nats a token on average, by noise that lasts for `runs` strides."""
    rng = np.random.default_rng(seed)
    noise = np.repeat(rng.normal(gain, 1, (-(-strides // runs), 1)), runs, axis=0)[:strides]
    base = rng.normal(-5, 1, (strides, 2))
    return table(np.stack([base, base + noise], axis=1))


def chosen(scores, candidate):
    return np.full(len(scores.target), candidate)


def test_the_mean_is_that_of_the_tokens_that_are_there():
    target = np.array([[[-1, -1], [-2, -3]], [[-4, np.nan], [-1, np.nan]]])
    found = paired_difference(table(target), np.array([1, 1]), np.array([0, 0]))
    assert (found.mean, found.tokens, found.strides, found.block) == (pytest.approx((5 - 2 + 1 - 4) / 3), 3, 2, 1)
    # every draw is one of 3/2, 0 and -3
    assert (found.low, found.high) == (pytest.approx(-3), pytest.approx(1.5))


def test_it_is_the_difference_of_the_nlls():
    scores = noisy(500, 0.3)
    first, second = chosen(scores, 1), np.arange(500) % 2
    found = paired_difference(scores, first, second, resamples=100)
    apart = text_perplexity(scores, first).nll - text_perplexity(scores, second).nll
    assert found.mean * found.tokens == pytest.approx(apart)
    turned = paired_difference(scores, second, first, resamples=100)
    assert (turned.mean, turned.low, turned.high) == (
        -found.mean,
        pytest.approx(-found.high),
        pytest.approx(-found.low),
    )


def test_the_same_choice_differs_by_nothing():
    found = paired_difference(noisy(50, 1.0), np.ones(50, int), np.ones(50, int), resamples=100)
    assert (found.mean, found.low, found.high) == (0, 0, 0)


def test_the_interval_is_that_of_independent_strides():
    """Block 1 is the plain bootstrap: the mean, and 1.96 standard errors to either side."""
    scores = noisy(2000, 0.1)
    found = paired_difference(scores, chosen(scores, 1), chosen(scores, 0), block=1)
    gains = (scores.target[:, 0] - scores.target[:, 1]).mean(axis=1)
    error = 1.96 * gains.std() / np.sqrt(2000)
    assert found.low == pytest.approx(found.mean - error, abs=0.1 * error)
    assert found.high == pytest.approx(found.mean + error, abs=0.1 * error)


def test_blocks_see_that_neighbours_depend_on_each_other():
    """Where noise lasts for 20 strides the plain bootstrap is too sure; blocks hold the truth about as often as they
    say."""
    held = {1: 0, 44: 0}
    for seed in range(40):
        scores = noisy(2000, 0.1, seed, runs=20)
        for block in held:
            found = paired_difference(scores, chosen(scores, 1), chosen(scores, 0), block=block, resamples=300)
            held[block] += found.low <= -0.1 <= found.high
    assert held[44] >= 33
    assert held[1] <= 24


def test_seeds_and_blocks():
    scores = noisy(400, 0.1)
    one, two, three = (paired_difference(scores, chosen(scores, 1), chosen(scores, 0), seed=s) for s in (0, 0, 1))
    assert one == two != three
    assert one.block == 20
    for block in (0, 401):
        with pytest.raises(
            UsageError, match=f"in blocks of {block} needs as many strides after the first window, not 400"
        ):
            paired_difference(scores, chosen(scores, 1), chosen(scores, 0), block=block)
    with pytest.raises(UsageError, match="not 0"):
        paired_difference(table(np.zeros((0, 2, 4))), np.zeros(0, int), np.zeros(0, int))
