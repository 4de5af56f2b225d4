"""Weights, configuration and tokenizer fields of a GGUF file of the Llama family."""

import functools
from pathlib import Path
from typing import Any

import numpy as np

from ralm_jax.config import ConfigFile
from ralm_jax.errors import RalmError
from ralm_jax.sources.base import Index, TensorInfo, sampled_hash

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

    def size(self, key: str, default: int | None = None) -> int:
        """The value of field `key`, or `default`.

        Raises:
            RalmError: it is missing, or not a whole number above 0.
        """
        value = self.require(key) if default is None else self.get(key, default)
        if not isinstance(value, int) or value < 1:
            raise RalmError(f"{self.path}: GGUF field {key!r} is {value!r}, expected a number of 1 or more")
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
    heads, hidden = file.size("llama.attention.head_count"), file.size("llama.embedding_length")
    if "token_embd.weight" not in file.tensors:
        raise RalmError(f"{file.path}: token_embd.weight is missing")
    head_dim = file.size("llama.attention.key_length", hidden // heads)
    values = {
        "model_type": "llama",
        "vocab_size": int(file.tensors["token_embd.weight"].shape[-1]),
        "hidden_size": hidden,
        "num_hidden_layers": file.require("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "partial_rotary_factor": file.size("llama.rope.dimension_count", head_dim) / head_dim,
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
    for name in ("bos", "eos"):
        number = file.get(f"tokenizer.ggml.{name}_token_id")
        if number is not None:
            values[f"{name}_token_id"] = number
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
                self.tensors[name] = TensorInfo(shape, "F32", file.path.name, tensor.tensor_type.name)
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
    *block, stem, suffix = name.split(".") if "." in name else (name, "")
    layer = block[1] if len(block) == 2 and block[0] == "blk" else ""
    template = GGUF_NAMES.get(stem)
    if template is None or ("{}" in template) != bool(layer) or suffix not in ("weight", "bias"):
        return None
    return f"{template.format(layer)}.{suffix}"
