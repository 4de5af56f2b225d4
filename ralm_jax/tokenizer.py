"""Tokenizers, from a folder, a tokenizer file or a GGUF file, with one explicit policy for special tokens.

`encode` never adds special tokens. What a tokenizer would add by default (BOS for LLaMA and OPT, nothing for GPT-2)
stands in `prefix` and `suffix`, and whoever builds a window decides whether it goes in.
"""

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from ralm_jax.errors import RalmError, UsageError, first_line
from ralm_jax.hub import CHAT_TEMPLATE, TOKENIZER_FILES, locate
from ralm_jax.sources.gguf import GGUFFile, open_gguf
from ralm_jax.text import read_content, read_object, write_text


@dataclass(frozen=True)
class Tokenizer:
    """Text to tokens and back.

    Attributes:
        prefix: special tokens that the tokenizer puts in front of a text by default (BOS, or nothing).
        suffix: those that it puts behind.
        chat_template: Jinja, as `ralm_jax.chat` renders it; empty where there is none.
        named_tokens: special tokens by the names that it has for them, such as ("bos_token", "<s>").
    """

    backend: tokenizers.Tokenizer
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    origin: str
    chat_template: str = ""
    named_tokens: tuple[tuple[str, str], ...] = ()

    def encode(self, text: str) -> np.ndarray:
        """int32 tokens of `text`, without special tokens."""
        return self.encode_with_offsets(text)[0]

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """int32 tokens (n,) of `text` and the characters (n, 2) that each stands for: first, one past the last."""
        (encoding,) = self._encode([text])
        return np.asarray(encoding.ids, np.int32), np.asarray(encoding.offsets, np.int64).reshape(-1, 2)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of every text, on all cores."""
        return [np.asarray(encoding.ids, np.int32) for encoding in self._encode(texts)]

    def _encode(self, texts: Sequence[str]) -> list[tokenizers.Encoding]:
        try:
            return self.backend.encode_batch(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception, a vocabulary without unknown token for one
            raise RalmError(f"{self.origin}: the tokenizer cannot encode the text ({error})") from None

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """The text of `ids`, special tokens included, spaces left alone."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=False)

    @property
    def bos(self) -> int | None:
        """The token that stands in front of a text by default, if there is one.

        Raises:
            RalmError: there are several.
        """
        if len(self.prefix) > 1:
            raise RalmError(
                f"{self.origin}: the tokenizer puts {len(self.prefix)} tokens in front of a text, not one BOS"
            )
        return self.prefix[0] if self.prefix else None

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, as transformers reads them."""
        made = tokenizers.Tokenizer.from_str(self.backend.to_str())
        before, after = ([made.id_to_token(i) for i in ids] for ids in (self.prefix, self.suffix))
        if before or after:
            ids = {made.id_to_token(i): i for i in (*self.prefix, *self.suffix)}
            made.post_processor = processors.TemplateProcessing(
                single=[*before, "$A", *after], special_tokens=list(ids.items())
            )
        made.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast"} | ({"bos_token": before[0]} if before else {})
        config |= dict(self.named_tokens) | ({"chat_template": self.chat_template} if self.chat_template else {})
        write_text(str(folder / "tokenizer_config.json"), json.dumps(config, indent=2, ensure_ascii=False) + "\n")

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of vocabulary, merges, rules and special-token policy."""
        return hashlib.sha256(f"{self.backend.to_str()}{self.prefix}{self.suffix}".encode()).hexdigest()


def load_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of a model folder, .gguf file or Hugging Face id.

    Folders hold tokenizer.json, tokenizer.model (SentencePiece), vocab.json with merges.txt, or vocab.txt (WordPiece);
    naming one of these files names its folder.

    Raises:
        UsageError: no such folder, file or id, or no tokenizer in the folder.
        RalmError: a tokenizer that cannot be read, or of a kind that is not supported.
    """
    named = Path(model).expanduser()
    path = named.parent if named.is_file() and named.name in TOKENIZER_FILES else locate(model, weights=False)
    try:
        return read_tokenizer(path)
    except RalmError:
        raise
    except BaseException as error:  # the library raises bare Exception, and a panic that is not even that
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise RalmError(f"{path}: the tokenizer cannot be read ({first_line(error)})") from None


def read_tokenizer(path: Path) -> Tokenizer:
    """As `load_tokenizer`, with whatever the libraries raise."""
    if path.is_file():
        return gguf_tokenizer(open_gguf(path))
    config = read_object(path / "tokenizer_config.json")
    if (path / "tokenizer.json").exists():
        backend, adds_bos = from_tokenizer_json(path / "tokenizer.json"), None
    elif (path / "tokenizer.model").exists():
        backend, adds_bos = from_sentencepiece(path / "tokenizer.model"), True
    elif (path / "vocab.json").exists() and (path / "merges.txt").exists():
        backend, adds_bos = from_vocab_and_merges(path, config), None
    elif (path / "vocab.txt").exists():
        backend, adds_bos = from_wordpiece(path / "vocab.txt", config), None
    else:
        raise UsageError(
            f"{path}: no tokenizer (tokenizer.json, tokenizer.model, vocab.json with merges.txt, or vocab.txt); "
            "name a folder that has one with --tokenizer"
        )
    # The flag decides where it is stated; otherwise tokenizer.json's template, or the default of the kind.
    prefix, suffix = template_specials(backend)
    wanted = config.get("add_bos_token", adds_bos)
    if wanted is not None:
        prefix = (special_id(backend, config, "bos_token", path),) if wanted else ()
    if config.get("add_eos_token") is not None:
        suffix = (special_id(backend, config, "eos_token", path),) if config["add_eos_token"] else ()
    return Tokenizer(backend, prefix, suffix, str(path), stated_template(path, config), stated_names(path, config))


def stated_template(folder: Path, config: dict[str, Any]) -> str:
    """The chat template of a folder: a file of its own, or in tokenizer_config.json, where several have names."""
    file = folder / CHAT_TEMPLATE
    if file.is_file():
        return read_content(file)
    stated = config.get("chat_template") or ""
    if isinstance(stated, list):
        stated = {one.get("name"): one.get("template") for one in stated if isinstance(one, dict)}.get("default", "")
    return stated if isinstance(stated, str) else ""


def stated_names(folder: Path, config: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """The names of a folder's special tokens, with the tokens."""
    stated = read_object(folder / "special_tokens_map.json") | config
    found = {name: token_text(value) for name, value in stated.items() if name.endswith("_token")}
    return tuple((name, token) for name, token in found.items() if isinstance(token, str))


def from_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise RalmError(f"{path}: not a tokenizer.json that this version of tokenizers reads ({error})") from None
    backend.no_truncation()  # which a file may ask for
    backend.no_padding()
    return backend


def from_vocab_and_merges(folder: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    """GPT-2's byte-level BPE, as GPT-2, GPT-Neo, GPT-J, OPT and RoBERTa store it."""
    try:
        model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    except Exception as error:
        raise RalmError(f"{folder}: vocab.json and merges.txt cannot be read ({error})") from None
    backend = byte_level_bpe(model, pre_tokenizers.ByteLevel(add_prefix_space=False))
    added = read_object(folder / "special_tokens_map.json") | config
    names = {token_text(value) for key, value in added.items() if key.endswith("_token") and value}
    names.add("<|endoftext|>")
    known = sorted(name for name in names if isinstance(name, str) and backend.token_to_id(name) is not None)
    backend.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in known])
    if added.get("cls_token") and added.get("sep_token"):  # RoBERTa's
        enclose(backend, folder, *(token_text(added[name]) for name in ("cls_token", "sep_token")))
    return backend


def from_wordpiece(path: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    """BERT's WordPiece."""
    try:
        model = models.WordPiece.from_file(str(path), unk_token="[UNK]", max_input_chars_per_word=100)
    except Exception as error:
        raise RalmError(f"{path}: cannot be read ({error})") from None
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=config.get("tokenize_chinese_chars", True),
        strip_accents=config.get("strip_accents"),
        lowercase=config.get("do_lower_case", True),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    special = [name for name in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if backend.token_to_id(name) is not None]
    backend.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in special])
    enclose(backend, path, "[CLS]", "[SEP]")
    return backend


def enclose(backend: tokenizers.Tokenizer, path: Path, *tokens: str) -> None:
    """Makes the two `tokens` stand before and after a text by default.

    Raises:
        RalmError: the vocabulary does not have them.
    """
    ids = [backend.token_to_id(token) for token in tokens]
    if None in ids:
        raise RalmError(f"{path}: the vocabulary has no {' or no '.join(tokens)}")
    backend.post_processor = processors.TemplateProcessing(
        single=f"{tokens[0]} $A {tokens[1]}", special_tokens=list(zip(tokens, ids, strict=True))
    )


def byte_level_bpe(model: models.BPE, pre_tokenizer: pre_tokenizers.PreTokenizer) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    return backend


PROBE = (
    "The 1,234 quick\tbrown foxes  jump — naïve ﬁnesse, Ⅷ ½ ａ 日本語 Ωμέγα \U0001f600\n  def f(x):\n    return x\n"
    + " ".join(f"{a}{b}ing {b}{a}tion" for a in "abcdefghijklmnoprstuvw" for b in "aeiouy")
)


def from_sentencepiece(path: Path) -> tokenizers.Tokenizer:
    """LLaMA's SentencePiece BPE with byte fallback.

    Raises:
        RalmError: not a SentencePiece model, or one whose tokens of a probe text are others than ours: a unigram model,
            or one that normalises text.
    """
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.Load(str(path))
    except (OSError, RuntimeError) as error:
        raise RalmError(f"{path}: not a SentencePiece model ({error})") from None
    ids = range(processor.GetPieceSize())
    backend = sentencepiece_bpe(
        [processor.IdToPiece(i) for i in ids],
        [processor.GetScore(i) for i in ids],
        [i for i in ids if processor.IsControl(i) or processor.IsUnknown(i)],
    )
    if backend.encode(PROBE, add_special_tokens=False).ids != processor.Encode(PROBE):
        raise RalmError(
            f"{path}: not a BPE model of LLaMA's kind; name a folder with a tokenizer.json with --tokenizer"
        )
    return backend


def sentencepiece_bpe(
    pieces: list[str], scores: list[float], special: list[int], *, space_prefix: bool = True
) -> tokenizers.Tokenizer:
    """SentencePiece BPE as a `tokenizers` model: two pieces merge where their union is a piece, best score first."""
    ids = {piece: i for i, piece in enumerate(pieces)}
    ranked = []
    for piece, score in zip(pieces, scores, strict=True):
        splits = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        found = sorted((ids[a], ids[b], a, b) for a, b in splits if a in ids and b in ids)
        ranked += [(-score, ids[piece], a, b) for _, _, a, b in found]
    ranked.sort(key=lambda merge: merge[:2])
    unknown = next((pieces[i] for i in special if pieces[i] == "<unk>"), None)
    model = models.BPE(
        vocab=ids, merges=[(a, b) for _, _, a, b in ranked], unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    prefixed = [normalizers.Prepend("▁")] if space_prefix else []
    stripped = [decoders.Strip(" ", 1, 0)] if space_prefix else []
    backend.normalizer = normalizers.Sequence([*prefixed, normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
    )
    backend.add_special_tokens([tokenizers.AddedToken(pieces[i], special=True, normalized=False) for i in special])
    return backend


# Pre-tokenizers by the name that GGUF files give them (llama.cpp's LLAMA_VOCAB_PRE_TYPE_*).
GGUF_PRE_TOKENIZERS = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}
GGUF_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
GGUF_SPECIAL = (2, 3, 4)  # unknown, control, user-defined (llama.cpp's token types)


def gguf_tokenizer(file: GGUFFile) -> Tokenizer:
    """The tokenizer that a GGUF file carries.

    Raises:
        RalmError: a vocabulary kind or pre-tokenizer that is not supported.
    """
    kind, pieces = file.require("tokenizer.ggml.model"), file.require("tokenizer.ggml.tokens")
    types = file.get("tokenizer.ggml.token_type", [1] * len(pieces))
    special = [i for i, piece_type in enumerate(types) if piece_type in GGUF_SPECIAL]
    if kind == "gpt2":
        pre = file.get("tokenizer.ggml.pre", "gpt-2")
        if pre not in GGUF_PRE_TOKENIZERS:
            known = ", ".join(GGUF_PRE_TOKENIZERS)
            raise RalmError(
                f"{file.path}: pre-tokenizer {pre!r} is not supported (supported: {known}); "
                "name a folder with the model's tokenizer.json with --tokenizer"
            )
        merges = [tuple(merge.split(" ", 1)) for merge in file.require("tokenizer.ggml.merges")]
        model = models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges)
        backend = byte_level_bpe(model, GGUF_PRE_TOKENIZERS[pre]())
        backend.add_special_tokens(
            [tokenizers.AddedToken(pieces[i], special=True, normalized=False) for i in sorted(special)]
        )
    elif kind == "llama":
        if file.get("tokenizer.ggml.remove_extra_whitespaces", False):
            raise RalmError(f"{file.path}: a tokenizer that removes extra spaces is not supported")
        space_prefix = file.get("tokenizer.ggml.add_space_prefix", True)
        backend = sentencepiece_bpe(pieces, file.require("tokenizer.ggml.scores"), special, space_prefix=space_prefix)
    else:
        raise RalmError(f"{file.path}: vocabulary kind {kind!r} is not supported (supported: gpt2, llama)")
    adds_bos = file.get("tokenizer.ggml.add_bos_token", kind == "llama")
    adds_eos = file.get("tokenizer.ggml.add_eos_token", False)
    prefix = (int(file.require("tokenizer.ggml.bos_token_id")),) if adds_bos else ()
    suffix = (int(file.require("tokenizer.ggml.eos_token_id")),) if adds_eos else ()
    ids = {name: file.get(f"tokenizer.ggml.{key}_token_id") for name, key in GGUF_NAMES.items()}
    named = tuple((name, pieces[id]) for name, id in ids.items() if id is not None and 0 <= id < len(pieces))
    return Tokenizer(backend, prefix, suffix, str(file.path), file.get("tokenizer.chat_template", ""), named)


def template_specials(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the post-processor of a tokenizer.json puts in front of a text and behind it."""
    encoding = probe(backend)
    if encoding is None:
        return (), ()
    own = [i for i, added in enumerate(encoding.special_tokens_mask) if not added]
    return tuple(encoding.ids[: own[0]]), tuple(encoding.ids[own[-1] + 1 :])


def probe(backend: tokenizers.Tokenizer, *, pair: bool = False) -> tokenizers.Encoding | None:
    """Some text, or a `pair` of the same text, with special tokens around; None where the tokenizer adds none."""
    if not backend.num_special_tokens_to_add(pair):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=False)
    for token in sorted(vocabulary, key=vocabulary.__getitem__):
        try:
            encoding = backend.encode(token, token if pair else None)
        except Exception:  # a word-level vocabulary without an unknown token cannot encode every token's name
            continue
        if not all(encoding.special_tokens_mask):
            return encoding
    return None


def token_text(value: Any) -> Any:
    """A special token is stored as a string or as an object with "content"."""
    return value.get("content") if isinstance(value, dict) else value


def special_id(backend: tokenizers.Tokenizer, config: dict[str, Any], name: str, path: Path) -> int:
    """The id of the special token that the tokenizer's own files call `name`."""
    merged = read_object(path / "special_tokens_map.json") | config
    default = {"bos_token": "<s>", "eos_token": "</s>"}[name]
    token = token_text(merged.get(name, default))
    number = backend.token_to_id(token) if isinstance(token, str) else None
    if number is None:
        raise RalmError(f"{path}: the tokenizer adds {name} = {token!r}, which its vocabulary does not have")
    return number
