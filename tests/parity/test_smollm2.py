"""A real 135M-parameter Llama: GGUF -> ours -> safetensors -> PyTorch, on real text."""

import numpy as np
import pytest
import torch
import transformers

from ralm_jax.reader import load_reader
from ralm_jax.text import read_text
from ralm_jax.tokenizer import load_tokenizer


@pytest.mark.slow
def test_smollm2_on_wikitext(shared, smollm2_gguf, tmp_path, one_device):
    reader = load_reader(str(smollm2_gguf), mesh=one_device)
    reader.save(tmp_path / "smollm2")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "smollm2").eval()
    text = read_text(str(shared / "data/text/wikitext-103-v1.test.lines.jsonl.gz"))
    ids = load_tokenizer(str(smollm2_gguf)).encode(text.content)[None, :1024]

    def label_log_probs(logits):
        log_probs = torch.log_softmax(torch.tensor(np.array(logits))[0, :-1].double(), dim=-1)
        return log_probs.gather(1, torch.tensor(ids[0, 1:, None].astype(np.int64)))[:, 0].numpy()

    with torch.no_grad():
        expected = label_log_probs(model(torch.tensor(ids.astype(np.int64))).logits.numpy())
    np.testing.assert_allclose(label_log_probs(reader.logits(ids)), expected, atol=2e-4)
    assert np.exp(-expected.mean()) == pytest.approx(13.7547, rel=1e-4)
