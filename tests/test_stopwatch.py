"""Laps without compilation."""

import jax
import jax.numpy as jnp
import pytest

from ralm_jax import stopwatch
from ralm_jax.stopwatch import COMPILING, Stopwatch, compiled_seconds


def test_laps_are_without_compilation(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(stopwatch.time, "monotonic", lambda: now[0])
    watch = Stopwatch()
    now[0] += 3
    assert watch.lap() == pytest.approx(3)
    now[0] += 10
    for event in COMPILING:
        jax.monitoring.record_event_duration_secs(event, 2.5)
    jax.monitoring.record_event_duration_secs("/jax/core/compile/another", 1.0)
    assert watch.lap() == pytest.approx(5)
    assert watch.lap() == pytest.approx(0)


def test_jax_tells_when_it_compiles():
    """Events are named as this version names them."""
    Stopwatch()
    before = compiled_seconds()[0]
    jax.jit(lambda x: jnp.sin(x) + 0.123).lower(1.0).compile()
    assert compiled_seconds()[0] > before
