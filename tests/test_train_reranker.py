"""The predictive reranker from tables to a folder that loads: examples, batches, what it learns, and the command."""

import csv
import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from ralm_jax import ranking
from ralm_jax.cli import main
from ralm_jax.cross_encoder import load_cross_encoder
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.score_table import open_scores
from ralm_jax.settings import QuerySettings, RerankerSettings, StrideSettings, TrainSettings, WindowSettings
from ralm_jax.sharding import make_mesh
from ralm_jax.text import Text
from ralm_jax.tokenizer import load_tokenizer
from retrieval.bm25 import build_index
from retrieval.corpus import Passage
from retrieval.reranker import rerank
from retrieval.table import open_retrieval
from tests import tiny
from train import reranker as module
from train.collect import collect
from train.data import PairMaker, held_out_batches, read_examples, split, training_batches
from train.loop import compiled_step
from train.optim import make_optimizer
from train.reranker import Evaluation, choice_figures, reranker_loss, train_reranker
from train.state import new_state

PAIRS = RerankerSettings(k=4, pair_tokens=48, prefix_tokens=12, held_out=0.25)
SETTINGS = TrainSettings(steps=6, batch_size=8, learning_rate=1e-3, check_every=3, log_every=2, dropout=0.1)


@pytest.fixture(scope="module")
def text():
    return Text(tiny.text(1500), "training text")


@pytest.fixture(scope="module")
def data(tmp_path_factory, text):
    """60 strides; some have fewer than 4 passages, some none: the index has few passages."""
    folder = tmp_path_factory.mktemp("examples")
    rows = (Passage(row["id"], row["title"], row["text"]) for row in tiny.passages(12))
    index = build_index(rows, str(folder / "index"))
    collect(
        text, tiny.reader(tiny.GPT2), tiny.tokenizer(), index, str(folder / "data"), examples=60,
        strides=StrideSettings(64, 8), queries=QuerySettings(k=5, query_length=8), windows=WindowSettings(4, 24),
    )  # fmt: skip
    return folder / "data"


@pytest.fixture(scope="module")
def init(tmp_path_factory):
    return tiny.save_encoder(tmp_path_factory.mktemp("init") / "bert")


@pytest.fixture(scope="module")
def examples(data, text):
    return read_examples(str(data), text, 4)


@pytest.fixture(scope="module")
def maker(init, text, examples):
    model = load_cross_encoder(str(init), mesh=make_mesh(data=1), new_head_seed=0)
    return PairMaker(text, examples[1], load_tokenizer(str(init)), model, PAIRS)


class TestExamples:
    def test_they_are_the_tables(self, data, text, examples):
        found, _ = examples
        scores = open_scores(str(data / "scores"))
        kept = (scores.passages[:, :4] >= 0).any(axis=1)
        assert 0 < found.without_passage == 60 - len(found) == int((~kept).sum())
        np.testing.assert_array_equal(found.rows, scores.passages[kept, :4])
        expected = np.nansum(scores.target[kept, 1:5], axis=2, dtype=np.float64)
        np.testing.assert_allclose(found.log_probs, expected, rtol=1e-6)
        assert found.log_probs.dtype == np.float32
        assert (found.log_probs[found.rows < 0] == 0).all()
        assert (found.rows < 0).any()
        np.testing.assert_allclose(found.plain, scores.target[kept, 0].sum(axis=1), rtol=1e-5)
        _, offsets = tiny.tokenizer().encode_with_offsets(text.content)
        for begin, end, count in zip(found.begins, found.ends, found.tokens, strict=True):
            first = int(np.flatnonzero(offsets[:, 0] == begin)[0])
            assert offsets[first + count - 1, 1] == end

    def test_of_another_text(self, data):
        with pytest.raises(RalmError, match="was made from the text training text, not from other"):
            read_examples(str(data), Text(tiny.text(1500, seed=5), "other"), 4)

    def test_of_passages_that_share_a_window(self, tmp_path, data, text):
        shutil.copytree(data, tmp_path / "data")
        manifest = tmp_path / "data" / "scores" / "manifest.json"
        content = json.loads(manifest.read_text())
        content["settings"]["passages_in_window"] = 2
        manifest.write_text(json.dumps(content))
        with pytest.raises(RalmError, match="was scored with 2 passages in a window together"):
            read_examples(str(tmp_path / "data"), text, 4)

    def test_without_any_passage(self, data, text, monkeypatch):
        scores = open_scores(str(data / "scores"))
        none = dataclasses.replace(scores, passages=np.full_like(scores.passages, -1))
        monkeypatch.setattr("train.data.open_scores", lambda _: none)
        with pytest.raises(RalmError, match="none of its 60 strides has a passage to learn from"):
            read_examples(str(data), text, 4)

    def test_fewer_passages_than_asked_for(self, data, text, caplog):
        found, _ = read_examples(str(data), text, 16)
        assert found.rows.shape[1] == 5
        assert "has 5 passages a stride; training with these, not 16" in caplog.text

    @pytest.mark.parametrize("held_out", [0.1, 0.25, 0.5])
    def test_no_held_out_prefix_has_a_target_of_training_in_it(self, examples, held_out):
        found, _ = examples
        training, held = split(found, held_out, 1000, reach=60)
        assert training.ends.max() <= held.begins.min() - 60
        wanted = held_out * len(found)
        assert wanted - 10 <= len(held) <= wanted + 1
        assert len(training) >= (1 - held_out) * len(found) - 2

    def test_no_more_are_held_out_than_wanted(self, examples):
        (training, held), (same, some) = (split(examples[0], 0.5, limit, reach=60) for limit in (1000, 5))
        assert len(training) == len(same)
        assert len(some) == 5
        assert (some.begins[0], some.begins[-1]) == (held.begins[0], held.begins[-1])
        assert np.isin(some.begins, held.begins).all()

    def test_nothing_held_out(self, examples):
        training, held = split(examples[0], 0, 1000, reach=60)
        assert (len(training), len(held)) == (len(examples[0]), 0)

    def test_too_few_to_hold_some_out(self, examples):
        with pytest.raises(RalmError, match="4 examples leave 3 to train on and 0 held out"):
            split(examples[0].only(np.arange(4)), 0.25, 1000, reach=10**6)


class TestBatches:
    def test_pairs_are_the_prefix_and_each_passage(self, init, text, examples, maker):
        found, passages = examples
        tokenizer = load_tokenizer(str(init))
        row = int(np.flatnonzero((found.rows >= 0).sum(axis=1) == 2)[0])
        batch = maker(found, row)
        assert batch.tokens.shape == batch.types.shape == batch.valid.shape == (4, 48)
        assert batch.there.tolist() == (found.rows[row] >= 0).tolist()
        assert not batch.valid[~batch.there].any()
        prefix = tokenizer.encode(text.content[: found.begins[row]])[-12:]
        passage = tokenizer.encode(passages.contents(found.rows[row, :1])[0])
        own = batch.tokens[0][batch.valid[0]].tolist()
        assert own[1:13] == prefix.tolist()
        assert own[14 : 14 + len(passage)] == passage[: 48 - 15].tolist()
        assert (batch.types[0][batch.valid[0]] == 1).argmax() == 14
        np.testing.assert_array_equal(batch.log_probs, found.log_probs[row])

    def test_tokens_that_the_model_does_not_know(self, tmp_path, text, examples):
        small = tiny.save_encoder(tmp_path / "small", dataclasses.replace(tiny.BERT, vocab_size=20))
        model = load_cross_encoder(str(small), mesh=make_mesh(data=1), new_head_seed=0)
        make = PairMaker(text, examples[1], load_tokenizer(str(small)), model, PAIRS)
        for batches in (held_out_batches(make, examples[0], 8), training_batches(make, examples[0], 8, 0, 0, 1)):
            with pytest.raises(RalmError, match=r"its tokenizer has a token \d+, it knows 20"):
                next(batches)

    def test_their_order_follows_from_the_seed_and_the_step(self, examples, maker):
        found, _ = examples

        def take(start, count, seed=3):
            return list(training_batches(maker, found, 8, seed, start, start + count))

        whole = take(0, 9)
        for start in (1, 4, 8):
            jax.tree.map(np.testing.assert_array_equal, take(start, 9 - start), whole[start:])
        assert not np.array_equal(whole[0].log_probs, take(0, 1, seed=4)[0].log_probs)

    def test_an_epoch_has_every_example_once_and_another_order_follows(self, examples, maker):
        found, _ = examples
        count = len(found)
        batches = training_batches(maker, found, 1, 0, 0, 2 * count)
        epochs = [[float(next(batches).log_probs[0, 0]) for _ in range(count)] for _ in range(2)]
        assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(found.log_probs[:, 0].tolist())
        assert epochs[0] != epochs[1] != found.log_probs[:, 0].tolist()

    def test_held_out_examples_are_each_there_once(self, examples, maker):
        found = examples[0].only(np.arange(10))
        batches = list(held_out_batches(maker, found, 8))
        assert [batch.log_probs.shape for batch in batches] == [(8, 4), (8, 4)]
        weights = np.concatenate([batch.weight for batch in batches])
        assert weights.tolist() == [1] * 10 + [0] * 6
        seen = np.concatenate([batch.log_probs for batch in batches])[weights > 0]
        np.testing.assert_array_equal(seen, found.log_probs)


class TestStep:
    def state(self, init, settings, mesh=None):
        model = load_cross_encoder(str(init), mesh=mesh or make_mesh(data=1), new_head_seed=0)
        loss = reranker_loss(model.graphdef, PAIRS, settings.dropout)
        task = module.Task(model.state, model.mesh, loss, lambda start: [], None, {})
        state = new_state(model.state, make_optimizer(settings), model.mesh)
        return task, state, compiled_step(task, settings, state)

    def test_one_compilation_for_ragged_batches(self, init, examples, maker):
        task, state, step = self.state(init, SETTINGS)
        for batch in training_batches(maker, examples[0], 8, 0, 0, 4):
            with module.on_mesh(task.mesh):
                state, told = step(state, batch)
        assert step._cache_size() == 1
        assert np.isfinite(float(told["loss"]))

    @pytest.mark.slow
    def test_micro_batches_and_devices_make_the_same_update(self, init, examples, maker):
        batch = next(training_batches(maker, examples[0], 8, 0, 0, 1))
        found = []
        for shape, parts in (((1, 1, 1), 1), ((2, 2, 2), 2)):
            settings = dataclasses.replace(SETTINGS, dropout=0.0, warmup=0, micro_batches=parts)
            task, state, step = self.state(init, settings, make_mesh(*shape))
            with module.on_mesh(task.mesh):
                _, told = step(state, batch)
            found.append((float(told["loss"]), float(told["gradient_norm"])))
        assert found[0] == pytest.approx(found[1], rel=1e-5)

    def test_dropout_changes_the_loss_and_follows_from_the_key(self, init, examples, maker):
        model = load_cross_encoder(str(init), mesh=make_mesh(data=1), new_head_seed=0)
        batch = next(training_batches(maker, examples[0], 8, 0, 0, 1))
        loss = jax.jit(reranker_loss(model.graphdef, PAIRS, 0.3))
        values = [float(loss(model.state, batch, jax.random.key(seed))[0]) for seed in (0, 0, 1)]
        assert values[0] == values[1] != values[2]


def test_figures_of_choices(examples):
    found = examples[0]
    tokens = found.tokens.sum()
    figures = choice_figures(found, np.where(found.rows >= 0, found.log_probs, 1e9).astype(np.float32))
    assert figures["nll_chosen"] == figures["nll_oracle"] < figures["nll_first"]
    assert figures["nll_first"] == pytest.approx(-found.log_probs[:, 0].sum() / tokens)
    assert figures["nll_none"] == pytest.approx(-found.plain.sum() / tokens)


def test_choices_are_those_of_the_table(data, examples):
    """The oracle of the figures is `ranking.oracle`."""
    scores = open_scores(str(data / "scores"))
    chosen = ranking.oracle(scores, 4)
    target = scores.target[np.arange(60), chosen][chosen > 0]
    nll = choice_figures(examples[0], np.zeros(examples[0].rows.shape))["nll_oracle"]
    assert nll == pytest.approx(-target.sum(dtype=np.float64) / examples[0].tokens.sum(), rel=1e-6)


@pytest.mark.slow
def test_it_learns_which_passage_helps(init, examples, maker):
    """Where passages with a certain word help, it finds these on strides that it has not seen."""
    found, passages = examples
    helps = np.array(["a" in passages.contents([row])[0].split()[0] for row in range(len(passages))])
    assert 3 <= helps.sum() <= 9
    there = found.rows >= 0
    log_probs = np.where(there, np.where(helps[found.rows], -20.0, -30.0), 0).astype(np.float32)
    made = dataclasses.replace(found, log_probs=log_probs)
    settings = dataclasses.replace(SETTINGS, steps=60, learning_rate=3e-3, dropout=0.0)
    training, held = split(made, 0.25, 1000, reach=60)
    model = load_cross_encoder(str(init), mesh=make_mesh(data=1), new_head_seed=0)
    evaluate = Evaluation(model, maker, held, PAIRS, settings)
    before = evaluate(model.state)
    task = module.Task(model.state, model.mesh, reranker_loss(model.graphdef, PAIRS, 0), lambda start: [], None, {})
    state = new_state(model.state, make_optimizer(settings), model.mesh)
    step = compiled_step(task, settings, state)
    for batch in training_batches(maker, training, 8, 0, 0, settings.steps):
        with module.on_mesh(task.mesh):
            state, _ = step(state, batch)
    after = evaluate(state.params)
    assert before["nll_oracle"] == after["nll_oracle"] < before["nll_chosen"]
    assert after["nll_chosen"] == after["nll_oracle"]
    assert after["held_out_loss"] < before["held_out_loss"] / 5


def ranked_begins(data, text):
    """The first character of the target of every stride of the table."""
    _, offsets = tiny.tokenizer().encode_with_offsets(text.content)
    return offsets[open_retrieval(str(data / "retrieval")).begins, 0]


def test_prefixes_are_read_as_in_training(tmp_path, data, text):
    """With a tokenizer whose offsets leave spaces out."""
    folder = tiny.save_cross_encoder(tmp_path / "roberta", dataclasses.replace(tiny.ROBERTA, vocab_size=300))
    tokenizer = tiny.trimming_tokenizer()
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    model = load_cross_encoder(str(folder), mesh=make_mesh(data=1))
    found, passages = read_examples(str(data), text, 5)
    maker = PairMaker(text, passages, tokenizer, model, PAIRS)
    scores = Evaluation(model, maker, found, PAIRS, SETTINGS).scores(model.state)[0]
    table = open_retrieval(str(data / "retrieval"))
    ranked = rerank(
        model, load_tokenizer(str(folder)), table, passages, text, tiny.tokenizer(), str(tmp_path / "ranking"),
        settings=PAIRS,
    )  # fmt: skip
    there = found.rows >= 0
    own = np.isin(ranked_begins(data, text), found.begins)
    np.testing.assert_allclose(ranked.scores[own][there], scores[there], atol=1e-5)


class TestTraining:
    @pytest.mark.slow
    def test_the_result_is_the_best_checkpoint_and_ranks_as_in_training(self, tmp_path, data, text, init):
        said = []
        options = {"settings": SETTINGS, "reranker": PAIRS, "mesh": make_mesh(data=1), "announce": said.append}
        trained = train_reranker(str(init), str(data), text, str(tmp_path / "out"), **options)
        loaded = load_cross_encoder(str(tmp_path / "out" / "model"), mesh=make_mesh(data=1))
        tiny.assert_same(loaded.state, trained.state)
        with (tmp_path / "out" / "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["step"] for row in rows] == [str(step) for step in range(7)]
        checked = {int(row["step"]): float(row["held_out_loss"]) for row in rows if row["held_out_loss"]}
        assert sorted(checked) == [0, 3, 6]
        held, passages = read_examples(str(data), text, 4)
        maker = PairMaker(text, passages, load_tokenizer(str(tmp_path / "out" / "model")), loaded, PAIRS)
        _, held = split(held, 0.25, 1000, maker.reach)
        found = Evaluation(loaded, maker, held, PAIRS, SETTINGS)(loaded.state)
        assert found["held_out_loss"] == pytest.approx(min(checked.values()), rel=1e-6)
        assert said[0].endswith("have no passage")

        ranked = rerank(
            loaded, load_tokenizer(str(tmp_path / "out" / "model")), open_retrieval(str(data / "retrieval")), passages,
            text, tiny.tokenizer(), str(tmp_path / "ranking"), settings=PAIRS,
        )  # fmt: skip
        own = np.isin(ranked_begins(data, text), held.begins)
        scores = Evaluation(loaded, maker, held, PAIRS, SETTINGS).scores(loaded.state)[0]
        there = held.rows >= 0
        np.testing.assert_allclose(ranked.scores[own][:, :4][there], scores[there], atol=1e-5)

        again = train_reranker(str(init), str(data), text, str(tmp_path / "out"), if_exists="resume", **options)
        tiny.assert_same(again.state, trained.state)

    def test_evaluation_needs_no_more_memory_than_a_micro_batch(self, init, examples, maker, monkeypatch):
        model, sizes = load_cross_encoder(str(init), mesh=make_mesh(data=1), new_head_seed=0), []
        batches = module.held_out_batches

        def recorded(make, held, size):
            sizes.append(size)
            return batches(make, held, size)

        monkeypatch.setattr(module, "held_out_batches", recorded)
        held = examples[0].only(np.arange(5))
        settings = (SETTINGS, dataclasses.replace(SETTINGS, micro_batches=4))
        whole, parts = (Evaluation(model, maker, held, PAIRS, each)(model.state) for each in settings)
        assert sizes == [8, 2]
        assert whole == pytest.approx(parts, rel=1e-5)

    @pytest.mark.slow
    def test_an_overwritten_run_leaves_no_model(self, tmp_path, data, text, init, monkeypatch):
        options = {"settings": dataclasses.replace(SETTINGS, steps=1), "reranker": PAIRS, "mesh": make_mesh(data=1)}
        folder = str(tmp_path / "out")
        train_reranker(str(init), str(data), text, folder, **options)
        assert (tmp_path / "out" / "model").is_dir()

        def interrupted(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr("train.loop.run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_reranker(str(init), str(data), text, folder, if_exists="overwrite", **options)
        assert not (tmp_path / "out" / "model").exists()

    def test_a_temperature_is_for_kl(self):
        assert RerankerSettings(loss="kl", temperature=2).temperature == 2
        with pytest.raises(UsageError, match="--temperature is for --loss kl"):
            RerankerSettings(temperature=2)

    @pytest.mark.slow
    def test_sizes_that_do_not_fit_are_refused_first(self, tmp_path, data, text, init):
        with pytest.raises(UsageError, match="--pair-tokens 100 is more than the 64 positions"):
            train_reranker(
                str(init), str(data), text, str(tmp_path / "out"), settings=SETTINGS,
                reranker=dataclasses.replace(PAIRS, pair_tokens=100), mesh=make_mesh(data=1),
            )  # fmt: skip
        with pytest.raises(UsageError, match="use a shorter prefix"):
            train_reranker(
                str(init), str(data), text, str(tmp_path / "out"), settings=SETTINGS,
                reranker=dataclasses.replace(PAIRS, prefix_tokens=45), mesh=make_mesh(data=1),
            )  # fmt: skip
        assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_commands(tmp_path, monkeypatch, capsys, tiny_model, init, text):
    """From a corpus and a text to a reranker; a finished run is not touched unasked."""
    monkeypatch.chdir(tmp_path)
    tiny.write_corpus(Path("corpus.jsonl"), 30)
    Path("text.txt").write_text(text.content)
    Path("evaluated.txt").write_text(" ".join(text.content.split()[300:400]))

    def ralm(*options):
        code = 0
        try:
            main([str(option) for option in options])
        except SystemExit as stopped:
            code = stopped.code
        return code, capsys.readouterr()

    assert ralm("index", "--corpus", "corpus.jsonl", "--out", "index")[0] == 0
    files = ["--text", "text.txt", "--out", "new"]
    for command in (
        ["train", "reranker-data", "--model", tiny_model, "--index", "index", *files],
        ["train", "reranker", "--init", init, "--data", "data", *files],
        ["report", "--scores", "data/scores"],
    ):
        code, told = ralm(*command, "--seed", -1)
        assert (code, told.err) == (2, "ralm: error: seed must be at least 0, not -1\n")
    collecting = ["train", "reranker-data", "--model", tiny_model, "--text", "text.txt", "--index", "index",
                  "--out", "data", "--examples", 40, "--k", 3, "--window", 64, "--stride", 8, "--past", 4,
                  "--without", "evaluated.txt"]  # fmt: skip
    code, told = ralm(*collecting)
    assert code == 0, told.err
    assert "data: 40 of the text's 180 strides" in told.out
    assert "strides were left out of the draw: they share words with evaluated.txt" in told.out
    code, told = ralm(*collecting)
    assert (code, told.err.count("\n")) == (2, 1)
    assert "--resume" in told.err

    training = ["train", "reranker", "--init", init, "--data", "data", "--text", "text.txt", "--out", "out", "--k", 3,
                "--pair-tokens", 48, "--prefix-tokens", 12, "--held-out", 0.25, "--steps", 2, "--batch-size", 8,
                "--check-every", 1, "--learning-rate", 1e-3, "--dropout", 0]  # fmt: skip
    code, told = ralm(*training)
    assert code == 0, told.err
    assert "`ralm rerank --reranker out/model`" in told.out.splitlines()[-1]
    assert load_cross_encoder("out/model").trained_with == {"prefix_tokens": 12, "pair_tokens": 48}
    assert "\r" not in told.out + told.err
    assert load_tokenizer("out/model").fingerprint == load_tokenizer(str(init)).fingerprint
    code, told = ralm(*training)
    assert (code, told.err.count("\n")) == (2, 1)

    def exhausted(*_, **__):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes")

    with monkeypatch.context() as patched:
        patched.setattr(module, "train", exhausted)
        code, told = ralm(*training)
    assert (code, "out of memory: try more --micro-batches or --dtype bfloat16" in told.err) == (1, True)
    code, told = ralm(*training, "--resume", "--seed", 3)
    assert code == 1
    assert "was made with other settings" in told.err
