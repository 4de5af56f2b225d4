"""Checkpoints in and out: round trips, shards, streams, and every way in which one can be broken."""

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ralm_jax.config import ConfigFile
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.keys import Layout
from ralm_jax.models.llama import LlamaConfig
from ralm_jax.reader import load_reader, unloaded_reader
from ralm_jax.sharding import make_mesh
from ralm_jax.weights import flat_state
from tests import tiny
from tests.tiny import assert_same, edit_tensors

FAMILIES = pytest.mark.parametrize("name", tiny.READERS)


@pytest.fixture
def folder(tmp_path):
    """A fresh copy of a tiny Llama checkpoint that a test may break."""
    tiny.reader(tiny.LLAMA).save(tmp_path / "llama")
    return tmp_path / "llama"


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
    edit_tensors(folder, lambda tensors: tensors.update({"model.embed_tokens.weight": values}))
    reader = load_reader(str(folder), mesh=make_mesh(data=1))
    table = flat_state(reader.state)["embed.table"].get_value()
    np.testing.assert_array_equal(table, values.astype(np.float32))
    half = load_reader(str(folder), dtype="bfloat16", mesh=make_mesh(data=1))
    assert all(leaf.dtype == ml_dtypes.bfloat16 for leaf in jax.tree.leaves(half.state))


def test_base_models_are_saved_without_prefix(folder):
    edit_tensors(folder, lambda t: [t.update({k.removeprefix("model."): t.pop(k)}) for k in list(t)])
    reader = load_reader(str(folder), mesh=make_mesh(data=1))
    assert_same(reader.state, tiny.reader(tiny.LLAMA).state)


def test_buffers_of_old_files_are_passed_over(tmp_path):
    tiny.reader(tiny.GPT2).save(tmp_path / "gpt2")
    mask = np.ones((1, 1, 8, 8), np.uint8)
    edit_tensors(
        tmp_path / "gpt2",
        lambda t: t.update(
            {"transformer.h.0.attn.bias": mask, "transformer.h.1.attn.masked_bias": np.float32(-1e4).reshape(1)}
        ),
    )
    assert_same(load_reader(str(tmp_path / "gpt2"), mesh=make_mesh(data=1)).state, tiny.reader(tiny.GPT2).state)


def test_saving_over_a_checkpoint_is_refused(folder):
    with pytest.raises(UsageError, match="holds a checkpoint already"):
        tiny.reader(tiny.LLAMA).save(folder)


def test_fingerprints_tell_weights_apart(folder):
    """Whichever tensor is changed, however small a part of the file it is."""
    first = load_reader(str(folder), mesh=make_mesh(data=1)).fingerprint
    assert load_reader(str(folder), mesh=make_mesh(data=1)).fingerprint == first
    found = {first}
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"):
        edit_tensors(folder, lambda t, name=name: t.update({name: t[name] + 1}))
        found.add(load_reader(str(folder), mesh=make_mesh(data=1)).fingerprint)
    assert len(found) == 4


def test_what_would_be_loaded(folder):
    loaded, unloaded = load_reader(str(folder)), unloaded_reader(str(folder))
    assert (unloaded.fingerprint, unloaded.config, unloaded.mesh) == (loaded.fingerprint, loaded.config, loaded.mesh)
    values = [leaf.get_value() for leaf in flat_state(unloaded.state).values()]
    assert all(isinstance(value, jax.ShapeDtypeStruct) for value in values)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(RalmError, match="not a whole safetensors file"):
        unloaded_reader(str(folder))


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
