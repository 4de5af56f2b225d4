"""Cross-encoders against transformers' sequence classifiers: scores within 1e-4, in both directions, and pairs' tokens
the same."""

import json

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from flax import nnx
from tokenizers import processors

from ralm_jax.convert import convert
from ralm_jax.cross_encoder import load_cross_encoder, pair_tokens
from ralm_jax.sharding import make_mesh
from ralm_jax.tokenizer import load_tokenizer
from tests import tiny
from tests.parity.test_encoders import SIZES, TOLERANCE, randomised

MODELS = {
    "bert": lambda: transformers.BertForSequenceClassification(
        transformers.BertConfig(**SIZES, num_labels=1, type_vocab_size=2)
    ),
    "bert-relu": lambda: transformers.BertForSequenceClassification(
        transformers.BertConfig(**SIZES, num_labels=1, hidden_act="relu", layer_norm_eps=1e-3)
    ),
    "roberta": lambda: transformers.RobertaForSequenceClassification(
        transformers.RobertaConfig(**SIZES, num_labels=1, type_vocab_size=1)
    ),
    "roberta-padding-3": lambda: transformers.RobertaForSequenceClassification(
        transformers.RobertaConfig(**SIZES, num_labels=1, type_vocab_size=1, pad_token_id=3)
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    torch.manual_seed(0)
    model = randomised(MODELS[request.param]())
    folder = tmp_path_factory.mktemp("cross-encoders") / request.param
    model.save_pretrained(folder)
    return model, load_cross_encoder(str(folder), mesh=make_mesh(data=1)), folder


def batch(model):
    """Three padded pairs, the second texts of type 1 where the model has it."""
    rng = np.random.default_rng(0)
    ids = rng.integers(5, 96, (3, 40)).astype(np.int32)
    valid = np.arange(40)[None] < np.array([40, 33, 7])[:, None]
    types = (np.arange(40)[None] >= np.array([20, 9, 3])[:, None]) & valid
    return ids, (types & (model.config.type_vocab_size == 2)).astype(np.int32), valid


def torch_scores(model, ids, types, valid):
    ids = np.where(valid, ids, model.config.pad_token_id)
    with torch.no_grad():
        inputs = [torch.tensor(array.astype(np.int64)) for array in (ids, valid, types)]
        return model(*inputs).logits[:, 0].numpy()


def test_scores(pair):
    model, ours, _ = pair
    expected = torch_scores(model, *batch(model))
    assert expected.std() > 0.03
    found = ours.scores(*batch(model))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def test_token_types_count(pair):
    model, ours, _ = pair
    ids, types, valid = batch(model)
    same = np.allclose(ours.scores(ids, types, valid), ours.scores(ids, np.ones_like(types), valid), atol=1e-3)
    assert same == (model.config.type_vocab_size == 1)


def reloaded(folder):
    found, info = transformers.AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return found.eval()


def test_export_reloads_in_transformers(pair, tmp_path):
    model, ours, _ = pair
    ours.save(tmp_path / "out")
    again = reloaded(tmp_path / "out")
    assert (type(again), again.config.num_labels) == (type(model), 1)
    np.testing.assert_allclose(torch_scores(again, *batch(model)), torch_scores(model, *batch(model)), atol=1e-6)


def test_converted_it_keeps_its_head(pair, tmp_path):
    model, ours, folder = pair
    convert(str(folder), str(tmp_path / "hf"), "hf")
    np.testing.assert_allclose(
        torch_scores(reloaded(tmp_path / "hf"), *batch(model)), torch_scores(model, *batch(model)), atol=1e-6
    )
    convert(str(tmp_path / "hf"), str(tmp_path / "orbax"), "orbax")
    again = load_cross_encoder(str(tmp_path / "orbax"), mesh=make_mesh(data=1))
    np.testing.assert_array_equal(again.scores(*batch(model)), ours.scores(*batch(model)))


@pytest.mark.parametrize("kind", [transformers.BertModel, transformers.BertForPreTraining])
@pytest.mark.slow
def test_a_new_head_starts_from_the_pooler(kind, tmp_path):
    """As BertForSequenceClassification does; only the classifier is drawn."""
    torch.manual_seed(0)
    randomised(kind(transformers.BertConfig(**SIZES, type_vocab_size=2))).save_pretrained(tmp_path)
    model = transformers.BertForSequenceClassification.from_pretrained(tmp_path, num_labels=1).eval()
    ours, other = (load_cross_encoder(str(tmp_path), mesh=make_mesh(data=1), new_head_seed=seed) for seed in (0, 1))
    tiny.assert_same(nnx.State({"dense": ours.state["dense"]}), nnx.State({"dense": other.state["dense"]}))
    assert not np.allclose(ours.state["out"]["kernel"][...], other.state["out"]["kernel"][...])
    with torch.no_grad():
        model.classifier.weight.copy_(torch.tensor(np.asarray(ours.state["out"]["kernel"][...]).T))
        model.classifier.bias.zero_()
    expected = torch_scores(model, *batch(model))
    assert expected.std() > 1e-3
    np.testing.assert_allclose(ours.scores(*batch(model)), expected, atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_pairs_are_those_of_transformers(kind, tmp_path):
    """Also where the passage is cut: by "only_second"."""
    made = tiny.backend()
    processor = {"bert": processors.BertProcessing, "roberta": processors.RobertaProcessing}[kind]
    made.post_processor = processor(("</s>", 2), ("<s>", 1))
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")), pad_token="<unk>"
    )
    prefixes, passages = [tiny.text(n, n) for n in (1, 12, 30)], [tiny.text(n, n) for n in (40, 60, 100)]
    expected = theirs(
        prefixes, passages, truncation="only_second", max_length=64, padding=True, return_token_type_ids=True,
        return_tensors="np",
    )  # fmt: skip
    tokens, types, valid = pair_tokens(load_tokenizer(str(tmp_path)), prefixes, passages, 64, 30)
    np.testing.assert_array_equal(valid, expected["attention_mask"] == 1)
    np.testing.assert_array_equal(tokens[valid], expected["input_ids"][valid])
    np.testing.assert_array_equal(types[valid], expected["token_type_ids"][valid])
    assert types.any() == (kind == "bert")


@pytest.mark.slow
def test_minilm_with_a_new_head_on_real_pairs(minilm, tmp_path):
    """A real tokenizer and real weights, from texts to scores; saved by us, read by transformers."""
    ours = load_cross_encoder(str(minilm), mesh=make_mesh(data=1), new_head_seed=0)
    ours.save(tmp_path / "saved")
    model, tokenizer = reloaded(tmp_path / "saved"), transformers.AutoTokenizer.from_pretrained(minilm)
    prefixes = ["A sower went out to sow,", "", "naïve façades; 1,234 of them"]
    passages = ["Sower\nThe parable of the sower is in three gospels.", "word " * 300, "日本語 and Ωμέγα"]
    inputs = tokenizer(prefixes, passages, truncation="only_second", max_length=200, padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = model(**inputs).logits[:, 0].numpy()
    tokens, types, valid = pair_tokens(load_tokenizer(str(minilm)), prefixes, passages, 200, 100)
    np.testing.assert_array_equal(tokens[valid], inputs["input_ids"].numpy()[inputs["attention_mask"].numpy() == 1])
    np.testing.assert_array_equal(types, inputs["token_type_ids"].numpy())
    assert expected.std() > 1e-3
    np.testing.assert_allclose(ours.scores(tokens, types, valid), expected, atol=TOLERANCE)
