"""Benchmarks run, and what they compare is the same."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["smollm2", "gpt2-small"])
def test_scoring(tmp_path, reader, smollm2_gguf):
    script = Path(__file__).parents[2] / "benchmarks" / "scoring.py"
    command = [sys.executable, str(script), "--quick", "--reader", reader, "--json", str(tmp_path / "out.json")]
    subprocess.run(command, check=True, cwd=tmp_path)
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["largest_nll_difference"] < 2e-4
    assert figures["ratio"] > 1.2
    assert figures["ours_peak_mb"] < figures["loop_peak_mb"]
