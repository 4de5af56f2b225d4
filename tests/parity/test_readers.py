"""Readers against their PyTorch originals: tiny random configurations, float32, 1e-4 on logits."""

import numpy as np
import pytest
import torch
import transformers

from ralm_jax.reader import load_reader
from ralm_jax.sharding import make_mesh

TOLERANCE = 1e-4


def torch_logits(model, ids, mask=None):
    arguments = {}
    if mask is not None:
        positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
        arguments = {"attention_mask": torch.tensor(mask.astype(np.int64)), "position_ids": torch.tensor(positions)}
    with torch.no_grad():
        return model(torch.tensor(ids.astype(np.int64)), **arguments).logits.numpy()


def random_ids(shape, seed=0):
    return np.random.default_rng(seed).integers(0, 96, shape).astype(np.int32)


@pytest.mark.parametrize("length", [1, 50, 200])
def test_logits(pair, length):
    model, reader = pair
    ids = random_ids((2, length))
    expected = torch_logits(model, ids)
    assert expected.std() > 0.1
    np.testing.assert_allclose(reader.logits(ids), expected, atol=TOLERANCE)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(pair, side):
    model, reader = pair
    ids = random_ids((3, 40))
    valid = np.ones((3, 40), bool)
    for row, padding in enumerate((0, 7, 23)):
        valid[row, (slice(0, padding) if side == "left" else slice(40 - padding, 40))] = False
    expected = torch_logits(model, ids, valid)
    np.testing.assert_allclose(np.asarray(reader.logits(ids, valid))[valid], expected[valid], atol=TOLERANCE)


def test_export_reloads_in_transformers(pair, tmp_path):
    model, reader = pair
    reader.save(tmp_path / "out")
    again, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = random_ids((2, 30))
    np.testing.assert_array_equal(torch_logits(again.eval(), ids), torch_logits(model, ids))


REAL = [
    "gpt2_smiles_0.2m", "gpt2_smiles_0.5m", "stories260K/hf", "gptneo_from_gpt2_smiles_0.5m",
    "opt_from_gpt2_smiles_0.5m", "gptj_tiny", "opt_tiny", "gpt_neo_tiny",
]  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_real_weights(shared, name):
    folder = shared / "data/weights" / name
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    reader = load_reader(str(folder), mesh=make_mesh(data=1))
    ids = np.random.default_rng(0).integers(0, 60, (2, 74)).astype(np.int32)
    np.testing.assert_allclose(reader.logits(ids), torch_logits(model, ids), atol=TOLERANCE)
