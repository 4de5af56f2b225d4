"""Tiny readers, tokenizers, texts and corpora, made by program."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import tokenizers
from flax import nnx
from safetensors.numpy import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers, processors

from ralm_jax.model import abstract, random_model
from ralm_jax.models import CROSS_ENCODERS, ENCODERS
from ralm_jax.models.encoder import BertConfig, RobertaConfig
from ralm_jax.models.gpt2 import GPT2Config
from ralm_jax.models.gpt_neo import GPTNeoConfig
from ralm_jax.models.gptj import GPTJConfig
from ralm_jax.models.llama import LlamaConfig
from ralm_jax.models.opt import OPTConfig
from ralm_jax.reader import Reader, random_reader
from ralm_jax.sharding import make_mesh
from ralm_jax.tokenizer import Tokenizer
from ralm_jax.weights import flat_state, padded_array

WORDS = [f"{first}{second}" for first in "bdfklmnprst" for second in ("a", "e", "i", "o", "u", "an", "er", "il", "os")]

GPT2 = GPT2Config(
    vocab_size=128, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=4, head_dim=8, mlp_size=64,
    max_positions=256, activation="gelu_new", norm_epsilon=1e-5, tie_word_embeddings=True, scale_attention=True,
)  # fmt: skip

LLAMA = LlamaConfig(
    vocab_size=128, hidden_size=32, num_layers=3, num_heads=8, num_kv_heads=2, head_dim=8, mlp_size=48,
    max_positions=256, activation="silu", norm_epsilon=1e-5, tie_word_embeddings=False, rope_theta=10000.0,
    rope_factor=1.0, attention_bias=False, mlp_bias=False,
)  # fmt: skip

GPT_NEO = GPTNeoConfig(
    vocab_size=128, hidden_size=32, num_layers=4, num_heads=4, num_kv_heads=4, head_dim=8, mlp_size=64,
    max_positions=256, activation="gelu_new", norm_epsilon=1e-5, tie_word_embeddings=True, local_window=8,
    layer_kinds=("global", "local", "global", "local"),
)  # fmt: skip

GPTJ = GPTJConfig(
    vocab_size=128, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=4, head_dim=8, mlp_size=64,
    max_positions=256, activation="gelu_new", norm_epsilon=1e-5, tie_word_embeddings=False, rotary_dim=4,
)  # fmt: skip

OPT = OPTConfig(
    vocab_size=128, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=4, head_dim=8, mlp_size=64,
    max_positions=256, activation="relu", norm_epsilon=1e-5, tie_word_embeddings=True, word_size=32, pre_norm=True,
    bias=True,
)  # fmt: skip

BERT = BertConfig(
    vocab_size=128, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=4, head_dim=8, mlp_size=64,
    max_positions=64, activation="gelu", norm_epsilon=1e-12, token_types=2,
)  # fmt: skip

ROBERTA = RobertaConfig(**vars(BERT) | {"token_types": 1, "position_offset": 2})

READERS = {
    "gpt2": GPT2,
    "gpt2-untied": replace(GPT2, tie_word_embeddings=False),
    "llama": LLAMA,
    "llama-tied": replace(LLAMA, tie_word_embeddings=True, rope_factor=4.0),
    "gpt-neo": GPT_NEO,
    "gptj": GPTJ,
    "opt": OPT,
    "opt-350m": replace(OPT, word_size=16, pre_norm=False),
    "opt-untied-no-bias": replace(OPT, tie_word_embeddings=False, bias=False),
    "llama-mha-bias": replace(LLAMA, num_kv_heads=8, attention_bias=True, mlp_bias=True),
}


def tokenizer(*, bos: bool = False) -> Tokenizer:
    """The tokenizer of `backend`."""
    return Tokenizer(backend(bos=bos), (1,) if bos else (), (2,) if bos else (), "tiny")


def backend(*, bos: bool = False) -> tokenizers.Tokenizer:
    """One token a word of `WORDS`, a space or a newline; with `bos`, a template adds <s> and </s>."""
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", " ", "\n", *WORDS])}
    made = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r" |\n|[^ \n]+"), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(["<s>", "</s>"])
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    return made


def trimming_tokenizer() -> Tokenizer:
    """RoBERTa's kind: byte-level, a space belongs to the word behind it, but not to the word's offsets."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<s>", "</s>", *alphabet, *(f"Ġ{letter}" for letter in "bdfklmnprst")]
    merges = [("Ġ", piece[1:]) for piece in pieces if len(piece) == 2 and piece[0] == "Ġ"]
    made = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = processors.RobertaProcessing(
        ("</s>", 1), ("<s>", 0), trim_offsets=True, add_prefix_space=False
    )
    return Tokenizer(made, (0,), (1,), "trimming")


def text(tokens: int, seed: int = 0) -> str:
    """A text of `tokens` tokens: words and spaces."""
    words = np.random.default_rng(seed).choice(WORDS, (tokens + 1) // 2)
    return " ".join(words) + (" " if tokens % 2 == 0 else "")


def passages(count: int, seed: int = 1) -> list[dict]:
    rng = np.random.default_rng(seed)
    return [
        {"id": str(i), "title": f"{rng.choice(WORDS)} {i}", "text": " ".join(rng.choice(WORDS, rng.integers(5, 15)))}
        for i in range(count)
    ]


def write_corpus(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in passages(count)), encoding="utf-8")
    return path


@functools.cache
def reader(config, seed: int = 0) -> Reader:
    """A random reader on one device whose biases and norms are not the identity, so that a forgotten one shows."""
    made = random_reader(config, seed=seed, mesh=make_mesh(data=1))
    rng = np.random.default_rng(seed)
    return replace(made, state=jax.tree.map(lambda x: x + rng.normal(0, 0.1, x.shape).astype(np.float32), made.state))


def on(made: Reader, mesh) -> Reader:
    """The same reader on another mesh."""
    graphdef, placed = abstract(made.family, made.config, mesh)
    leaves = [
        (
            path,
            leaf.replace(
                padded_array(leaf.get_value(), value.shape, lambda index, value=value: np.asarray(value)[index])
            ),
        )
        for (path, leaf), value in zip(nnx.to_flat_state(placed), jax.tree.leaves(made.state), strict=True)
    ]
    return replace(made, mesh=mesh, graphdef=graphdef, state=nnx.from_flat_state(leaves))


def assert_same(left: nnx.State, right: nnx.State) -> None:
    for (path, a), (other, b) in zip(flat_state(left).items(), flat_state(right).items(), strict=True):
        assert path == other
        np.testing.assert_array_equal(a.get_value(), b.get_value(), err_msg=path)


def edit_tensors(folder: Path, change) -> None:
    """Rewrites the single safetensors file of `folder` after `change(tensors)`."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def edit_config(folder: Path, **values) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def save_encoder(folder: Path, config=BERT, *, seed: int = 0) -> Path:
    """A random encoder and its tokenizer; what it makes of two texts differs."""
    return save_random(folder, ENCODERS[config.model_type], config, seed)


def save_cross_encoder(folder: Path, config=BERT, *, seed: int = 0) -> Path:
    family = CROSS_ENCODERS[config.model_type]
    return save_random(folder, family, family.config(**vars(config)), seed, 0.3)


def save_random(folder: Path, family, config, seed: int, noise: float = 0.1) -> Path:
    made = random_model(family, config, seed=seed, mesh=make_mesh(data=1))
    rng = np.random.default_rng(seed)
    state = jax.tree.map(lambda x: x + rng.normal(0, noise, x.shape).astype(np.float32), made.state)
    replace(made, state=state).save(folder)
    backend(bos=True).save(str(folder / "tokenizer.json"))
    return folder


def save_model(folder: Path, config, *, bos: bool = False, seed: int = 0) -> Path:
    reader(config, seed).save(folder)
    backend(bos=bos).save(str(folder / "tokenizer.json"))
    return folder
