"""Where a reader's tensors come from: safetensors files (one or sharded), or a GGUF file of the Llama family.

A source lists every tensor's name, shape and dtype from the headers alone, and reads any slice of one as NumPy.
Headers are checked in full before a byte of a tensor is read.
"""

import functools
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from ralm_jax.config import ConfigFile
from ralm_jax.errors import RalmError
from ralm_jax.text import parse_json

Index = tuple[slice, ...]

SAMPLE_BYTES = 1 << 14  # a fingerprint reads so much at the start, in the middle and at the end of every tensor


class TensorInfo(NamedTuple):
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it: F32, BF16, …
    file: str  # for messages


class TensorSource(Protocol):
    """Tensors by Hugging Face name."""

    tensors: dict[str, TensorInfo]

    def read(self, name: str, index: Index) -> np.ndarray:
        """The slice `index` of tensor `name`, in the dtype that it is stored in."""

    def fingerprint(self) -> str:
        """A hash of names, shapes and samples of every tensor; reading all of a large model would take minutes."""


def sampled_hash(path: Path, spans: Iterable[tuple[int, int]]) -> bytes:
    """SHA-256 over the size of a file, what lies in front of its first tensor, and samples of each tensor; `spans`
    are the tensors' first bytes and lengths."""
    digest = hashlib.sha256(str(path.stat().st_size).encode())
    ordered = sorted(spans)
    with path.open("rb") as file:
        digest.update(file.read(ordered[0][0] if ordered else -1))
        for start, length in ordered:
            for place in (0, (length - SAMPLE_BYTES) // 2, length - SAMPLE_BYTES):
                file.seek(start + max(0, place))
                digest.update(file.read(min(SAMPLE_BYTES, length)))
    return digest.digest()


# --- safetensors ---


class SafetensorsSource:
    """The `model.safetensors` of a folder, or the shards that its `model.safetensors.index.json` names.

    Raises:
        RalmError: no weights; a missing, truncated or malformed shard; an index that does not fit its shards.
    """

    def __init__(self, folder: Path):
        paths, index = weight_files(folder)
        self._paths = {path.name: path for path in paths}
        self._spans: dict[Path, list[tuple[int, int]]] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for path in paths:
            header = read_header(path)
            self._spans[path] = [entry.span for entry in header.values()]
            for name, entry in header.items():
                if name in self.tensors:
                    raise RalmError(
                        f"{path}: {name} is also in {self.tensors[name].file}; it each tensor must be in one file"
                    )
                self.tensors[name] = TensorInfo(entry.shape, entry.dtype, path.name)
        if index is not None:
            check_index(folder, index, {name: info.file for name, info in self.tensors.items()})

    def read(self, name: str, index: Index) -> np.ndarray:
        from safetensors import safe_open

        # opened anew each time: pages of a mapping that stays open count as memory, up to the whole file
        with safe_open(self._paths[self.tensors[name].file], framework="np") as file:
            return file.get_slice(name)[index]

    def fingerprint(self) -> str:
        hashes = (sampled_hash(path, spans) for path, spans in self._spans.items())
        return hashlib.sha256(b"".join(hashes)).hexdigest()


def weight_files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The safetensors files of `folder` and, if there is one, the index: tensor name -> file name."""
    single, index_path = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not index_path.exists():
        if single.exists():
            return [single], None
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        hint = f" ({pickles[0]} is a pickle: convert it to safetensors with transformers)" if pickles else ""
        raise RalmError(f"{folder}: no model.safetensors and no model.safetensors.index.json{hint}")
    content = parse_json(index_path.read_bytes(), str(index_path))
    index = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
        raise RalmError(f"{index_path}: not a safetensors index (expected weight_map: tensor -> file)")
    files = sorted(set(index.values()))
    if single.exists() and files != [single.name]:
        raise RalmError(
            f"{folder}: model.safetensors lies beside an index of {len(files)} other files, and one of the two is "
            "stale; move one away"
        )
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise RalmError(f"{folder}: {len(missing)} of {len(files)} shards are missing: {', '.join(missing[:5])}")
    return [folder / file for file in files], index


def check_index(folder: Path, index: dict[str, str], found: dict[str, str]) -> None:
    """Refuses an index that places a tensor elsewhere than the shards do."""
    differing = sorted(name for name in found.keys() | index.keys() if found.get(name) != index.get(name))
    if differing:
        name = differing[0]
        raise RalmError(
            f"{folder}: the index is stale, {len(differing)} tensors differ: for {name} it says "
            f"{index.get(name, 'nothing')}, but the tensor is in {found.get(name, 'no file')}"
        )


class HeaderEntry(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    span: tuple[int, int]  # first byte in the file, and how many


def read_header(path: Path) -> dict[str, HeaderEntry]:
    """The tensors of a safetensors file by name; the data is left alone.

    Raises:
        RalmError: a header that is cut off, oversized, not JSON, with a key twice, or whose offsets leave holes,
            overlap or do not match shapes and file size.
    """
    from safetensors import SafetensorError, safe_open

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in entries if keys.count(key) > 1)
            raise ValueError(f"{twice} appears twice in the header")
        return entries

    try:
        with safe_open(path, framework="np"):  # checks lengths, offsets and file size
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length), object_pairs_hook=unique)
    except (SafetensorError, OSError, ValueError) as error:
        raise RalmError(f"{path}: not a whole safetensors file ({error}); fetch it again") from None
    header.pop("__metadata__", None)
    entries = {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        entries[name] = HeaderEntry(entry["dtype"], tuple(entry["shape"]), (8 + length + start, stop - start))
    return entries


# --- GGUF ---

GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "model.layers.{}.input_layernorm",
    "attn_q": "model.layers.{}.self_attn.q_proj",
    "attn_k": "model.layers.{}.self_attn.k_proj",
    "attn_v": "model.layers.{}.self_attn.v_proj",
    "attn_output": "model.layers.{}.self_attn.o_proj",
    "ffn_norm": "model.layers.{}.post_attention_layernorm",
    "ffn_gate": "model.layers.{}.mlp.gate_proj",
    "ffn_up": "model.layers.{}.mlp.up_proj",
    "ffn_down": "model.layers.{}.mlp.down_proj",
}


class GGUFFile:
    """A GGUF file: its fields, decoded on demand, and its tensors.

    Raises:
        RalmError: not a GGUF file, or a truncated one.
    """

    def __init__(self, path: Path):
        from gguf import GGUFReader

        self.path = path
        try:
            self._reader = GGUFReader(path)
            self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        except (OSError, ValueError, IndexError, KeyError, OverflowError) as error:
            raise RalmError(f"{path}: not a whole GGUF file ({error}); fetch it again") from None

    def get(self, key: str, default: Any = None) -> Any:
        """The value of field `key`, or `default`."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        """The value of field `key`.

        Raises:
            RalmError: the field is missing.
        """
        value = self.get(key)
        if value is None:
            raise RalmError(f"{self.path}: GGUF field {key!r} is missing")
        return value


def open_gguf(path: Path) -> GGUFFile:
    """`path` as a `GGUFFile`; parsed once for weights, configuration and tokenizer."""
    state = path.stat()
    return parsed_gguf(path, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=1)
def parsed_gguf(path: Path, _time: int, _size: int) -> GGUFFile:
    return GGUFFile(path)


def gguf_config(file: GGUFFile) -> ConfigFile:
    """The fields of a llama GGUF under the names of a Hugging Face `config.json`.

    Raises:
        RalmError: another architecture, or a field that is missing.
    """
    architecture = file.require("general.architecture")
    if architecture != "llama":
        raise RalmError(f"{file.path}: GGUF architecture {architecture!r} is not supported (supported: llama)")
    heads, hidden = file.require("llama.attention.head_count"), file.require("llama.embedding_length")
    if "token_embd.weight" not in file.tensors:
        raise RalmError(f"{file.path}: token_embd.weight is missing")
    head_dim = file.get("llama.attention.key_length", hidden // heads)
    values = {
        "model_type": "llama",
        "vocab_size": int(file.tensors["token_embd.weight"].shape[-1]),
        "hidden_size": hidden,
        "num_hidden_layers": file.require("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "partial_rotary_factor": file.get("llama.rope.dimension_count", head_dim) / head_dim,
        "intermediate_size": file.require("llama.feed_forward_length"),
        "max_position_embeddings": file.require("llama.context_length"),
        "rms_norm_eps": file.require("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": file.get("llama.rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    # older files state a linear factor alone
    linear = file.get("llama.rope.scale_linear")
    scaling = file.get("llama.rope.scaling.type", "none" if linear is None else "linear")
    if scaling != "none":
        factor = file.get("llama.rope.scaling.factor", linear)
        values["rope_scaling"] = {"rope_type": scaling, "factor": factor}
    return ConfigFile(values, str(file.path))


class GGUFSource:
    """The tensors of a llama GGUF under Hugging Face's names, dequantised to float32, in Hugging Face's row order.

    Raises:
        RalmError: a tensor that no Llama has.
    """

    def __init__(self, file: GGUFFile):
        self._file = file
        config = gguf_config(file).values
        # llama.cpp interleaves the two rotary halves of each query and key head
        self._interleaved = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        self._names: dict[str, str] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._last: tuple[str, np.ndarray] = ("", np.empty(0))
        unknown = []
        for gguf_name, tensor in file.tensors.items():
            name = gguf_to_hf(gguf_name)
            if name is None:
                unknown.append(gguf_name)
            else:
                self._names[name] = gguf_name
                shape = tuple(int(size) for size in reversed(tensor.shape))
                self.tensors[name] = TensorInfo(shape, "F32", file.path.name)
        if unknown:
            raise RalmError(f"{file.path}: {len(unknown)} tensors that no Llama has: {', '.join(unknown[:5])}")

    def read(self, name: str, index: Index) -> np.ndarray:
        if self._last[0] != name:  # the devices ask for slices of the same tensor one after another
            self._last = (name, self._dequantised(name))
        return self._last[1][index]

    def _dequantised(self, name: str) -> np.ndarray:
        from gguf.quants import dequantize

        tensor = self._file.tensors[self._names[name]]
        values = dequantize(tensor.data, tensor.tensor_type).reshape(self.tensors[name].shape)
        heads = self._interleaved.get(name.split(".")[-2])
        if heads is None:
            return values
        pairs = values.reshape(heads, -1, 2, *values.shape[1:])  # head, pair, half, …
        return pairs.swapaxes(1, 2).reshape(values.shape)

    def fingerprint(self) -> str:
        spans = [(int(tensor.data_offset), int(tensor.n_bytes)) for tensor in self._file.tensors.values()]
        return sampled_hash(self._file.path, spans).hex()


def gguf_to_hf(name: str) -> str | None:
    """Hugging Face's name of a llama GGUF tensor, "blk.3.attn_q.weight" for one; None if there is none."""
    *block, stem, suffix = name.split(".")
    layer = block[1] if len(block) == 2 and block[0] == "blk" else ""
    template = GGUF_NAMES.get(stem)
    if template is None or ("{}" in template) != bool(layer) or suffix not in ("weight", "bias"):
        return None
    return f"{template.format(layer)}.{suffix}"
