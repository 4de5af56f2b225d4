"""`ralm eval long`. As in `cli`, nothing heavy is imported before it runs."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from tyro.conf import arg

from ralm_jax import processes
from ralm_jax.cli_options import APIOptions, DeviceOptions, ReaderOptions, RerunOptions, refuse_set
from ralm_jax.errors import UsageError
from ralm_jax.openai_client import is_api
from ralm_jax.settings import GenerateSettings, LongPrompts, LongTask, MetricFamily, RougePackage, Truncation, at_least

if TYPE_CHECKING:
    from eval.long_chunks import Ranker
    from ralm_jax.generate.generator import Generator
    from ralm_jax.tokenizer import Tokenizer


@dataclass(frozen=True)
class LongRetrieval:
    """What the prompt has in place of the document."""

    retriever: Annotated[str, arg(metavar="none|bm25|ENCODER")] = "none"
    """What ranks a document's chunks of 300 words, or a few-shot task's examples: bm25, or an encoder of passages: a
    folder, a Hugging Face id, or openai:NAME for a server's. none: the prompt has the document."""
    query_encoder: str | None = None
    """Encoder of questions, where it is not that of passages (Dragon, DPR)."""
    pooling: Literal["cls", "mean"] | None = None
    """How an encoder makes one vector of a text. Default: as its folder states."""
    top: int = 5
    """Chunks in the prompt, most relevant first."""

    def ranker(self, devices: DeviceOptions) -> "Ranker | None":
        """What ranks; None for none. Every process has an encoder of its own.

        Raises:
            UsageError: no such encoder, or options that would be ignored.
            RalmError: it cannot be loaded.
        """
        at_least(1, top=self.top)
        if self.retriever in ("none", "bm25"):
            refuse_set(self, "an encoder as --retriever", "query_encoder", "pooling")
        if self.retriever == "none":
            refuse_set(self, "a --retriever", "top")
            return None
        from eval.long_chunks import BM25Ranker, DenseRanker

        if self.retriever == "bm25":
            return BM25Ranker()
        from retrieval.embedder import load_embedder

        passages, *queries = (
            load_embedder(name, pooling=self.pooling, mesh=devices.own())
            for name in (self.retriever, self.query_encoder)
            if name
        )
        return DenseRanker(passages, *queries)


@dataclass(frozen=True)
class EvalLong:
    """Have a reader answer questions about long documents, with or without retrieval from them: one of nine tasks, by
    the prompts and the metric of its benchmark.

    Answers that are in the folder are not asked for again: --resume with another --metric-family only scores them, and
    with a larger --limit-examples asks the others."""

    task: LongTask
    """The task."""
    model: str
    """The reader: a folder, a .gguf file, a Hugging Face id, or openai:NAME or openai-chat:NAME for a server's, which
    needs --tokenizer and --window."""
    data: str
    """Folder with the public files (LongBench's, SCROLLS', ZeroSCROLLS' or original ones), or the task's file."""
    out: str
    """Folder for predictions.jsonl and result-FAMILY.json."""
    window: int | None = None
    """Tokens that prompt and answer may have together. Default: as many as the reader takes."""
    retrieval: LongRetrieval = LongRetrieval()
    prompt_preset: LongPrompts = "xu2023"
    """How tasks are asked. xu2023: turns of a chat, as in Retrieval meets Long Context. longbench: as in LongBench."""
    metric_family: MetricFamily | None = None
    """Whose rules make the score. Default: longbench for prompts of longbench, otherwise those of the benchmark that
    the paper takes the task from."""
    rouge: RougePackage | None = None
    """The package that computes ROUGE. Default: the family's."""
    truncation: Truncation | None = None
    """What a prompt that does not fit loses: middle (LongBench), the context's end (context-tail, NVIDIA), or that with
    a note in its place (document-tail, ZeroSCROLLS). Default: middle for longbench, context-tail for xu2023."""
    limit_examples: int | None = None
    """Only the first so many examples. Default: all."""
    max_new_tokens: int | None = None
    """Tokens of an answer at most. Default: LongBench's for the task, 64 for quality."""
    reader: ReaderOptions = ReaderOptions()
    api: APIOptions = APIOptions()
    rerun: RerunOptions = RerunOptions()

    def run(self) -> None:
        from eval import long, long_report
        from eval.long_metrics import find_metric
        from eval.long_prompts import LONG_PRESETS, find_template
        from eval.tasks import TASKS, read_examples
        from ralm_jax.text import write_text

        at_least(1, limit_examples=self.limit_examples, max_new_tokens=self.max_new_tokens, window=self.window)
        task, preset = TASKS[self.task], LONG_PRESETS[self.prompt_preset]
        find_template(self.prompt_preset, self.task)
        family = self.metric_family or ("longbench" if self.prompt_preset == "longbench" else task.source)
        metric, usual = (find_metric(family, task.kind, self.task, rouge) for rouge in (self.rouge, None))
        metric.score("a", ["a"], ["a"])  # its package is missed before an hour of work, not after it
        every = read_examples(self.task, self.data)
        examples = every[: self.limit_examples]
        ranker = self.retrieval.ranker(self.reader.devices)
        generator, tokenizer, window = self.open_reader()
        settings = long.LongSettings(
            self.task,
            self.prompt_preset,
            self.truncation or preset.truncation,
            window,
            self.retrieval.top if ranker else 0,
            GenerateSettings(max_new_tokens=self.max_new_tokens or task.new_tokens, stop=preset.stop),
        )
        about = self.about()
        with self.api.accounting(generator):
            predictions = long.answer_examples(
                examples, settings, generator, tokenizer, self.out, ranker=ranker, about=about,
                data_sha256=long.examples_sha256(every), if_exists=self.rerun.if_exists,
            )  # fmt: skip
        if not processes.first():
            return
        result = long_report.report(examples, predictions, settings, family, metric, about)
        name = long_report.result_name(family, metric, usual)
        content = json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False)
        write_text(str(Path(self.out).expanduser() / name), content + "\n")
        print(f"{long_report.format_report(result)}\n\n{long.PREDICTIONS} and {name} are in {self.out}.")

    def open_reader(self) -> "tuple[Generator, Tokenizer, int]":
        """What answers, what cuts its prompts, and its window.

        Raises:
            UsageError: a server's model without tokenizer or window; or as `ReaderOptions.generator`.
            RalmError: the model or its tokenizer cannot be loaded.
        """
        from ralm_jax.tokenizer import load_tokenizer

        tokenizer = self.reader.tokenizer
        if is_api(self.model):
            if tokenizer is None or self.window is None:
                raise UsageError(f"{self.model}: name --window, and the folder of its tokenizer with --tokenizer")
            generator = replace(self.reader, tokenizer=None).generator(self.model, None, self.api)
            return generator, load_tokenizer(tokenizer), self.window
        from ralm_jax.generate.local import LocalGenerator

        local = cast(LocalGenerator, self.reader.generator(self.model, self.window, self.api))
        return local, local.tokenizer, local.window

    def about(self) -> dict[str, Any]:
        """The options that a result is told with."""
        options = asdict(self)
        del options["rerun"], options["api"], options["reader"]["devices"]
        return options
