"""Embedders: texts in, vectors out. A text's vector does not depend on what it is embedded together with."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from ralm_jax.encoder import Encoder, Pooling, load_encoder
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.sharding import batch_multiple, shard_batch
from ralm_jax.tokenizer import Tokenizer, load_tokenizer
from retrieval.openai import PREFIX, OpenAIEmbedder

LENGTHS = np.array([16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192])  # tokens a padded text
BATCH_TOKENS = defaultdict(lambda: 32768, cpu=2048)  # a device and forward


class Embedder(Protocol):
    """What makes vectors of texts."""

    @property
    def location(self) -> str:
        """Where it is: what `load_embedder` is given to have it again."""

    @property
    def settings(self) -> dict[str, Any]:
        """All that its vectors depend on."""

    @property
    def dimension(self) -> int:
        """D, the length of a vector."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Its tokenizer; None if it has none here."""

    @property
    def cut(self) -> int:
        """How many texts were too long for it so far, and were cut."""

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """(n, D) float32 vectors of `texts`."""


@dataclass
class LocalEmbedder:
    """An encoder and its tokenizer, on all devices of the encoder's mesh.

    A text is padded to a length that it alone decides, and a batch of a length has one shape: that makes one
    compilation a length, and the same numbers whatever else is in the batch.
    """

    encoder: Encoder
    tokenizer: Tokenizer
    location: str
    cut: int = 0

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "sha256": self.encoder.fingerprint,
            "tokenizer_sha256": self.tokenizer.fingerprint,
            "dtype": self.encoder.dtype,
            **vars(self.encoder.recipe),
        }

    @property
    def dimension(self) -> int:
        return self.encoder.config.hidden_size

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """(n, D) float32 vectors by the encoder's recipe.

        Raises:
            RalmError: the encoder gives NaN, or does not know a token of the tokenizer.
        """
        tokens = self._tokens(texts)
        longest = self.encoder.recipe.max_tokens
        lengths = np.minimum(LENGTHS[np.searchsorted(LENGTHS, [len(own) for own in tokens])], longest)
        mesh, waiting = self.encoder.mesh, []
        for length in np.unique(lengths).tolist():
            rows = np.flatnonzero(lengths == length)
            batch = max(1, BATCH_TOKENS[jax.default_backend()] // length) * batch_multiple(mesh)
            for start in range(0, len(rows), batch):
                chosen = rows[start : start + batch]
                ids, valid = padded([tokens[row] for row in chosen], batch, length)
                waiting.append((chosen, self.encoder.embed(shard_batch(mesh, ids), shard_batch(mesh, valid))))
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        for chosen, found in waiting:  # the devices compute while the host prepares
            vectors[chosen] = np.asarray(found)[: len(chosen)]
        if not np.isfinite(vectors).all():
            advice = "; try --dtype float32" if self.encoder.dtype != "float32" else ""
            raise RalmError(f"{self.location}: the encoder gives NaN in {self.encoder.dtype}{advice}")
        return vectors

    def _tokens(self, texts: Sequence[str]) -> list[np.ndarray]:
        """int32 tokens of each text, special tokens included."""
        prefix, suffix = np.array(self.tokenizer.prefix, np.int32), np.array(self.tokenizer.suffix, np.int32)
        room = self.encoder.recipe.max_tokens - len(prefix) - len(suffix)
        found = self.tokenizer.encode_batch(texts)
        self.cut += sum(len(tokens) > room for tokens in found)
        tokens = [np.concatenate([prefix, tokens[:room], suffix]) for tokens in found]
        highest, known = max((own.max(initial=0) for own in tokens), default=0), self.encoder.config.vocab_size
        if highest >= known:
            raise RalmError(f"{self.location}: the tokenizer has a token {highest}, the encoder knows {known}")
        return tokens


def padded(tokens: Sequence[np.ndarray], batch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and which of them are real, (batch, length); rows beyond `tokens` have one token, for the sake of means."""
    ids, valid = np.zeros((batch, length), np.int32), np.zeros((batch, length), bool)
    valid[:, 0] = True
    for row, own in enumerate(tokens):
        ids[row, : len(own)], valid[row, : len(own)] = own, True
    return ids, valid


def load_embedder(
    name: str, *, pooling: Pooling | None = None, dtype: str = "float32", mesh: Mesh | None = None
) -> Embedder:
    """The embedder that `name` names.

    Args:
        name: a model folder, a Hugging Face id, or "openai:MODEL" for a server's (`retrieval.openai`).
        pooling: None for what the checkpoint states.
        dtype: of parameters and activations.

    Raises:
        UsageError: there is none, or `pooling` or `dtype` is asked of a server.
        RalmError: it cannot be loaded.
    """
    if name.startswith(PREFIX):
        if pooling is not None or dtype != "float32":
            raise UsageError(f"{name}: pooling and dtype are the server's")
        return OpenAIEmbedder(name.removeprefix(PREFIX))
    tokenizer, encoder = load_tokenizer(name), load_encoder(name, pooling=pooling, dtype=dtype, mesh=mesh)
    path = Path(name).expanduser()
    if encoder.recipe.max_tokens <= len(tokenizer.prefix) + len(tokenizer.suffix):
        raise UsageError(f"{name}: texts of {encoder.recipe.max_tokens} tokens have no room beside the special tokens")
    return LocalEmbedder(encoder, tokenizer, str(path.absolute()) if path.exists() else name)
