"""MODEL on the command line: a folder, a .gguf file, or a Hugging Face id."""

import re
from pathlib import Path

from ralm_jax.errors import RalmError, UsageError, first_line
from ralm_jax.openai_client import is_api

CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    CHAT_TEMPLATE,
)
DESCRIPTIONS = (
    "config.json",
    "generation_config.json",
    "modules.json",
    "sentence_bert_config.json",
    "*_Pooling/config.json",
    *TOKENIZER_FILES,
)
WEIGHTS = ("model*.safetensors*", "flax_model*.msgpack*", "pytorch_model*.bin*")  # in order of preference


def locate(model: str, *, weights: bool = True) -> Path:
    """The local folder or .gguf file of `model`; an id is fetched through `huggingface_hub` and its cache.

    Args:
        weights: fetch the weights too, not only configuration and tokenizer.

    Raises:
        UsageError: no such folder or file, and no Hugging Face id either; or a server's model.
        RalmError: the id cannot be fetched (unknown, gated, no network, or offline mode and not in the cache).
    """
    if is_api(model):
        raise UsageError(f"{model}: is a server's; this needs the model's files")
    path = Path(model).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise UsageError(f"{model}: a model is a folder, a .gguf file or a Hugging Face id, not this file")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) or model.startswith(".") or model.endswith(".gguf"):
        raise UsageError(f"{model}: no such folder or file")
    return fetch(model, weights)


def fetch(model: str, weights: bool) -> Path:
    """Downloads what is needed of a Hugging Face id, or finds it in the cache (HF_HUB_OFFLINE=1: only there)."""
    from huggingface_hub import constants, errors, snapshot_download

    offline = " (offline mode, HF_HUB_OFFLINE, is on)" if constants.HF_HUB_OFFLINE else ""
    try:
        folder = Path(snapshot_download(model, allow_patterns=list(DESCRIPTIONS)))
        for pattern in WEIGHTS if weights else ():
            snapshot_download(model, allow_patterns=[pattern])
            if any(folder.glob(pattern)):
                break
        return folder
    except errors.LocalEntryNotFoundError:
        raise RalmError(
            f"{model}: no such folder, and not in the Hugging Face cache nor reachable on the hub{offline}"
        ) from None
    except errors.HFValidationError:
        raise UsageError(f"{model}: no such folder, and not a Hugging Face id") from None
    except (errors.HTTPError, OSError) as error:  # unknown or gated repository, no network, an incomplete snapshot
        raise RalmError(f"{model}: could not be fetched from the hub: {first_line(error)}") from None
