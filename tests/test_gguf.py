"""GGUF files, written by program with llama.cpp's names, row order and quantisation."""

from dataclasses import replace

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from ralm_jax.errors import RalmError
from ralm_jax.reader import load_reader
from ralm_jax.sharding import make_mesh
from ralm_jax.sources.gguf import GGUF_NAMES
from ralm_jax.weights import flat_state, hf_tensors, stored_tensor
from tests import tiny

CONFIG = replace(tiny.LLAMA, rope_factor=2.0, rope_theta=30000.0)


def interleaved(values, heads):
    """llama.cpp's order of query and key rows, as its converter writes it from Hugging Face's."""
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def write(path, *, config=CONFIG, kind=None, architecture="llama", extra=(), drop=(), scaling="linear", rotary=None):
    reader = tiny.reader(config)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_uint32(f"{architecture}.block_count", config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.mlp_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    writer.add_rope_freq_base(config.rope_theta)
    if rotary is not None:
        writer.add_rope_dimension_count(rotary)
    if scaling == "old":
        writer.add_float32(f"{architecture}.rope.scale_linear", config.rope_factor)
    else:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
        writer.add_rope_scaling_factor(config.rope_factor)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    names = {hf: ours for ours, hf in GGUF_NAMES.items()}
    leaves = flat_state(reader.state)
    for name, wanted in hf_tensors(reader.family, reader.state).items():
        values = stored_tensor(wanted, leaves)
        stem, suffix = name.rsplit(".", 1)
        *_, layer = ["", *[part for part in stem.split(".") if part.isdigit()]]
        gguf_stem = names[stem.replace(f".{layer}.", ".{}.") if layer else stem]
        full = f"blk.{layer}.{gguf_stem}.{suffix}" if layer else f"{gguf_stem}.{suffix}"
        if full in drop:
            continue
        if stem.endswith("q_proj"):
            values = interleaved(values, config.num_heads)
        if stem.endswith("k_proj"):
            values = interleaved(values, config.num_kv_heads)
        if kind is not None and values.ndim == 2 and values.shape[1] % 32 == 0:
            writer.add_tensor(full, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(full, values)
    for full in extra:
        writer.add_tensor(full, np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_tensor_finds_its_place_and_order(tmp_path):
    reader = load_reader(str(write(tmp_path / "tiny.gguf")), mesh=make_mesh(data=1))
    assert replace(reader.config, norm_epsilon=CONFIG.norm_epsilon) == CONFIG
    expected = flat_state(tiny.reader(CONFIG).state)
    for path, leaf in flat_state(reader.state).items():
        np.testing.assert_array_equal(leaf.get_value(), expected[path].get_value(), err_msg=path)


def test_older_files_state_a_linear_factor_alone(tmp_path):
    reader = load_reader(str(write(tmp_path / "tiny.gguf", scaling="old")), mesh=make_mesh(data=1))
    assert reader.config.rope_factor == 2.0


def test_a_file_that_is_replaced_is_read_again(tmp_path):
    first = load_reader(str(write(tmp_path / "tiny.gguf")), mesh=make_mesh(data=1))
    other = replace(CONFIG, num_layers=2)
    second = load_reader(str(write(tmp_path / "tiny.gguf", config=other)), mesh=make_mesh(data=1))
    assert (first.config.num_layers, second.config.num_layers) == (3, 2)
    assert first.fingerprint != second.fingerprint


def test_quantised_tensors_are_dequantised(tmp_path):
    kind = gguf.GGMLQuantizationType.Q8_0
    reader = load_reader(str(write(tmp_path / "tiny.gguf", kind=kind)), mesh=make_mesh(data=1, fsdp=2, tensor=2))
    table = np.asarray(flat_state(tiny.reader(CONFIG).state)["embed.table"].get_value())
    loaded = np.asarray(flat_state(reader.state)["embed.table"].get_value())
    np.testing.assert_array_equal(loaded, dequantize(quantize(table, kind), kind))
    assert not np.array_equal(loaded, table)


def test_a_tied_head_is_not_stored(tmp_path):
    path = write(tmp_path / "tiny.gguf", drop=["output.weight"])
    assert load_reader(str(path), mesh=make_mesh(data=1)).config.tie_word_embeddings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "qwen2"}, "GGUF architecture 'qwen2' is not supported"),
        ({"extra": ["blk.0.ssm_a", "mystery.weight"]}, "2 tensors that no Llama has: blk.0.ssm_a, mystery.weight"),
        ({"drop": ["blk.1.ffn_up.weight"]}, "layers.1.mlp.up_proj.weight is missing"),
        ({"scaling": "yarn"}, "rope_type = 'yarn' is not supported"),
        ({"drop": ["token_embd.weight"]}, "token_embd.weight is missing"),
        ({"rotary": 4}, "partial_rotary_factor = 0.5 is not supported"),
    ],
)
def test_refusals(tmp_path, options, message):
    with pytest.raises(RalmError, match=message):
        load_reader(str(write(tmp_path / "tiny.gguf", **options)), mesh=make_mesh(data=1))


@pytest.mark.parametrize("size", [0, 3, 100, 3000, -50])
def test_truncated(tmp_path, size):
    path = write(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(RalmError, match="not a whole GGUF file"):
        load_reader(str(path), mesh=make_mesh(data=1))
