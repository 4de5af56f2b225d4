"""The reranker's losses against equation 9 in float64, and their gradients against finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.losses import make_loss, marginal_loss, posterior_loss


def float64_terms(scores, log_probs, there):
    """log softmax(f) and log p of each row's passages that are there."""
    for f, log_p, own in zip(scores.astype(np.float64), log_probs.astype(np.float64), there, strict=True):
        f = f[own] - f[own].max()
        yield f - np.log(np.exp(f).sum()), log_p[own]


def equation_9(scores, log_probs, there):
    """-log sum_i p_rank p_theta, less that of the best passage."""
    losses = []
    for log_rank, log_p in float64_terms(scores, log_probs, there):
        highest = (log_rank + log_p).max()
        losses.append(log_p.max() - highest - np.log(np.exp(log_rank + log_p - highest).sum()))
    return np.array(losses)


def divergence(scores, log_probs, there, temperature):
    losses = []
    for log_rank, log_p in float64_terms(scores, log_probs, there):
        tempered = (log_p - log_p.max()) / temperature
        log_q = tempered - np.log(np.exp(tempered).sum())
        losses.append((np.exp(log_q) * (log_q - log_rank)).sum())
    return np.array(losses)


def case(lowest, highest, seed=0, spread=None):
    """64 strides of 1 to 16 passages; `spread` is how far apart a stride's log-probabilities lie, if stated."""
    rng = np.random.default_rng(seed)
    there = np.arange(16)[None] < rng.integers(1, 17, 64)[:, None]
    there = rng.permuted(there, axis=1)
    log_probs = rng.uniform(lowest, highest, (64, 16))
    if spread is not None:
        log_probs = log_probs[:, :1] + rng.uniform(0, spread, (64, 16))
    return rng.normal(0, 1, (64, 16)).astype(np.float32), log_probs.astype(np.float32), there


CASES = [case(-8, -5), case(-2000, -5), case(-2000, -1990), case(-2000, -5, spread=3)]


@pytest.mark.parametrize("given", CASES, ids=["short", "wide", "improbable", "close"])
def test_equation_9(given):
    """2,000 nats in float32 are known to 1e-4; less the best passage's, they are known to 1e-6."""
    np.testing.assert_allclose(jax.jit(marginal_loss)(*given), equation_9(*given), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("given", CASES, ids=["short", "wide", "improbable", "close"])
@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_divergence_from_the_readers_posterior(given, temperature):
    found = make_loss("kl", temperature)(*given)
    np.testing.assert_allclose(found, divergence(*given, temperature), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("given", CASES, ids=["short", "wide", "improbable", "close"])
@pytest.mark.parametrize("name", ["marginal", "kl"])
def test_gradients(given, name):
    scores, log_probs, there = given
    exact = equation_9 if name == "marginal" else lambda *arrays: divergence(*arrays, 1.0)
    found = jax.grad(lambda f: make_loss(name, 1.0)(f, log_probs, there).sum())(jnp.asarray(scores))
    expected = np.zeros(scores.shape)
    for column in range(scores.shape[1]):
        step = np.zeros(scores.shape)
        step[:, column] = 1e-5
        up, down = (exact(scores + sign * step, log_probs, there) for sign in (1, -1))
        expected[:, column] = (up - down) / 2e-5
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert (np.asarray(found)[~there] == 0).all()


@pytest.mark.parametrize("loss", [marginal_loss, posterior_loss])
def test_what_is_masked_does_not_count(loss):
    """Not even where there is NaN, or where a stride has no passage at all."""
    scores, log_probs, there = case(-300, -5)
    there[0] = False
    noise = np.where(there, 0, np.nan).astype(np.float32)
    value, gradient = jax.value_and_grad(lambda f: loss(f, log_probs + noise, there)[1:].sum())(scores)
    changed = loss(np.where(there, scores, 1e30).astype(np.float32), log_probs, there)
    np.testing.assert_array_equal(changed, loss(scores, log_probs, there))
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    assert np.isfinite(changed).all()


def test_one_passage_leaves_nothing_to_learn():
    scores, log_probs, _ = case(-2000, -5)
    there = np.arange(16)[None] == np.arange(64)[:, None] % 16
    np.testing.assert_array_equal(marginal_loss(scores, log_probs, there), np.zeros(64))
    np.testing.assert_array_equal(posterior_loss(scores, log_probs, there), np.zeros(64))
