"""PyTorch's pickles, read through PyTorch as plain weights."""

import json
import pickle

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from ralm_jax.errors import RalmError
from ralm_jax.reader import load_reader
from ralm_jax.sharding import make_mesh
from ralm_jax.sources import open_source
from tests import tiny
from tests.tiny import assert_same


@pytest.fixture
def folder(tmp_path):
    tiny.reader(tiny.GPT2).save(tmp_path / "gpt2")
    return tmp_path / "gpt2"


def tensors(folder):
    found = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    return {name: torch.tensor(values) for name, values in found.items()}


def refusal(folder):
    with pytest.raises(RalmError) as caught:
        load_reader(str(folder), mesh=make_mesh(data=1))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_one_file(folder):
    torch.save(tensors(folder), folder / "pytorch_model.bin")
    reader = load_reader(str(folder), mesh=make_mesh(data=1))
    assert_same(reader.state, tiny.reader(tiny.GPT2).state)


def test_files_of_old_versions(folder):
    torch.save(tensors(folder), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    reader = load_reader(str(folder), mesh=make_mesh(data=1))
    assert_same(reader.state, tiny.reader(tiny.GPT2).state)
    assert reader.fingerprint == load_reader(str(folder), mesh=make_mesh(data=1)).fingerprint


def test_parameters_are_tensors(folder):
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in tensors(folder).items()}
    torch.save(parameters, folder / "pytorch_model.bin")
    assert_same(load_reader(str(folder), mesh=make_mesh(data=1)).state, tiny.reader(tiny.GPT2).state)


def test_shards_and_bfloat16(folder):
    whole = {name: tensor.bfloat16() for name, tensor in tensors(folder).items()}
    halves = [list(whole)[::2], list(whole)[1::2]]
    weight_map = {}
    for i, names in enumerate(halves, start=1):
        file = f"pytorch_model-0000{i}-of-00002.bin"
        torch.save({name: whole[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    name = "transformer.wte.weight"
    values = open_source(folder).read(name, (slice(3, 9), slice(None)))
    assert values.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(values.astype(np.float32), whole[name][3:9].float().numpy())
    load_reader(str(folder), mesh=make_mesh(data=1))


def test_fingerprints_tell_weights_apart(folder):
    whole = tensors(folder)
    torch.save(whole, folder / "pytorch_model.bin")
    first = open_source(folder).fingerprint()
    assert open_source(folder).fingerprint() == first
    whole["transformer.ln_f.bias"][3] += 1
    torch.save(whole, folder / "pytorch_model.bin")
    assert open_source(folder).fingerprint() != first


class Harmful:
    def __reduce__(self):
        return (print, ("this must not run",))


@pytest.mark.parametrize("legacy", [False, True])
def test_code_in_a_pickle_is_not_run(folder, capsys, legacy):
    tensors(folder)
    content = {"transformer.wte.weight": Harmful()}
    torch.save(content, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    assert "not a checkpoint that PyTorch loads as plain weights" in refusal(folder)
    assert "this must not run" not in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"x" * 100, pickle.dumps([1, 2])])
def test_damaged(folder, content):
    tensors(folder)
    (folder / "pytorch_model.bin").write_bytes(content)
    assert "pytorch_model.bin: not a checkpoint that PyTorch loads as plain weights" in refusal(folder)


@pytest.mark.parametrize("content", [[torch.ones(3)], {1: torch.ones(3)}, {"a": torch.eye(3).to_sparse()}])
def test_not_a_dictionary_of_tensors(folder, content):
    tensors(folder)
    torch.save(content, folder / "pytorch_model.bin")
    assert "not a dictionary of plain tensors by name" in refusal(folder)
