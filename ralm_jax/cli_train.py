"""`ralm train`: commands that learn something. As in `cli`, nothing heavy is imported before one runs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import tyro

from ralm_jax.cli_options import APIOptions, DeviceOptions, ExcludeOptions, ReaderOptions, RerunOptions, TextOptions
from ralm_jax.errors import UsageError
from ralm_jax.settings import (
    AttentionName,
    ContextSettings,
    InstructSettings,
    QuerySettings,
    ReaderTrainSettings,
    RerankerSettings,
    Split,
    StrideSettings,
    TrainSettings,
    WindowSettings,
    at_least,
)


@dataclass(frozen=True)
class TrainingText(TextOptions):
    """The text that is learned from."""

    split: Split = "train"
    """Split of --dataset."""


@dataclass(frozen=True)
class RerankerData:
    """Collect what a reranker learns from: a sample of a text's strides, with passages, scored by the frozen reader."""

    model: str
    """The reader: a folder, a .gguf file, a Hugging Face id, or openai:NAME for a server's."""
    index: str
    """Folder that `ralm index` made."""
    out: str
    """Folder for the examples: a RetrievalTable and a ScoreTable."""
    examples: int = 300_000
    """Strides to draw."""
    seed: int = 0
    """Of the sample."""
    without: tuple[str, ...] = ()
    """Texts that will be evaluated: strides that share a run of 13 words with them are left out."""
    text: TrainingText = TrainingText()
    exclude: ExcludeOptions = ExcludeOptions()
    strides: StrideSettings = StrideSettings()
    queries: QuerySettings = QuerySettings()
    windows: WindowSettings = WindowSettings()
    reader: ReaderOptions = ReaderOptions()
    api: APIOptions = APIOptions()
    rerun: RerunOptions = RerunOptions()

    def run(self) -> None:
        from ralm_jax.text import read_text
        from retrieval.retriever import open_index
        from train.collect import check_windows, collect

        check_windows(self.strides, self.windows)  # known before anything is loaded
        at_least(1, examples=self.examples)
        at_least(0, seed=self.seed)
        batch_size, text = self.reader.windows_a_batch(), self.text.read()
        excluded, without = self.exclude.titles(self.text), [read_text(path) for path in self.without]
        index = open_index(self.index)
        tokenizer, reader = self.reader.load(self.model, self.api)
        with self.api.accounting(reader):
            sample = collect(
                text,
                reader,
                tokenizer,
                index,
                self.out,
                examples=self.examples,
                seed=self.seed,
                without=without,
                strides=self.strides,
                queries=self.queries,
                windows=self.windows,
                excluded=excluded,
                batch_size=batch_size,
                if_exists=self.rerun.if_exists,
            )
        print(f"{self.out}: {len(sample.schedule) - 1:,} of the text's {sample.strides:,} strides")
        if self.without:
            named = ", ".join(self.without)
            print(f"{sample.left_out:,} strides were left out of the draw: they share words with {named}")


@dataclass(frozen=True)
class Reranker:
    """Train a predictive reranker to choose the passage that helps the reader most."""

    init: str
    """What is trained: a BERT, RoBERTa or cross-encoder, as a folder or a Hugging Face id."""
    data: str
    """Folder that `ralm train reranker-data` made."""
    out: str
    """Folder for checkpoints, metrics.csv, and the trained model in `model`."""
    index: str | None = None
    """The index of the examples, if it has been moved."""
    text: TrainingText = TrainingText()
    reranker: RerankerSettings = RerankerSettings()
    training: TrainSettings = TrainSettings()
    devices: DeviceOptions = DeviceOptions()
    rerun: RerunOptions = RerunOptions()

    def run(self) -> None:
        from train.reranker import MODEL, train_reranker

        train_reranker(
            self.init,
            self.data,
            self.text.read(),
            self.out,
            settings=self.training,
            reranker=self.reranker,
            index=self.index,
            mesh=self.devices.all(),
            if_exists=self.rerun.if_exists,
            announce=lambda line: print(line, flush=True),
        )
        print(f"The reranker, for `ralm rerank --reranker {self.out}/{MODEL}`, is there.")


@dataclass(frozen=True)
class Documents:
    """What a reader learns from."""

    text: tuple[str, ...] = ()
    """Files that are one long document each: plain text, or jsonl rows that are joined, compressed (gzip, zstd) or
    not."""
    data: tuple[str, ...] = ()
    """Files with a document a row, a string or {"text"}: jsonl, compressed or not, or Parquet."""

    def read(self) -> Iterator[str]:
        """
        Raises:
            UsageError: none is named.
        """
        from train.windows import read_documents

        if not self.text and not self.data:
            raise UsageError("name what is learned from with --text or --data")
        return read_documents(self.text, self.data)


@dataclass(frozen=True)
class TunedReader:
    """How the reader that is tuned is loaded and run."""

    tokenizer: str | None = None
    """Where the tokenizer is, if not with the model."""
    attention: AttentionName = "auto"
    """How attention is computed: xla everywhere, splash on TPUs, cudnn on GPUs in 16 bits; auto takes what the devices
    have."""
    devices: DeviceOptions = DeviceOptions()


@dataclass(frozen=True)
class Context:
    """Extend a reader's window by position interpolation, and tune it on long documents."""

    model: str
    """The reader, of the family llama: a folder, a .gguf file or a Hugging Face id."""
    out: str
    """Folder for checkpoints, metrics.csv, perplexity.csv by position, and the reader in `model`."""
    documents: Documents = Documents()
    context: ContextSettings = ContextSettings()
    training: ReaderTrainSettings = ReaderTrainSettings()
    reader: TunedReader = TunedReader()
    rerun: RerunOptions = RerunOptions()

    def run(self) -> None:
        from train.context import MODEL, train_context

        train_context(
            self.model,
            self.documents.read(),
            self.out,
            settings=self.training,
            context=self.context,
            tokenizer=self.reader.tokenizer,
            attention=self.reader.attention,
            mesh=self.reader.devices.all(),
            if_exists=self.rerun.if_exists,
            announce=lambda line: print(line, flush=True),
        )
        print(f"The reader, for --model {self.out}/{MODEL}, is there.")


@dataclass(frozen=True)
class Instruct:
    """Tune a reader to answer: of conversations it learns the answers."""

    model: str
    """The reader: a folder, a .gguf file or a Hugging Face id."""
    data: tuple[str, ...]
    """jsonl files of conversations: {"question", "answer"}, or {"messages": [{"role", "content"}, …]} of user and
    assistant in turn; with "system" and "context" where there are."""
    out: str
    """Folder for checkpoints, metrics.csv, and the reader in `model`."""
    weights: tuple[float, ...] = ()
    """How much of the blend's windows each file of --data has. Default: as many as it fills."""
    instruct: InstructSettings = InstructSettings()
    training: ReaderTrainSettings = ReaderTrainSettings()
    reader: TunedReader = TunedReader()
    rerun: RerunOptions = RerunOptions()

    def run(self) -> None:
        from train.context import MODEL
        from train.instruct import train_instruct

        if not self.data:
            raise UsageError("--data: name at least one file")
        train_instruct(
            self.model,
            self.data,
            self.out,
            settings=self.training,
            instruct=self.instruct,
            weights=self.weights,
            tokenizer=self.reader.tokenizer,
            attention=self.reader.attention,
            mesh=self.reader.devices.all(),
            if_exists=self.rerun.if_exists,
            announce=lambda line: print(line, flush=True),
        )
        print(f"The reader, for --model {self.out}/{MODEL}, is there.")


@dataclass(frozen=True)
class Train:
    """Train what helps a frozen reader, or the reader itself."""

    task: (
        Annotated[RerankerData, tyro.conf.subcommand("reranker-data", prefix_name=False)]
        | Annotated[Reranker, tyro.conf.subcommand("reranker", prefix_name=False)]
        | Annotated[Context, tyro.conf.subcommand("context", prefix_name=False)]
        | Annotated[Instruct, tyro.conf.subcommand("instruct", prefix_name=False)]
    )

    @property
    def rerun(self) -> RerunOptions:
        return self.task.rerun

    @property
    def saves_memory(self) -> str:
        return "a smaller --batch-size" if isinstance(self.task, RerankerData) else "more --micro-batches"

    def run(self) -> None:
        self.task.run()
