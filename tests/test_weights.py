"""Checkpoints in and out: round trips, shards, streams, and every way in which one can be broken."""

import json
import shutil
import struct

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from ralm_jax.config import ConfigFile
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.keys import Layout
from ralm_jax.models.llama import LlamaConfig
from ralm_jax.reader import load_reader
from ralm_jax.sharding import make_mesh
from ralm_jax.sources import read_header
from ralm_jax.weights import flat_state
from tests import tiny

FAMILIES = pytest.mark.parametrize("name", tiny.READERS)


@pytest.fixture
def folder(tmp_path):
    """A fresh copy of a tiny Llama checkpoint that a test may break."""
    tiny.reader(tiny.LLAMA).save(tmp_path / "llama")
    return tmp_path / "llama"


def edit(folder, change):
    """Rewrites the single safetensors file after `change(tensors)`."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def edit_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refusal(folder):
    with pytest.raises(RalmError) as caught:
        load_reader(str(folder), mesh=make_mesh(data=1))
    message = str(caught.value)
    assert "\n" not in message
    return message


def assert_same(left, right):
    for (path, a), (other, b) in zip(flat_state(left).items(), flat_state(right).items(), strict=True):
        assert path == other
        np.testing.assert_array_equal(a.get_value(), b.get_value(), err_msg=path)


@FAMILIES
@pytest.mark.parametrize("shard_bytes", [1 << 30, 10_000])
def test_round_trip(name, shard_bytes, tmp_path):
    from ralm_jax import weights

    reader = tiny.reader(tiny.READERS[name])
    weights.save(tmp_path / "out", reader.family, reader.config, reader.state, shard_bytes)
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert shards[0] == "model.safetensors" if shard_bytes > 10_000 else len(shards) > 2
    again = load_reader(str(tmp_path / "out"), mesh=make_mesh(data=1))
    assert again.config == reader.config
    assert_same(again.state, reader.state)


@FAMILIES
def test_streams_to_shards(name, tmp_path):
    reader = tiny.reader(tiny.READERS[name])
    reader.save(tmp_path / "out")
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    spread = load_reader(str(tmp_path / "out"), mesh=mesh)
    assert_same(spread.state, reader.state)
    kernel = flat_state(spread.state)["layers.attention.q.kernel"].get_value()
    expected = NamedSharding(mesh, PartitionSpec(None, "fsdp", "tensor", None))
    assert kernel.sharding.is_equivalent_to(expected, kernel.ndim)


def test_reading_a_shard_reads_only_its_slice(folder, monkeypatch):
    from ralm_jax.sources import SafetensorsSource

    sizes = []
    read = SafetensorsSource.read

    def counted(self, name, index):
        values = read(self, name, index)
        sizes.append((name, values.shape))
        return values

    monkeypatch.setattr(SafetensorsSource, "read", counted)
    load_reader(str(folder), mesh=make_mesh(data=1, fsdp=2, tensor=2))
    gates = {shape for name, shape in sizes if name == "model.layers.0.mlp.gate_proj.weight"}
    assert gates == {(24, 16)}  # of (48, 32)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_stored_dtypes_are_read_exactly(folder, stored):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(128, 32)).astype(stored)
    edit(folder, lambda tensors: tensors.update({"model.embed_tokens.weight": values}))
    reader = load_reader(str(folder), mesh=make_mesh(data=1))
    table = flat_state(reader.state)["embed.table"].get_value()
    np.testing.assert_array_equal(table, values.astype(np.float32))
    half = load_reader(str(folder), dtype="bfloat16", mesh=make_mesh(data=1))
    assert all(leaf.dtype == ml_dtypes.bfloat16 for leaf in jax.tree.leaves(half.state))


def test_base_models_are_saved_without_prefix(folder):
    edit(folder, lambda t: [t.update({k.removeprefix("model."): t.pop(k)}) for k in list(t)])
    reader = load_reader(str(folder), mesh=make_mesh(data=1))
    assert_same(reader.state, tiny.reader(tiny.LLAMA).state)


def test_buffers_of_old_files_are_passed_over(tmp_path):
    tiny.reader(tiny.GPT2).save(tmp_path / "gpt2")
    mask = np.ones((1, 1, 8, 8), np.uint8)
    edit(
        tmp_path / "gpt2",
        lambda t: t.update(
            {"transformer.h.0.attn.bias": mask, "transformer.h.1.attn.masked_bias": np.float32(-1e4).reshape(1)}
        ),
    )
    assert_same(load_reader(str(tmp_path / "gpt2"), mesh=make_mesh(data=1)).state, tiny.reader(tiny.GPT2).state)


class TestTied:
    @pytest.fixture
    def tied(self, tmp_path):
        tiny.reader(tiny.READERS["llama-tied"]).save(tmp_path / "tied")
        return tmp_path / "tied"

    def test_under_the_heads_name(self, tied):
        edit(tied, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
        reader = load_reader(str(tied), mesh=make_mesh(data=1))
        assert_same(reader.state, tiny.reader(tiny.READERS["llama-tied"]).state)

    def test_under_both_names(self, tied):
        edit(tied, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
        reader = load_reader(str(tied), mesh=make_mesh(data=1))
        assert_same(reader.state, tiny.reader(tiny.READERS["llama-tied"]).state)

    def test_but_different(self, tied):
        edit(tied, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
        assert "embed_tokens.weight and lm_head.weight differ" in refusal(tied)


class TestBroken:
    """Each message names the file or the key, and what was expected."""

    def test_all_problems_are_reported_together(self, folder):
        def change(tensors):
            del tensors["model.layers.1.mlp.up_proj.weight"]
            tensors["model.norm.weight"] = np.ones(31, np.float32)
            tensors["classifier.weight"] = np.ones(3, np.float32)

        edit(folder, change)
        message = refusal(folder)
        assert "layers.1.mlp.up_proj.weight is missing (expected shape [48, 32])" in message
        assert "model.norm.weight in model.safetensors has shape [31], expected [32]" in message
        assert "classifier.weight in model.safetensors is unknown to llama" in message

    def test_no_memory_is_spent_first(self, folder, monkeypatch):
        edit(folder, lambda t: t.pop("lm_head.weight"))
        monkeypatch.setattr("ralm_jax.weights.read_part", lambda *_: pytest.fail("a tensor was read"))
        assert "lm_head.weight is missing" in refusal(folder)

    def test_integers_are_not_weights(self, folder):
        edit(folder, lambda t: t.update({"model.norm.weight": np.ones(32, np.int32)}))
        assert "model.norm.weight in model.safetensors is I32, expected one of F64, F32, F16, BF16" in refusal(folder)

    def test_both_with_and_without_prefix(self, folder):
        edit(folder, lambda t: t.update({"norm.weight": np.ones(32, np.float32)}))
        message = refusal(folder)
        assert "norm.weight" in message
        assert "remove one" in message

    def test_an_old_name_of_a_norm_is_not_guessed(self, folder):
        edit(folder, lambda t: t.update({"model.norm.gamma": t.pop("model.norm.weight")}))
        message = refusal(folder)
        assert "norm.weight is missing" in message
        assert "model.norm.gamma" in message

    def test_truncated(self, folder):
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        assert "not a whole safetensors file" in refusal(folder)

    def test_an_interrupted_download_of_nothing(self, folder):
        (folder / "model.safetensors").write_bytes(b"")
        assert "not a whole safetensors file" in refusal(folder)

    def test_a_huge_header(self, folder):
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

    def test_no_weights_but_a_pickle(self, folder):
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        assert "pytorch_model.bin is a pickle" in refusal(folder)

    @pytest.mark.parametrize("content", ["", "[]", "{", '{"hidden_size": 32}'])
    def test_config(self, folder, content):
        (folder / "config.json").write_text(content)
        assert "config.json" in refusal(folder)

    def test_a_config_that_is_not_there(self, folder):
        (folder / "config.json").unlink()
        assert "no config.json" in refusal(folder)

    def test_wrong_class(self, folder):
        edit_config(folder, model_type="mamba")
        assert "model_type = 'mamba' is not supported (supported: gpt2, llama)" in refusal(folder)

    def test_a_class_that_does_not_match(self, folder):
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
            ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling: factor = 0.0 is not supported"),
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
    def test_maths_that_no_reader_has(self, folder, values, expected):
        edit_config(folder, **values)
        assert expected in refusal(folder)

    def test_gpt2_scaled_by_layer(self, tmp_path):
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

    def test_a_missing_shard(self, sharded):
        shard = sorted(sharded.glob("model-*"))[1]
        shard.unlink()
        assert f"shards are missing: {shard.name}" in refusal(sharded)

    def test_an_index_beside_a_newer_single_file(self, sharded):
        tiny.reader(tiny.LLAMA).save(sharded / "single")
        shutil.copy(sharded / "single" / "model.safetensors", sharded)
        assert "one of the two is stale" in refusal(sharded)

    def test_an_index_that_places_a_tensor_elsewhere(self, sharded):
        path, index = self.index(sharded)
        files = sorted(set(index["weight_map"].values()))
        index["weight_map"]["model.norm.weight"] = files[0]
        path.write_text(json.dumps(index))
        assert "the index is stale, 1 tensors differ: for model.norm.weight it says model-00001" in refusal(sharded)

    def test_an_index_of_a_tensor_that_is_nowhere(self, sharded):
        path, index = self.index(sharded)
        index["weight_map"]["extra"] = sorted(set(index["weight_map"].values()))[0]
        path.write_text(json.dumps(index))
        assert "extra" in refusal(sharded)

    def test_an_index_that_is_none(self, sharded):
        path, _ = self.index(sharded)
        for content in ("[]", '{"weight_map": {"a": 1}}', '{"weight_map": 5}'):
            path.write_text(content)
            assert "not a safetensors index" in refusal(sharded)

    def test_a_tensor_in_two_shards(self, sharded):
        _, index = self.index(sharded)
        first, second = sorted(set(index["weight_map"].values()))[:2]
        tensors, others = load_file(sharded / first), load_file(sharded / second)
        name = next(iter(tensors))
        save_file(others | {name: tensors[name]}, sharded / second)
        assert "each tensor must be in one file" in refusal(sharded)


def test_saving_over_a_checkpoint_is_refused(folder):
    with pytest.raises(UsageError, match="holds a checkpoint already"):
        tiny.reader(tiny.LLAMA).save(folder)


def test_fingerprints_tell_weights_apart(folder):
    """Whichever tensor is changed, however small a part of the file it is."""
    first = load_reader(str(folder), mesh=make_mesh(data=1)).fingerprint
    assert load_reader(str(folder), mesh=make_mesh(data=1)).fingerprint == first
    found = {first}
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"):
        edit(folder, lambda t, name=name: t.update({name: t[name] + 1}))
        found.add(load_reader(str(folder), mesh=make_mesh(data=1)).fingerprint)
    assert len(found) == 4


@pytest.mark.parametrize(
    ("values", "theta", "factor"),
    [
        ({}, 10000.0, 1.0),
        ({"rope_theta": 500000.0}, 500000.0, 1.0),
        ({"rope_theta": 2e4, "rope_scaling": {"type": "linear", "factor": 4.0}}, 2e4, 4.0),
        ({"rope_theta": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 2}}, 2e4, 2.0),
        ({"rope_theta": 2e4, "rope_scaling": None}, 2e4, 1.0),
        ({"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e4}}, 3e4, 8.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}, "rope_scaling": None}, 3e4, 1.0),
    ],
)
def test_rope_settings_of_every_generation_of_files(values, theta, factor):
    file = ConfigFile({k: v for k, v in tiny.LLAMA.to_hf().items() if not k.startswith("rope")} | values, "c")
    config = LlamaConfig.from_hf(file)
    assert (config.rope_theta, config.rope_factor) == (theta, factor)


def test_layout_slices_are_the_whole_sliced():
    layout = Layout.parse("d (three n h) -> three d n h")
    sizes = {"three": 3, "d": 4, "n": 6, "h": 2}
    stored = np.arange(4 * 36).reshape(4, 36)
    whole = stored.reshape(4, 3, 6, 2).transpose(1, 0, 2, 3)
    index = {"three": slice(1, 2), "d": slice(2, 4), "n": slice(3, 6), "h": slice(None)}
    cut = stored[layout.stored_index(sizes, index)]
    np.testing.assert_array_equal(cut.reshape(2, 1, 3, 2).transpose(1, 0, 2, 3), whole[1:2, 2:4, 3:6])
    with pytest.raises(UsageError, match="do not lie together"):
        layout.stored_index(sizes, index | {"h": slice(0, 1)})


def test_vocabulary_rows_of_the_checkpoint_are_kept(folder):
    """A padded vocabulary stays as it is stored: its rows take part in the softmax, as in the original."""
    reader = load_reader(str(folder), mesh=make_mesh(data=1))
    assert reader.logits(np.zeros((1, 3), np.int32)).shape == (1, 3, tiny.LLAMA.vocab_size)
