"""Examples of a predictive reranker, from their tables to batches of one fixed shape."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from eval.lm import open_retrieved
from ralm_jax.cross_encoder import CrossEncoder, cut_pairs, join_pairs, pair_format
from ralm_jax.errors import RalmError
from ralm_jax.score_table import open_scores
from ralm_jax.settings import RerankerSettings
from ralm_jax.text import Text
from ralm_jax.tokenizer import Tokenizer
from retrieval.corpus import PassageRows
from retrieval.reranker import PREFIX_CHARACTERS, prefix_text
from train.collect import RETRIEVAL, SCORES

log = logging.getLogger("ralm")

THREADS = 2  # that make batches while the device computes


@dataclass(frozen=True)
class Examples:
    """Strides with passages; n of them, in the order of the text.

    Attributes:
        begins: (n,) the first character of the target.
        ends: (n,) one past its last.
        tokens: (n,) of the target, the reader's.
        rows: (n, k) passages, -1 for none.
        log_probs: (n, k) float32, the reader's of the target with each passage; 0 for none.
        plain: (n,) float32, the same without passage.
        without_passage: strides that were dropped, for there is nothing to rank.
    """

    begins: np.ndarray
    ends: np.ndarray
    tokens: np.ndarray
    rows: np.ndarray
    log_probs: np.ndarray
    plain: np.ndarray
    without_passage: int

    def __len__(self) -> int:
        return len(self.begins)

    def only(self, which: np.ndarray) -> "Examples":
        arrays = {name: value[which] for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return replace(self, **arrays)


def read_examples(location: str, text: Text, k: int, index: str | None = None) -> tuple[Examples, PassageRows]:
    """The examples that `train.collect` left in `location`, with their first `k` passages.

    Args:
        index: where the index is, if not where it was.

    Raises:
        UsageError: there are none, or their index has gone.
        RalmError: they are of another text, not complete, or without passages.
    """
    table, passages = open_retrieved(str(Path(location) / RETRIEVAL), index)
    scores = open_scores(str(Path(location) / SCORES))
    if table.settings["text_sha256"] != text.fingerprint:
        raise RalmError(f"{location}: was made from the text {table.about['text']}, not from {text.origin}")
    if scores.settings["retrieval"] != table.settings:
        raise RalmError(f"{location}: its scores are not those of its retrieval; repeat `ralm train reranker-data`")
    together = scores.settings.get("passages_in_window", 1)
    if together > 1:
        raise RalmError(
            f"{location}: was scored with {together} passages in a window together, but a reranker ranks them one by "
            "one; make the examples anew"
        )
    rows = scores.passages[:, :k]
    if k > scores.passages.shape[1]:
        log.warning("%s has %d passages a stride; training with these, not %d", location, rows.shape[1], k)
    begins, ends = table.begins[1:], table.ends[1:]
    summed = np.asarray(np.nansum(scores.target[:, : 1 + k], axis=2, dtype=np.float64), np.float32)
    found = (rows >= 0).any(axis=1)
    if not found.any():
        raise RalmError(f"{location}: none of its {len(rows)} strides has a passage to learn from")
    return Examples(
        scores.begins[found],
        scores.token_ends[ends - 1][found],
        (ends - begins)[found],
        rows[found],
        np.where(rows >= 0, summed[:, 1:], 0)[found],
        summed[found, 0],
        int((~found).sum()),
    ), passages


def split(examples: Examples, held_out: float, limit: int, reach: int) -> tuple[Examples, Examples]:
    """Examples to train on, and the share `held_out` of them that is last in the text; at most `limit` of these, evenly
    spread.

    Those between are dropped: a held-out prefix, which begins up to `reach` characters before its target, has no target
    of training in it.

    Raises:
        RalmError: nothing is left on one of the sides.
    """
    if held_out == 0:
        return examples, examples.only(np.zeros(0, np.int64))
    border = examples.begins[min(len(examples) - 1, round((1 - held_out) * len(examples)))] if len(examples) else 0
    training, held = examples.only(examples.ends <= border), examples.only(examples.begins - reach >= border)
    if not len(training) or not len(held):
        raise RalmError(
            f"{len(examples)} examples leave {len(training)} to train on and {len(held)} held out; make more of them, "
            "change --held-out, or lower --prefix-tokens"
        )
    spread = np.linspace(0, len(held) - 1, min(limit, len(held)))
    return training, held.only(spread.round().astype(np.int64))


class Batch(NamedTuple):
    """B strides with k pairs of T tokens, on the host or on devices; what is not `there` is padding."""

    tokens: Any  # (B, k, T) int32
    types: Any  # (B, k, T) int32
    valid: Any  # (B, k, T) bool
    log_probs: Any  # (B, k) float32
    there: Any  # (B, k) bool
    weight: Any  # (B,) float32


class PairMaker:
    """Examples as arrays: the prefix of a stride, paired with each of its passages.

    Raises:
        UsageError: the prefix leaves a passage no room.
    """

    def __init__(
        self,
        text: Text,
        passages: PassageRows,
        tokenizer: Tokenizer,
        cross_encoder: CrossEncoder,
        settings: RerankerSettings,
    ):
        self._text, self._passages, self._tokenizer, self._settings = text.content, passages, tokenizer, settings
        self._cross_encoder = cross_encoder
        self._format, self.reach = pair_format(tokenizer), PREFIX_CHARACTERS * settings.prefix_tokens
        cut_pairs(self._format, [], [], settings.pair_tokens, settings.prefix_tokens)  # refuses what cannot fit

    def __call__(self, examples: Examples, row: int) -> Batch:
        """Example `row`, without the batch axis.

        Raises:
            RalmError: the cross-encoder does not know a token.
        """
        settings, rows = self._settings, examples.rows[row]
        there = rows >= 0
        before = prefix_text(self._text, int(examples.begins[row]), settings.prefix_tokens)
        prefix, *passages = self._tokenizer.encode_batch([before, *self._passages.contents(rows[there])])
        texts = cut_pairs(
            self._format, [prefix] * len(passages), passages, settings.pair_tokens, settings.prefix_tokens
        )
        pairs = join_pairs(self._format, *texts, settings.pair_tokens)
        self._cross_encoder.check_tokens(pairs[0])
        shape = (len(rows), settings.pair_tokens)
        tokens, types, valid = (np.zeros(shape, part.dtype) for part in pairs)
        for whole, part in zip((tokens, types, valid), pairs, strict=True):
            whole[there, : part.shape[1]] = part
        return Batch(tokens, types, valid, examples.log_probs[row], there, np.ones((), np.float32))


def training_batches(
    make: PairMaker, examples: Examples, batch_size: int, seed: int, start: int, stop: int
) -> Iterator[Batch]:
    """Shuffled batches `start` to `stop`, each of which follows from `seed` alone; made by threads ahead of their use.
    An epoch ends within a batch, so none is short."""
    return shuffled_batches(lambda row: make(examples, row), len(examples), batch_size, seed, start, stop)


def held_out_batches(make: PairMaker, examples: Examples, batch_size: int) -> Iterator[Batch]:
    """All examples in order; the last batch is filled up with examples of no weight."""
    return ordered_batches(lambda row: make(examples, row), len(examples), batch_size)


def shuffled_batches(
    example: Callable[[int], Any], count: int, batch_size: int, seed: int, start: int, stop: int
) -> Iterator[Any]:
    """Shuffled batches `start` to `stop` of `count` examples, each of which follows from `seed` alone; made by threads
    ahead of their use. An epoch ends within a batch, so none is short."""
    from grain import MapDataset

    rows = MapDataset.source(range(count)).seed(seed).shuffle().repeat(-(-stop * batch_size // count))
    return ahead(rows.map(example).batch(batch_size, batch_fn=stack).slice(slice(start, stop)))


def ordered_batches(example: Callable[[int], Any], count: int, batch_size: int) -> Iterator[Any]:
    """All of `count` examples in order; the last batch is filled up with examples whose `weight` is 0."""
    from grain import MapDataset

    def batch(number: int) -> Any:
        rows = np.arange(number * batch_size, (number + 1) * batch_size)
        made = stack([example(int(row)) for row in np.minimum(rows, count - 1)])
        real = (rows < count).reshape(-1, *[1] * (made.weight.ndim - 1))
        return made._replace(weight=np.where(real, made.weight, np.float32(0)))

    return ahead(MapDataset.range(-(-count // batch_size)).map(batch))


def ahead(batches: Any) -> Iterator[Any]:
    """The batches of a Grain data set, made by threads while earlier ones are used."""
    from grain import ReadOptions

    return iter(batches.to_iter_dataset(ReadOptions(num_threads=THREADS, prefetch_buffer_size=2 * THREADS)))


def stack(parts: Sequence[Any]) -> Any:
    """Examples as one batch."""
    return jax.tree.map(lambda *values: np.stack(values), *parts)
