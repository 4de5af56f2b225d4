"""Reader + windows -> ScoreTable: batched, jit-compiled, one compilation a shape, resumable chunk by chunk.

In exact mode every window is scored by itself, as the papers define it. In shared mode the strides of a block that have
a passage in common are scored in one window, which ends with the block: neighbouring strides share about half of their
first passages. Such a window is longer by half of block - stride where the reader has the positions, so that a stride's
prefix has up to so many tokens more or less at its far end, and as many on average; all else is the same.

Of several processes, each prepares and writes chunks of its own, while their devices make one step of all.
"""

import functools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from ralm_jax import processes
from ralm_jax.attention import Valid
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.model import matmul_precision
from ralm_jax.reader import Reader
from ralm_jax.score_table import Scores, ScoreTable
from ralm_jax.sharding import on_mesh
from ralm_jax.share import Share
from ralm_jax.tokenizer import Tokenizer
from ralm_jax.windows import Schedule, Windows, bucket_length, build_windows

LOGITS_BYTES = 1 << 27  # of logits that may exist at once on a device
BATCH_TOKENS = defaultdict(lambda: 65536, cpu=4096)  # enough to keep the device busy
BATCHES_A_CHUNK = 8  # of work that a killed run can lose
PASSAGES_KEPT = 100_000  # tokenised passages in memory


@functools.partial(jax.jit, static_argnums=(0, 5))
def label_log_probs(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B R"],
    labels: Int[Array, "B R"],
    rows: int,
    valid: Valid | None = None,
) -> Float[Array, "B R"]:
    """Float32 log-probabilities of `labels`, each predicted by the hidden state at its position.

    The positions are gathered before the vocabulary projection, and `rows` of them are projected at a time, so that
    logits which nobody reads are never formed. `valid` as for `ralm_jax.attention.attend`.
    """
    with matmul_precision(jax.tree.leaves(state)[0].dtype):
        model = nnx.merge(graphdef, state)
        hidden = jnp.take_along_axis(model.hidden(tokens, valid), positions[:, :, None], axis=1)

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


def logits_rows(vocab_size: int, windows: int) -> int:
    """How many rows of logits each of a device's `windows` may have at once."""
    return max(1, LOGITS_BYTES // (4 * vocab_size * windows))


class WindowScorer(Protocol):
    """Who scores windows: a reader on this machine, or one behind a server's API.

    Attributes:
        multiple: a batch has a multiple of so many windows.
        batch_size: windows a batch.
        groups: of processes that score at the same time, each its own windows, and as many batches.
        group: this process's.
        leads: whether this process is the first of its group.
    """

    multiple: int
    batch_size: int
    groups: int = 1
    group: int = 0
    leads: bool = True

    def batches(self, windows: Windows, batch_size: int, count: int | None = None) -> Iterator[np.ndarray]:
        """Log-probabilities (n, R) float32 of any number of windows, a batch at a time; NaN where `windows.scored` is
        False.

        Args:
            count: of batches, those behind the last window being empty; None for as many as there are.

        Raises:
            RalmError: the reader gives NaN, or does not know a token; or the server does not score.
        """
        ...

    def score(self, windows: Windows, batch_size: int | None = None) -> np.ndarray:
        """`batches` as one array."""
        return np.concatenate(list(self.batches(windows, batch_size or self.batch_size)))


class Scorer(WindowScorer):
    """Scores fixed-shape windows with a reader on this machine.

    Attributes:
        multiple: devices that share a group's windows.
        batch_size: windows a forward and group; a multiple of `multiple`.
    """

    def __init__(self, reader: Reader, window: int, labels: int, batch_size: int | None = None):
        """
        Args:
            window, labels: the shape of most windows, T and R.
            batch_size: windows a forward of all processes; None chooses: enough tokens to keep the device busy, less
                where memory is short.
        """
        self.reader, self.share = reader, Share(reader.mesh)
        self.multiple, self.groups, self.group = self.share.multiple, self.share.groups, self.share.group
        self.leads = self.share.leads
        wanted = max(1, BATCH_TOKENS[jax.default_backend()] // window) * self.multiple
        if batch_size is not None:
            wanted = math.ceil(batch_size / self.groups)
        self.batch_size = -(-wanted // self.multiple) * self.multiple
        free = processes.once(free_bytes)
        if batch_size is None and free is not None:
            while self.batch_size > self.multiple and self.temporary_bytes(window, labels) > 0.9 * free:
                self.batch_size = max(1, self.batch_size // 2 // self.multiple) * self.multiple

    def temporary_bytes(self, window: int, labels: int) -> int:
        """Memory that the compiled step takes on a device beside weights and windows."""
        size = self.batch_size * self.groups
        shapes = [jax.ShapeDtypeStruct((size, n), jnp.int32) for n in (window, labels, labels)]
        with on_mesh(self.reader.mesh):
            step = label_log_probs.lower(self.reader.graphdef, self.reader.state, *shapes, self.rows(self.batch_size))
            analysis = step.compile().memory_analysis()
        return 0 if analysis is None else analysis.temp_size_in_bytes

    def rows(self, batch_size: int) -> int:
        """How many rows of logits a window may have at once, in a forward of `batch_size` windows a group."""
        return logits_rows(self.reader.config.vocab_size, batch_size // self.multiple)

    def batches(self, windows: Windows, batch_size: int, count: int | None = None) -> Iterator[np.ndarray]:
        """The host prepares a batch while the device computes the one before."""
        highest, known = windows.tokens.max(initial=0), self.reader.config.vocab_size
        if highest >= known:
            raise RalmError(
                f"a window has token {highest}, the reader {self.reader.name} knows {known}; name the reader's own "
                "tokenizer with --tokenizer"
            )
        pending: tuple[Windows, int, jax.Array] | None = None
        count = math.ceil(len(windows) / batch_size) if count is None else count
        for start in range(0, count * batch_size, batch_size):
            batch = windows.rows(start, batch_size)
            current = (batch, max(0, min(batch_size, len(windows) - start)), self.dispatch(batch))
            if pending is not None:
                yield self.collect(*pending)
            pending = current
        if pending is not None:
            yield self.collect(*pending)

    def dispatch(self, windows: Windows) -> jax.Array:
        """Log-probabilities (n, R) of the labels of a full batch, to which every group has given its `windows`; perhaps
        not yet computed."""
        with on_mesh(self.reader.mesh):
            arrays = [self.share.place(x) for x in (windows.tokens, windows.positions, windows.labels)]
            return label_log_probs(self.reader.graphdef, self.reader.state, *arrays, self.rows(len(windows)))

    def collect(self, batch: Windows, real: int, log_probs: jax.Array) -> np.ndarray:
        """The first `real` of this group's rows of a dispatched batch, once they are there."""
        values = np.where(batch.scored, self.share.read(log_probs), np.float32(np.nan))[:real]
        if np.isnan(values[batch.scored[:real]]).any():
            advice = "; try --dtype float32" if self.reader.dtype != "float32" else ""
            raise RalmError(f"{self.reader.name}: the reader gives NaN in {self.reader.dtype}{advice}")
        return values


def free_bytes() -> int | None:
    """Free memory of a device; None where the platform does not say."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else None


class PassageTokens:
    """The tokens of retrieved passages, as they go into windows: cut to length, with special tokens or without.

    Attributes:
        limit: tokens of a passage that go in.
        truncated: rows of the passages that had to be cut to it.
    """

    def __init__(
        self, texts: Callable[[Sequence[int]], list[str]], tokenizer: Tokenizer, limit: int, *, specials: bool
    ):
        """
        Args:
            texts: gives the texts (title included) of corpus rows.
            limit: tokens that a passage may have, special tokens included.
            specials: whether passages carry what the tokenizer adds by default.

        Raises:
            UsageError: `limit` leaves nothing beside the special tokens.
        """
        self.truncated: set[int] = set()
        self._texts, self._tokenizer = texts, tokenizer
        self._prefix = np.array(tokenizer.prefix if specials else (), np.int32)
        self._suffix = np.array(tokenizer.suffix if specials else (), np.int32)
        self.limit = limit - len(self._prefix) - len(self._suffix)
        if self.limit < 1:
            raise UsageError(f"passages of {limit} tokens have no room beside the tokenizer's special tokens")
        self._cache: dict[int, np.ndarray] = {}

    def __call__(self, rows: np.ndarray) -> list[np.ndarray]:
        """int32 tokens of each of `rows` (n,); empty where the row is -1."""
        wanted = {int(row) for row in rows if row >= 0}
        new = sorted(wanted - self._cache.keys())
        if len(self._cache) + len(new) > PASSAGES_KEPT:
            self._cache = {row: self._cache[row] for row in wanted if row in self._cache}
        for row, tokens in zip(new, self._tokenizer.encode_batch(self._texts(new)), strict=True):
            if len(tokens) > self.limit:
                self.truncated.add(row)
            self._cache[row] = np.concatenate([self._prefix, tokens[: self.limit], self._suffix])
        empty = np.zeros(0, np.int32)
        return [self._cache[int(row)] if row >= 0 else empty for row in rows]


class JoinedPassages:
    """The tokens of groups of passages, which stand in a window together, the best nearest to the prefix."""

    def __init__(self, encode: PassageTokens, groups: np.ndarray):
        """
        Args:
            groups: (G, n) rows of passages, best first; -1 for none.
        """
        self._encode, self._groups = encode, groups

    def __call__(self, ids: np.ndarray) -> list[np.ndarray]:
        """int32 tokens of each of the groups `ids` (n,); empty where the id is -1."""
        rows = np.full((len(ids), self._groups.shape[1]), -1)
        rows[ids >= 0] = self._groups[ids[ids >= 0], ::-1]
        tokens = iter(self._encode(rows.ravel()))
        return [np.concatenate([next(tokens) for _ in group]) for group in rows]


@dataclass(frozen=True)
class Job:
    """What is scored.

    Attributes:
        tokens: (L,) int32, the text.
        schedule: its strides.
        window: tokens a window.
        stride: tokens that a stride has at most.
        block: strides that share windows; 1 is exact.
        margin: tokens that a shared window is longer than `window`.
        past: tokens before each target that are scored as well.
        rows: (J, k) the passages, or groups of them, of the strides after the first; -1 for none.
        passage_tokens: gives the tokens of rows.
        bos: a token in front of every window, or None.
    """

    tokens: np.ndarray
    schedule: Schedule
    window: int
    stride: int
    block: int
    past: int
    rows: np.ndarray
    passage_tokens: Callable[[np.ndarray], list[np.ndarray]]
    bos: int | None
    margin: int = 0

    def first_window(self) -> Windows:
        """The first window: all tokens but the first are labels."""
        start, end = self.schedule.starts[:1], self.schedule.ends[:1]
        count = int((end - start)[0])
        return build_windows(
            self.tokens,
            starts=start,
            first_labels=start + 1,
            ends=end,
            passages=[np.zeros(0, np.int32)],
            num_labels=count - 1,
            length=bucket_length(count, self.window),
            bos=self.bos,
        )

    def shared(self, strides: range, *, plain: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Which windows a chunk of strides (counted after the first, from a block's first on) takes.

        Args:
            plain: with those of "no passage".

        Returns:
            (n, 2) block and passage of each window, and (m, 3) stride, candidate and window of each place in the table,
            by window.
        """
        retrieved = self.rows[strides.start : strides.stop]
        rows = np.concatenate([np.full((len(retrieved), 1), -1), retrieved], axis=1)  # candidate 0: no passage
        wanted = rows >= 0
        wanted[:, 0] = plain
        places, passages = np.argwhere(wanted), rows[wanted]
        blocks = (places[:, 0] + strides.start) // self.block
        keys = blocks * (passages.max(initial=0) + 2) + passages + 1
        _, first, window = np.unique(keys, return_index=True, return_inverse=True)
        order = np.argsort(first)  # windows in the order in which their places come
        window = np.argsort(order)[window]
        places = np.column_stack([places, window])[np.argsort(window, kind="stable")]
        return np.column_stack([blocks, passages])[first[order]], places

    def windows(self, strides: range, *, plain: bool = True) -> tuple[Windows, np.ndarray]:
        """The windows of a chunk of strides, and (m, 4) stride, candidate, window and first label of each place."""
        wanted, places = self.shared(strides, plain=plain)
        first = wanted[:, 0] * self.block + 1  # strides of the schedule, which counts the first window
        last = np.minimum(first + self.block, len(self.schedule)) - 1
        windows = build_windows(
            self.tokens,
            starts=self.schedule.starts[last] - self.margin,
            first_labels=self.schedule.targets[first] - self.past,
            ends=self.schedule.ends[last],
            passages=self.passage_tokens(wanted[:, 1]),
            num_labels=self.past + self.block * self.stride,
            length=self.window + self.margin,
            bos=self.bos,
        )
        begins = self.schedule.targets[places[:, 0] + strides.start + 1] - self.schedule.targets[first[places[:, 2]]]
        return windows, np.column_stack([places, begins])


def chunk_strides(windows: int, strides: int, batch_size: int, block: int) -> int:
    """Strides a chunk: several full batches of windows, whole blocks, and in exact mode no ragged batch if every stride
    has all candidates.

    Args:
        windows: that all `strides` take.
    """
    each = max(1, windows) / max(1, strides)
    whole = block if block > 1 else batch_size // math.gcd(batch_size, math.ceil(each))
    wanted = min(BATCHES_A_CHUNK * batch_size / each, max(1, strides))
    return math.ceil(wanted / whole) * whole


def score_job(
    scorer: WindowScorer, job: Job, table: ScoreTable, *, plain: Scores | None = None, progress: bool | None = None
) -> None:
    """Fills what `table` lacks of `job`.

    Args:
        plain: scores of the same windows, whose "no passage" is copied instead of computed.
        progress: show a progress bar on the terminal; None for "if there is one".

    Raises:
        RalmError: as `WindowScorer.batches`, or the table cannot be written.
    """
    plain_too = plain is None

    def count(strides: range) -> int:
        return len(job.shared(strides, plain=plain_too)[0])

    if processes.once(table.first_window_missing):
        first = plain.first_window if plain else scorer.score(job.first_window(), scorer.multiple)[0]
        if processes.first():
            table.write_first_window(first)
    todo = processes.once(table.missing)
    counts, total = list(map(count, todo)), count(range(len(job.rows)))
    size, shape = scorer.batch_size, (1 + job.rows.shape[1], job.past + job.stride)
    started, scored = time.perf_counter(), 0
    bar = tqdm(
        total=total,
        initial=total - sum(counts),
        unit="window",
        disable=processes.bar_hidden(progress),
        dynamic_ncols=True,
    )
    with bar:
        for begin in range(0, len(todo), scorer.groups):
            together, own = counts[begin : begin + scorer.groups], begin + scorer.group
            chunk = todo[own] if own < len(todo) else range(0)  # without one, the others' steps are gone along with
            windows, places = job.windows(chunk, plain=plain_too)
            filled = np.full((len(chunk), *shape), np.nan, np.float32)
            if plain is not None:
                strides = slice(chunk.start, chunk.stop)
                filled[:, 0] = np.concatenate([plain.past[strides, 0], plain.target[strides, 0]], axis=1)
            start = 0
            for values in scorer.batches(windows, size, math.ceil(max(together) / size)):
                first_place, last_place = np.searchsorted(places[:, 2], [start, start + len(values)])
                stride, candidate, window, label = places[first_place:last_place].T
                filled[stride, candidate] = values[window[:, None] - start, label[:, None] + np.arange(shape[1])]
                made = sum(max(0, min(size, windows - start)) for windows in together)
                start, scored = start + size, scored + made
                rate = scored * job.window / (time.perf_counter() - started)
                bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
                bar.update(made)
            if scorer.leads and len(chunk):
                table.write(chunk, filled)
