"""Text from a reader on this machine's devices."""

from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from ralm_jax.errors import UsageError
from ralm_jax.generate.decoding import bucket, decode, keys_of
from ralm_jax.generate.generator import Generation
from ralm_jax.generate.sampling import Sampling
from ralm_jax.generate.writing import Writer
from ralm_jax.reader import Reader
from ralm_jax.scoring import BATCH_TOKENS, free_bytes
from ralm_jax.settings import GenerateSettings
from ralm_jax.sharding import batch_multiple
from ralm_jax.tokenizer import Tokenizer


class LocalGenerator:
    """A `Generator` of a reader; prompts that are too long lose tokens at their start, BOS apart."""

    def __init__(
        self, reader: Reader, tokenizer: Tokenizer, *, window: int | None = None, batch_size: int | None = None
    ):
        """
        Args:
            window: tokens that prompt and text may have together; None for the reader's positions.
            batch_size: prompts at a time; None chooses.

        Raises:
            UsageError: a window of more than the reader's positions.
        """
        self.reader, self.tokenizer = reader, tokenizer
        self.window = checked_window(reader, window)
        self.specials = np.array([] if tokenizer.bos is None else [tokenizer.bos], np.int32)
        self.name = reader.name
        self.identity = reader.identity | {"tokenizer_sha256": tokenizer.fingerprint, "window": self.window}
        self._batch_size = batch_size

    def with_window(self, window: int | None) -> "LocalGenerator":
        """The same reader with another window; as `__init__`."""
        return LocalGenerator(self.reader, self.tokenizer, window=window, batch_size=self._batch_size)

    def generate(
        self,
        prompts: Sequence[str],
        settings: GenerateSettings,
        *,
        tell: Callable[[int, str], None] | None = None,
    ) -> Iterator[tuple[int, Generation]]:
        """As `Generator.generate`; prompts of like length go together, the longest first."""
        encoded = self.encode(prompts)
        cut = [self.windowed(tokens, settings.max_new_tokens) for tokens in encoded]
        keys, order = keys_of(settings.seed, len(prompts)), sorted(range(len(prompts)), key=lambda i: -len(cut[i]))
        while order:
            size = self.rows_at_once(bucket(len(cut[order[0]])) + settings.max_new_tokens)
            batch, order = order[:size], order[size:]
            writers = [self.writer(cut[i], settings, i, tell) for i in batch]
            told: set[int] = set()
            steps = decode(
                self.reader,
                [cut[i] for i in batch],
                settings.max_new_tokens,
                Sampling.of(settings),
                keys=keys[np.array(batch)],
                batch=size if len(batch) > size // 2 else None,
            )
            for written in steps:
                for row, (i, writer) in enumerate(zip(batch, writers, strict=True)):
                    writer.add(int(written.tokens[row]), float(written.log_probs[row]))
                    if writer.finish and i not in told:
                        told.add(i)
                        lost = len(self.specials) + len(encoded[i]) - len(cut[i])
                        yield i, writer.generation(len(cut[i]), lost)
                if len(told) == len(batch):
                    break

    def encode(self, prompts: Sequence[str]) -> list[np.ndarray]:
        """int32 tokens of prompts, without BOS.

        Raises:
            UsageError: a prompt without tokens.
        """
        encoded = [np.array(tokens, np.int32) for tokens in self.tokenizer.encode_batch(list(prompts))]
        empty = [i for i, tokens in enumerate(encoded) if not len(tokens)]
        if empty:
            raise UsageError(f"prompt {empty[0] + 1} of {len(prompts)} is empty")
        return encoded

    def writer(
        self, prompt: np.ndarray, settings: GenerateSettings, place: int, tell: Callable[[int, str], None] | None
    ) -> Writer:
        """The writer of the prompt at `place`."""
        return Writer(
            self.tokenizer,
            prompt,
            settings.max_new_tokens,
            stop=settings.stop,
            ends=self.reader.ends,
            tell=None if tell is None else lambda piece: tell(place, piece),
        )

    def windowed(self, tokens: np.ndarray, room: int, passage: np.ndarray | Sequence[int] = ()) -> np.ndarray:
        """BOS where the reader wants one, `passage`, and of a text's `tokens` the last that leave `room` for new ones.

        Raises:
            UsageError: none do.
        """
        left = self.window - len(passage) - room  # BOS takes the place of the last token, which nothing is read after
        if left < 1:
            beside = f"a passage of {len(passage)} and " if len(passage) else ""
            raise UsageError(
                f"a window of {self.window:,} tokens has no room for a text beside {beside}{room:,} new ones; use a "
                "larger window, shorter passages or fewer new tokens"
            )
        return np.concatenate([self.specials, passage, tokens[-left:]]).astype(np.int32)

    def rows_at_once(self, length: int) -> int:
        """Prompts that a batch of so many tokens each may have: enough to keep the devices busy, and the keys and
        values of all take half of the free memory at most."""
        devices = batch_multiple(self.reader.mesh)
        if self._batch_size is not None:
            return -(-self._batch_size // devices) * devices
        rows, free = max(1, BATCH_TOKENS[jax.default_backend()] // length), free_bytes()
        if free is not None:
            config, size = self.reader.config, jax.tree.leaves(self.reader.state)[0].dtype.itemsize
            row_bytes = 2 * length * config.num_layers * config.num_kv_heads * config.head_dim * size
            rows = max(1, min(rows, free // 2 // row_bytes))
        return rows * devices


def checked_window(reader: Reader, window: int | None) -> int:
    """`window`, or the reader's positions.

    Raises:
        UsageError: it is more than these.
    """
    most = reader.config.max_positions
    if window is not None and window > most:
        raise UsageError(f"a window of {window:,} tokens is more than the {most:,} positions of {reader.name}")
    return window or most
