"""Rotary phases: relative positions only, interpolation, float32."""

import jax.numpy as jnp
import numpy as np

from ralm_jax.rope import rotary_phases, rotate_half, token_positions


def positions(*values):
    return jnp.array([values], jnp.int32)


def test_products_depend_on_distance_alone():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 16)), jnp.float32) for _ in range(2))

    def product(i, j):
        turned = (rotate_half(x, rotary_phases(positions(p), 16, 10000.0)) for x, p in ((q, i), (k, j)))
        first, second = turned
        return float((first * second).sum())

    assert np.isclose(product(3, 1), product(103, 101), atol=1e-4)
    assert not np.isclose(product(3, 1), product(3, 2), atol=1e-2)


def test_interpolation_divides_positions():
    fine = rotary_phases(positions(8, 400), 16, 10000.0, factor=4.0)
    coarse = rotary_phases(positions(2, 100), 16, 10000.0)
    for a, b in zip(fine, coarse, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_phases_are_float32_where_bfloat16_has_collapsed():
    cos, _ = rotary_phases(positions(30000, 30001), 64, 10000.0)
    assert cos.dtype == jnp.float32
    assert not np.allclose(cos[0, 0], cos[0, 1])
    assert jnp.bfloat16(30000) == jnp.bfloat16(30001)  # what the phases would be made of


def test_positions_skip_left_padding():
    valid = jnp.array([[False, False, True, True, True]])
    assert token_positions(valid, (1, 5)).tolist() == [[0, 0, 0, 1, 2]]
    assert token_positions(None, (2, 3)).tolist() == [[0, 1, 2], [0, 1, 2]]


def test_positions_begin_anew_at_each_document():
    numbers = jnp.array([[1, 1, 1, 2, 3, 3, 0, 0], [2, 2, 2, 2, 2, 2, 2, 2]])
    assert token_positions(numbers, (2, 8)).tolist() == [[0, 1, 2, 0, 0, 1, 0, 1], [*range(8)]]


def test_bfloat16_has_few_positions_and_phases_have_all():
    """Of 16,384 positions bfloat16 has 1,025; interpolated phases tell every two neighbours apart."""
    every = jnp.arange(16384, dtype=jnp.int32)
    assert len(np.unique(np.asarray(every.astype(jnp.bfloat16), np.float32))) == 1025
    cos, sin = rotary_phases(every[None], 64, 10000.0, factor=8.0)
    turned = np.stack([cos[0, :, 0, 0], sin[0, :, 0, 0]], axis=1)  # of the fastest pair
    step = np.linalg.norm(np.diff(turned, axis=0), axis=1)
    np.testing.assert_allclose(step, 2 * np.sin(1 / 16), atol=2e-3)
