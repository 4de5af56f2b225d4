"""Choosing tokens: greedy, drawn, penalised."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ralm_jax.errors import UsageError
from ralm_jax.generate.decoding import keys_of
from ralm_jax.generate.sampling import Sampling, choose, kept
from ralm_jax.settings import GenerateSettings

LOGITS = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05], [0.05, 0.15, 0.3, 0.5]], jnp.float32))
MINIMUM = np.finfo(np.float32).min


def sampling(**settings):
    return Sampling.of(GenerateSettings(**settings))


def draws(settings, count=4000, row=0):
    """Shares of the tokens that `count` keys draw from one row."""
    logits = jnp.broadcast_to(LOGITS[row], (count, 4))
    return np.bincount(np.asarray(choose(logits, None, keys_of(0, count), settings)), minlength=4) / count


def test_greedy_takes_the_likeliest_and_the_first_of_equals():
    assert choose(LOGITS, None, keys_of(0, 2), sampling()).tolist() == [0, 3]
    assert choose(jnp.zeros((1, 4)), None, keys_of(0, 1), sampling()).tolist() == [0]


def test_drawn_as_often_as_likely():
    np.testing.assert_allclose(draws(sampling(temperature=1.0)), [0.5, 0.3, 0.15, 0.05], atol=0.03)


def test_temperature():
    flat = np.array([0.5, 0.3, 0.15, 0.05]) ** 0.5
    np.testing.assert_allclose(draws(sampling(temperature=2.0)), flat / flat.sum(), atol=0.03)


def test_top_k_and_top_p_leave_the_likeliest():
    np.testing.assert_allclose(draws(sampling(temperature=1.0, top_k=2)), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(draws(sampling(temperature=1.0, top_p=0.7)), [0.625, 0.375, 0, 0], atol=0.03)
    assert draws(sampling(temperature=1.0, top_p=0.01))[0] == 1  # one is always left


@pytest.mark.parametrize("top_p", [0.5, 0.8, 0.94, 0.96])
def test_top_p_is_the_fewest_that_reach_it(top_p):
    left = np.asarray(kept(LOGITS, sampling(temperature=1.0, top_p=top_p))) > MINIMUM
    ranked = np.sort(np.exp(np.asarray(LOGITS[0])))[::-1].cumsum()
    assert left.sum(axis=1).tolist() == [1 + int((ranked < top_p - 1e-6).sum())] * 2


def test_repetition_is_penalised_on_both_sides_of_zero():
    logits = jnp.array([[2.0, 1.5, -1.0, -1.5]])
    seen = jnp.array([[True, False, True, False]])
    assert choose(logits, seen, keys_of(0, 1), sampling(repetition_penalty=2.0)).tolist() == [1]
    assert choose(logits[:, 2:], seen[:, 2:], keys_of(0, 1), sampling(repetition_penalty=2.0)).tolist() == [1]


def test_a_prompts_key_follows_from_its_place():
    assert jax.random.key_data(keys_of(3, 5)[2:4]).tolist() == jax.random.key_data(keys_of(3, 2, first=2)).tolist()
    assert jax.random.key_data(keys_of(3, 1)).tolist() != jax.random.key_data(keys_of(4, 1)).tolist()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max new tokens must be at least 1"),
        ({"temperature": -1.0}, "temperature must be from 0"),
        ({"temperature": float("nan")}, "temperature must be from 0"),
        ({"temperature": 1.0, "top_k": 0}, "top k must be at least 1"),
        ({"temperature": 1.0, "top_p": 0.0}, "top p must be from"),
        ({"top_p": 0.9}, "set a temperature above 0"),
        ({"repetition_penalty": 0.0}, "repetition penalty must be from"),
        ({"stop": ("",)}, "a stop string is empty"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(UsageError, match=message):
        GenerateSettings(**settings)
