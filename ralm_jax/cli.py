"""The `ralm` command: each subcommand is a frozen dataclass that is parsed, calls library functions, and prints.

Nothing heavy is imported before a command runs, and only here does `ralm_jax` look up to the packages above it.
"""

import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import tyro
from tyro.conf import create_mutex_group

from ralm_jax import __version__, processes
from ralm_jax.cli_eval import Eval
from ralm_jax.cli_generate import Generate
from ralm_jax.cli_models import Convert, Inspect
from ralm_jax.cli_options import (
    APIOptions,
    CorpusOptions,
    DenseOptions,
    ExcludeOptions,
    JobOptions,
    ReaderOptions,
    ReportOptions,
    RerunOptions,
    TextOptions,
    check_output_file,
    job_options,
    refuse_set,
)
from ralm_jax.cli_plan import Plan
from ralm_jax.cli_rerank import Rerank
from ralm_jax.cli_retrieval import ConvertCorpus, ConvertRetrieval
from ralm_jax.cli_selective import Selective
from ralm_jax.cli_sweep import Paper, Sweep
from ralm_jax.cli_train import Train
from ralm_jax.errors import RalmError, UsageError, first_line
from ralm_jax.settings import DenseSearch, QuerySettings, StrideSettings, TextDataset, WindowSettings, at_least

ONE_OF_CORPUS = create_mutex_group(required=True, title="the corpus")
ONE_OF_QUERY = create_mutex_group(required=True, title="queries")


@dataclass(frozen=True)
class Index:
    """Cut a corpus into passages and index them, for BM25 or as vectors."""

    out: str
    """Folder for the index."""
    corpus: Annotated[str | None, ONE_OF_CORPUS] = None
    """A file, or a folder of files: Pyserini, BEIR, LongBench or SCROLLS jsonl, DPR TSV or plain text, compressed
    (gzip, zstd) or not, Parquet, or what Hugging Face `datasets` saved."""
    dataset: Annotated[TextDataset | None, ONE_OF_CORPUS] = None
    """The training split of a data set of the paper, from --data-path or the Hugging Face hub."""
    data_path: str | None = None
    """File or folder where --dataset lies. Default: the Hugging Face hub (needs ralm-jax[data])."""
    engine: Literal["bm25", "lucene", "dense"] = "bm25"
    """bm25: by words. lucene: the same by Lucene (needs ralm-jax[lucene] and Java 21 or newer). dense: by vectors of an
    encoder."""
    passages: CorpusOptions = CorpusOptions()
    dense: DenseOptions = DenseOptions()
    rerun: RerunOptions = RerunOptions()

    def run(self) -> None:
        if self.dataset is None:
            refuse_set(self, "--dataset", "data_path")
        passages, count, source = self.passages.open(self.corpus, self.dataset, self.data_path)
        corpus = self.corpus or self.dataset
        if self.engine == "dense":
            print(f"{self.out}: {self.dense.index(passages, self.out, source, self.rerun.if_exists)}")
            print(f"{corpus}: {count}")
            return
        if self.dense != DenseOptions():
            raise UsageError("--encoder and its options are for --engine dense")
        from retrieval import bm25, lucene

        build_index: Callable[..., Any] = lucene.build_index if self.engine == "lucene" else bm25.build_index
        told: dict[str, Any] = {"announce": print} if self.engine == "bm25" else {}
        index = build_index(passages, self.out, source=source, if_exists=self.rerun.if_exists, **told)
        terms = f", {index.about['terms']:,} terms" if "terms" in index.about else ""
        print(f"{corpus}: {count}")
        print(f"{self.out}: {index.about['passages']:,} passages{terms}")


@dataclass(frozen=True)
class Fuse:
    """Make one index of several over the same passages, by reciprocal-rank fusion."""

    index: tuple[str, ...]
    """Folders that `ralm index` made."""
    out: str
    """Folder for the fused index, which `retrieve`, `search` and `score` take as any other."""
    depth: int = 100
    """Hits of each index that count."""
    overwrite: bool = False
    """Replace an index that is there."""

    def run(self) -> None:
        from retrieval.hybrid import fuse

        made = fuse(self.index, self.out, depth=self.depth, if_exists="overwrite" if self.overwrite else "refuse")
        engines = ", ".join(part.settings["engine"] for part in made.parts)
        print(f"{self.out}: {len(made.passages):,} passages, by {engines}")


@dataclass(frozen=True)
class Retrieve:
    """Retrieve passages for every stride of a text."""

    index: str
    """Folder that `ralm index` made, any Lucene index, or lucene:NAME for a prebuilt one of Pyserini's."""
    tokenizer: str
    """The reader whose tokens make the strides: a folder, a .gguf file or a Hugging Face id."""
    out: str
    """Folder or bucket for the RetrievalTable."""
    export_json: str | None = None
    """Also write the paper's retrieval JSON to this file."""
    text: TextOptions = TextOptions()
    exclude: ExcludeOptions = ExcludeOptions()
    strides: StrideSettings = StrideSettings()
    queries: QuerySettings = QuerySettings()
    dense_search: DenseSearch = "jax"
    """What searches a dense index; the hits are the same."""
    job: JobOptions = JobOptions()
    rerun: RerunOptions = RerunOptions()

    def run(self) -> None:
        from ralm_jax.tokenizer import load_tokenizer
        from retrieval.interchange import export_json
        from retrieval.query import retrieve
        from retrieval.retriever import open_index

        check_output_file(self.export_json)
        text, excluded = self.text.read(), self.exclude.titles(self.text)
        index = open_index(self.index, dense_search=self.dense_search)
        tokenizer = load_tokenizer(self.tokenizer)
        table = retrieve(
            index,
            text,
            tokenizer,
            self.out,
            strides=self.strides,
            queries=self.queries,
            excluded=excluded,
            if_exists=self.rerun.if_exists,
        )
        found = (table.rows >= 0).sum(axis=1)
        print(f"{self.out}: {len(found):,} strides, {found.mean():.1f} passages each, {(found == 0).sum():,} without")
        if self.export_json and processes.first():
            own = index.tokenizer if self.queries.query_tokens == "retriever" else None
            export_json(self.export_json, table, index.passages, text, tokenizer, own)
            print(f"{self.export_json}: the same in the paper's format")


@dataclass(frozen=True)
class Score:
    """Score a text with a reader: log-probabilities with and without each retrieved passage."""

    model: str
    """The reader: a folder, a .gguf file, a Hugging Face id, or openai:NAME for a server's."""
    out: str
    """Folder or bucket for the ScoreTable."""
    retrieval: str | None = None
    """RetrievalTable, or the paper's retrieval JSON; without it only "no passage" is scored."""
    index: str | None = None
    """The index of the RetrievalTable, if it has been moved."""
    k: int = 16
    """Passages a stride that are scored."""
    strides_of_retrieval: bool = False
    """Score the strides of --retrieval, which another reader's tokens made: for reranking by this reader."""
    text: TextOptions = TextOptions()
    strides: StrideSettings = StrideSettings()
    windows: WindowSettings = WindowSettings()
    reader: ReaderOptions = ReaderOptions()
    api: APIOptions = APIOptions()
    rerun: RerunOptions = RerunOptions()

    def run(self) -> None:
        from eval.lm import open_retrieved, score

        at_least(0, k=self.k)
        self.windows.passage_limit(self.strides)  # known before anything is loaded
        batch_size, text = self.reader.windows_a_batch(), self.text.read()
        retrieved = open_retrieved(self.retrieval, self.index) if self.retrieval else None
        tokenizer, reader = self.reader.load(self.model, self.api)
        with self.api.accounting(reader):
            scores = score(
                text,
                reader,
                tokenizer,
                self.out,
                strides=self.strides,
                windows=self.windows,
                retrieved=retrieved,
                k=self.k,
                strides_of_retrieval=self.strides_of_retrieval,
                batch_size=batch_size,
                if_exists=self.rerun.if_exists,
            )
        print(f"{self.out}: {1 + len(scores.passages):,} strides, {int(scores.num_passages.sum()):,} passages scored")


@dataclass(frozen=True)
class Report:
    """Print the perplexities of ScoreTables under ranking strategies."""

    scores: tuple[str, ...]
    """ScoreTables."""
    ranking: tuple[str, ...] = ()
    """RankingTables that `ralm rerank` made, for the strategy predictive: one for all ScoreTables, or one for each."""
    zero_shot_by: tuple[str, ...] = ()
    """ScoreTables of another reader that `ralm score --strides-of-retrieval` made, for the strategy zero-shot-by: one
    for all ScoreTables, or one for each."""
    json: str | None = None
    """Also write the figures to this file."""
    report: ReportOptions = ReportOptions()

    def run(self) -> None:
        check_output_file(self.json)
        if not self.scores:
            raise UsageError("--scores: name at least one ScoreTable")
        self.report.show(self.scores, self.json, self.ranking, self.zero_shot_by)


@dataclass(frozen=True)
class Search:
    """Look into an index: the best passages for a query."""

    index: str
    """Folder that `ralm index` made, any Lucene index, or lucene:NAME for a prebuilt one of Pyserini's."""
    query: Annotated[str | None, ONE_OF_QUERY] = None
    """One query."""
    queries: Annotated[str | None, ONE_OF_QUERY] = None
    """A jsonl file of rows {"query"}."""
    k: int = 16
    """Passages a query."""
    exclude: ExcludeOptions = ExcludeOptions()
    dense_search: DenseSearch = "jax"
    """What searches a dense index; the hits are the same."""
    json: str | None = None
    """Write jsonl rows {"query", "hits": [{"id", "score", "title", "text"}]} to this file instead of printing."""

    def run(self) -> None:
        from ralm_jax.text import encodable, json_line, write_lines
        from retrieval.corpus import read_field
        from retrieval.retriever import look_up, open_index

        check_output_file(self.json)
        queries = read_field(self.queries, "query") if self.queries else [encodable(self.query or "", "--query")]
        excluded = self.exclude.titles()
        index = open_index(self.index, dense_search=self.dense_search)
        rows = look_up(index, queries, self.k, excluded)
        if self.json:
            written = write_lines(self.json, map(json_line, rows))
            print(f"{self.json}: {written:,} queries")
            return
        for row in rows:
            print(f"{row['query']}: {len(row['hits'])} passages")
            for hit in row["hits"]:
                print(f"{hit['score']:10.4f}  [{hit['id']}] {hit['title']}: {hit['text'][:90]}")


@dataclass(frozen=True)
class LM:
    """Index, retrieve, score and report in one go."""

    model: str
    """The reader: a folder, a .gguf file, a Hugging Face id, or openai:NAME for a server's."""
    out: str
    """Folder for index, retrieval, scores and report.json."""
    text: TextOptions = TextOptions()
    corpus: str | None = None
    """A file, or a folder of files: Pyserini, BEIR, LongBench or SCROLLS jsonl, DPR TSV or plain text, compressed
    (gzip, zstd) or not, Parquet, or what Hugging Face `datasets` saved. Default: the --dataset's own training split."""
    exclude: ExcludeOptions = ExcludeOptions()
    passages: CorpusOptions = CorpusOptions()
    strides: StrideSettings = StrideSettings()
    queries: QuerySettings = QuerySettings()
    windows: WindowSettings = WindowSettings()
    reader: ReaderOptions = ReaderOptions()
    api: APIOptions = APIOptions()
    report: ReportOptions = ReportOptions()
    rerun: RerunOptions = RerunOptions()

    def run(self) -> None:
        from eval.lm import language_model

        self.windows.passage_limit(self.strides)  # known before anything is loaded
        self.report.check_past(self.report.names(), self.windows)
        batch_size, text, excluded = self.reader.windows_a_batch(), self.text.read(), self.exclude.titles(self.text)
        passages, count, source = self.passages.open(self.corpus, self.text.dataset, self.text.data_path)
        tokenizer, reader = self.reader.load(self.model, self.api)
        with self.api.accounting(reader):
            language_model(
                text,
                reader,
                tokenizer,
                passages,
                self.out,
                strides=self.strides,
                queries=self.queries,
                windows=self.windows,
                source=source,
                excluded=excluded,
                batch_size=batch_size,
                if_exists=self.rerun.if_exists,
            )
        if count.bad:
            print(f"{self.corpus or self.text.dataset}: {count}")
        out = Path(self.out).expanduser()
        if processes.first():
            self.report.show([str(out / "scores")], str(out / "report.json"))
        print(f"\nIndex, retrieval, scores and report.json are in {self.out}.")


COMMANDS: dict[str, Callable[..., Any]] = {
    "index": Index,
    "fuse": Fuse,
    "retrieve": Retrieve,
    "score": Score,
    "rerank": Rerank,
    "report": Report,
    "selective": Selective,
    "search": Search,
    "lm": LM,
    "generate": Generate,
    "sweep": Sweep,
    "paper": Paper,
    "train": Train,
    "eval": Eval,
    "convert-retrieval": ConvertRetrieval,
    "convert-corpus": ConvertCorpus,
    "inspect": Inspect,
    "plan": Plan,
    "convert": Convert,
}


def main(args: Sequence[str] | None = None) -> None:
    """Runs `ralm`; exits with 0, with 1 for a failure, 2 for a request that cannot be met, 130 for Ctrl-C, 143 where
    SIGTERM stops a training that can go on from there."""
    args = sys.argv[1:] if args is None else list(args)
    logging.basicConfig(format="ralm: %(levelname)s: %(message)s", level=logging.WARNING)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = interrupt_again
    command: Any = None
    try:
        if args == ["--version"]:
            print(f"ralm {__version__}", flush=True)
            return
        if "" in args:  # an unset shell variable, which a path would take for the current folder
            raise UsageError(f"{' '.join(args[: args.index('')])}: what follows is empty")
        command = tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="ralm",
            description="How much does retrieval help a frozen language model? "
            "`ralm lm` answers in one go; the other commands are its steps. `ralm --version` prints the version.",
            args=args,
            config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone),
        )
        job = job_options(command)
        if job is not None:
            job.join()
        if processes.count() > 1:
            let_one_speak()
        command.run()
        processes.wait()  # the end of one is the end of all
        sys.stdout.flush()
    except RalmError as error:
        processes.fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        resumable = hasattr(command, "rerun") and getattr(command, "engine", "") != "lucene"
        again = "the same command" if isinstance(command, Sweep) else "--resume" if resumable else None
        advice = f"; what is finished is kept, and {again} goes on from there" if again else ""
        processes.fail(f"interrupted{advice}", 130)
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:  # a full disk, no permission
        processes.fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), 1)
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            broken(error)
        saving = getattr(command, "saves_memory", "a smaller --batch-size")
        processes.fail(f"the device is out of memory: try {saving} or --dtype bfloat16", 1)
    except Exception as error:
        broken(error)


def let_one_speak() -> None:
    """Of several processes, only the first says how it goes. What libraries print of their connections goes to
    stderr."""
    out = os.dup(1)
    os.dup2(2, 1)
    sys.stdout.flush()
    sys.stdout = os.fdopen(out, "w") if processes.first() else open(os.devnull, "w")  # noqa: SIM115
    if not processes.first():
        logging.disable(logging.WARNING)


def broken(error: Exception) -> NoReturn:
    """A fault of ours, or of what one process of several has done to the others: shows where, and ends them all."""
    if processes.count() == 1:
        raise error
    traceback.print_exception(error)
    processes.fail(f"{type(error).__name__}: {first_line(error)}", 1)


def interrupt_again(ignored: Any) -> None:
    """Ctrl-C that falls into a garbage collection's callback, of which JAX has one, would be ignored: sends another."""
    if ignored.exc_type is KeyboardInterrupt:
        main_thread = threading.main_thread().ident or 0
        threading.Timer(0.01, signal.pthread_kill, (main_thread, signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(ignored)
