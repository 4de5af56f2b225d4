"""Measured things run in processes of their own, so that their memory is theirs."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any


def run_apart(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` in a fresh process, so that no side sees the other's memory."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()
