"""Longer windows by position interpolation (Chen et al., 2023; Retrieval meets long context, section 3): position p of
a reader counts as p / factor from now on, and tuning on long documents gets it used to that."""

import csv
import io
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from ralm_jax import checkpoint, processes, weights
from ralm_jax.config import ReaderConfig
from ralm_jax.convert import keep_stated
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.hub import TOKENIZER_FILES, locate
from ralm_jax.model import DTYPES, abstract, config_file
from ralm_jax.models.llama import LlamaConfig
from ralm_jax.reader import Reader, load_reader
from ralm_jax.rope import token_positions
from ralm_jax.scoring import label_log_probs, logits_rows
from ralm_jax.settings import AttentionName, ContextSettings, IfExists, ReaderTrainSettings
from ralm_jax.sharding import batch_multiple, on_mesh, shard_batch, whole
from ralm_jax.text import write_text
from ralm_jax.tokenizer import Tokenizer, load_tokenizer
from train.causal import Batch, causal_loss
from train.checkpoints import BEST_BY
from train.data import ordered_batches, shuffled_batches
from train.loop import Task, train
from train.windows import Piece, Windows, cut, make_windows, split

MODEL, TABLE = "model", "perplexity.csv"  # in the run's folder


def extended(config: ReaderConfig, context: ContextSettings, name: str) -> LlamaConfig:
    """The configuration of a reader `name` whose window is `factor` times as long.

    Raises:
        UsageError: its positions cannot be interpolated, or are already and that was not asked for.
    """
    if not isinstance(config, LlamaConfig):
        raise UsageError(
            f"{name}: has {config.position_kind}, whose interpolation its config.json cannot state; only readers of "
            "the family llama can be extended"
        )
    if config.rope_factor != 1 and context.factor != 1 and not context.again:
        raise UsageError(
            f"{name}: is interpolated by {config.rope_factor:g} already; add --again to make that "
            f"{config.rope_factor * context.factor:g}"
        )
    return replace(
        config,
        rope_factor=config.rope_factor * context.factor,
        max_positions=config.max_positions * context.factor,
    )


def train_context(
    model: str,
    documents: Iterator[str],
    out: str,
    *,
    settings: ReaderTrainSettings,
    context: ContextSettings,
    tokenizer: str | None = None,
    attention: AttentionName = "auto",
    mesh: Mesh | None = None,
    if_exists: IfExists = "refuse",
    announce: Callable[[str], None] = print,
) -> Reader:
    """Extends the window of `model` and tunes it on `documents`. Writes the reader to the folder `model` of `out`, and
    held-out perplexities by position to `perplexity.csv`.

    Args:
        tokenizer: where it is, if not with the model.
        mesh: None for all devices, as `load_reader` has it.
        announce: is told how it goes, a line at a time.

    Raises:
        UsageError: no such model, or one that cannot be extended; `out` is taken and `if_exists` refuses.
        RalmError: too few documents; a model that cannot be loaded, trained or written.
    """
    reader, coder = load_reader(model, mesh=mesh, attention=attention), load_tokenizer(tokenizer or model)
    config = extended(reader.config, context, model)
    graphdef, _ = abstract(reader.family, config, reader.mesh)
    pieces = cut(documents, coder, config.max_positions)
    check_tokens(pieces, coder, config, model)
    training, held = make_windows(split(pieces, context.held_out), config.max_positions, together=context.pack)
    held = held.spread(context.held_out_limit)
    check_attention(attention, training)
    announce(
        f"{len(training):,} windows of {training.length:,} tokens to train on, {training.padding:.1%} of them padding; "
        f"{len(held):,} held out"
    )
    edges = bucket_edges(reader.config.max_positions, config.max_positions)
    evaluation = Evaluation(held, reader.mesh, settings, edges)
    task = Task(
        params=reader.state,
        mesh=reader.mesh,
        loss=causal_loss(graphdef, reader.mesh),
        batches=lambda start: shuffled_batches(
            training, len(training), settings.batch_size, settings.seed, start, settings.steps
        ),
        evaluate=(lambda params: evaluation(graphdef, params).figures()) if len(held) else None,
        identity={
            "init_sha256": reader.fingerprint,
            "tokenizer_sha256": coder.fingerprint,
            "windows_sha256": [training.fingerprint, held.fingerprint],
            "context": asdict(context),
        },
        result=MODEL,
    )
    state = train(task, out, settings, if_exists=if_exists, announce=announce)
    root = Path(out).expanduser()
    trained = replace(reader, config=config, graphdef=graphdef, state=state)
    save(trained, coder, model, root / MODEL)
    if len(held):
        columns = {
            "as it was": evaluation(reader.graphdef, reader.state),
            "interpolated": evaluation(graphdef, reader.state),
            "tuned": evaluation(graphdef, state),
        }
        for line in table_lines(columns):
            announce(line)
        processes.once(lambda: write_text(str(root / TABLE), table_csv(columns)))
    return trained


def check_attention(attention: AttentionName, windows: Windows) -> None:
    """
    Raises:
        UsageError: it would let documents of a window see each other.
    """
    if attention == "cudnn" and windows.marked:
        raise UsageError(
            "--attention cudnn does not keep the documents of a window apart; add --no-pack, or use auto or xla"
        )


def check_tokens(pieces: Sequence[Piece], tokenizer: Tokenizer, config: ReaderConfig, name: str) -> None:
    """
    Raises:
        RalmError: the reader does not know a token.
    """
    highest = max((int(piece.tokens.max(initial=0)) for piece in pieces), default=0)
    if highest >= config.vocab_size:
        raise RalmError(
            f"{tokenizer.origin}: gives token {highest}, the reader {name} knows {config.vocab_size}; name the "
            "reader's own with --tokenizer"
        )


def save(reader: Reader, tokenizer: Tokenizer, source: str, folder: Path) -> None:
    """Writes `reader`, with the tokenizer, to `folder`, whole or not at all; what an earlier run left goes.

    One process writes Hugging Face's layout. Of several none may have room for all weights: they write an Orbax
    checkpoint together, which loads as well, and of which `ralm convert --to hf` makes the other.
    """
    path, part = locate(source), folder.with_name(f"{folder.name}.part")

    def clear() -> None:
        for left in (part, folder):
            shutil.rmtree(left, ignore_errors=True)
        part.mkdir(parents=True)

    def describe() -> None:
        weights.write_config(part, reader.config)
        keep_stated(part / "config.json", config_file(path).values)
        tokenizer.save(part)
        own = TOKENIZER_FILES if tokenizer.origin == str(path) else ()
        for name in (*own, "generation_config.json"):
            if (path / name).is_file():
                shutil.copyfile(path / name, part / name)
        part.rename(folder)

    processes.once(clear)
    if processes.count() == 1:
        reader.save(part)
    else:
        checkpoint.save(part, reader.state)
    processes.once(describe)


def bucket_edges(before: int, after: int) -> list[int]:
    """Where buckets of positions begin, and the end: quarter, half and whole of the window `before`, and its doubles up
    to the window `after`."""
    edges = {0, before // 4, before // 2, after}
    while before < after:
        edges.add(before)
        before *= 2
    return sorted(edges)


@dataclass(frozen=True)
class Buckets:
    """Held-out negative log-likelihood by position, counted from where a document begins in its window.

    Attributes:
        edges: (n + 1,) where buckets begin, and the end.
        nll: (n,) summed, in nats.
        tokens: (n,) that were predicted.
    """

    edges: Sequence[int]
    nll: np.ndarray
    tokens: np.ndarray

    def perplexities(self) -> dict[tuple[int, int], float]:
        """By first position and one past the last, where there are tokens."""
        spans = zip(self.edges[:-1], self.edges[1:], self.nll, self.tokens, strict=True)
        return {(begin, end): float(np.exp(nll / count)) for begin, end, nll, count in spans if count}

    def figures(self) -> dict[str, float]:
        """Of all tokens, and perplexities by bucket, for `train.loop`."""
        named = {f"perplexity_{begin}_{end}": value for (begin, end), value in self.perplexities().items()}
        return {BEST_BY: float(self.nll.sum() / self.tokens.sum())} | named


class Evaluation:
    """Perplexity on held-out windows, by position."""

    def __init__(self, held: Windows, mesh: Mesh, settings: ReaderTrainSettings, edges: Sequence[int]):
        self._held, self._mesh, self._edges = held, mesh, edges
        self._size = settings.batch_size // settings.micro_batches  # what fits into memory
        self._dtype = DTYPES[settings.dtype]

    def __call__(self, graphdef: nnx.GraphDef, params: nnx.State) -> Buckets:
        nll, tokens = (np.zeros(self._held.length) for _ in range(2))
        with on_mesh(self._mesh):
            narrow = jax.jit(lambda params: jax.tree.map(lambda x: x.astype(self._dtype), params))(params)
            for batch in ordered_batches(self._held, len(self._held), self._size):
                placed = jax.tree.map(partial(shard_batch, self._mesh), batch)
                found, places = (whole(part).ravel() for part in token_nll(graphdef, narrow, placed, self._mesh))
                nll += np.bincount(places, found, self._held.length)
                tokens += np.bincount(places, batch.weight.ravel(), self._held.length)
        starts = self._edges[:-1]
        return Buckets(self._edges, np.add.reduceat(nll, starts), np.add.reduceat(tokens, starts))


@partial(jax.jit, static_argnums=(0, 3))
def token_nll(
    graphdef: nnx.GraphDef, params: nnx.State, batch: Batch, mesh: Mesh
) -> tuple[Float[Array, "B T"], Int[Array, "B T"]]:
    """Weighted negative log-likelihood of every label, and the position in its document that it is predicted at."""
    places = token_positions(None, batch.tokens.shape)
    rows = logits_rows(nnx.merge(graphdef, params).vocab_size, -(-len(batch.tokens) // batch_multiple(mesh)))
    found = label_log_probs(graphdef, params, batch.tokens, places, batch.labels, rows, batch.documents)
    return -found * batch.weight, token_positions(batch.documents, batch.tokens.shape)


def table_lines(columns: dict[str, Buckets]) -> list[str]:
    """Perplexities of several readers by bucket, in Markdown."""
    first = next(iter(columns.values()))
    counts = dict(zip(zip(first.edges[:-1], first.edges[1:], strict=True), first.tokens, strict=True))
    lines = [f"| positions | tokens | {' | '.join(columns)} |", "|---" * (2 + len(columns)) + "|"]
    for begin, end in first.perplexities():
        values = " | ".join(f"{found.perplexities()[begin, end]:.2f}" for found in columns.values())
        lines.append(f"| {begin:,} to {end - 1:,} | {int(counts[begin, end]):,} | {values} |")
    return lines


def table_csv(columns: dict[str, Buckets]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["begin", "end", "tokens", *columns])
    first = next(iter(columns.values()))
    for begin, end, count in zip(first.edges[:-1], first.edges[1:], first.tokens, strict=True):
        if count:
            writer.writerow([begin, end, int(count), *(found.perplexities()[begin, end] for found in columns.values())])
    return buffer.getvalue()
