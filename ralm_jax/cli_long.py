"""`ralm eval long` and `ralm eval lengths`. As in `cli`, nothing heavy is imported before one runs."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from tyro.conf import arg

from ralm_jax import processes
from ralm_jax.cli_options import (
    APIOptions,
    DeviceOptions,
    ReaderOptions,
    RerunOptions,
    check_output_file,
    distinct,
    refuse_set,
)
from ralm_jax.errors import UsageError
from ralm_jax.openai_client import is_api
from ralm_jax.settings import GenerateSettings, LongPrompts, LongTask, MetricFamily, RougePackage, Truncation, at_least

if TYPE_CHECKING:
    from eval.long import LongSettings
    from eval.long_chunks import Ranker
    from eval.long_metrics import Metric
    from ralm_jax.generate.generator import Generator
    from ralm_jax.tokenizer import Tokenizer

    Opened = tuple[Generator, Tokenizer, int]  # what answers, what cuts its prompts, and its window

TOP, TOPS = 5, (5, 10, 20)


@dataclass(frozen=True)
class LongRetrieval:
    """What the prompt has in place of the document."""

    retriever: Annotated[tuple[str, ...], arg(metavar="none|bm25|ENCODER")] = ("none",)
    """What ranks a document's chunks of 300 words, or a few-shot task's examples: bm25, or an encoder of passages: a
    folder, a Hugging Face id, or openai:NAME for a server's. none: the prompt has the document."""
    query_encoder: str | None = None
    """Encoder of questions, where it is not that of passages (Dragon, DPR)."""
    pooling: Literal["cls", "mean"] | None = None
    """How an encoder makes one vector of a text. Default: as its folder states."""
    top: tuple[int, ...] = ()
    """Chunks in the prompt, most relevant first. Default: 5; of `ralm eval lengths` 5, 10 and 20."""

    def check(self) -> None:
        """
        Raises:
            UsageError: options that would be ignored, or cannot be.
        """
        encoders = [name for name in distinct("retriever", self.retriever) if name not in ("none", "bm25")]
        for number in self.top:
            at_least(1, top=number)
        if not encoders:
            refuse_set(self, "an encoder as --retriever", "query_encoder", "pooling")
        if len(encoders) > 1:
            refuse_set(self, "one encoder as --retriever", "query_encoder")
        if set(self.retriever) == {"none"}:
            refuse_set(self, "a --retriever", "top")

    def tops(self, name: str) -> Sequence[int]:
        """How many chunks of the retriever `name` prompts have; 0 for the document."""
        return (0,) if name == "none" else distinct("top", self.top or (TOP,))

    def ranker(self, name: str, devices: DeviceOptions) -> "Ranker | None":
        """What ranks; None for none. Every process has an encoder of its own.

        Raises:
            UsageError: no such encoder.
            RalmError: it cannot be loaded.
        """
        from eval.long_chunks import BM25Ranker, DenseRanker

        if name in ("none", "bm25"):
            return BM25Ranker() if name == "bm25" else None
        from retrieval.embedder import load_embedder

        passages, *queries = (
            load_embedder(encoder, pooling=self.pooling, mesh=devices.own())
            for encoder in (name, self.query_encoder)
            if encoder
        )
        return DenseRanker(passages, *queries)


@dataclass(frozen=True)
class EvalLong:
    """Have a reader answer questions about long documents, with or without retrieval from them: nine tasks, each by the
    prompts and the metric of its benchmark.

    --task, --window, --retriever and --top take one value or several; every combination has a folder of its own.
    Answers that are there are not asked for again: --resume with another --metric-family only scores them, and with a
    larger --limit-examples asks the others."""

    task: tuple[LongTask, ...]
    """The tasks."""
    model: str
    """The reader: a folder, a .gguf file, a Hugging Face id, or openai:NAME or openai-chat:NAME for a server's, which
    needs --tokenizer and --window."""
    data: str
    """Folder with the public files (LongBench's, SCROLLS', ZeroSCROLLS' or original ones), or a task's file."""
    out: str
    """Folder for long.csv, and folders with predictions.jsonl and result-FAMILY.json."""
    window: tuple[int, ...] = ()
    """Tokens that prompt and answer may have together. Default: as many as the reader takes."""
    retrieval: LongRetrieval = LongRetrieval()
    prompt_preset: LongPrompts = "xu2023"
    """How tasks are asked. xu2023: turns of a chat, as in Retrieval meets Long Context. longbench: as in LongBench."""
    chat: bool = False
    """Ask in the chat template of the reader's tokenizer, but not the few-shot tasks, as LongBench does."""
    metric_family: MetricFamily | None = None
    """Whose rules make the score. Default: longbench for prompts of longbench, otherwise those of the benchmark that
    the paper takes the task from."""
    rouge: RougePackage | None = None
    """The package that computes ROUGE. Default: the family's."""
    truncation: Truncation | None = None
    """What a prompt that does not fit loses: middle (LongBench), the context's end (context-tail, NVIDIA), or that with
    a note in its place (document-tail, ZeroSCROLLS). Default: middle for longbench, context-tail for xu2023."""
    limit_examples: int | None = None
    """Only the first so many examples of each task. Default: all."""
    max_new_tokens: int | None = None
    """Tokens of an answer at most. Default: LongBench's for the task, 64 for quality."""
    reader: ReaderOptions = ReaderOptions()
    api: APIOptions = APIOptions()
    rerun: RerunOptions = RerunOptions()

    def run(self) -> None:
        from eval import long, long_report
        from eval.tasks import read_examples
        from ralm_jax.text import write_text

        at_least(1, limit_examples=self.limit_examples, max_new_tokens=self.max_new_tokens)
        for window in self.window:
            at_least(1, window=window)
        self.retrieval.check()
        judges = {task: self.metric(task) for task in distinct("task", self.task)}
        examples = {task: read_examples(task, self.data) for task in judges}
        hashes = {task: long.examples_sha256(every) for task, every in examples.items()}
        rankers = {
            name: self.retrieval.ranker(name, self.reader.devices) for name in dict.fromkeys(self.retrieval.retriever)
        }
        opened = self.open_readers()
        cells = [
            (one, name, self.settings(task, one[2], top))
            for task, one, name in product(judges, opened, rankers)
            for top in self.retrieval.tops(name)
        ]
        names = [long.cell_name(settings, name) for _, name, settings in cells]
        processes.once(lambda: self.check_folders(names))
        out = Path(self.out).expanduser()
        with self.api.accounting(opened[0][0]):
            for (generator, tokenizer, _), name, settings in cells:
                asked, folder = examples[settings.task][: self.limit_examples], out / long.cell_name(settings, name)
                about = self.about(settings, name)
                predictions = long.answer_examples(
                    asked, settings, generator, tokenizer, str(folder), ranker=rankers[name], about=about,
                    data_sha256=hashes[settings.task], if_exists=self.rerun.if_exists,
                )  # fmt: skip
                if not processes.first():
                    continue
                family, metric, usual = judges[settings.task]
                result = long_report.report(asked, predictions, settings, name, family, metric, about)
                content = json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False)
                write_text(str(folder / long_report.result_name(family, metric, usual)), content + "\n")
                print(long_report.format_report(result), flush=True)
        if not processes.first():
            return
        results = long_report.read_results(self.out)
        write_text(str(out / long.FIGURES), long_report.format_csv(results))
        if len(results) > 1:
            print(f"\n{long_report.format_table(results)}")
        print(f"\nPredictions and scores are in {self.out}.")

    def settings(self, task: LongTask, window: int, top: int) -> "LongSettings":
        from eval.long import LongSettings
        from eval.long_prompts import LONG_PRESETS
        from eval.tasks import TASKS

        preset, new_tokens = LONG_PRESETS[self.prompt_preset], self.max_new_tokens or TASKS[task].new_tokens
        generate = GenerateSettings(max_new_tokens=new_tokens, stop=preset.stop)
        truncation = self.truncation or preset.truncation
        return LongSettings(task, self.prompt_preset, self.chat, truncation, window, top, generate)

    def metric(self, task: LongTask) -> "tuple[MetricFamily, Metric, Metric]":
        """Whose rules score a task, the metric, and the one that these rules have unless another package is named.

        Raises:
            UsageError: there is no prompt or no such metric for the task, or a package is not installed.
        """
        from eval.long_metrics import find_metric
        from eval.long_prompts import find_template
        from eval.tasks import TASKS

        find_template(self.prompt_preset, task)
        default = "longbench" if self.prompt_preset == "longbench" else TASKS[task].source
        family = self.metric_family or default
        metric, usual = (find_metric(family, TASKS[task].kind, task, rouge) for rouge in (self.rouge, None))
        metric.score("a", ["a"], ["a"])  # its package is missed before an hour of work, not after it
        return family, metric, usual

    def check_folders(self, names: Sequence[str]) -> None:
        """
        Raises:
            UsageError: two settings have one name; or a folder is there and was not to be, which is told before an hour
                of work on those before it.
        """
        for name in names:
            if names.count(name) > 1:
                raise UsageError(f"two retrievers would write to {self.out}/{name}; give their folders other names")
            if self.rerun.if_exists == "refuse" and (Path(self.out).expanduser() / name).exists():
                raise UsageError(f"{self.out}/{name}: is there already; add --resume to go on, or --overwrite")

    def open_readers(self) -> "list[Opened]":
        """One for each window.

        Raises:
            UsageError: a server's model without tokenizer or window; or as `ReaderOptions.generator`.
            RalmError: the model or its tokenizer cannot be loaded.
        """
        from ralm_jax.tokenizer import load_tokenizer

        windows, tokenizer = list(dict.fromkeys(self.window)), self.reader.tokenizer
        if is_api(self.model):
            if tokenizer is None or not windows:
                raise UsageError(f"{self.model}: name --window, and the folder of its tokenizer with --tokenizer")
            if self.chat:
                raise UsageError(f"--chat is for a reader on this machine; {self.model} has turns of its own")
            generator = replace(self.reader, tokenizer=None).generator(self.model, None, self.api)
            return [(generator, load_tokenizer(tokenizer), window) for window in windows]
        from ralm_jax.generate.local import LocalGenerator

        first = cast(LocalGenerator, self.reader.generator(self.model, windows[0] if windows else None, self.api))
        several = [first, *(first.with_window(window) for window in windows[1:])]
        return [(local, local.tokenizer, local.window) for local in several]

    def about(self, settings: "LongSettings", retriever: str) -> dict[str, Any]:
        """The options that a result is told with."""
        options = asdict(self) | {"task": settings.task, "window": settings.window}
        options["retrieval"] |= {"retriever": retriever, "top": settings.top}
        del options["rerun"], options["api"], options["reader"]["devices"]
        return options


@dataclass(frozen=True)
class EvalLengths:
    """Count how long the documents of long-context tasks are, and their best chunks together, in a reader's tokens."""

    tokenizer: str
    """Whose tokens: a folder with a tokenizer, a .gguf file or a Hugging Face id."""
    data: str
    """Folder with the public files, or a task's file."""
    task: tuple[LongTask, ...] = ()
    """The tasks. Default: the seven of the paper's table."""
    retrieval: LongRetrieval = LongRetrieval()
    csv: str | None = None
    """Also write every length to this file."""
    out: str | None = None
    """Also draw how lengths are distributed, as this PNG."""
    devices: DeviceOptions = DeviceOptions()

    def run(self) -> None:
        from eval import long_lengths, paper_long
        from eval.tasks import read_examples
        from ralm_jax.text import write_text
        from ralm_jax.tokenizer import load_tokenizer

        for file in (self.csv, self.out):
            check_output_file(file)
        self.retrieval.check()
        if len(self.retrieval.retriever) > 1:
            raise UsageError("--retriever: name one, whose chunks are counted")
        examples = {task: read_examples(task, self.data) for task in dict.fromkeys(self.task or paper_long.SEVEN)}
        tokenizer = load_tokenizer(self.tokenizer)
        ranker = self.retrieval.ranker(self.retrieval.retriever[0], self.devices)
        found = [
            long_lengths.measure(task, every, tokenizer, ranker, sorted(set(self.retrieval.top or TOPS)))
            for task, every in examples.items()
        ]
        if self.csv:
            write_text(self.csv, long_lengths.format_csv(found))
        if self.out:
            long_lengths.draw(self.out, found)
        print(f"{long_lengths.format_table(found)}\n\nTokens of {self.tokenizer}, in the mean.")
