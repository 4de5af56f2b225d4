"""Reader + windows -> ScoreTable: batched, jit-compiled, one compilation a shape, resumable chunk by chunk.

Exact mode: every window is scored by itself, as the papers define it.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from ralm_jax.errors import RalmError
from ralm_jax.reader import Reader, matmul_precision
from ralm_jax.score_table import ScoreTable
from ralm_jax.sharding import batch_multiple, on_mesh, shard_batch
from ralm_jax.tokenizer import Tokenizer
from ralm_jax.windows import Protocol, Schedule, Windows, bucket_length, build_windows

LOGITS_BYTES = 1 << 27  # of logits that may exist at once on a device
BATCH_TOKENS = {"cpu": 4096, "gpu": 65536, "tpu": 65536}  # enough to keep the device busy
BATCHES_A_CHUNK = 8  # of work that a killed run can lose


@functools.partial(jax.jit, static_argnums=(0, 5))
def label_log_probs(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B R"],
    labels: Int[Array, "B R"],
    rows: int,
) -> Float[Array, "B R"]:
    """Float32 log-probabilities of `labels`, each predicted by the hidden state at its position.

    The positions are gathered before the vocabulary projection, and `rows` of them are projected at a time, so that
    logits which nobody reads are never formed.
    """
    with matmul_precision(jax.tree.leaves(state)[0].dtype):
        model = nnx.merge(graphdef, state)
        hidden = jnp.take_along_axis(model.hidden(tokens), positions[:, :, None], axis=1)

        def block_log_probs(block: tuple[jax.Array, jax.Array]) -> jax.Array:
            block_hidden, block_labels = block
            logits = model.logits(block_hidden)
            label_logits = jnp.take_along_axis(logits, block_labels[:, :, None], axis=2)[:, :, 0]
            return label_logits - jax.nn.logsumexp(logits, axis=2)

        batch, count = labels.shape
        if count <= rows:
            return block_log_probs((hidden, labels))
        padding = -count % rows
        hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0)))
        labels = jnp.pad(labels, ((0, 0), (0, padding)))
        blocks = (
            hidden.reshape(batch, -1, rows, hidden.shape[2]).swapaxes(0, 1),
            labels.reshape(batch, -1, rows).swapaxes(0, 1),
        )
        return jax.lax.map(block_log_probs, blocks).swapaxes(0, 1).reshape(batch, -1)[:, :count]


class Scorer:
    """Scores fixed-shape windows with a reader.

    Attributes:
        batch_size: windows a forward; a multiple of the devices that share the batch.
    """

    def __init__(self, reader: Reader, window: int, batch_size: int | None = None):
        """`batch_size` None chooses: enough tokens to keep the device busy, less where memory is short."""
        self.reader, self.multiple = reader, batch_multiple(reader.mesh)
        wanted = batch_size or max(1, BATCH_TOKENS.get(jax.default_backend(), 4096) // window) * self.multiple
        self.batch_size = -(-wanted // self.multiple) * self.multiple
        if batch_size is None:
            self.batch_size = self._fitting(window, self.batch_size)

    def _fitting(self, window: int, batch_size: int) -> int:
        """The largest halving of `batch_size` whose compiled step fits the device's free memory."""
        stats = jax.local_devices()[0].memory_stats() or {}
        if "bytes_limit" not in stats:
            return batch_size
        free = 0.9 * (stats["bytes_limit"] - stats["bytes_in_use"])
        while batch_size > self.multiple and self._temporary_bytes(window, batch_size) > free:
            batch_size = max(self.multiple, batch_size // 2 // self.multiple * self.multiple)
        return batch_size

    def _temporary_bytes(self, window: int, batch_size: int) -> int:
        shapes = [jax.ShapeDtypeStruct((batch_size, n), jnp.int32) for n in (window, 64, 64)]
        with on_mesh(self.reader.mesh):
            step = label_log_probs.lower(self.reader.graphdef, self.reader.state, *shapes, self._rows(batch_size))
            analysis = step.compile().memory_analysis()
        return 0 if analysis is None else analysis.temp_size_in_bytes

    def _rows(self, batch_size: int) -> int:
        """How many rows of logits a window may have at once."""
        row_bytes = 4 * self.reader.config.vocab_size * batch_size // self.multiple
        return max(1, LOGITS_BYTES // row_bytes)

    def dispatch(self, windows: Windows) -> jax.Array:
        """Log-probabilities (n, R) of the labels of a full batch, perhaps not yet computed."""
        with on_mesh(self.reader.mesh):
            arrays = [shard_batch(self.reader.mesh, x) for x in (windows.tokens, windows.positions, windows.labels)]
            return label_log_probs(self.reader.graphdef, self.reader.state, *arrays, self._rows(len(windows)))

    def score(self, windows: Windows, batch_size: int | None = None) -> np.ndarray:
        """Log-probabilities (n, R) float32 of any number of windows; NaN where `windows.scored` is False.

        Raises:
            RalmError: the reader gives NaN.
        """
        return np.concatenate(list(self.batches(windows, batch_size or self.batch_size)))

    def batches(self, windows: Windows, batch_size: int) -> Iterator[np.ndarray]:
        """`score`, a batch at a time; the host prepares a batch while the device computes the one before."""
        pending: tuple[Windows, int, jax.Array] | None = None
        for start in range(0, len(windows), batch_size):
            batch = windows.rows(start, batch_size)
            current = (batch, min(batch_size, len(windows) - start), self.dispatch(batch))
            if pending is not None:
                yield self._collect(*pending)
            pending = current
        if pending is not None:
            yield self._collect(*pending)

    def _collect(self, batch: Windows, real: int, log_probs: jax.Array) -> np.ndarray:
        values = np.where(batch.scored, np.asarray(log_probs), np.nan)[:real]
        if np.isnan(values[batch.scored[:real]]).any():
            raise RalmError(f"{self.reader.name}: the reader gives NaN in {self.reader.dtype}; use --dtype float32")
        return values.astype(np.float32)


class PassageTokens:
    """The tokens of retrieved passages, as they go into windows: cut to length, special tokens by the protocol.

    Attributes:
        truncated: rows of the passages that had to be cut.
    """

    def __init__(self, texts: Callable[[Sequence[int]], list[str]], tokenizer: Tokenizer, protocol: Protocol):
        """`texts` gives the text (title included) of corpus rows."""
        self.truncated: set[int] = set()
        self._texts, self._tokenizer = texts, tokenizer
        specials = protocol.bos == "passage"
        self._prefix = np.array(tokenizer.prefix if specials else (), np.int32)
        self._suffix = np.array(tokenizer.suffix if specials else (), np.int32)
        limit = min(protocol.passage_tokens, protocol.passage_room)
        self._limit = max(0, limit - len(self._prefix) - len(self._suffix))
        self._cache: dict[int, np.ndarray] = {}

    def __call__(self, rows: np.ndarray) -> list[np.ndarray]:
        """int32 tokens of each of `rows` (n,); empty where the row is -1."""
        wanted = {int(row) for row in rows if row >= 0}
        new = sorted(wanted - self._cache.keys())
        if len(self._cache) + len(new) > 100_000:
            self._cache = {row: self._cache[row] for row in wanted if row in self._cache}
        for row, tokens in zip(new, self._tokenizer.encode_batch(self._texts(new)), strict=True):
            if len(tokens) > self._limit:
                self.truncated.add(row)
            self._cache[row] = np.concatenate([self._prefix, tokens[: self._limit], self._suffix])
        empty = np.zeros(0, np.int32)
        return [self._cache[int(row)] if row >= 0 else empty for row in rows]


@dataclass(frozen=True)
class Job:
    """What is scored: a text's tokens by a protocol, with `rows` (J, k) of passages for the strides after the first."""

    tokens: np.ndarray
    schedule: Schedule
    protocol: Protocol
    rows: np.ndarray
    passage_tokens: Callable[[np.ndarray], list[np.ndarray]]
    bos: int | None

    def first_window(self) -> Windows:
        """The first window: all tokens but the first are labels."""
        end = self.schedule.ends[:1]
        length = bucket_length(int(end[0]), self.protocol.window)
        return build_windows(
            self.tokens,
            starts=self.schedule.starts[:1],
            first_labels=np.ones(1, np.int64),
            ends=end,
            passages=[np.zeros(0, np.int32)],
            num_labels=int(end[0]) - 1,
            length=length,
            bos=self.bos,
        )

    def windows(self, strides: range) -> tuple[Windows, np.ndarray]:
        """The windows of a chunk of strides (counted after the first window), and for each the place (stride,
        candidate) that it fills in the chunk."""
        rows = self.rows[strides.start : strides.stop]
        candidates = np.concatenate([np.ones((len(rows), 1), bool), rows >= 0], axis=1)
        places = np.argwhere(candidates)
        passages = self.passage_tokens(
            np.where(places[:, 1] > 0, rows[places[:, 0], places[:, 1] - 1], -1)
            if rows.shape[1]
            else np.full(len(places), -1)
        )
        which = places[:, 0] + strides.start + 1
        built = build_windows(
            self.tokens,
            starts=self.schedule.starts[which],
            first_labels=self.schedule.targets[which] - self.protocol.past,
            ends=self.schedule.ends[which],
            passages=passages,
            num_labels=self.protocol.past + self.protocol.stride,
            length=self.protocol.window,
            bos=self.bos,
        )
        return built, places


def chunk_strides(candidates: int, batch_size: int) -> int:
    """Strides a chunk: several full batches of windows, and no ragged one where that is cheap."""
    whole = batch_size // math.gcd(batch_size, candidates)
    return -(-BATCHES_A_CHUNK * batch_size // candidates // whole) * whole or whole


def score_job(scorer: Scorer, job: Job, table: ScoreTable, *, progress: bool | None = None) -> None:
    """Fills what `table` lacks of `job`.

    Args:
        progress: show a progress bar on the terminal; None for "if there is one".

    Raises:
        RalmError: the reader gives NaN, or the table cannot be written.
    """
    if table.first_window_missing():
        table.write_first_window(scorer.score(job.first_window(), scorer.multiple)[0])
    todo = table.missing()
    per_stride = 1 + (job.rows >= 0).sum(axis=1)
    total = int(per_stride.sum())
    left = sum(int(per_stride[chunk.start : chunk.stop].sum()) for chunk in todo)
    columns = job.protocol.past + job.protocol.stride
    started, scored = time.perf_counter(), 0
    disable = None if progress is None else not progress
    with tqdm(total=total, initial=total - left, unit="window", disable=disable, dynamic_ncols=True) as bar:
        for chunk in todo:
            windows, places = job.windows(chunk)
            filled = np.full((len(chunk), 1 + job.rows.shape[1], columns), np.nan, np.float32)
            start = 0
            for values in scorer.batches(windows, scorer.batch_size):
                here = places[start : start + len(values)]
                filled[here[:, 0], here[:, 1]] = values
                start, scored = start + len(values), scored + len(values)
                rate = scored * job.protocol.window / (time.perf_counter() - started)
                bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
                bar.update(len(values))
            table.write(chunk, filled, job.rows[chunk.start : chunk.stop])
