"""Random PyTorch readers of every family, and ours loaded from what they saved."""

import itertools

import pytest
import torch
import transformers

from ralm_jax.reader import load_reader
from ralm_jax.sharding import make_mesh

transformers.utils.logging.set_verbosity_error()  # it warns of end tokens beyond a tiny vocabulary

# Weights of 0.15 give logits of standard deviation 1. Twice that saturates the softmax, which then turns the rounding
# of either side into 1e-4 (measured against PyTorch in float64).

LLAMA = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "max_position_embeddings": 512, "initializer_range": 0.15,
}  # fmt: skip
GPT2 = {"vocab_size": 96, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 200, "initializer_range": 0.15}

NEO = {
    "vocab_size": 96, "hidden_size": 48, "num_layers": 4, "num_heads": 4, "max_position_embeddings": 200,
    "attention_types": [[["global", "local"], 2]], "window_size": 9, "initializer_range": 0.1,
}  # fmt: skip
GPTJ = {"vocab_size": 96, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 200, "initializer_range": 0.15}
OPT = {
    "vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 80,
    "max_position_embeddings": 200, "word_embed_proj_dim": 48, "init_std": 0.15,
}  # fmt: skip


def llama(**values):
    return transformers.LlamaConfig(**(LLAMA | values))


VARIANTS = {
    **{
        f"llama-{heads}-heads-{kv}-kv-{'tied' if tied else 'untied'}": llama(
            num_attention_heads=heads, num_key_value_heads=kv, tie_word_embeddings=tied
        )
        for (heads, kv), tied in itertools.product([(6, 6), (6, 3), (6, 2), (6, 1)], [False, True])
    },
    "llama-rope-factor-4": llama(
        num_attention_heads=6, num_key_value_heads=2,
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    ),
    "llama-theta-eps-head-dim": llama(
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    ),
    "llama-biases-gelu": llama(
        num_attention_heads=6, num_key_value_heads=3, attention_bias=True, mlp_bias=True, hidden_act="gelu"
    ),
    "gpt2": transformers.GPT2Config(**GPT2),
    "gpt2-untied": transformers.GPT2Config(**GPT2, tie_word_embeddings=False),
    "gpt2-inner-eps-relu": transformers.GPT2Config(
        **GPT2, n_inner=70, layer_norm_epsilon=1e-3, activation_function="relu"
    ),
    "gpt-neo": transformers.GPTNeoConfig(**NEO),
    "gpt-neo-local-first": transformers.GPTNeoConfig(
        **(NEO | {"attention_types": [[["local"], 2], [["global"], 2]], "intermediate_size": 70})
    ),
    "gptj": transformers.GPTJConfig(**GPTJ, rotary_dim=8),
    "gptj-whole-heads": transformers.GPTJConfig(**GPTJ, rotary_dim=12, n_inner=70),
    "opt": transformers.OPTConfig(**OPT),
    "opt-350m": transformers.OPTConfig(**(OPT | {"word_embed_proj_dim": 32, "do_layer_norm_before": False})),
    "opt-untied-no-bias": transformers.OPTConfig(**OPT, tie_word_embeddings=False, enable_bias=False),
    "gpt2-unscaled": transformers.GPT2Config(**(GPT2 | {"initializer_range": 0.1}), scale_attn_weights=False),
}  # fmt: skip


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request, tmp_path_factory):
    """A random PyTorch model whose every parameter matters, and ours loaded from what it saved."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(VARIANTS[request.param]).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases and norms start as zeros and ones
                parameter.add_(0.2 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("parity") / request.param
    model.save_pretrained(folder)
    return model, load_reader(str(folder), mesh=make_mesh(data=1))
