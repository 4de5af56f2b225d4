"""The settings of the protocol; the paper's values are the defaults (In-Context RALM, sections 3 to 6).

Nothing heavy is imported here: the command line reads its options and their help from these classes.
"""

from dataclasses import dataclass
from typing import Literal

from ralm_jax.errors import UsageError

Preset = Literal["default", "ai21"]
Bos = Literal["every-window", "passage"]
Exclusion = Literal["inside", "after"]
IfExists = Literal["refuse", "resume", "overwrite"]
QueryTokens = Literal["reader", "retriever"]
DenseSearch = Literal["jax", "faiss"]
TextDataset = Literal["wikitext-103", "realnews", "arxiv", "stackexchange", "freelaw"]
QuestionDataset = Literal["nq", "triviaqa"]
Prompts = Literal["ram2023", "liu2023", "instruct"]
LongTask = Literal[
    "qmsum", "qasper", "narrativeqa", "quality", "musique", "hotpotqa", "multifieldqa_en", "trec", "samsum"
]
LongPrompts = Literal["xu2023", "longbench"]
MetricFamily = Literal["longbench", "scrolls", "nvidia"]
RougePackage = Literal["rouge", "rouge-score"]
Truncation = Literal["middle", "document-tail", "context-tail"]
Split = Literal["test", "validation", "train"]
RerankerLoss = Literal["marginal", "kl"]
AttentionName = Literal["auto", "xla", "cudnn", "splash"]
Decay = Literal["linear", "cosine", "constant"]
Template = Literal["xu2023", "chat"]
PREFIX_TOKENS = 128  # that a reranker reads


def at_least(minimum: int, **values: int | None) -> None:
    """
    Raises:
        UsageError: a value is below `minimum`.
    """
    for name, value in values.items():
        if value is not None and value < minimum:
            raise UsageError(f"{name.replace('_', ' ')} must be at least {minimum}, not {value}")


@dataclass(frozen=True)
class StrideSettings:
    """How the text is cut into windows and strides."""

    window: int = 1024
    """Tokens a window."""
    stride: int = 4
    """Tokens that each window after the first predicts; there is one retrieval a stride."""
    limit_strides: int | None = None
    """Only the first so many strides, the first window included. Default: all."""
    preset: Preset = "default"
    """ai21: special tokens and title exclusion as in the paper's released code."""

    def __post_init__(self) -> None:
        at_least(1, window=self.window, stride=self.stride, limit_strides=self.limit_strides)
        if self.stride >= self.window:
            raise UsageError(
                f"stride {self.stride} in windows of {self.window} would leave tokens unscored; the stride must be "
                "smaller than the window"
            )


@dataclass(frozen=True)
class QuerySettings:
    """How passages are found."""

    k: int = 16
    """Passages a stride."""
    query_length: int = 32
    """Tokens before the target that make the query."""
    query_tokens: QueryTokens = "reader"
    """Whose tokens these are: the reader's, or those of a dense retriever's own tokenizer."""
    exclusion: Exclusion | None = None
    """Leave titles out inside the search (k hits guaranteed) or after it. Default: inside; ai21: after."""

    def __post_init__(self) -> None:
        at_least(1, k=self.k, query_length=self.query_length)

    def exclusion_of(self, preset: Preset) -> Exclusion:
        """Where titles are left out. "after" is what the paper's code does: it drops them from the first
        max(100, 4 k) hits, and fewer than k may remain."""
        return self.exclusion or ("after" if preset == "ai21" else "inside")


@dataclass(frozen=True)
class WindowSettings:
    """How windows are built from text and passages."""

    past: int = 32
    """Tokens before the target that are scored too, for zero-shot reranking."""
    passage_tokens: int = 256
    """A passage is cut to so many tokens."""
    passages_in_window: int = 1
    """Passages that stand in a window together, the best nearest to the prefix: the first so many are candidate 1, the
    next candidate 2, and so on. Where all of them have no room, each is cut to its share."""
    bos: Bos | None = None
    """Where the BOS of a tokenizer that adds one goes. Default: every-window; ai21: passage."""
    block: int | None = None
    """Strides of a block of so many tokens share the window of a passage, which ends with the block: faster, with up to
    half of block - stride tokens more or less at the prefix's far end, as far as the reader has positions. Default: the
    stride, which is exact."""

    def __post_init__(self) -> None:
        at_least(0, past=self.past)
        at_least(1, passage_tokens=self.passage_tokens, block=self.block, passages_in_window=self.passages_in_window)

    def bos_of(self, preset: Preset) -> Bos:
        """Where special tokens go. "every-window": BOS once in front of every window, no special token inside.
        "passage", as in the paper's code: passages carry what the tokenizer adds by default, text carries none."""
        return self.bos or ("passage" if preset == "ai21" else "every-window")

    def block_strides(self, strides: StrideSettings) -> int:
        """Strides that share windows.

        Raises:
            UsageError: a block is no whole number of strides.
        """
        block = self.block or strides.stride
        if block % strides.stride:
            raise UsageError(f"a block of {block} tokens is no whole number of strides of {strides.stride}")
        return block // strides.stride

    def passage_limit(self, strides: StrideSettings) -> int:
        """Tokens that a passage may have: as many as asked for, and as leave targets and past tokens in the window.

        Raises:
            UsageError: there is no room for any, or as `block_strides`.
        """
        block = self.block_strides(strides) * strides.stride
        room = (strides.window - block - self.past) // self.passages_in_window
        if room < 1:
            beside = f"a block of {block}" if block > strides.stride else f"stride {block}"
            several = f" for {self.passages_in_window} passages" if self.passages_in_window > 1 else ""
            raise UsageError(
                f"a window of {strides.window} has no room{several} beside {beside} and past {self.past}; use a "
                "larger window or a smaller past"
            )
        return min(self.passage_tokens, room)


@dataclass(frozen=True)
class RerankSettings:
    """What of a text and a passage a reranker reads."""

    prefix_tokens: int | None = None
    """Tokens of the reranker's own before the target that it reads. Default: as it was trained, or 128 where that
    is not known."""
    pair_tokens: int | None = None
    """Tokens that prefix and passage may have together, special tokens included; the passage loses its end. Default: as
    it was trained, or the reranker's positions."""

    def __post_init__(self) -> None:
        at_least(1, prefix_tokens=self.prefix_tokens, pair_tokens=self.pair_tokens)


@dataclass(frozen=True)
class TrainSettings:
    """How parameters are learned. The paper states steps, batch size and peak learning rate; the rest is usual."""

    steps: int = 10_000
    """Updates."""
    batch_size: int = 32
    """Examples an update."""
    micro_batches: int = 1
    """Parts that a batch is worked through in, where memory is short; only dropout's draws differ."""
    learning_rate: float = 1e-5
    """At its peak."""
    warmup: float = 0.1
    """Share of the steps that the learning rate rises over."""
    decay: Decay = "linear"
    """How the learning rate falls to 0 afterwards, or stays."""
    weight_decay: float = 0.01
    """Of matrices and embeddings; biases and norms have none."""
    beta1: float = 0.9
    """Of AdamW."""
    beta2: float = 0.999
    """Of AdamW."""
    clip: float = 1.0
    """Longest gradient, over all parameters; 0 for any length."""
    dropout: float = 0.1
    """Share of activations that a step leaves out."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation; parameters and optimiser are float32 always."""
    seed: int = 0
    """For the order of examples, dropout, and parameters that the model lacks."""
    check_every: int = 500
    """Steps from one evaluation on held-out examples, and checkpoint, to the next."""
    log_every: int = 10
    """Steps from one line on the terminal to the next."""

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, batch_size=self.batch_size, micro_batches=self.micro_batches)
        at_least(1, check_every=self.check_every, log_every=self.log_every)
        at_least(0, seed=self.seed)
        for name, low, high in (("warmup", 0, 1), ("dropout", 0, 0.99), ("beta1", 0, 0.9999), ("beta2", 0, 0.9999)):
            if not low <= getattr(self, name) <= high:
                raise UsageError(f"{name} must be from {low} to {high}, not {getattr(self, name)}")
        for name in ("learning_rate", "weight_decay", "clip"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UsageError(f"{name.replace('_', ' ')} must be 0 or more, not {getattr(self, name)}")
        if self.batch_size % self.micro_batches:
            raise UsageError(f"{self.micro_batches} micro batches do not divide a batch of {self.batch_size}")


@dataclass(frozen=True)
class ReaderTrainSettings(TrainSettings):
    """How a reader is tuned. Steps, batch size and the constant learning rate are those of Retrieval meets
    long context; no weight decay and beta2 those of Chen et al. (2023)."""

    steps: int = 1000
    """Updates."""
    batch_size: int = 128
    """Windows an update."""
    learning_rate: float = 5e-6
    """At its peak."""
    warmup: float = 0.0
    """Share of the steps that the learning rate rises over."""
    decay: Decay = "constant"
    """How the learning rate falls to 0 afterwards, or stays."""
    weight_decay: float = 0.0
    """Of matrices and embeddings; biases and norms have none."""
    beta2: float = 0.95
    """Of AdamW."""
    dropout: float = 0.0
    """Readers have none."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the computation; parameters and optimiser are float32 always."""
    check_every: int = 100
    """Steps from one evaluation on held-out windows, and checkpoint, to the next."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dropout:
            raise UsageError("readers have no dropout; leave --dropout at 0")


@dataclass(frozen=True)
class ContextSettings:
    """How a reader's window grows."""

    factor: int = 4
    """Times the window that the reader has; 1 tunes it as it is."""
    again: bool = False
    """Extend a reader whose positions are interpolated already: factors multiply."""
    pack: bool = True
    """Several documents share a window and do not see each other; otherwise each has windows of its own."""
    held_out: float = 0.05
    """Share of the documents, cut into windows, that comes last and only evaluates."""
    held_out_limit: int = 64
    """At most so many of these windows, evenly spread, are evaluated on."""

    def __post_init__(self) -> None:
        at_least(1, factor=self.factor, held_out_limit=self.held_out_limit)
        if not 0 <= self.held_out < 1:
            raise UsageError(f"held out must be from 0 to below 1, not {self.held_out}")


@dataclass(frozen=True)
class InstructSettings:
    """What a reader learns answers from."""

    window: int | None = None
    """Tokens a window; conversations that are longer are left out, and counted. Default: the reader's positions."""
    pack: bool = True
    """Several conversations share a window and do not see each other; otherwise each has a window of its own."""
    template: Template = "xu2023"
    """What the reader reads. xu2023: "System: …", context, "User: …", "Assistant: …". chat: the chat template of its
    tokenizer, with the context in front of the first question."""
    held_out: float = 0.05
    """Share of each file, its last rows, that only evaluates."""

    def __post_init__(self) -> None:
        at_least(1, window=self.window)
        if not 0 <= self.held_out < 1:
            raise UsageError(f"held out must be from 0 to below 1, not {self.held_out}")


@dataclass(frozen=True)
class RerankerSettings(RerankSettings):
    """What a predictive reranker learns from."""

    k: int = 16
    """Passages a stride."""
    prefix_tokens: int = PREFIX_TOKENS
    """Tokens of the reranker's own before the target that it reads: long enough to say what the text is about, and a
    passage of 100 words nearly always fits beside them in 320."""
    pair_tokens: int = 320
    """Tokens that prefix and passage may have together, special tokens included; the passage loses its end."""
    held_out: float = 0.1
    """Share of the examples, the last ones of the text, that only evaluate."""
    held_out_limit: int = 2000
    """At most so many of these, evenly spread, are evaluated on."""
    loss: RerankerLoss = "marginal"
    """marginal: the paper's equation 9. kl: the reader's own distribution over the passages is the target."""
    temperature: float = 1.0
    """Of the reader's distribution in kl; higher is flatter."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, k=self.k, held_out_limit=self.held_out_limit)
        if not 0 <= self.held_out < 1:
            raise UsageError(f"held out must be from 0 to below 1, not {self.held_out}")
        if not 0 < self.temperature < float("inf"):
            raise UsageError(f"temperature must be above 0, not {self.temperature}")
        if self.loss != "kl" and self.temperature != 1:
            raise UsageError("--temperature is for --loss kl")


@dataclass(frozen=True)
class GenerateSettings:
    """How text is written after a prompt."""

    max_new_tokens: int = 128
    """Tokens to write at most."""
    temperature: float = 0.0
    """0 takes the likeliest token always (greedy); otherwise logits are divided by it before one is drawn."""
    top_k: int | None = None
    """Draw from the so many likeliest tokens. Default: all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that have this probability together."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that were there before, and multiplies the negative (Keskar et al.,
    2019)."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are not part of it."""
    seed: int = 0
    """Of what is drawn."""

    def __post_init__(self) -> None:
        at_least(1, max_new_tokens=self.max_new_tokens, top_k=self.top_k)
        at_least(0, seed=self.seed)
        for name, low, high in (("temperature", 0, 100), ("top_p", 1e-6, 1), ("repetition_penalty", 0.01, 100)):
            if not low <= getattr(self, name) <= high:
                raise UsageError(f"{name.replace('_', ' ')} must be from {low:g} to {high}, not {getattr(self, name)}")
        if "" in self.stop:
            raise UsageError("a stop string is empty")
        if self.temperature == 0 and (self.top_k is not None or self.top_p != 1):
            raise UsageError("top k and top p are for drawing tokens: set a temperature above 0")
