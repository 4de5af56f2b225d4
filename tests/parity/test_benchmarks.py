"""Benchmarks run, and what they compare is the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def figures(tmp_path, script, *options):
    path = Path(__file__).parents[2] / "benchmarks" / script
    command = [sys.executable, str(path), "--json", str(tmp_path / "out.json"), *options]
    subprocess.run(command, check=True, cwd=tmp_path, env={**os.environ, "XLA_FLAGS": ""})  # one device
    return json.loads((tmp_path / "out.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("format", ["safetensors", "msgpack"])
def test_loading(tmp_path, format):
    found = figures(tmp_path, "loading.py", "--format", format, "--layers", "26")
    assert found["model_mb"] == pytest.approx(found["checkpoint_mb"])
    assert found["added_mb"] < found["bound_mb"]


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["smollm2", "gpt2"])
def test_scoring(tmp_path, reader, smollm2_gguf):
    (found,) = figures(tmp_path, "scoring.py", "--quick", "--reader", reader)
    assert found["largest_nll_difference"] < 2e-4
    assert found["ratio"] > 1.2
    assert found["ours_peak_mb"] < found["loop_peak_mb"]


@pytest.mark.slow
def test_scoring_as_on_a_gpu(tmp_path, smollm2_gguf):
    options = ("--quick", "--reader", "smollm2", "gpt2", "--dtype", "bfloat16", "--window", "128")
    for found in figures(tmp_path, "scoring.py", *options):
        assert found["dtype"] == "bfloat16"
        assert found["largest_nll_difference"] < 0.3  # bfloat16 has 8 bits
        assert found["ours_tokens_per_second"] > 0 < found["share_of_matmul_rate"]


@pytest.mark.slow
def test_generate(tmp_path, smollm2_gguf):
    for found in figures(tmp_path, "generate.py", "--quick"):
        assert found["same_tokens"] == 1
        assert found["prefill"]["ratio"] > 1
        assert found["decode"]["ratio"] > 1
