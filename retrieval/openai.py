"""Embeddings by a server that speaks OpenAI's API. Base URL and key come from the environment, and go nowhere else."""

import functools
import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from ralm_jax.errors import RalmError, UsageError, first_line

PREFIX = "openai:"
BATCH = 128  # texts a request; servers take 2,048 at most
RETRIES = 6  # by the client, which waits longer each time, or as long as the server says


class OpenAIEmbedder:
    """An `Embedder` behind OPENAI_BASE_URL (default: OpenAI's own) and OPENAI_API_KEY; vectors have length 1.

    What was embedded once is in `cache_file()` and is not asked for again.
    """

    tokenizer = None
    cut = 0  # texts that are too long are refused by the server

    def __init__(self, model: str):
        """
        Raises:
            UsageError: the package `openai` is not installed, no key in the environment, or no model.
        """
        import_openai()
        if not model:
            raise UsageError(f"{PREFIX}: name a model of the server's after the colon")
        if not os.environ.get("OPENAI_API_KEY"):
            raise UsageError("OPENAI_API_KEY is not set; a server that asks for no key takes any")
        self.model = model
        self.location = f"{PREFIX}{model}"
        self.settings: dict[str, Any] = {"openai": model, "normalize": True}

    @functools.cached_property
    def dimension(self) -> int:
        return self.embed(["dimension"]).shape[1]

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """(n, D) float32 vectors of length 1.

        Raises:
            RalmError: the server refuses, does not answer after several tries, or gives something else than vectors; or
                the cache cannot be read or written.
        """
        if not texts:
            return np.zeros((0, self.dimension), np.float32)
        openai, key = import_openai(), os.environ["OPENAI_API_KEY"]
        try:
            with openai.OpenAI(max_retries=RETRIES) as client, closing(sqlite3.connect(cache_file())) as cache:
                cache.execute("CREATE TABLE IF NOT EXISTS vectors (key BLOB PRIMARY KEY, vector BLOB) WITHOUT ROWID")
                starts = range(0, len(texts), BATCH)
                found = [self._batch(texts[start : start + BATCH], client, cache) for start in starts]
        except openai.OpenAIError as error:
            raise RalmError(f"{self.location}: {first_line(error).replace(key, '***')}") from None
        except (sqlite3.Error, OSError) as error:
            raise RalmError(f"{cache_file()}: the cache of embeddings cannot be used ({error})") from None
        vectors = [vector for batch in found for vector in batch]
        if len({len(vector) for vector in vectors}) > 1:
            raise RalmError(
                f"{self.location}: gives vectors of different lengths; the model behind the name has changed"
            )
        return np.stack(vectors)

    def _batch(self, texts: Sequence[str], client: Any, cache: sqlite3.Connection) -> list[np.ndarray]:
        """The vectors of `texts`, from the cache or else from the server."""
        keys = {text: self._key(text, str(client.base_url)) for text in texts}
        marks = ", ".join("?" * len(keys))
        rows = cache.execute(f"SELECT key, vector FROM vectors WHERE key IN ({marks})", list(keys.values()))
        known = {key: np.frombuffer(vector, np.float32) for key, vector in rows}
        missing = [text for text, key in keys.items() if key not in known]
        if missing:
            vectors = self._ask(missing, client)
            new = {keys[text]: vector for text, vector in zip(missing, vectors, strict=True)}
            with cache:
                pairs = [(key, vector.tobytes()) for key, vector in new.items()]
                cache.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?)", pairs)
            known |= new
        return [known[keys[text]] for text in texts]

    def _ask(self, texts: list[str], client: Any) -> np.ndarray:
        """The server's vectors, made to have length 1.

        Raises:
            RalmError: they are not one finite vector for each text.
        """
        response = client.embeddings.create(model=self.model, input=texts, encoding_format="float")
        try:
            ordered = sorted(response.data, key=lambda item: item.index)
            vectors = np.array([item.embedding for item in ordered], np.float32)
        except (TypeError, ValueError, AttributeError):
            vectors = np.zeros(0, np.float32)
        norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
        if vectors.ndim != 2 or len(vectors) != len(texts) or not (np.isfinite(norms) & (norms > 0)).all():
            raise RalmError(f"{self.location}: the server did not answer with a vector for each text")
        return vectors / norms

    def _key(self, text: str, server: str) -> bytes:
        """What the cache knows a text by: a hash of server, model and text, so that it holds none of them."""
        return sha256("\0".join((server, self.model, text)).encode()).digest()


def cache_file() -> Path:
    """ralm/embeddings.sqlite in the user's cache folder ($XDG_CACHE_HOME, or ~/.cache)."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ralm"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "embeddings.sqlite"


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
