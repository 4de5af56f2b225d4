"""The optimiser against AdamW written out, and which parameters decay."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ralm_jax.errors import UsageError
from ralm_jax.models import ENCODERS, READERS
from ralm_jax.settings import RerankerSettings, TrainSettings
from ralm_jax.sharding import make_mesh
from ralm_jax.weights import flat_state
from tests import tiny
from train.optim import is_decayed, learning_rate, make_optimizer


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("linear", [0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25]),
        ("constant", [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        ("cosine", [0.25, 0.5, 0.75, 1, 1, 0.5 + 2**0.5 / 4, 0.5, 0.5 - 2**0.5 / 4]),
    ],
)
def test_learning_rate(decay, expected):
    rate = learning_rate(TrainSettings(steps=8, warmup=0.5, decay=decay, learning_rate=2e-3))
    np.testing.assert_allclose([rate(step) for step in range(8)], np.array(expected) * 2e-3, rtol=1e-6)


@pytest.mark.parametrize("warmup", [0, 0.125, 1])
def test_every_update_counts_however_long_the_warm_up(warmup):
    rate = learning_rate(TrainSettings(steps=8, warmup=warmup, learning_rate=1.0))
    rates = [float(rate(step)) for step in range(8)]
    assert all(0 < value <= 1 for value in rates)
    assert max(rates) == 1


@pytest.mark.parametrize("config", [*tiny.READERS.values(), tiny.BERT, tiny.ROBERTA])
def test_what_decays_in_every_family(config):
    """Matrices and embeddings; neither biases, which stacked layers give two axes and more, nor norms."""
    from ralm_jax.model import abstract

    _, state = abstract((READERS | ENCODERS)[config.model_type], config, make_mesh(data=1))
    decayed = {path: leaf.get_value() for path, leaf in flat_state(is_decayed(state)).items()}
    assert all(decays == path.endswith(("kernel", "table")) for path, decays in decayed.items())
    assert any(decayed.values())
    assert not all(decayed.values())


def test_a_parameter_of_an_unknown_name_is_refused():
    with pytest.raises(UsageError, match=r"whether head\.weight decays"):
        is_decayed({"head": {"weight": np.zeros(3)}})


def test_updates_are_adamw_with_clipping():
    settings = TrainSettings(
        steps=4, warmup=0, decay="constant", learning_rate=0.1, weight_decay=0.5, clip=1.0, beta1=0.8, beta2=0.9
    )
    optimizer = make_optimizer(settings)
    params = {"kernel": jnp.array([[1.0, -2.0]]), "bias": jnp.array([3.0])}
    state = optimizer.init(params)
    expected = {name: np.asarray(value, np.float64) for name, value in params.items()}
    first, second = ({name: np.zeros(value.shape) for name, value in params.items()} for _ in range(2))
    for step in range(1, 4):
        gradients = {"kernel": jnp.array([[3.0 * step, 0.1]]), "bias": jnp.array([-4.0])}
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        norm = np.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in gradients.values()))
        for name, gradient in gradients.items():
            clipped = np.asarray(gradient, np.float64) / max(1, norm)
            first[name] = 0.8 * first[name] + 0.2 * clipped
            second[name] = 0.9 * second[name] + 0.1 * clipped**2
            adam = first[name] / (1 - 0.8**step) / (np.sqrt(second[name] / (1 - 0.9**step)) + 1e-8)
            expected[name] = expected[name] - 0.1 * (adam + (0.5 * expected[name] if name == "kernel" else 0))
    for name, value in expected.items():
        np.testing.assert_allclose(params[name], value, rtol=1e-5)


def test_optimiser_state_is_float32_whatever_is_computed_in():
    state = make_optimizer(TrainSettings(dtype="bfloat16")).init({"kernel": jnp.ones((2, 2))})
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state)} == {"float32", "int32"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"batch_size": 6, "micro_batches": 4}, "4 micro batches do not divide a batch of 6"),
        ({"warmup": 1.5}, "warmup must be from 0 to 1"),
        ({"dropout": -0.1}, "dropout must be from 0"),
        ({"learning_rate": float("nan")}, "learning rate must be 0 or more"),
    ],
)
def test_settings_that_make_no_sense(changes, message):
    with pytest.raises(UsageError, match=message):
        TrainSettings(**changes)


@pytest.mark.parametrize("changes", [{"k": 0}, {"held_out": 1.0}, {"temperature": 0.0}, {"pair_tokens": 0}])
def test_reranker_settings_that_make_no_sense(changes):
    with pytest.raises(UsageError, match="must be"):
        RerankerSettings(**changes)
