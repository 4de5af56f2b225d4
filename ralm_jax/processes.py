"""The processes of this job: this one alone, or several that `join` brings together, as on the hosts of a pod.

All run the same command and must see the same folders, on a shared disk or in a bucket. What the job does once, such as
making a folder or a report, process 0 does while the others wait. When one fails, all end.

Nothing heavy is imported before `join`.
"""

import atexit
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from ralm_jax.errors import RalmError, UsageError, first_line

T = TypeVar("T")

HEARTBEAT = 60  # seconds without a sign of life after which a process is taken for dead, and all end
PATIENCE_MS = 30 * 24 * 3600 * 1000  # of who waits for process 0; one that dies does not keep anybody waiting
FAILED = "ralm/failed"  # the key under which the first to fail says why
GRACE = 3.0  # seconds in which a process that is told of a failure may end by itself


@dataclass
class Job:
    """What `join` finds.

    Attributes:
        client: of JAX's coordination service, by which processes talk without their devices, which may be busy.
        calls: of `once` so far; the same in all processes.
    """

    count: int = 1
    index: int = 0
    client: Any = None
    calls: int = 0


alone, job = Job(), Job()  # `job` is replaced by `join`, and within `once`


def join(coordinator: str | None = None, number: int | None = None, index: int | None = None) -> None:
    """Brings the processes of this job together, before any of them uses a device.

    Args:
        coordinator: HOST:PORT at which process 0 is to be found.
        number: of processes.
        index: which of them this is. All three are None for what JAX finds in the environment (TPU pods, SLURM, Open
            MPI, Kubernetes, JAX_COORDINATOR_ADDRESS).

    Raises:
        UsageError: the environment does not say, or the others are not to be found.
    """
    global job
    import jax
    from jax._src.distributed import global_state  # its key-value store has no public name

    jax.config.update("jax_enable_preemption_service", False)  # it would have every command ignore SIGTERM
    try:
        jax.distributed.initialize(coordinator, number, index, heartbeat_timeout_seconds=HEARTBEAT)
    except (ValueError, TypeError, RuntimeError) as error:
        advice = "" if coordinator else "; name them with --coordinator, --num-processes and --process-id"
        raise UsageError(f"the processes of this job cannot be joined ({first_line(error)}){advice}") from None
    job = Job(global_state.num_processes, global_state.process_id, global_state.client)
    if job.count > 1:
        done = threading.Event()
        watch = threading.Thread(target=end_with_others, args=(job, done), daemon=True)
        watch.start()
        atexit.register(watch.join)  # before JAX ends what it asks
        atexit.register(done.set)
    jax.devices()  # which all have to ask for at the same time


def count() -> int:
    return job.count


def index() -> int:
    return job.index


def first() -> bool:
    """Whether this is process 0, which speaks and writes for all."""
    return job.index == 0


def once(make: Callable[[], T]) -> T:
    """What `make` gives, or the RalmError that it raises, in all processes: when they have all come here, process 0
    runs it, as if it were alone. The value must be one that can be pickled."""
    global job
    if job.count == 1:
        return make()
    all_of_us = job
    job.calls += 1
    key = f"ralm/once/{job.calls}"
    job.client.wait_at_barrier(f"{key}/here", PATIENCE_MS)
    if job.index == 0:
        made: Any = None
        job = alone
        try:
            made = make()
        except RalmError as error:
            made = error
        finally:
            job = all_of_us
        job.client.key_value_set_bytes(key, pickle.dumps(made))
    else:
        made = pickle.loads(job.client.blocking_key_value_get_bytes(key, PATIENCE_MS))
    if isinstance(made, RalmError):
        raise made
    return made


def wait() -> None:
    """Waits until all processes have come here."""
    once(lambda: None)


def own_share(items: list[T]) -> list[T]:
    """Those of `items` that are this process's to do."""
    return items[job.index :: job.count]


def bar_hidden(progress: bool | None) -> bool | None:
    """tqdm's `disable`: only process 0 shows progress, if it is wanted, or for None if there is a terminal."""
    return True if job.index else None if progress is None else not progress


# --- the end ---


def fail(message: str, code: int) -> NoReturn:
    """Says on stderr why this process ends, unless another one has said just that; all others end with it."""
    if job.count == 1:
        say(message)
        sys.exit(code)
    if job.index:
        time.sleep(GRACE / 4)  # what is everybody's fault, process 0 says
    try:
        job.client.key_value_set(FAILED, message)
        said = False
    except RuntimeError:  # another one has failed before
        said = told_by(job) == message
    if not said:
        say(message)
    leave(job, code)


def say(message: str) -> None:
    which = f"process {job.index} of {job.count}: " if job.index else ""
    print(f"ralm: error: {which}{message}", file=sys.stderr, flush=True)


def told_by(job: Job) -> str | None:
    """What the first to fail said, if it can still be asked."""
    try:
        return job.client.key_value_try_get(FAILED)
    except RuntimeError:
        return None


def leave(job: Job, code: int) -> NoReturn:
    """Ends at once: an orderly end would wait for the others, who may be waiting for us. Process 0, which keeps what
    they all have to hear, is the last."""
    sys.stdout.flush()
    deadline = time.monotonic() + 2 * GRACE
    try:
        for other in range(1, job.count):
            if job.index == 0:
                left = max(1, int(1000 * (deadline - time.monotonic())))
                job.client.blocking_key_value_get(f"ralm/left/{other}", left)
        if job.index:
            job.client.key_value_set(f"ralm/left/{job.index}", "", allow_overwrite=True)
    except RuntimeError:  # who does not answer is dead already
        pass
    os._exit(code)


def end_with_others(job: Job, done: threading.Event) -> None:
    """Ends this process when another one fails, whatever it is waiting for."""
    while told_by(job) is None:
        if done.wait(1):
            return
    time.sleep(GRACE)  # most failures are those of all
    print(f"ralm: error: process {job.index} of {job.count} ends, as another one failed", file=sys.stderr, flush=True)
    leave(job, 1)
