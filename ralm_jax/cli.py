"""The `ralm` command: each subcommand is a frozen dataclass that is parsed, calls library functions, and prints.

Nothing heavy is imported before a command runs, and only here does `ralm_jax` look up to the packages above it.
"""

import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.conf import arg, create_mutex_group

from ralm_jax import __version__
from ralm_jax.errors import RalmError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ralm_jax.windows import Protocol
    from retrieval.corpus import Passage
    from retrieval.query import Retrieval

ONE_OF_RERUN = create_mutex_group(required=False, title="output that is there")
ONE_OF_QUERY = create_mutex_group(required=True, title="queries")


# --- options that several commands share ---


@dataclass(frozen=True)
class RerunOptions:
    """What to do with an earlier run's output."""

    resume: Annotated[bool, ONE_OF_RERUN] = False
    """Go on where an earlier run stopped."""
    overwrite: Annotated[bool, ONE_OF_RERUN] = False
    """Replace what an earlier run left."""


@dataclass(frozen=True)
class CorpusOptions:
    """How the corpus becomes passages."""

    corpus_format: Literal["auto", "pyserini", "beir", "dpr", "text"] = "auto"
    """Format of the files; auto goes by their names and first rows."""
    passage_words: int = 100
    """Running text is cut into passages of so many words."""
    split_rows: bool = False
    """Cut the rows of jsonl and TSV files as well; they are passages as they are otherwise."""

    def read(self, corpus: str) -> "Iterator[Passage]":
        from retrieval.corpus import read_corpus

        return read_corpus(corpus, self.corpus_format, passage_words=self.passage_words, split_rows=self.split_rows)


@dataclass(frozen=True)
class StrideOptions:
    """How the text is cut into windows and strides."""

    window: int = 1024
    """Tokens a window."""
    stride: int = 4
    """Tokens that each window predicts; there is one retrieval a stride."""
    k: int = 16
    """Passages a stride."""
    limit_strides: int | None = None
    """Only the first so many strides, the first window included. Default: all."""
    preset: Literal["default", "ai21"] = "default"
    """ai21: BOS and title exclusion as in the paper's released code."""


@dataclass(frozen=True)
class QueryOptions:
    """How passages are found."""

    query_length: int = 32
    """Tokens before the target that make the query."""
    exclude_titles: str | None = None
    """File with one title a line; passages with these titles are left out."""
    exclusion: Literal["inside", "after"] | None = None
    """Leave titles out inside the search (k hits guaranteed) or after it. Default: inside; ai21: after."""

    def retrieval(self, strides: StrideOptions) -> "Retrieval":
        from retrieval.corpus import read_titles
        from retrieval.query import Retrieval

        return Retrieval(
            stride=strides.stride,
            window=strides.window,
            query_length=self.query_length,
            k=strides.k,
            excluded=read_titles(self.exclude_titles) if self.exclude_titles else frozenset(),
            exclusion=self.exclusion or ("after" if strides.preset == "ai21" else "inside"),
        )


@dataclass(frozen=True)
class ScoringOptions:
    """How windows are built and scored."""

    tokenizer: str | None = None
    """Where the tokenizer is, if not with the model."""
    past: int = 32
    """Tokens before the target that are scored too, for zero-shot reranking."""
    passage_tokens: int = 256
    """A passage is cut to so many tokens."""
    bos: Literal["every-window", "passage"] | None = None
    """Where the BOS of a tokenizer that adds one goes. Default: by preset, every-window or (ai21) passage."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and computation; log-probabilities are float32 always."""
    batch_size: Annotated[int | Literal["auto"], arg(metavar="N|auto")] = "auto"
    """Windows a forward; auto fills the device."""

    def protocol(self, strides: StrideOptions) -> "Protocol":
        from ralm_jax.windows import PRESETS, Protocol

        return Protocol(
            window=strides.window,
            stride=strides.stride,
            past=self.past,
            passage_tokens=self.passage_tokens,
            bos=self.bos or PRESETS[strides.preset],
        )

    def windows_a_batch(self) -> int | None:
        """None for auto.

        Raises:
            UsageError: below 1.
        """
        if self.batch_size == "auto":
            return None
        if self.batch_size < 1:
            raise UsageError(f"batch size must be at least 1, not {self.batch_size}")
        return self.batch_size


@dataclass(frozen=True)
class ReportOptions:
    """What is reported."""

    strategies: str = "none,first,zero-shot,oracle"
    """Of none, first, random, zero-shot, oracle; separated by commas."""
    zero_shot_tokens: int = 16
    """Past tokens that zero-shot reranking goes by."""
    seed: int = 0
    """For random."""

    def names(self) -> list[str]:
        from eval.report import check_strategies

        return check_strategies(self.strategies)

    def show(self, tables: Sequence[str], json_file: str | None) -> None:
        """Prints the report of each ScoreTable; the JSON of one is an object, of several a list of them."""
        from eval.report import format_report, make_report
        from ralm_jax.text import write_text

        reports = [
            make_report(table, self.names(), zero_shot_tokens=self.zero_shot_tokens, seed=self.seed) for table in tables
        ]
        print("\n\n".join(format_report(report) for report in reports))
        if json_file:
            content = [report.to_json() for report in reports]
            write_text(json_file, json.dumps(content[0] if len(content) == 1 else content, indent=2) + "\n")


# --- the commands ---


@dataclass(frozen=True)
class Index:
    """Cut a corpus into passages and index them for BM25."""

    corpus: str
    """A file, or a folder of files: Pyserini jsonl, BEIR jsonl, DPR TSV or plain text, gzipped or not."""
    out: str
    """Folder for the index."""
    passages: CorpusOptions = CorpusOptions()
    overwrite: bool = False
    """Replace an index that is there."""

    def run(self) -> None:
        from retrieval.bm25 import build_index

        index = build_index(self.passages.read(self.corpus), self.out, source=self.corpus, overwrite=self.overwrite)
        print(f"{self.out}: {index.about['passages']:,} passages, {index.about['terms']:,} terms")


@dataclass(frozen=True)
class Retrieve:
    """Retrieve passages for every stride of a text."""

    index: str
    """Folder that `ralm index` made."""
    text: str
    """The text: plain, or jsonl rows (strings or {"text"}), gzipped or not."""
    tokenizer: str
    """The reader whose tokens make the strides: a folder, a .gguf file or a Hugging Face id."""
    out: str
    """Folder or bucket for the RetrievalTable."""
    export_json: str | None = None
    """Also write the paper's retrieval JSON to this file."""
    strides: StrideOptions = StrideOptions()
    queries: QueryOptions = QueryOptions()
    rerun: RerunOptions = RerunOptions()

    def run(self) -> None:
        from ralm_jax.text import read_text
        from ralm_jax.tokenizer import load_tokenizer
        from retrieval.bm25 import BM25Index
        from retrieval.query import retrieve
        from retrieval.table import write_json

        check_output_file(self.export_json)
        retrieval = self.queries.retrieval(self.strides)
        index, text, tokenizer = BM25Index.open(self.index), read_text(self.text), load_tokenizer(self.tokenizer)
        table = retrieve(
            index,
            text,
            tokenizer,
            retrieval,
            self.out,
            limit_strides=self.strides.limit_strides,
            resume=self.rerun.resume,
            overwrite=self.rerun.overwrite,
        )
        found = (table.rows >= 0).sum(axis=1)
        print(f"{self.out}: {len(found):,} strides, {found.mean():.1f} passages each, {(found == 0).sum():,} without")
        if self.export_json:
            write_json(self.export_json, table, index.passages, text, tokenizer)
            print(f"{self.export_json}: the same in the paper's format")


@dataclass(frozen=True)
class Score:
    """Score a text with a reader: log-probabilities with and without each retrieved passage."""

    model: str
    """The reader: a folder, a .gguf file or a Hugging Face id."""
    text: str
    """The text: plain, or jsonl rows (strings or {"text"}), gzipped or not."""
    out: str
    """Folder or bucket for the ScoreTable."""
    retrieval: str | None = None
    """RetrievalTable, or the paper's retrieval JSON; without it only "no passage" is scored."""
    index: str | None = None
    """The index of the RetrievalTable, if it has been moved."""
    strides: StrideOptions = StrideOptions()
    scoring: ScoringOptions = ScoringOptions()
    rerun: RerunOptions = RerunOptions()

    def run(self) -> None:
        from eval.lm import open_retrieved, score
        from ralm_jax.reader import load_reader
        from ralm_jax.text import read_text
        from ralm_jax.tokenizer import load_tokenizer

        protocol, batch_size = self.scoring.protocol(self.strides), self.scoring.windows_a_batch()
        text, tokenizer = read_text(self.text), load_tokenizer(self.scoring.tokenizer or self.model)
        retrieved = open_retrieved(self.retrieval, self.index) if self.retrieval else None
        scores = score(
            text,
            load_reader(self.model, dtype=self.scoring.dtype),
            tokenizer,
            protocol,
            self.out,
            retrieved=retrieved,
            k=self.strides.k,
            batch_size=batch_size,
            limit_strides=self.strides.limit_strides,
            resume=self.rerun.resume,
            overwrite=self.rerun.overwrite,
        )
        print(f"{self.out}: {1 + len(scores.passages):,} strides, {int(scores.num_passages.sum()):,} passages scored")


@dataclass(frozen=True)
class Report:
    """Print the perplexities of ScoreTables under ranking strategies."""

    scores: tuple[str, ...]
    """ScoreTables."""
    json: str | None = None
    """Also write the figures to this file."""
    report: ReportOptions = ReportOptions()

    def run(self) -> None:
        check_output_file(self.json)
        if not self.scores:
            raise UsageError("--scores: name at least one ScoreTable")
        self.report.show(self.scores, self.json)


@dataclass(frozen=True)
class Search:
    """Look into an index: the best passages for a query."""

    index: str
    """Folder that `ralm index` made."""
    query: Annotated[str | None, ONE_OF_QUERY] = None
    """One query."""
    queries: Annotated[str | None, ONE_OF_QUERY] = None
    """A jsonl file of rows {"query"}."""
    k: int = 16
    """Passages a query."""
    exclude_titles: str | None = None
    """File with one title a line; passages with these titles are left out."""
    json: str | None = None
    """Write jsonl rows {"query", "hits": [{"id", "score", "title", "text"}]} to this file instead of printing."""

    def run(self) -> None:
        from ralm_jax.text import write_text
        from retrieval.bm25 import BM25Index
        from retrieval.corpus import read_queries, read_titles

        check_output_file(self.json)
        queries = read_queries(self.queries) if self.queries else [self.query or ""]
        titles = read_titles(self.exclude_titles) if self.exclude_titles else frozenset()
        rows = BM25Index.open(self.index).look_up(queries, self.k, titles)
        if self.json:
            write_text(self.json, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            print(f"{self.json}: {len(rows):,} queries")
            return
        for row in rows:
            print(f"{row['query']}: {len(row['hits'])} passages")
            for hit in row["hits"]:
                print(f"{hit['score']:10.4f}  [{hit['id']}] {hit['title']}: {hit['text'][:90]}")


@dataclass(frozen=True)
class LM:
    """Index, retrieve, score and report in one go."""

    model: str
    """The reader: a folder, a .gguf file or a Hugging Face id."""
    text: str
    """The text: plain, or jsonl rows (strings or {"text"}), gzipped or not."""
    corpus: str
    """A file, or a folder of files: Pyserini jsonl, BEIR jsonl, DPR TSV or plain text, gzipped or not."""
    out: str
    """Folder for index, retrieval, scores and report.json."""
    passages: CorpusOptions = CorpusOptions()
    strides: StrideOptions = StrideOptions()
    queries: QueryOptions = QueryOptions()
    scoring: ScoringOptions = ScoringOptions()
    report: ReportOptions = ReportOptions()
    rerun: RerunOptions = RerunOptions()

    def run(self) -> None:
        from eval.lm import language_model
        from ralm_jax.reader import load_reader
        from ralm_jax.text import read_text
        from ralm_jax.tokenizer import load_tokenizer

        self.report.names()
        protocol, retrieval = self.scoring.protocol(self.strides), self.queries.retrieval(self.strides)
        batch_size = self.scoring.windows_a_batch()
        text, tokenizer = read_text(self.text), load_tokenizer(self.scoring.tokenizer or self.model)
        language_model(
            text,
            load_reader(self.model, dtype=self.scoring.dtype),
            tokenizer,
            self.passages.read(self.corpus),
            retrieval,
            protocol,
            self.out,
            source=self.corpus,
            batch_size=batch_size,
            limit_strides=self.strides.limit_strides,
            resume=self.rerun.resume,
            overwrite=self.rerun.overwrite,
        )
        out = Path(self.out).expanduser()
        self.report.show([str(out / "scores")], str(out / "report.json"))
        print(f"\nIndex, retrieval, scores and report.json are in {self.out}.")


def check_output_file(path: str | None) -> None:
    """
    Raises:
        UsageError: the folder that `path` should go to is not there; better known before an hour of work.
    """
    if path and not Path(path).expanduser().absolute().parent.is_dir():
        raise UsageError(f"{path}: the folder {Path(path).parent} does not exist")


COMMANDS: dict[str, Callable[..., Any]] = {
    "index": Index,
    "retrieve": Retrieve,
    "score": Score,
    "report": Report,
    "search": Search,
    "lm": LM,
}


def main(args: Sequence[str] | None = None) -> None:
    """Runs `ralm`; exits with 0, with 1 for a failure, 2 for a request that cannot be met, 130 for Ctrl-C."""
    args = sys.argv[1:] if args is None else list(args)
    if args == ["--version"]:
        print(f"ralm {__version__}")
        return
    logging.basicConfig(format="ralm: %(levelname)s: %(message)s", level=logging.WARNING)
    try:
        tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="ralm",
            description="How much does retrieval help a frozen language model? "
            "`ralm lm` answers in one go; the other commands are its steps. `ralm --version` prints the version.",
            args=args,
            config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone),
        ).run()
    except RalmError as error:
        fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        fail("interrupted; finished chunks are kept, and --resume goes on from there", 130)
    except OSError as error:  # a full disk, no permission
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), 1)
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        fail("the device is out of memory: try a smaller --batch-size or --dtype bfloat16", 1)


def fail(message: str, code: int) -> None:
    print(f"ralm: error: {message}", file=sys.stderr)
    sys.exit(code)
