"""Broken checkpoints, built by program: one line that names file, key, expected and found; exit code 1; and no memory
spent first."""

import importlib.util
import json
import logging
import shutil
import struct

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ralm_jax import cli
from ralm_jax.encoder import load_encoder
from ralm_jax.errors import RalmError
from ralm_jax.model import random_model
from ralm_jax.models import ENCODERS
from ralm_jax.reader import load_reader
from ralm_jax.sharding import make_mesh
from ralm_jax.sources.safetensors import read_header
from tests import tiny
from tests.tiny import assert_same, edit_config, edit_tensors


@pytest.fixture
def folder(tmp_path):
    """A fresh copy of a tiny Llama checkpoint that a test may break."""
    tiny.reader(tiny.LLAMA).save(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def refusal(tmp_path, capsys, monkeypatch):
    """What `ralm score` says of a model folder that it refuses, after a look at exit code and memory."""
    tiny.backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text(tiny.text(100))
    options = ["--text", str(tmp_path / "text.txt"), "--tokenizer", str(tmp_path / "tokenizer.json")]
    options += ["--window", "64", "--out", str(tmp_path / "scores")]

    def refused(folder):
        monkeypatch.setattr("ralm_jax.weights.read_part", lambda *_: pytest.fail("a tensor was read"))
        before = len(jax.live_arrays())
        with pytest.raises(SystemExit) as caught:
            cli.main(["score", "--model", str(folder), *options])
        assert caught.value.code == 1
        assert len(jax.live_arrays()) <= before
        assert not (tmp_path / "scores").exists()
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith(f"ralm: error: {folder}")
        return lines[0]

    return refused


class TestBroken:
    """Each message names the file or the key, and what was expected."""

    def test_all_problems_are_reported_together(self, refusal, folder):
        def change(tensors):
            del tensors["model.layers.1.mlp.up_proj.weight"]
            tensors["model.norm.weight"] = np.ones(31, np.float32)
            tensors["classifier.weight"] = np.ones(3, np.float32)

        edit_tensors(folder, change)
        message = refusal(folder)
        assert "layers.1.mlp.up_proj.weight is missing (expected shape [48, 32])" in message
        assert "model.norm.weight in model.safetensors has shape [31], expected [32]" in message
        assert "classifier.weight in model.safetensors is unknown to llama" in message

    def test_integers_are_not_weights(self, refusal, folder):
        edit_tensors(folder, lambda t: t.update({"model.norm.weight": np.ones(32, np.int32)}))
        assert "model.norm.weight in model.safetensors is I32, expected one of F64, F32, F16, BF16" in refusal(folder)

    def test_both_with_and_without_prefix(self, refusal, folder):
        edit_tensors(folder, lambda t: t.update({"norm.weight": np.ones(32, np.float32)}))
        message = refusal(folder)
        assert "norm.weight" in message
        assert "remove one" in message

    def test_an_old_name_of_a_norm_is_not_guessed(self, refusal, folder):
        edit_tensors(folder, lambda t: t.update({"model.norm.gamma": t.pop("model.norm.weight")}))
        message = refusal(folder)
        assert "norm.weight is missing" in message
        assert "model.norm.gamma" in message

    def test_truncated(self, refusal, folder):
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        assert "not a whole safetensors file" in refusal(folder)

    def test_an_interrupted_download_of_nothing(self, refusal, folder):
        (folder / "model.safetensors").write_bytes(b"")
        assert "not a whole safetensors file" in refusal(folder)

    def test_a_huge_header(self, refusal, folder):
        path = folder / "model.safetensors"
        path.write_bytes(struct.pack("<Q", 1 << 60) + path.read_bytes()[8:])
        assert "not a whole safetensors file" in refusal(folder)

    @pytest.mark.parametrize(
        ("first", "second", "size"),
        [((0, 16), (8, 24), 24), ((0, 16), (24, 40), 40), ((0, 16), (16, 24), 24)],
        ids=["overlap", "hole", "too short for its shape"],
    )
    def test_offsets_that_lie(self, tmp_path, first, second, size):
        entry = lambda offsets: {"dtype": "F32", "shape": [4], "data_offsets": offsets}  # noqa: E731
        header = json.dumps({"a": entry(first), "b": entry(second)}).encode()
        path = tmp_path / "crafted.safetensors"
        path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * size)
        with pytest.raises(RalmError, match=r"crafted\.safetensors: not a whole safetensors file"):
            read_header(path)

    def test_a_key_twice_in_a_header(self, tmp_path):
        entry = '{"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}'
        header = f'{{"a": {entry}, "a": {entry}}}'.encode()
        path = tmp_path / "crafted.safetensors"
        path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 16)
        with pytest.raises(RalmError, match=r"crafted\.safetensors.*twice|not a whole"):
            read_header(path)

    def test_no_weights_but_a_pickle(self, refusal, folder):
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        there = importlib.util.find_spec("torch") is not None
        expected = "not a checkpoint that PyTorch loads" if there else "a PyTorch pickle, which only PyTorch reads"
        assert f"pytorch_model.bin: {expected}" in refusal(folder)

    @pytest.mark.parametrize("content", ["", "[]", "{", '{"hidden_size": 32}'])
    def test_config(self, refusal, folder, content):
        (folder / "config.json").write_text(content)
        assert "config.json" in refusal(folder)

    def test_a_config_that_is_not_there(self, refusal, folder):
        (folder / "config.json").unlink()
        assert "no config.json" in refusal(folder)

    def test_wrong_class(self, refusal, folder):
        edit_config(folder, model_type="mamba")
        assert "model_type = 'mamba' is not supported (supported: gpt2, gpt_neo, gptj, opt, llama)" in refusal(folder)

    def test_a_class_that_does_not_match(self, refusal, folder):
        shutil.copy(tiny_gpt2_config(folder.parent), folder / "config.json")
        message = refusal(folder)
        assert "wpe.weight is missing" in message
        assert "is unknown to gpt2" in message

    @pytest.mark.parametrize(
        ("values", "expected"),
        [
            ({"rms_norm_eps": None}, "'rms_norm_eps' is missing"),
            ({"hidden_act": "swish"}, "hidden_act = 'swish' is not supported"),
            ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type = 'yarn' is not supported"),
            ({"rope_scaling": {"type": "linear"}}, "rope_scaling: 'factor' is missing"),
            ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling: factor = 0 is not supported"),
            ({"rope_scaling": "linear"}, "'rope_scaling' is 'linear', of the wrong type"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
            ({"hidden_size": "32"}, "'hidden_size' is '32', of the wrong type"),
            ({"num_key_value_heads": 0}, "num_key_value_heads = 0 is not supported (supported: 1 or more)"),
            ({"head_dim": 7}, "head_dim = 7 is not supported (supported: an even number)"),
            ({"tie_word_embeddings": "yes"}, "of the wrong type"),
            ({"model_type": ["llama"]}, "of the wrong type"),
            ({"num_key_value_heads": 3}, "num_key_value_heads = 3 is not supported"),
        ],
    )
    def test_maths_that_no_reader_has(self, refusal, folder, values, expected):
        edit_config(folder, **values)
        assert expected in refusal(folder)

    @pytest.mark.parametrize(
        ("config", "values", "expected"),
        [
            (tiny.GPTJ, {"rotary_dim": 3}, "rotary_dim = 3 is not supported"),
            (tiny.GPTJ, {"rotary_dim": 10}, "rotary_dim = 10 is not supported"),
            (tiny.GPTJ, {"tie_word_embeddings": True}, "tie_word_embeddings = True is not supported"),
            (tiny.GPT_NEO, {"attention_types": [[["global", "sparse"], 2]]}, "is not supported (supported: global or"),
            (tiny.GPT_NEO, {"attention_types": [[["global"], 10**12]]}, "for each of 4 layers"),
            (tiny.GPT_NEO, {"attention_types": [[[["global"], []], 2]]}, "for each of 4 layers"),
            (tiny.GPT_NEO, {"attention_types": "global"}, "for each of 4 layers"),
            (tiny.GPT_NEO, {"window_size": None}, "'window_size' is missing"),
            (tiny.GPT_NEO, {"num_heads": 5}, "5 heads do not divide a hidden size of 32"),
            (
                tiny.OPT,
                {"layer_norm_elementwise_affine": False},
                "layer_norm_elementwise_affine = False is not supported",
            ),
            (tiny.OPT, {"do_layer_norm_before": None}, "'do_layer_norm_before' is missing"),
            (tiny.OPT, {"word_embed_proj_dim": 16}, "embed_tokens.weight in model.safetensors has shape [128, 32]"),
        ],
    )
    def test_maths_of_the_other_families(self, refusal, tmp_path, config, values, expected):
        tiny.reader(config).save(tmp_path / "model")
        edit_config(tmp_path / "model", **values)
        assert expected in refusal(tmp_path / "model")

    def test_gptj_must_say_what_it_rotates(self, refusal, tmp_path):
        tiny.reader(tiny.GPTJ).save(tmp_path / "model")
        path = tmp_path / "model" / "config.json"
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "rotary_dim"}))
        assert "'rotary_dim' is missing" in refusal(tmp_path / "model")

    def test_gpt2_scaled_by_layer(self, refusal, tmp_path):
        tiny.reader(tiny.GPT2).save(tmp_path / "gpt2")
        edit_config(tmp_path / "gpt2", scale_attn_by_inverse_layer_idx=True)
        assert "scale_attn_by_inverse_layer_idx" in refusal(tmp_path / "gpt2")


def tiny_gpt2_config(folder):
    tiny.reader(tiny.GPT2).save(folder / "other")
    return folder / "other" / "config.json"


class TestSharded:
    @pytest.fixture
    def sharded(self, tmp_path):
        from ralm_jax import weights

        reader = tiny.reader(tiny.LLAMA)
        weights.save(tmp_path / "sharded", reader.family, reader.config, reader.state, 20_000)
        return tmp_path / "sharded"

    def index(self, folder):
        path = folder / "model.safetensors.index.json"
        return path, json.loads(path.read_text())

    def test_a_missing_shard(self, refusal, sharded):
        shard = sorted(sharded.glob("model-*"))[1]
        shard.unlink()
        assert f"shards are missing: {shard.name}" in refusal(sharded)

    def test_an_index_beside_a_newer_single_file(self, refusal, sharded):
        tiny.reader(tiny.LLAMA).save(sharded / "single")
        shutil.copy(sharded / "single" / "model.safetensors", sharded)
        assert "one of the two is stale" in refusal(sharded)

    def test_an_index_that_places_a_tensor_elsewhere(self, refusal, sharded):
        path, index = self.index(sharded)
        files = sorted(set(index["weight_map"].values()))
        index["weight_map"]["model.norm.weight"] = files[0]
        path.write_text(json.dumps(index))
        assert "the index is stale, 1 tensors differ: for model.norm.weight it says model-00001" in refusal(sharded)

    def test_an_index_with_a_head_that_was_dropped_as_tied(self, sharded):
        path, index = self.index(sharded)
        index["weight_map"]["extra"] = sorted(set(index["weight_map"].values()))[0]
        path.write_text(json.dumps(index))
        assert_same(load_reader(str(sharded), mesh=make_mesh(data=1)).state, tiny.reader(tiny.LLAMA).state)

    def test_an_index_of_a_tensor_that_is_nowhere(self, refusal, sharded):
        _, index = self.index(sharded)
        file = sharded / index["weight_map"]["model.norm.weight"]
        tensors = load_file(file)
        del tensors["model.norm.weight"]
        save_file(tensors, file)
        assert "norm.weight is missing (expected shape [32])" in refusal(sharded)

    def test_a_truncated_shard(self, refusal, sharded):
        shard = sorted(sharded.glob("model-*"))[1]
        shard.write_bytes(shard.read_bytes()[:-10])
        assert f"{shard.name}: not a whole safetensors file" in refusal(sharded)

    def test_an_index_that_is_none(self, refusal, sharded):
        path, _ = self.index(sharded)
        for content in ("[]", '{"weight_map": {"a": 1}}', '{"weight_map": 5}'):
            path.write_text(content)
            assert "not an index of shards" in refusal(sharded)

    def test_a_tensor_in_two_shards(self, refusal, sharded):
        _, index = self.index(sharded)
        first, second = sorted(set(index["weight_map"].values()))[:2]
        tensors, others = load_file(sharded / first), load_file(sharded / second)
        name = next(iter(tensors))
        save_file(others | {name: tensors[name]}, sharded / second)
        assert "each tensor must be in one file" in refusal(sharded)


class TestTied:
    @pytest.fixture
    def tied(self, tmp_path):
        tiny.reader(tiny.READERS["llama-tied"]).save(tmp_path / "tied")
        return tmp_path / "tied"

    def test_under_the_heads_name(self, tied):
        edit_tensors(tied, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
        reader = load_reader(str(tied), mesh=make_mesh(data=1))
        assert_same(reader.state, tiny.reader(tiny.READERS["llama-tied"]).state)

    def test_under_both_names(self, tied):
        edit_tensors(tied, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
        reader = load_reader(str(tied), mesh=make_mesh(data=1))
        assert_same(reader.state, tiny.reader(tiny.READERS["llama-tied"]).state)

    def test_but_different(self, refusal, tied):
        edit_tensors(tied, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
        assert "embed_tokens.weight and lm_head.weight differ" in refusal(tied)

    def test_under_no_name(self, refusal, tied):
        edit_tensors(tied, lambda t: t.pop("model.embed_tokens.weight"))
        assert "embed_tokens.weight is missing (expected shape [128, 32])" in refusal(tied)


class TestEncoders:
    """The names that wrappers and older programs give to a BERT's parameters."""

    @pytest.fixture
    def encoder(self):
        return random_model(ENCODERS["bert"], tiny.BERT, mesh=make_mesh(data=1))

    @pytest.fixture
    def bert(self, tmp_path, encoder):
        encoder.save(tmp_path / "bert")
        return tmp_path / "bert"

    def load(self, folder):
        return load_encoder(str(folder), pooling="mean", mesh=make_mesh(data=1))

    def refused(self, folder):
        before = len(jax.live_arrays())
        with pytest.raises(RalmError) as caught:
            self.load(folder)
        assert len(jax.live_arrays()) <= before
        return str(caught.value)

    @pytest.mark.parametrize("prefix", ["bert.", "question_encoder.bert_model.", "ctx_encoder.bert_model."])
    def test_prefixes(self, bert, encoder, prefix):
        edit_tensors(bert, lambda t: [t.update({prefix + name: t.pop(name)}) for name in list(t)])
        assert_same(self.load(bert).state, encoder.state)

    def test_another_prefix(self, bert):
        edit_tensors(bert, lambda t: [t.update({f"model.{name}": t.pop(name)}) for name in list(t)])
        message = self.refused(bert)
        assert "embeddings.word_embeddings.weight is missing (expected shape [128, 32])" in message
        assert "model.embeddings.LayerNorm.bias in model.safetensors is unknown to bert" in message

    def test_two_encoders_in_one_file(self, bert):
        edit_tensors(bert, lambda t: [t.update({f"bert.{name}": t[name]}) for name in list(t)])
        assert "are there; remove one" in self.refused(bert)

    def test_gamma_and_beta(self, bert, encoder):
        def rename(tensors):
            for name in list(tensors):
                old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
                tensors[old] = tensors.pop(name)

        edit_tensors(bert, rename)
        assert_same(self.load(bert).state, encoder.state)

    def test_gamma_beside_weight(self, bert):
        edit_tensors(bert, lambda t: t.update({"embeddings.LayerNorm.gamma": t["embeddings.LayerNorm.weight"].copy()}))
        assert "embeddings.LayerNorm.gamma in model.safetensors is unknown to bert" in self.refused(bert)

    def test_a_gamma_of_something_else(self, bert):
        edit_tensors(bert, lambda t: t.update({"encoder.layer.0.output.dense.gamma": np.ones(32, np.float32)}))
        assert "encoder.layer.0.output.dense.gamma in model.safetensors is unknown" in self.refused(bert)

    def test_heads_are_passed_over(self, bert, encoder):
        extra = {"pooler.dense.weight": np.ones((32, 32), np.float32), "cls.predictions.bias": np.ones(9, np.float32)}
        edit_tensors(bert, lambda t: t.update(extra | {"embeddings.position_ids": np.arange(64)[None]}))
        assert_same(self.load(bert).state, encoder.state)

    def test_a_head_that_no_list_names(self, bert):
        edit_tensors(bert, lambda t: t.update({"qa_outputs.weight": np.ones((2, 32), np.float32)}))
        assert "qa_outputs.weight in model.safetensors is unknown to bert" in self.refused(bert)

    @pytest.mark.parametrize(
        ("values", "expected"),
        [
            ({"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key' is not supported"),
            ({"model_type": "dpr", "projection_dim": 128}, "projection_dim = 128 is not supported"),
            ({"layer_norm_eps": None}, "'layer_norm_eps' is missing"),
            ({"num_attention_heads": 5}, "5 heads do not divide a hidden size of 32"),
            ({"model_type": "llama"}, "is not supported (supported: bert, dpr, roberta)"),
            ({"is_decoder": True}, "is_decoder = True is not supported"),
            ({"architectures": 5, "hidden_act": "x"}, "hidden_act = 'x' is not supported"),
            ({"layer_norm_eps": 10**400}, "is not supported (supported: a number above 0)"),
            ({"model_type": "roberta", "pad_token_id": None}, "'pad_token_id' is None"),
        ],
    )
    def test_configurations(self, bert, values, expected):
        edit_config(bert, **values)
        assert expected in self.refused(bert)

    def test_recipes(self, bert):
        edit_config(bert, architectures=["Contriever"])
        assert load_encoder(str(bert), mesh=make_mesh(data=1)).recipe.pooling == "mean"
        modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in
                   (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))]  # fmt: skip
        (bert / "modules.json").write_text(json.dumps(modules))
        (bert / "1_Pooling").mkdir()
        pooling = bert / "1_Pooling" / "config.json"
        pooling.write_text(json.dumps({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}))
        (bert / "sentence_bert_config.json").write_text('{"max_seq_length": 40}')
        recipe = load_encoder(str(bert), mesh=make_mesh(data=1)).recipe
        assert (recipe.pooling, recipe.normalize, recipe.max_tokens) == ("cls", True, 40)
        pooling.write_text(json.dumps({"pooling_mode_max_tokens": True}))
        assert "pooling = ['max'] is not supported" in self.refused(bert)
        for content, expected in (({"pooling_mode": "cls"}, "cls"), ({"pooling_mode": ["mean"]}, "mean"), ({}, "mean")):
            pooling.write_text(json.dumps(content))
            assert load_encoder(str(bert), mesh=make_mesh(data=1)).recipe.pooling == expected
        for limit in ("abc", -5, True, {}):
            (bert / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": limit}))
            assert "max_seq_length" in self.refused(bert)
        (bert / "sentence_bert_config.json").unlink()
        (bert / "modules.json").write_text(json.dumps([{"type": "x.Dense", "path": "2_Dense"}]))
        assert "modules of type Dense are not supported" in self.refused(bert)
        (bert / "modules.json").write_text("{}")
        assert load_encoder(str(bert), mesh=make_mesh(data=1)).recipe.max_tokens == 64
        (bert / "modules.json").write_text('[{"type": "x.Pooling"}]')
        assert "expected a list of modules with type and path" in self.refused(bert)

    def test_an_encoder_is_no_reader(self, refusal, bert):
        assert "model_type = 'bert' is not supported (supported: gpt2," in refusal(bert)


class TestFloat16:
    def test_families_that_overflow(self, folder, caplog):
        load_reader(str(folder), dtype="float16", mesh=make_mesh(data=1))
        assert "activations of Llama are known to overflow float16; bfloat16 is safe" in caplog.text
        tiny.reader(tiny.OPT).save(folder.parent / "opt")
        caplog.clear()
        load_reader(str(folder.parent / "opt"), dtype="float16", mesh=make_mesh(data=1))
        assert caplog.records == []

    def test_weights_that_overflow(self, folder, caplog):
        edit_tensors(folder, lambda t: t.update({"model.norm.weight": np.full(32, 7e4, np.float32)}))
        with caplog.at_level(logging.WARNING):
            load_reader(str(folder), dtype="float16", mesh=make_mesh(data=1))
        assert "model.norm.weight: has numbers that float16 cannot hold" in caplog.text
        caplog.clear()
        load_reader(str(folder), dtype="bfloat16", mesh=make_mesh(data=1))
        assert caplog.records == []

    def test_bfloat16_is_read_bit_by_bit(self, folder):
        values = np.arange(1, 1 << 15, 257, dtype=np.uint16)[:32].view(ml_dtypes.bfloat16)
        edit_tensors(folder, lambda t: t.update({"model.norm.weight": values}))
        reader = load_reader(str(folder), dtype="bfloat16", mesh=make_mesh(data=1))
        found = np.asarray(tiny.flat_state(reader.state)["norm.scale"].get_value())
        np.testing.assert_array_equal(found.view(np.uint16), values.view(np.uint16))
