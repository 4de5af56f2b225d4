"""What all uses of a server that speaks OpenAI's API share: client, errors, cache, threads, and what was used.

Base URL and key come from the environment (OPENAI_BASE_URL, OPENAI_API_KEY), and go nowhere else.
"""

import json
import os
import sqlite3
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from hashlib import sha256
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from ralm_jax.errors import RalmError, UsageError, first_line

T = TypeVar("T")
R = TypeVar("R")
PREFIX, CHAT_PREFIX = "openai:", "openai-chat:"
RETRIES = 6  # by the client, which waits longer each time, or as long as the server says
CONCURRENCY = 8  # requests at the same time, where nobody says
TIMEOUT = 600.0  # seconds that an answer may take
CONNECTION_ADVICE = "is the server at OPENAI_BASE_URL running?"
ADVICE = {
    401: "check OPENAI_API_KEY",
    404: "the server at OPENAI_BASE_URL has no such model or endpoint",
    429: "ask again later, or fewer at once",
}


def is_api(model: str) -> bool:
    """Whether MODEL on the command line is a server's."""
    return model.startswith((PREFIX, CHAT_PREFIX))


class Server:
    """A model behind OPENAI_BASE_URL (default: OpenAI's own) and OPENAI_API_KEY.

    Attributes:
        name: openai:MODEL or openai-chat:MODEL.
        model: as the server names it.
    """

    def __init__(self, name: str):
        """
        Raises:
            UsageError: the package `openai` is not installed, no key in the environment, or no model.
        """
        import_openai()
        self.name, self.model = name, name.partition(":")[2]
        if not self.model:
            raise UsageError(f"{name}: name a model of the server's after the colon")
        if not os.environ.get("OPENAI_API_KEY"):
            raise UsageError("OPENAI_API_KEY is not set; a server that asks for no key takes any")

    @contextmanager
    def client(self, advice: Mapping[int, str] | None = None) -> Iterator[Any]:
        """
        Args:
            advice: what else to say about a refusal, by its HTTP status.

        Raises:
            RalmError: the server refuses, or does not answer after several tries, while the client is in use.
        """
        openai, key = import_openai(), os.environ["OPENAI_API_KEY"]
        try:
            with openai.OpenAI(max_retries=RETRIES, timeout=TIMEOUT) as client:
                yield client
        except openai.OpenAIError as error:
            message = first_line(error).replace(key, "***").rstrip(".")
            status: Any = getattr(error, "status_code", None)
            if status is not None and not message.startswith("Error code"):
                message = f"Error code: {status}"  # the library gives the page that came with it
            lost = isinstance(error, openai.APIConnectionError)
            told = [message, CONNECTION_ADVICE if lost else ADVICE.get(status), (advice or {}).get(status)]
            raise RalmError(f"{self.name}: {'; '.join(filter(None, told))}") from None

    @contextmanager
    def answering(self, what: str) -> Iterator[None]:
        """
        Raises:
            RalmError: an answer that is read inside is not `what`; the library hands over any JSON, or none.
        """
        try:
            yield
        except (TypeError, ValueError, AttributeError, IndexError):
            raise RalmError(f"{self.name}: the server did not answer with {what}") from None


class Cache:
    """Answers of servers by a hash of what was asked, in a SQLite file of the user's cache folder; safe for threads."""

    def __init__(self, name: str, table: str = "answers"):
        """
        Args:
            name: of what is kept, and of the file.
            table: in the file.
        """
        self.name, self.table, self._lock = name, table, threading.Lock()

    def __enter__(self) -> "Cache":
        """
        Raises:
            RalmError: the file cannot be opened.
        """
        with self._errors():
            path = cache_file(self.name)
            self._connection = sqlite3.connect(path, timeout=60, check_same_thread=False)
            try:
                with self._connection as connection:
                    columns = "(key BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID"
                    connection.execute(f"CREATE TABLE IF NOT EXISTS {self.table} {columns}")
            except BaseException:
                self._connection.close()
                raise
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._connection.close()

    def get(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """What is there of `keys`.

        Raises:
            RalmError: the file cannot be read.
        """
        marks = ", ".join("?" * len(keys))
        with self._errors(), self._lock, closing(self._connection.cursor()) as cursor:
            return dict(cursor.execute(f"SELECT * FROM {self.table} WHERE key IN ({marks})", list(keys)).fetchall())

    def put(self, values: Mapping[bytes, bytes]) -> None:
        """
        Raises:
            RalmError: the file cannot be written.
        """
        with self._errors(), self._lock, self._connection as connection:
            connection.executemany(f"INSERT OR REPLACE INTO {self.table} VALUES (?, ?)", values.items())

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            place = cache_folder() / f"{self.name}.sqlite"
            raise RalmError(f"{place}: the cache of {self.name} cannot be used ({error})") from None


class Usage:
    """What was asked of a server. Tokens are what the server says it read and wrote.

    Attributes:
        requests: that were answered.
        cached: answers that came from the cache instead.
    """

    def __init__(self) -> None:
        self.requests = self.cached = self.prompt_tokens = self.new_tokens = 0
        self._lock = threading.Lock()

    def add(self, usage: Any = None, *, cached: bool = False) -> None:
        """
        Args:
            usage: of a response; a server may leave it out.
        """
        with self._lock:
            self.requests += not cached
            self.cached += cached
            self.prompt_tokens += getattr(usage, "prompt_tokens", None) or 0
            self.new_tokens += getattr(usage, "completion_tokens", None) or 0

    def told(self, price_in: float = 0, price_out: float = 0) -> str:
        """One line; with the cost where there are prices, of a million tokens that are read and written."""
        line = (
            f"{self.requests:,} requests ({self.prompt_tokens:,} tokens read, {self.new_tokens:,} written), "
            f"{self.cached:,} answers from the cache"
        )
        cost = (self.prompt_tokens * price_in + self.new_tokens * price_out) / 1e6
        return f"{line}; cost {cost:,.4f}" if price_in or price_out else line


def concurrently(work: Callable[[T], R], items: Sequence[T], threads: int) -> Generator[tuple[int, R], None, None]:
    """What `work` makes of each of `items`, with its place, in the order in which they are finished.

    Whoever stops asking, for Ctrl-C or an error, or closes this, starts no other item and waits for none that is under
    way: the threads are daemons, so that a process can end without them.

    Args:
        threads: items that are worked on at the same time.

    Raises:
        whatever `work` does, of the first item for which it does.
    """
    todo, done = SimpleQueue[int](), SimpleQueue[tuple[int, Any, BaseException | None]]()
    for place in range(len(items)):
        todo.put(place)
    stopped = threading.Event()

    def serve() -> None:
        while not stopped.is_set():
            try:
                place = todo.get_nowait()
            except Empty:
                return
            try:
                done.put((place, work(items[place]), None))
            except BaseException as error:
                stopped.set()  # before anyone is told: no thread takes another item meanwhile
                done.put((place, None, error))

    try:
        for _ in range(min(threads, len(items))):
            threading.Thread(target=serve, daemon=True).start()
        for _ in items:
            place, result, error = done.get()
            if error is not None:
                raise error
            yield place, result
    finally:
        stopped.set()


def cache_key(*asked: Any) -> bytes:
    """What the cache knows an answer by: a hash of all that was asked, server and model among it, so that it holds none
    of them."""
    return sha256(json.dumps(asked, sort_keys=True).encode()).digest()


def cache_folder() -> Path:
    """ralm in the user's cache folder ($XDG_CACHE_HOME, or ~/.cache)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ralm"


def cache_file(name: str) -> Path:
    """NAME.sqlite in the cache folder, which is made if it is not there."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    return cache_folder() / f"{name}.sqlite"


def import_openai() -> Any:
    """
    Raises:
        UsageError: the package is not installed.
    """
    try:
        import openai
    except ImportError:
        raise UsageError("the package openai is not installed: pip install 'ralm-jax[openai]'") from None
    return openai
