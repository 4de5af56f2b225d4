"""Encoders against their PyTorch originals: hidden states within 1e-4, pooling, wrappers' key layouts."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from ralm_jax.convert import convert
from ralm_jax.encoder import load_encoder
from ralm_jax.sharding import make_mesh

TOLERANCE = 1e-4

SIZES = {
    "vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 80,
    "max_position_embeddings": 66, "initializer_range": 0.15,
}  # fmt: skip

MODELS = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SIZES)),
    "bert-eps-relu": lambda: transformers.BertModel(
        transformers.BertConfig(**SIZES, layer_norm_eps=1e-3, hidden_act="relu")
    ),
    "bert-for-masked-lm": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)),
    "dpr-question": lambda: transformers.DPRQuestionEncoder(transformers.DPRConfig(**SIZES)),
    "dpr-context": lambda: transformers.DPRContextEncoder(transformers.DPRConfig(**SIZES)),
    "roberta": lambda: transformers.RobertaModel(transformers.RobertaConfig(**SIZES, type_vocab_size=1)),
    "roberta-padding-3": lambda: transformers.RobertaModel(
        transformers.RobertaConfig(**SIZES, type_vocab_size=1, pad_token_id=3)
    ),
    "roberta-classifier": lambda: transformers.RobertaForSequenceClassification(
        transformers.RobertaConfig(**SIZES, type_vocab_size=1, num_labels=1)
    ),
}


def randomised(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def backbone(model):
    """The bare encoder inside a wrapper."""
    for name in ("question_encoder", "ctx_encoder", "bert_model", "bert", "roberta"):
        model = getattr(model, name, model)
    return model


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    torch.manual_seed(0)
    model = randomised(MODELS[request.param]())
    folder = tmp_path_factory.mktemp("encoders") / request.param
    model.save_pretrained(folder)
    return model, load_encoder(str(folder), pooling="mean", mesh=make_mesh(data=1)), folder


def torch_hidden(model, ids, valid):
    bare = backbone(model)
    padding = bare.config.pad_token_id
    with torch.no_grad():
        ids = torch.tensor(np.where(valid, ids, padding).astype(np.int64))
        return bare(ids, attention_mask=torch.tensor(valid.astype(np.int64))).last_hidden_state.numpy()


def batch(seed=0):
    rng = np.random.default_rng(seed)
    ids = rng.integers(5, 96, (3, 40)).astype(np.int32)
    valid = np.arange(40)[None] < np.array([40, 33, 7])[:, None]
    return ids, valid


def test_hidden_states(pair):
    model, encoder, _ = pair
    ids, valid = batch()
    expected = torch_hidden(model, ids, valid)
    assert expected.std() > 0.3
    np.testing.assert_allclose(np.asarray(encoder.hidden(ids, valid))[valid], expected[valid], atol=TOLERANCE)


def test_left_padding_is_right_padding(pair):
    _, encoder, _ = pair
    ids, valid = batch()
    shift = [0, 7, 33]
    left, left_valid = (np.stack([np.roll(row, by) for row, by in zip(x, shift, strict=True)]) for x in (ids, valid))
    np.testing.assert_allclose(encoder.embed(left, left_valid), encoder.embed(ids, valid), atol=1e-5)


def test_converted_it_gives_the_same_vectors(pair, tmp_path):
    """Also where the recipe stood in the class of the original."""
    _, _, folder = pair
    ids, valid = batch()
    before = load_encoder(str(folder), mesh=make_mesh(data=1))
    for to in ("hf", "orbax"):
        convert(str(folder), str(tmp_path / to), to)
        after = load_encoder(str(tmp_path / to), mesh=make_mesh(data=1))
        assert after.recipe == before.recipe
        np.testing.assert_array_equal(after.embed(ids, valid), before.embed(ids, valid))


def test_a_row_of_padding_is_no_nan(pair):
    _, _, folder = pair
    ids, valid = batch()
    valid[1] = False
    for pooling in ("cls", "mean"):
        encoder = load_encoder(str(folder), pooling=pooling, normalize=True, mesh=make_mesh(data=1))
        assert np.isfinite(encoder.embed(ids, valid)).all()


def test_pooling(pair):
    model, _, folder = pair
    ids, valid = batch()
    hidden, weights = torch_hidden(model, ids, valid), valid[:, :, None].astype(np.float32)
    mean = (hidden * weights).sum(axis=1) / weights.sum(axis=1)
    for pooling, expected in (("cls", hidden[:, 0]), ("mean", mean)):
        for normalize in (False, True):
            encoder = load_encoder(str(folder), pooling=pooling, normalize=normalize, mesh=make_mesh(data=1))
            length = np.linalg.norm(expected, axis=1, keepdims=True) if normalize else 1
            np.testing.assert_allclose(encoder.embed(ids, valid), expected / length, atol=TOLERANCE)


def test_export_reloads_in_transformers(pair, tmp_path):
    model, encoder, _ = pair
    encoder.save(tmp_path / "out")
    again, info = transformers.AutoModel.from_pretrained(
        tmp_path / "out", add_pooling_layer=False, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids, valid = batch()
    np.testing.assert_allclose(torch_hidden(again.eval(), ids, valid), torch_hidden(model, ids, valid), atol=1e-6)


def test_recipes_that_checkpoints_state(pair, caplog):
    model, _, folder = pair
    encoder = load_encoder(str(folder), mesh=make_mesh(data=1))
    if type(model).__name__.startswith("DPR"):
        assert (encoder.recipe.pooling, caplog.records) == ("cls", [])
        ids, valid = batch()
        with torch.no_grad():
            expected = model(torch.tensor(np.where(valid, ids, 0)), torch.tensor(valid)).pooler_output
        np.testing.assert_allclose(encoder.embed(ids, valid), expected.numpy(), atol=TOLERANCE)
    else:
        assert encoder.recipe.pooling == "mean"
        assert "does not say how to pool" in caplog.text


# --- a real one: all-MiniLM-L6-v2 ---

SENTENCES = [
    "A sower went out to sow.",
    "The quick brown fox jumps over the lazy dog, 1,234 times; naïve façades don't mind.",
    "",
    "retrieval " * 300,
    "日本語 and Ωμέγα",
]


def padded(tokens):
    ids = np.zeros((len(tokens), max(map(len, tokens))), np.int32)
    valid = np.zeros(ids.shape, bool)
    for row, own in enumerate(tokens):
        ids[row, : len(own)], valid[row, : len(own)] = own, True
    return ids, valid


def with_specials(tokenizer, texts, longest):
    room = longest - len(tokenizer.prefix) - len(tokenizer.suffix)
    return [
        np.concatenate([tokenizer.prefix, tokens[:room], tokenizer.suffix]).astype(np.int32)
        for tokens in tokenizer.encode_batch(texts)
    ]


@pytest.fixture(scope="module")
def minilm_vectors(minilm):
    """By the recipe of its model card, in transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    model = transformers.AutoModel.from_pretrained(minilm).eval()
    inputs = tokenizer(SENTENCES, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][:, :, None]
    vectors = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))
    return inputs, hidden.numpy(), vectors.numpy()


def test_minilm_gives_the_vectors_of_its_recipe(minilm, minilm_vectors):
    from ralm_jax.tokenizer import load_tokenizer

    inputs, _, expected = minilm_vectors
    encoder = load_encoder(str(minilm), mesh=make_mesh(data=1))
    assert (encoder.recipe.pooling, encoder.recipe.normalize, encoder.recipe.max_tokens) == ("mean", True, 256)
    ids, valid = padded(with_specials(load_tokenizer(str(minilm)), SENTENCES, 256))
    np.testing.assert_array_equal(ids[valid], inputs["input_ids"].numpy()[inputs["attention_mask"].numpy() == 1])
    np.testing.assert_allclose(encoder.embed(ids, valid), expected, atol=TOLERANCE)


def test_minilm_as_roberta_gives_the_same_hidden_states(minilm, minilm_vectors, tmp_path):
    """Positions moved by two rows and token type 0 alone make it a RoBERTa."""
    tensors = load_file(minilm / "model.safetensors")
    positions = tensors["embeddings.position_embeddings.weight"]
    tensors["embeddings.position_embeddings.weight"] = np.concatenate([np.zeros_like(positions[:2]), positions])
    tensors["embeddings.token_type_embeddings.weight"] = tensors["embeddings.token_type_embeddings.weight"][:1].copy()
    tensors.pop("embeddings.position_ids", None)
    save_file({f"roberta.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    config = json.loads((minilm / "config.json").read_text())
    changes = {"model_type": "roberta", "type_vocab_size": 1, "pad_token_id": 1, "max_position_embeddings": 514}
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    encoder = load_encoder(str(tmp_path), pooling="mean", mesh=make_mesh(data=1))
    inputs, hidden, _ = minilm_vectors
    valid = inputs["attention_mask"].numpy() == 1
    ours = encoder.hidden(inputs["input_ids"].numpy().astype(np.int32), valid)
    np.testing.assert_allclose(np.asarray(ours)[valid], hidden[valid], atol=TOLERANCE)
