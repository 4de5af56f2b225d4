"""Training the predictive reranker: a cross-encoder that learns which passage helps a frozen reader (In-Context RALM,
section 6.2)."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from ralm_jax import processes
from ralm_jax.convert import keep_stated
from ralm_jax.cross_encoder import CrossEncoder, load_cross_encoder, pair_scores
from ralm_jax.encoder import transformer_folder
from ralm_jax.errors import UsageError
from ralm_jax.hub import TOKENIZER_FILES, locate
from ralm_jax.layers import Dropout
from ralm_jax.model import DTYPES, config_file
from ralm_jax.models.cross_encoder import TRAINED_WITH
from ralm_jax.settings import IfExists, RerankerSettings, RerankSettings, TrainSettings
from ralm_jax.sharding import make_mesh, on_mesh, replicated, shard_batch, whole
from ralm_jax.text import Text
from ralm_jax.tokenizer import load_tokenizer
from train.checkpoints import BEST_BY
from train.data import Batch, Examples, PairMaker, held_out_batches, read_examples, split, training_batches
from train.loop import Task, train
from train.losses import make_loss

MODEL = "model"  # the folder of the result


def train_reranker(
    init: str,
    data: str,
    text: Text,
    out: str,
    *,
    settings: TrainSettings,
    reranker: RerankerSettings,
    index: str | None = None,
    mesh: Mesh | None = None,
    if_exists: IfExists = "refuse",
    announce: Callable[[str], None] = print,
) -> CrossEncoder:
    """Trains `init` on the examples in `data`, and writes it to the folder `model` of `out` as Hugging Face does.

    Args:
        init: a cross-encoder, or a BERT or RoBERTa that is given a new head.
        data: what `train.collect` made of `text`.
        index: where the index of the examples is, if not where it was.
        mesh: None for all devices, sharing the batch.
        announce: is told how it goes, a line at a time.

    Raises:
        UsageError: `out` is taken and `if_exists` refuses; no such model or data; sizes that do not fit together.
        RalmError: the data are of another text, too few, or damaged; the model cannot be loaded, trained or written.
    """
    model = load_cross_encoder(init, mesh=mesh or make_mesh(), new_head_seed=settings.seed)
    if reranker.pair_tokens > model.config.max_positions:
        raise UsageError(
            f"--pair-tokens {reranker.pair_tokens} is more than the {model.config.max_positions} positions of {init}"
        )
    tokenizer = load_tokenizer(init)
    examples, passages = read_examples(data, text, reranker.k, index)
    make = PairMaker(text, passages, tokenizer, model, reranker)
    training, held = split(examples, reranker.held_out, reranker.held_out_limit, make.reach)
    announce(
        f"{len(training):,} examples to train on, {len(held):,} held out; {examples.without_passage:,} have no passage"
    )
    task = Task(
        params=model.state,
        mesh=model.mesh,
        loss=reranker_loss(model.graphdef, reranker, settings.dropout),
        batches=lambda start: training_batches(
            make, training, settings.batch_size, settings.seed, start, settings.steps
        ),
        evaluate=Evaluation(model, make, held, reranker, settings) if len(held) else None,
        identity={
            "init_sha256": model.fingerprint,
            "tokenizer_sha256": tokenizer.fingerprint,
            "text_sha256": text.fingerprint,
            "examples_sha256": sha256(examples.rows.tobytes() + examples.log_probs.tobytes()).hexdigest(),
            "reranker": vars(reranker),
        },
        result=MODEL,
    )
    state = train(task, out, settings, if_exists=if_exists, announce=announce)
    sizes = {name: getattr(reranker, name) for name in vars(RerankSettings())}
    trained = replace(model, state=state, trained_with=sizes)
    all_of_it = replace(trained, state=replicated(state, model.mesh))  # each process has a part
    processes.once(lambda: save(all_of_it, init, Path(out).expanduser() / MODEL))
    return trained


def save(model: CrossEncoder, init: str, folder: Path) -> None:
    """Writes `model` and the tokenizer of `init` to `folder`, whole or not at all. What an earlier run left goes."""
    source, part = transformer_folder(locate(init)), folder.with_name(f"{folder.name}.part")
    for left in (part, folder):
        shutil.rmtree(left, ignore_errors=True)
    model.save(part)
    keep_stated(part / "config.json", {**config_file(source).values, TRAINED_WITH: model.trained_with})
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, part / name)
    part.rename(folder)


def batch_scores(graphdef: nnx.GraphDef, params: nnx.State, batch: Batch, dropout: Dropout | None = None) -> jax.Array:
    """(B, k) float32 scores f of equation 7."""
    tokens, types, valid = (part.reshape(-1, part.shape[2]) for part in (batch.tokens, batch.types, batch.valid))
    return pair_scores(graphdef, params, tokens, types, valid, dropout).reshape(batch.there.shape)


def reranker_loss(
    graphdef: nnx.GraphDef, reranker: RerankerSettings, dropout: float
) -> Callable[[nnx.State, Batch, jax.Array], tuple[jax.Array, jax.Array]]:
    """The loss of `train.loop.Task`."""
    each = make_loss(reranker.loss, reranker.temperature)

    def loss(params: nnx.State, batch: Batch, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = batch_scores(graphdef, params, batch, Dropout(dropout, key) if dropout else None)
        return (each(scores, batch.log_probs, batch.there) * batch.weight).sum(), batch.weight.sum()

    return loss


class Evaluation:
    """What a reranker's choices are worth on held-out strides."""

    def __init__(
        self,
        model: CrossEncoder,
        make: PairMaker,
        examples: Examples,
        reranker: RerankerSettings,
        settings: TrainSettings,
    ):
        self._mesh, self._make, self._examples = model.mesh, make, examples
        self._size = settings.batch_size // settings.micro_batches  # what fits into memory
        each, dtype = make_loss(reranker.loss, reranker.temperature), DTYPES[settings.dtype]

        @jax.jit
        def scores_and_losses(params: nnx.State, batch: Batch) -> tuple[jax.Array, jax.Array]:
            scores = batch_scores(model.graphdef, jax.tree.map(lambda x: x.astype(dtype), params), batch)
            return scores, each(scores, batch.log_probs, batch.there)

        self._compiled = scores_and_losses

    def __call__(self, params: nnx.State) -> dict[str, float]:
        """The loss, and nats a target token with the passage that is chosen, the first, the best, and none."""
        scores, losses = self.scores(params)
        return {BEST_BY: float(losses.mean(dtype=np.float64))} | choice_figures(self._examples, scores)

    def scores(self, params: nnx.State) -> tuple[np.ndarray, np.ndarray]:
        """Scores (n, k) and losses (n,) of the held-out strides."""
        found = []
        for batch in held_out_batches(self._make, self._examples, self._size):
            with on_mesh(self._mesh):
                placed = Batch(*(shard_batch(self._mesh, part) for part in batch))
                found.append([whole(part)[batch.weight > 0] for part in self._compiled(params, placed)])
        scores, losses = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return scores, losses


def choice_figures(examples: Examples, scores: np.ndarray) -> dict[str, float]:
    """Nats a target token under the choices that `scores` (n, k) make, and under those that they compete with."""
    there = examples.rows >= 0
    first = there.argmax(axis=1)
    choices = {
        "nll_chosen": np.where(there, scores, -np.inf).argmax(axis=1),
        "nll_first": first,
        "nll_oracle": np.where(there, examples.log_probs, -np.inf).argmax(axis=1),
    }
    each, tokens = np.arange(len(examples)), examples.tokens.sum()
    figures = {
        name: float(-examples.log_probs[each, at].sum(dtype=np.float64) / tokens) for name, at in choices.items()
    }
    return figures | {"nll_none": float(-examples.plain.sum(dtype=np.float64) / tokens)}
