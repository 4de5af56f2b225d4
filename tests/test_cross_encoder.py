"""Cross-encoders: heads that are there and new ones, dropout, and pairs of texts as tokens."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import processors

from ralm_jax.cross_encoder import PairFormat, load_cross_encoder, pair_format, pair_scores, pair_tokens
from ralm_jax.encoder import load_encoder
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.layers import Dropout
from ralm_jax.model import config_file
from ralm_jax.models.cross_encoder import states_pair_head
from ralm_jax.sharding import make_mesh, on_mesh, shard_batch
from tests import tiny


@pytest.fixture(scope="module", params=["bert", "roberta"])
def model(request, tmp_path_factory):
    """The folder of a tiny cross-encoder."""
    config = {"bert": tiny.BERT, "roberta": tiny.ROBERTA}[request.param]
    return str(tiny.save_cross_encoder(tmp_path_factory.mktemp("cross-encoders") / request.param, config))


@pytest.fixture(scope="module")
def pairs():
    texts = [tiny.text(n, n) for n in (3, 20, 61, 30, 7, 9, 1, 16)]
    return pair_tokens(tiny.tokenizer(bos=True), texts, texts[::-1], 64, 16)


class TestModel:
    def test_devices_and_other_pairs_change_nothing(self, model, pairs, one_device):
        alone, mesh = load_cross_encoder(model, mesh=one_device), make_mesh(data=2, fsdp=2, tensor=2)
        spread = load_cross_encoder(model, mesh=mesh)
        scores = np.asarray(alone.scores(*pairs))
        assert scores.std() > 0.01
        np.testing.assert_allclose(spread.scores(*(shard_batch(mesh, array) for array in pairs)), scores, atol=1e-5)
        for row in range(len(scores)):
            np.testing.assert_allclose(alone.scores(*(a[row : row + 1] for a in pairs))[0], scores[row], atol=1e-5)

    def test_padding_changes_nothing(self, model, pairs, one_device):
        alone = load_cross_encoder(model, mesh=one_device)
        tokens, types, valid = pairs
        other = np.where(valid, tokens, 9)
        np.testing.assert_allclose(alone.scores(other, types, valid), alone.scores(*pairs), atol=1e-6)

    def test_it_is_an_encoder_too(self, model, tmp_path, one_device):
        from ralm_jax.convert import convert

        convert(model, str(tmp_path / "orbax"), "orbax")
        tokens = np.arange(20, dtype=np.int32)[None]
        plain, orbax = (load_encoder(m, pooling="cls", mesh=one_device) for m in (model, str(tmp_path / "orbax")))
        np.testing.assert_array_equal(plain.embed(tokens), orbax.embed(tokens))

    def test_what_has_no_head_is_refused(self, tmp_path):
        plain = str(tiny.save_encoder(tmp_path / "plain"))
        with pytest.raises(RalmError, match=r"plain: no trained reranker .* name another, or train one"):
            load_cross_encoder(plain)

    def test_a_head_of_several_labels_is_none(self, model):
        file = config_file(Path(model))
        assert states_pair_head(file)
        for change in ({"id2label": {"0": "a", "1": "b"}}, {"id2label": None}, {"architectures": ["BertModel"]}):
            assert not states_pair_head(type(file)(dict(file.values) | change, "there"))
        assert states_pair_head(type(file)(dict(file.values) | {"id2label": None, "num_labels": 1}, "there"))

    def test_a_head_that_is_not_in_the_file(self, tmp_path):
        plain = tiny.save_encoder(tmp_path / "plain")
        own = json.loads((plain / "config.json").read_text())
        claim = {"architectures": ["BertForSequenceClassification"], "num_labels": 1}
        (plain / "config.json").write_text(json.dumps(own | claim))
        with pytest.raises(RalmError, match=r"the weights do not fit: .*classifier\.weight is missing"):
            load_cross_encoder(str(plain))

    @pytest.mark.slow
    def test_a_new_head(self, tmp_path, pairs, one_device):
        for config in (tiny.BERT, tiny.ROBERTA):
            folder = str(tiny.save_encoder(tmp_path / config.model_type, config))
            first, again, other = (
                load_cross_encoder(folder, mesh=one_device, new_head_seed=seed) for seed in (0, 0, 1)
            )
            tiny.assert_same(first.state, again.state)
            assert first.fingerprint == again.fingerprint != other.fingerprint
            assert not np.allclose(first.state["dense"]["kernel"][...], other.state["dense"]["kernel"][...])
            assert 0.01 < np.std(first.state["dense"]["kernel"][...]) < 0.03
            encoder = load_encoder(folder, mesh=one_device, pooling="cls")
            tiny.assert_same(nnx.State({key: first.state[key] for key in encoder.state}), encoder.state)
            first.save(tmp_path / f"{config.model_type}-saved")
            saved = load_cross_encoder(str(tmp_path / f"{config.model_type}-saved"), mesh=one_device)
            np.testing.assert_array_equal(saved.scores(*pairs), first.scores(*pairs))

    def test_a_trained_head_is_never_replaced(self, model, one_device):
        kept = load_cross_encoder(model, mesh=one_device, new_head_seed=0)
        tiny.assert_same(kept.state, load_cross_encoder(model, mesh=one_device).state)


class TestDropout:
    def test_it_keeps_the_mean(self):
        x = jnp.ones((200, 200))
        dropped = np.asarray(Dropout(0.25, jax.random.key(0))(x, 0))
        assert set(np.unique(dropped)) == {np.float32(0), np.float32(1 / 0.75)}
        assert dropped.mean() == pytest.approx(1, abs=0.02)

    def test_scores_by_key(self, model, pairs, one_device):
        loaded = load_cross_encoder(model, mesh=one_device)
        score = jax.jit(pair_scores, static_argnums=0)

        def scores(rate, seed):
            with on_mesh(one_device):
                return np.asarray(score(loaded.graphdef, loaded.state, *pairs, Dropout(rate, jax.random.key(seed))))

        np.testing.assert_allclose(scores(0.0, 0), loaded.scores(*pairs), atol=1e-6)
        np.testing.assert_array_equal(scores(0.3, 0), scores(0.3, 0))
        assert (scores(0.3, 0) != scores(0.3, 1)).all()

    def test_every_layer_draws_its_own(self):
        split = Dropout(0.5, jax.random.key(0)).split(3)
        ones = jnp.ones((64,))
        draws = np.asarray(jax.lax.scan(lambda carry, own: (carry, own(ones, 0)), 0, split)[1])
        assert len(np.unique(draws, axis=0)) == 3

    def test_without_it_nothing_is_drawn(self, model, pairs, one_device):
        loaded = load_cross_encoder(model, mesh=one_device)
        with on_mesh(one_device):
            plain = str(jax.make_jaxpr(pair_scores, static_argnums=0)(loaded.graphdef, loaded.state, *pairs))
            drawn = str(
                jax.make_jaxpr(pair_scores, static_argnums=0)(
                    loaded.graphdef, loaded.state, *pairs, Dropout(0.1, jax.random.key(0))
                )
            )
        assert "random" not in plain
        assert "random" in drawn


def with_processor(processor):
    backend = tiny.backend()
    backend.post_processor = processor
    return replace(tiny.tokenizer(bos=True), backend=backend)


BERT_FORMAT, ROBERTA_FORMAT = PairFormat((1,), (2,), (2,), 1), PairFormat((1,), (2, 2), (2,), 0)


class TestPairs:
    def test_the_tokenizers_own_template(self):
        assert pair_format(with_processor(processors.BertProcessing(("</s>", 2), ("<s>", 1)))) == BERT_FORMAT
        assert pair_format(with_processor(processors.RobertaProcessing(("</s>", 2), ("<s>", 1)))) == ROBERTA_FORMAT
        odd = processors.TemplateProcessing(
            single="$A", pair="<s> <s> $A $B:1 </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
        assert pair_format(with_processor(odd)) == PairFormat((1, 1), (), (2,), 1)

    def test_without_a_template_for_pairs(self):
        from tokenizers import Tokenizer, models

        assert pair_format(tiny.tokenizer(bos=True)) == BERT_FORMAT
        bpe = replace(tiny.tokenizer(bos=True), backend=Tokenizer(models.BPE({"a": 0}, [])))
        assert pair_format(bpe) == ROBERTA_FORMAT

    def test_layout(self):
        tokenizer = tiny.tokenizer(bos=True)
        a, b = tokenizer.encode("ba be"), tokenizer.encode("da")
        tokens, types, valid = pair_tokens(tokenizer, ["ba be", ""], ["da", ""], 100, 10)
        assert tokens.shape == types.shape == valid.shape == (2, 64)
        assert tokens[0, :7].tolist() == [1, *a, 2, *b, 2]
        assert types[0, :8].tolist() == [0] * 5 + [1, 1, 0]
        assert valid[0].sum() == 7
        assert tokens[1, valid[1]].tolist() == [1, 2, 2]

    def test_what_is_cut(self):
        """The prefix keeps its end or its start, the passage its start, and the pair fits exactly."""
        tokenizer = tiny.tokenizer(bos=True)
        prefix, passage = tiny.text(50, 1), tiny.text(200, 2)
        own, other = tokenizer.encode(prefix), tokenizer.encode(passage)
        for keep, kept in (("end", own[-20:]), ("start", own[:20])):
            tokens, _, valid = pair_tokens(tokenizer, [prefix], [passage], 70, 20, keep)
            assert tokens.shape == (1, 70)
            assert valid.all()
            assert tokens[0].tolist() == [1, *kept, 2, *other[:47], 2]
        tokens, _, valid = pair_tokens(tokenizer, [prefix], [passage], 70, 0)
        assert tokens[0].tolist() == [1, 2, *other[:67], 2]

    def test_few_lengths(self):
        tokenizer = tiny.tokenizer(bos=True)
        lengths = {pair_tokens(tokenizer, [tiny.text(n)], [tiny.text(n)], 200, 100)[0].shape[1] for n in range(1, 150)}
        assert lengths == {64, 128, 192, 200}
        assert pair_tokens(tokenizer, [], [], 64, 16)[0].shape == (0, 64)

    def test_no_room(self):
        for prefix in (61, 200, -1):
            with pytest.raises(UsageError, match=f"a prefix of {prefix} tokens and 3 special tokens leave a "):
                pair_tokens(tiny.tokenizer(bos=True), ["ba"], ["da"], 64, prefix)
