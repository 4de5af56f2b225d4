"""How long work takes, without XLA's compilation, which a longer run or a cache would not see."""

import functools
import time

import jax

COMPILING = ("/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration")


class Stopwatch:
    """Seconds of laps; the first one begins now."""

    def __init__(self) -> None:
        self._before = self._now()

    def lap(self) -> float:
        """Seconds since the last lap, without compilation."""
        before, self._before = self._before, self._now()
        return self._before - before

    def _now(self) -> float:
        return time.monotonic() - compiled_seconds()[0]


@functools.cache
def compiled_seconds() -> list[float]:
    """Where the seconds that this process compiles from now on are summed."""
    total = [0.0]

    def add(event: str, duration_secs: float, **about: str | int) -> None:
        if event in COMPILING:
            total[0] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(add)
    return total
