"""Checkpoints that are not safetensors: Flax's msgpack, PyTorch's pickles, Orbax."""

import functools
import json
import re
import shutil
import subprocess
import sys

import flax.serialization
import ml_dtypes
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from safetensors.numpy import load_file

from ralm_jax import checkpoint
from ralm_jax.encoder import load_encoder
from ralm_jax.errors import RalmError
from ralm_jax.model import random_model
from ralm_jax.models import ENCODERS
from ralm_jax.reader import load_reader, unloaded_reader
from ralm_jax.sharding import make_mesh
from ralm_jax.sources import MsgpackSource, SafetensorsSource, open_source
from ralm_jax.weights import flat_state
from tests import tiny
from tests.tiny import assert_same


def load(folder):
    return load_reader(str(folder), mesh=make_mesh(data=1))


def refusal(folder):
    with pytest.raises(RalmError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def flax_tree(tensors):
    """What transformers' Flax classes saved: nested, kernels transposed."""
    tree = {}
    for name, tensor in tensors.items():
        *places, last = name.split(".")
        own = tree
        for place in places:
            own = own.setdefault(place, {})
        if last == "weight" and tensor.ndim == 2:
            embedding = any(word in places[-1] for word in ("wte", "wpe", "embed", "embeddings"))
            last, tensor = ("embedding", tensor) if embedding else ("kernel", tensor.T)
        own["scale" if last == "weight" else last] = np.ascontiguousarray(tensor)
    return tree


def to_flax(folder):
    """Replaces the safetensors of `folder` by a msgpack file of the same weights."""
    path = folder / "model.safetensors"
    tree = flax_tree(load_file(path))
    (folder / "flax_model.msgpack").write_bytes(flax.serialization.msgpack_serialize(tree))
    path.unlink()
    return folder / "flax_model.msgpack"


def msgpack_array(dtype, shape, data):
    """A tree of one array, as Flax writes it."""
    names = {"F32": "float32"}
    payload = msgpack.packb((shape, names.get(dtype, dtype), data))
    return msgpack.packb({"a": msgpack.ExtType(1, payload)})


class TestMsgpack:
    @pytest.fixture
    def folder(self, tmp_path):
        tiny.reader(tiny.OPT).save(tmp_path / "opt")
        return tmp_path / "opt"

    @pytest.mark.parametrize("name", tiny.READERS)
    def test_every_reader(self, tmp_path, name):
        reader = tiny.reader(tiny.READERS[name])
        reader.save(tmp_path / "out")
        to_flax(tmp_path / "out")
        assert_same(load(tmp_path / "out").state, reader.state)

    @pytest.mark.parametrize("config", [tiny.BERT, tiny.ROBERTA])
    def test_encoders(self, tmp_path, config):
        encoder = random_model(ENCODERS[config.model_type], config, mesh=make_mesh(data=1))
        encoder.save(tmp_path / "out")
        to_flax(tmp_path / "out")
        again = load_encoder(str(tmp_path / "out"), pooling="cls", mesh=make_mesh(data=1))
        assert again.config == config
        assert_same(again.state, encoder.state)

    def test_half_precision(self, folder):
        source = SafetensorsSource(folder)
        tree = {
            "a": {"kernel": np.arange(12, dtype=ml_dtypes.bfloat16).reshape(3, 4)},
            "b": {"bias": np.arange(5, dtype=np.float16), "step": 3, "nothing": None},
        }
        path = folder / "flax_model.msgpack"
        path.write_bytes(flax.serialization.msgpack_serialize(tree))
        source = MsgpackSource(folder)
        assert {name: (info.shape, info.dtype) for name, info in source.tensors.items()} == {
            "a.weight": ((4, 3), "BF16"),
            "b.bias": ((5,), "F16"),
        }
        np.testing.assert_array_equal(source.read("a.weight", (slice(1, 3),)), tree["a"]["kernel"].T[1:3])
        np.testing.assert_array_equal(source.read("b.bias", ()), tree["b"]["bias"])

    def test_arrays_that_flax_cut_into_chunks(self, folder, monkeypatch):
        monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 1000)
        path = to_flax(folder)
        assert b"__msgpack_chunked_array__" in path.read_bytes()
        assert_same(load(folder).state, tiny.reader(tiny.OPT).state)

    def test_shards(self, folder):
        tree = flax.serialization.msgpack_restore(to_flax(folder).read_bytes())
        (folder / "flax_model.msgpack").unlink()
        parts = {"flax_model-00001-of-00002.msgpack": {}, "flax_model-00002-of-00002.msgpack": {}}
        weight_map = {}
        for key, value in flatten(tree).items():
            file = sorted(parts)["layers" in key]
            own = parts[file]
            for place in key[:-1]:
                own = own.setdefault(place, {})
            own[key[-1]] = value
            weight_map["/".join(key)] = file
        for file, part in parts.items():
            (folder / file).write_bytes(flax.serialization.msgpack_serialize(part))
        (folder / "flax_model.msgpack.index.json").write_text(json.dumps({"weight_map": weight_map}))
        assert_same(load(folder).state, tiny.reader(tiny.OPT).state)
        (folder / sorted(parts)[1]).unlink()
        assert "1 of 2 shards are missing: flax_model-00002-of-00002.msgpack" in refusal(folder)

    @pytest.mark.parametrize(
        "damage", [lambda b: b[:-40], lambda b: b"", lambda b: b[: len(b) // 2], lambda b: b + b"\x00", lambda b: b"x"]
    )
    def test_damaged(self, folder, damage):
        path = to_flax(folder)
        path.write_bytes(damage(path.read_bytes()))
        assert "flax_model.msgpack: not a whole file of Flax parameters" in refusal(folder)

    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            (msgpack_array("F32", [2], b"\0" * 24), "an array of shape (2,) and dtype float32 in"),
            (msgpack_array("F32", [-2], b""), "not a whole file"),
            (msgpack_array("F32", ["x"], b""), "not a whole file"),
            (msgpack_array("garbage", [1], b"\0" * 4), "not a whole file"),
            (msgpack_array(7, [1], b"\0" * 4), "not a whole file"),
            (msgpack.packb({"a": msgpack.ExtType(5, b"x")}), "a value of extension type 5"),
            (b"\x81\xa1a" * 5000 + b"\xc0", "not a whole file"),
            (b"\x82\xa1a\x01\xa1a\x02", "a is there twice"),
        ],
    )
    def test_files_that_lie(self, folder, content, expected):
        path = to_flax(folder)
        path.write_bytes(content)
        assert expected in refusal(folder)

    def test_two_names_for_one_parameter(self, folder):
        tree = {"a": {"scale": np.ones(2, np.float32), "weight": np.ones(2, np.float32)}}
        to_flax(folder).write_bytes(flax.serialization.msgpack_serialize(tree))
        assert "two parameters are a.weight" in refusal(folder)

    def test_chunks_in_any_order(self, folder, monkeypatch):
        monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 1000)
        path = to_flax(folder)

        def turned(tree):
            return {key: turned(tree[key]) for key in sorted(tree)} if isinstance(tree, dict) else tree

        content = msgpack.unpackb(path.read_bytes(), strict_map_key=False)
        path.write_bytes(msgpack.packb(turned(content), strict_types=True))
        assert list(content["model"]["decoder"]["embed_tokens"]["embedding"]["chunks"])[2] == "2"
        assert_same(load(folder).state, tiny.reader(tiny.OPT).state)

    def test_a_missing_parameter(self, folder):
        path = to_flax(folder)
        tree = flax.serialization.msgpack_restore(path.read_bytes())
        del tree["model"]["decoder"]["final_layer_norm"]["scale"]
        path.write_bytes(flax.serialization.msgpack_serialize(tree))
        assert "final_layer_norm.weight is missing (expected shape [32])" in refusal(folder)

    def test_safetensors_come_first(self, folder):
        shutil.copy(folder / "model.safetensors", folder.parent)
        to_flax(folder)
        shutil.move(folder.parent / "model.safetensors", folder)
        assert isinstance(open_source(folder), SafetensorsSource)

    def test_fingerprints_tell_weights_apart(self, folder):
        path = to_flax(folder)
        first = load(folder).fingerprint
        tree = flax.serialization.msgpack_restore(path.read_bytes())
        tree["model"]["decoder"]["final_layer_norm"]["scale"] = np.full(32, 7, np.float32)
        path.write_bytes(flax.serialization.msgpack_serialize(tree))
        assert load(folder).fingerprint != first


def flatten(tree, place=()):
    if not isinstance(tree, dict):
        return {place: tree}
    return {key: leaf for name, part in tree.items() for key, leaf in flatten(part, (*place, name)).items()}


class TestOrbax:
    @pytest.fixture
    def folder(self, tmp_path):
        reader = tiny.reader(tiny.LLAMA)
        reader.save(tmp_path / "llama")
        (tmp_path / "llama" / "model.safetensors").unlink()
        checkpoint.save(tmp_path / "llama", reader.state)
        return tmp_path / "llama"

    def test_restored_onto_another_mesh(self, folder):
        alone = load(folder)
        assert_same(alone.state, tiny.reader(tiny.LLAMA).state)
        mesh = make_mesh(data=2, fsdp=2, tensor=2)
        spread = load_reader(str(folder), mesh=mesh)
        assert_same(spread.state, alone.state)
        kernel = flat_state(spread.state)["layers.attention.q.kernel"].get_value()
        assert kernel.addressable_shards[0].data.shape == (3, 16, 4, 8)
        assert spread.fingerprint == alone.fingerprint == unloaded_reader(str(folder)).fingerprint

    def test_in_another_dtype(self, folder):
        half = load_reader(str(folder), dtype="bfloat16", mesh=make_mesh(data=1))
        table = flat_state(half.state)["embed.table"].get_value()
        expected = flat_state(tiny.reader(tiny.LLAMA).state)["embed.table"].get_value()
        np.testing.assert_array_equal(table, expected.astype(ml_dtypes.bfloat16))

    def test_other_parameters(self, folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"attention_bias": True, "vocab_size": 130}))
        message = refusal(folder)
        assert "embed.table has shape [128, 32], expected [130, 32]" in message
        assert "layers.attention.k.bias is missing" in message

    def test_damaged(self, folder):
        for path in (folder / "orbax").rglob("*"):
            if path.is_file():
                path.write_bytes(path.read_bytes()[:10])
        assert "not a whole Orbax checkpoint" in refusal(folder)

    @pytest.mark.parametrize(
        "damage", [None, lambda b: b"", lambda b: b[:50], lambda b: b"\xa5" * len(b)],
        ids=["gone", "empty", "cut", "overwritten"],
    )  # fmt: skip
    def test_data_that_is_lost(self, folder, damage):
        """In a process of its own: all that it ever prints is one line, though other reads are on their way."""
        files = [path for path in (folder / "orbax").rglob("*") if path.is_file()]
        largest = max(files, key=lambda path: path.stat().st_size)
        largest.write_bytes(damage(largest.read_bytes())) if damage else largest.unlink()
        tiny.backend().save(str(folder / "tokenizer.json"))
        (folder / "text.txt").write_text(tiny.text(100))
        command = [sys.executable, "-m", "ralm_jax", "score", "--model", str(folder), "--window", "64"]
        command += ["--text", str(folder / "text.txt"), "--out", str(folder / "scores")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        said = re.escape(f"ralm: error: {folder}/orbax: not a whole Orbax checkpoint")
        why = r"[a-z_.]+\.(table|kernel|scale) cannot be read: .+"
        assert re.fullmatch(rf"{said} \({why}\); copy it again, or convert the model anew\n", done.stderr)
        assert not (folder / "scores").exists()

    def test_a_chunk_that_is_missing(self, folder):
        """Is not a chunk of zeros."""
        files = {"driver": "file", "path": f"{folder}/orbax/"}
        store = ts.KvStore.open({"driver": "ocdbt", "base": files}).result()
        assert b"norm.scale/0" in store.list().result()
        store.write("norm.scale/0", None).result()
        assert "not a whole Orbax checkpoint (norm.scale cannot be read: " in refusal(folder)

    @pytest.mark.parametrize("kind", ["manifest.ocdbt", "d/*"])
    def test_a_damaged_list(self, folder, kind):
        (path,) = (folder / "orbax").glob(kind)
        path.write_bytes(path.read_bytes()[:-5])
        message = refusal(folder)
        assert message.startswith(f"{folder}/orbax: not a whole Orbax checkpoint (")
        assert str(path) in message

    @pytest.mark.parametrize("options", [{"use_zarr3": True}, {"use_ocdbt": False}])
    def test_as_other_programs_store_it(self, folder, options):
        shutil.rmtree(folder / "orbax")
        tree = {}
        for name, leaf in flat_state(tiny.reader(tiny.LLAMA).state).items():
            *places, last = name.split(".")
            own = functools.reduce(lambda node, place: node.setdefault(place, {}), places, tree)
            own[last] = leaf.get_value()
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as orbax:
            orbax.save(folder / "orbax", tree)
        assert_same(load(folder).state, tiny.reader(tiny.LLAMA).state)

    def test_nothing_in_it(self, folder):
        shutil.rmtree(folder / "orbax")
        (folder / "orbax").mkdir()
        assert "not a whole Orbax checkpoint" in refusal(folder)


class TestPickles:
    def test_without_pytorch(self, tmp_path, monkeypatch):
        tiny.reader(tiny.LLAMA).save(tmp_path / "llama")
        (tmp_path / "llama" / "model.safetensors").rename(tmp_path / "llama" / "pytorch_model.bin")
        monkeypatch.setitem(__import__("sys").modules, "torch", None)
        assert "only PyTorch reads; install torch, or convert the model to safetensors" in refusal(tmp_path / "llama")

    def test_nothing_at_all(self, tmp_path):
        tiny.reader(tiny.LLAMA).save(tmp_path / "llama")
        (tmp_path / "llama" / "model.safetensors").unlink()
        assert "no weights there (model.safetensors, flax_model.msgpack, pytorch_model.bin)" in refusal(
            tmp_path / "llama"
        )
