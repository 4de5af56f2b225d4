"""Embeddings by a server that speaks OpenAI's API."""

import functools
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import numpy as np

from ralm_jax.errors import RalmError
from ralm_jax.openai_client import PREFIX, Cache, Server

BATCH = 128  # texts a request; servers take 2,048 at most


class OpenAIEmbedder:
    """An `Embedder` behind OPENAI_BASE_URL (default: OpenAI's own) and OPENAI_API_KEY; vectors have length 1.

    What was embedded once is in the cache, embeddings.sqlite, and is not asked for again.
    """

    tokenizer = None
    cut = 0  # texts that are too long are refused by the server

    def __init__(self, model: str):
        """
        Raises:
            UsageError: the package `openai` is not installed, no key in the environment, or no model.
        """
        self.location = f"{PREFIX}{model}"
        self.server = Server(self.location)
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
        with self.server.client() as client, Cache("embeddings", table="vectors") as cache:
            starts = range(0, len(texts), BATCH)
            found = [self._batch(texts[start : start + BATCH], client, cache) for start in starts]
        vectors = [vector for batch in found for vector in batch]
        if len({len(vector) for vector in vectors}) > 1:
            raise RalmError(
                f"{self.location}: gives vectors of different lengths; the model behind the name has changed"
            )
        return np.stack(vectors)

    def _batch(self, texts: Sequence[str], client: Any, cache: Cache) -> list[np.ndarray]:
        """The vectors of `texts`, from the cache or else from the server."""
        keys = {text: self._key(text, str(client.base_url)) for text in texts}
        known = {key: np.frombuffer(vector, np.float32) for key, vector in cache.get(list(keys.values())).items()}
        missing = [text for text, key in keys.items() if key not in known]
        if missing:
            vectors = self._ask(missing, client)
            new = {keys[text]: vector for text, vector in zip(missing, vectors, strict=True)}
            cache.put({key: vector.tobytes() for key, vector in new.items()})
            known |= new
        return [known[keys[text]] for text in texts]

    def _ask(self, texts: list[str], client: Any) -> np.ndarray:
        """The server's vectors, made to have length 1.

        Raises:
            RalmError: they are not one finite vector for each text.
        """
        with self.server.answering("a vector for each text"):
            response = client.embeddings.create(model=self.server.model, input=texts, encoding_format="float")
            ordered = sorted(response.data, key=lambda item: item.index)
            vectors = np.array([item.embedding for item in ordered], np.float32)
            norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
            if vectors.ndim != 2 or len(vectors) != len(texts) or not (np.isfinite(norms) & (norms > 0)).all():
                raise ValueError
        return vectors / norms

    def _key(self, text: str, server: str) -> bytes:
        """What the cache knows a text by: a hash of server, model and text, so that it holds none of them."""
        return sha256("\0".join((server, self.server.model, text)).encode()).digest()
