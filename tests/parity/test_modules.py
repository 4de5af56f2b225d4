"""The parts with traps against PyTorch's, at 1e-5."""

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from ralm_jax.layers import ACTIVATIONS, LayerNorm, RMSNorm
from ralm_jax.rope import rotary_phases, rotate_half
from ralm_jax.sharding import make_mesh, on_mesh


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_activations():
    x = 4 * normal(1000)
    for name, act in ACTIVATIONS.items():
        expected = ACT2FN[name](torch.tensor(x)).numpy()
        np.testing.assert_allclose(act(jnp.asarray(x)), expected, atol=1e-5, err_msg=name)


def test_norms():
    x, scale, bias = normal(2, 5, 32), normal(32, seed=1), normal(32, seed=2)
    with on_mesh(make_mesh(data=1)):
        layer = LayerNorm(32, 1e-3, rngs=nnx.Rngs(0), dtype=jnp.float32)
        rms = RMSNorm(32, 1e-3, rngs=nnx.Rngs(0), dtype=jnp.float32)
    layer.scale.set_value(jnp.asarray(scale))
    layer.bias.set_value(jnp.asarray(bias))
    rms.scale.set_value(jnp.asarray(scale))
    expected = torch.nn.functional.layer_norm(torch.tensor(x), (32,), torch.tensor(scale), torch.tensor(bias), 1e-3)
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected.numpy(), atol=1e-5)
    original = LlamaRMSNorm(32, 1e-3)
    original.weight.data = torch.tensor(scale)
    np.testing.assert_allclose(rms(jnp.asarray(x)), original(torch.tensor(x)).detach().numpy(), atol=1e-5)


def test_rms_norm_casts_before_it_scales():
    """In bfloat16 the order shows."""
    x, scale = torch.tensor(normal(1, 4, 64)).bfloat16(), torch.tensor(normal(64, seed=1)).bfloat16()
    original = LlamaRMSNorm(64, 1e-5)
    original.weight.data = scale
    with on_mesh(make_mesh(data=1)):
        rms = RMSNorm(64, 1e-5, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    rms.scale.set_value(jnp.asarray(scale.float().numpy(), jnp.bfloat16))
    ours = rms(jnp.asarray(x.float().numpy(), jnp.bfloat16))
    np.testing.assert_array_equal(np.asarray(ours, np.float32), original(x).detach().float().numpy())


def test_rotary_embedding_with_and_without_interpolation():
    for parameters in (
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
    ):
        config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=parameters)
        q, k = normal(1, 4, 40, 16), normal(1, 4, 40, 16, seed=1)
        positions = np.arange(32728, 32768)[None]
        cos, sin = LlamaRotaryEmbedding(config)(torch.tensor(q), torch.tensor(positions))
        expected = apply_rotary_pos_emb(torch.tensor(q), torch.tensor(k), cos, sin)
        phases = rotary_phases(jnp.asarray(positions, jnp.int32), 16, 10000.0, parameters.get("factor", 1.0))
        for ours, theirs in zip((q, k), expected, strict=True):
            turned = rotate_half(jnp.asarray(ours.transpose(0, 2, 1, 3)), phases)
            np.testing.assert_allclose(turned, theirs.numpy().transpose(0, 2, 1, 3), atol=1e-5)
