"""Options that several commands share, and what they turn into. As in `cli`, nothing heavy is imported here."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg, create_mutex_group

from ralm_jax.errors import UsageError
from ralm_jax.settings import IfExists, WindowSettings, at_least

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ralm_jax.reader import Reader
    from ralm_jax.tokenizer import Tokenizer
    from retrieval.corpus import Passage
    from retrieval.rows import RowCount

ONE_OF_RERUN = create_mutex_group(required=False, title="output that is there")


@dataclass(frozen=True)
class RerunOptions:
    resume: Annotated[bool, ONE_OF_RERUN] = False
    """Go on where an earlier run stopped."""
    overwrite: Annotated[bool, ONE_OF_RERUN] = False
    """Replace what an earlier run left."""

    @property
    def if_exists(self) -> IfExists:
        return "resume" if self.resume else "overwrite" if self.overwrite else "refuse"


@dataclass(frozen=True)
class CorpusOptions:
    """How the corpus becomes passages."""

    corpus_format: Literal["auto", "pyserini", "beir", "dpr", "parquet", "arrow", "text"] = "auto"
    """Format of the files; auto goes by their names and first rows."""
    passage_words: int = 100
    """Running text is cut into passages of so many words."""
    split_rows: bool = False
    """Cut the rows of the other formats as well; they are passages as they are otherwise."""
    skip_bad_rows: bool = False
    """Skip and count rows that are broken; they are refused otherwise."""

    def read(self, corpus: str) -> "tuple[Iterator[Passage], RowCount]":
        """The passages, and what counts the rows while they are read."""
        from retrieval.corpus import read_corpus
        from retrieval.rows import RowCount

        count = RowCount(self.skip_bad_rows)
        passages = read_corpus(
            corpus, self.corpus_format, passage_words=self.passage_words, split_rows=self.split_rows, count=count
        )
        return passages, count

    def describe(self, corpus: str) -> dict[str, Any]:
        from retrieval.corpus import describe_corpus

        return describe_corpus(
            corpus,
            self.corpus_format,
            passage_words=self.passage_words,
            split_rows=self.split_rows,
            skip_bad_rows=self.skip_bad_rows,
        )


@dataclass(frozen=True)
class DenseOptions:
    """How a dense index is made."""

    encoder: str | None = None
    """Encoder of passages: a folder or a Hugging Face id (BERT or RoBERTa and their like), or openai:MODEL for a server
    that speaks OpenAI's API (OPENAI_BASE_URL and OPENAI_API_KEY from the environment)."""
    query_encoder: str | None = None
    """Encoder of queries. Default: the same one."""
    pooling: Literal["cls", "mean"] | None = None
    """From hidden states to a vector. Default: as the encoder states."""
    encoder_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and computation; vectors are stored in bfloat16."""

    def index(self, corpus: "Iterator[Passage]", out: str, source: dict[str, Any], if_exists: IfExists) -> str:
        """Makes the index, and says what it is.

        Raises:
            UsageError: no encoder is named.
        """
        if self.encoder is None:
            raise UsageError("--engine dense: name a model with --encoder")
        from retrieval.dense import build_dense_index

        made = build_dense_index(
            corpus, out, self.encoder, self.query_encoder, pooling=self.pooling, dtype=self.encoder_dtype,
            source=source, if_exists=if_exists, announce=lambda line: print(line, flush=True),
        )  # fmt: skip
        return f"{len(made.passages):,} passages, vectors of {made.settings['dimension']:,} numbers"


@dataclass(frozen=True)
class ReaderOptions:
    """How the reader is loaded and run."""

    tokenizer: str | None = None
    """Where the tokenizer is, if not with the model."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of weights and computation; log-probabilities are float32 always."""
    batch_size: Annotated[int | Literal["auto"], arg(metavar="N|auto")] = "auto"
    """Windows a forward; auto fills the device."""

    def windows_a_batch(self) -> int | None:
        """None for auto.

        Raises:
            UsageError: below 1.
        """
        if self.batch_size == "auto":
            return None
        at_least(1, batch_size=self.batch_size)
        return self.batch_size

    def load(self, model: str) -> "tuple[Tokenizer, Reader]":
        from ralm_jax.reader import load_reader
        from ralm_jax.tokenizer import load_tokenizer

        return load_tokenizer(self.tokenizer or model), load_reader(model, dtype=self.dtype)


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

        at_least(1, zero_shot_tokens=self.zero_shot_tokens)
        return check_strategies(self.strategies)

    def check_past(self, windows: WindowSettings) -> None:
        """
        Raises:
            UsageError: fewer past tokens are to be scored than zero-shot reranking goes by.
        """
        if "zero-shot" in self.names() and self.zero_shot_tokens > windows.past:
            raise UsageError(
                f"zero-shot reranking by {self.zero_shot_tokens} tokens needs as many past tokens, not "
                f"{windows.past}: raise --past, or lower --zero-shot-tokens"
            )

    def show(self, tables: Sequence[str], json_file: str | None) -> None:
        """Prints the report of each ScoreTable; the JSON of one is an object, of several a list of them."""
        from eval.report import format_report, make_report
        from ralm_jax.text import write_text

        reports = [
            make_report(table, self.names(), zero_shot_tokens=self.zero_shot_tokens, seed=self.seed) for table in tables
        ]
        if json_file:
            content = [report.to_json() for report in reports]
            write_text(json_file, json.dumps(content[0] if len(content) == 1 else content, indent=2) + "\n")
        print("\n\n".join(format_report(report) for report in reports))


def titles_in(path: str | None) -> frozenset[str]:
    from retrieval.corpus import read_titles

    return read_titles(path) if path else frozenset()


def check_new_file(path: str, overwrite: bool) -> None:
    """As `check_output_file`, and keeps what is there.

    Raises:
        UsageError: `path` cannot be written, or is there already and `overwrite` is not set.
    """
    check_output_file(path)
    if Path(path).expanduser().is_file() and not Path(path).is_symlink() and not overwrite:
        raise UsageError(f"{path}: is there already; add --overwrite to replace it")


def check_output_file(path: str | None) -> None:
    """Finds out before an hour of work that a file could not be written after it.

    Raises:
        UsageError: `path` is a folder, or the folder that it should go to is not there.
    """
    file = Path(path or ".").expanduser().absolute()
    if path and not file.parent.is_dir():
        raise UsageError(f"{path}: the folder {Path(path).parent} does not exist")
    if path and file.is_dir():
        raise UsageError(f"{path}: is a folder; name a file")
