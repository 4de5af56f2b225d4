"""`attend` against attention written out in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ralm_jax.attention import attend

attend_ = jax.jit(attend, static_argnames="scale")


def reference(q, k, v, scale, valid=None):
    batch, length, heads, _ = q.shape
    group = heads // k.shape[2]
    out = np.zeros_like(q)
    for b in range(batch):
        for n in range(heads):
            scores = scale * q[b, :, n] @ k[b, :, n // group].T
            mask = np.tril(np.ones((length, length), bool))
            if valid is not None:
                mask &= valid[b][None, :]
            scores = np.where(mask, scores, -1e30)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            out[b, :, n] = (weights / weights.sum(axis=-1, keepdims=True)) @ v[b, :, n // group]
    return out


@pytest.mark.parametrize("length", [1, 7, 128, 129, 300])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_against_numpy(length, heads, kv_heads):
    rng = np.random.default_rng(length)
    q, k, v = (rng.normal(size=(2, length, n, 8)).astype(np.float32) for n in (heads, kv_heads, kv_heads))
    valid = rng.random((2, length)) > 0.3
    valid[:, 0] = True
    np.testing.assert_allclose(attend_(q, k, v, scale=0.3), reference(q, k, v, 0.3), atol=1e-5)
    np.testing.assert_allclose(attend_(q, k, v, scale=0.3, valid=valid), reference(q, k, v, 0.3, valid), atol=1e-5)


def test_long_windows_take_larger_blocks_not_more(monkeypatch):
    monkeypatch.setattr("ralm_jax.attention.BLOCK", 4)
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 333, 2, 4)).astype(np.float32) for _ in range(3))
    np.testing.assert_allclose(
        jax.jit(attend, static_argnames="scale")(q, k, v, scale=0.5), reference(q, k, v, 0.5), atol=1e-5
    )
    products = str(jax.make_jaxpr(lambda *x: attend(*x, scale=0.5))(q, k, v)).count("dot_general[")
    assert products == 2 * 31  # of 11 rows each


def test_rows_without_keys_are_finite():
    q = jnp.ones((1, 5, 2, 4))
    valid = jnp.zeros((1, 5), bool)
    assert np.isfinite(attend(q, q, q, scale=1.0, valid=valid)).all()
    gradient = jax.grad(lambda x: attend(x, x, x, scale=1.0, valid=valid).sum())(q)
    assert np.isfinite(gradient).all()


def test_large_scores_do_not_overflow():
    q = jnp.full((1, 6, 1, 4), 1e4, jnp.float32)
    assert np.isfinite(attend(q, q, q, scale=1.0)).all()


def test_an_unknown_implementation_fails_loudly():
    q = jnp.ones((1, 5, 2, 4))
    with pytest.raises(ValueError, match="'flash' is not one of auto, xla"):
        attend(q, q, q, scale=1.0, impl="flash")
