"""Decoding against transformers' `generate`, token for token."""

import numpy as np
import pytest
import torch
import transformers

from ralm_jax.generate.decoding import decode, keys_of
from ralm_jax.generate.sampling import Sampling, kept
from ralm_jax.reader import load_reader
from ralm_jax.settings import GenerateSettings
from ralm_jax.text import read_text
from ralm_jax.tokenizer import load_tokenizer

GREEDY = Sampling.of(GenerateSettings())


def ours(reader, prompts, count, sampling=GREEDY):
    """(n, count) tokens and their log-probabilities."""
    steps = list(decode(reader, prompts, count, sampling, keys=keys_of(0, len(prompts))))
    return np.stack([step.tokens for step in steps], 1), np.stack([step.log_probs for step in steps], 1)


def theirs(model, prompt, count, **settings):
    """The new tokens of one prompt, which needs no padding."""
    ids = torch.tensor(prompt.astype(np.int64))[None]
    with torch.no_grad():
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None,
            pad_token_id=0, **settings,
        )  # fmt: skip
    return made[0, len(prompt) :].numpy()


def prompts(count, longest, vocab_size, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, count)
    return [rng.integers(0, vocab_size, length).astype(np.int32) for length in lengths]


FAMILIES = [
    "llama-6-heads-2-kv-untied", "gpt2", "gpt-neo-local-first", "gptj", "opt-350m",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama-rope-factor-4", "opt")),
]  # fmt: skip


@pytest.mark.parametrize("pair", FAMILIES, indirect=True)
class TestGreedy:
    def test_tokens(self, pair):
        """As transformers', and as likely as without a cache."""
        model, reader = pair
        some = prompts(12, 60, 96)
        found, log_probs = ours(reader, some, 24)
        assert len(np.unique(found)) > 4
        whole = np.zeros((12, 84), np.int32)  # padding after a text, which no token of it sees
        for row, prompt, tokens in zip(whole, some, found, strict=True):
            np.testing.assert_array_equal(tokens, theirs(model, prompt, 24))
            row[: len(prompt) + 24] = [*prompt, *tokens]
        best = torch.log_softmax(torch.tensor(np.array(reader.logits(whole))), dim=-1).numpy().max(axis=2)
        for row, prompt, given in zip(best, some, log_probs, strict=True):
            np.testing.assert_allclose(given, row[len(prompt) - 1 :][:24], atol=1e-4)

    @pytest.mark.slow
    def test_repetition_penalty(self, pair):
        model, reader = pair
        some = prompts(6, 40, 96, seed=1)
        found, _ = ours(reader, some, 24, Sampling.of(GenerateSettings(repetition_penalty=1.3)))
        for prompt, tokens in zip(some, found, strict=True):
            np.testing.assert_array_equal(tokens, theirs(model, prompt, 24, repetition_penalty=1.3))


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (None, 0.7), (20, 0.5), (1, 1.0), (200, 0.999)])
def test_what_is_drawn_from(top_k, top_p):
    logits = np.random.default_rng(0).normal(0, 2, (50, 96)).astype(np.float32)
    warpers = transformers.LogitsProcessorList()
    if top_k is not None:
        warpers.append(transformers.TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(transformers.TopPLogitsWarper(top_p))
    expected = np.isfinite(warpers(None, torch.tensor(logits)).numpy())
    found = np.asarray(kept(logits, Sampling(1.0, top_k, top_p, 1.0))) > -1e30
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_smollm2(shared, smollm2_gguf, tmp_path, one_device):
    reader = load_reader(str(smollm2_gguf), mesh=one_device)
    reader.save(tmp_path / "smollm2")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "smollm2").eval()
    tokens = load_tokenizer(str(smollm2_gguf)).encode(
        read_text(str(shared / "data/text/wikitext-103-v1.test.lines.jsonl.gz")).content[:100_000]
    )
    rng = np.random.default_rng(0)
    some = [
        tokens[at : at + length]
        for at, length in zip(rng.integers(0, 20_000, 50), rng.integers(1, 200, 50), strict=True)
    ]
    found, _ = ours(reader, some, 32)
    for prompt, made in zip(some, found, strict=True):
        np.testing.assert_array_equal(made, theirs(model, prompt, 32))
