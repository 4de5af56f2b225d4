"""Commands that write corpora and retrieval results for other programs. As in `cli`, nothing heavy is imported before
one runs."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from ralm_jax.cli_options import CorpusOptions, check_new_file, refuse_set
from ralm_jax.errors import UsageError

Dialect = Literal[  # the keys of retrieval.results.DIALECTS
    "dpr", "contriever", "pyserini", "longbench", "ralm", "trec", "msmarco", "nq-open", "csv", "flashrag",
    "beir-queries",
]  # fmt: skip


@dataclass(frozen=True)
class ConvertRetrieval:
    """Write a file of questions or retrieval results as another program reads it."""

    file: Annotated[Positional[str], arg(metavar="IN")]
    """The file; gzip and zstd are fine."""
    out: str
    """The file to write; compressed if its name ends in .gz or .zst."""
    to: Dialect
    """Its dialect; those after msmarco are questions without passages. longbench: what was found is the context. ralm,
    the paper's retrieval JSON, is only read."""
    from_: Annotated[Literal["auto", Dialect], arg(name="from")] = "auto"
    """Dialect of IN; auto goes by its first line. The JSON dialects, TriviaQA's and SCROLLS's too, are told apart by
    their fields."""
    questions: str | None = None
    """File that has the questions' texts and answers by id, for a run."""
    corpus: str | None = None
    """Corpus that has the passages' texts by id, for a run."""
    passages: CorpusOptions = CorpusOptions()
    regex: bool = False
    """The answers are regular expressions, as in DPR's file of CuratedTREC."""
    overwrite: bool = False
    """Replace a file that is there."""

    def run(self) -> None:
        from retrieval.qa import mark_answers
        from retrieval.results import join_passages, join_questions, read_questions, write_questions

        check_new_file(self.out, self.overwrite)
        if self.corpus is None:
            refuse_set(self.passages, "--corpus")
        questions = read_questions(self.file, self.from_)
        if self.questions:
            questions = join_questions(questions, read_questions(self.questions))
        if self.corpus:
            passages, count = self.passages.read(self.corpus)
            questions = join_passages(questions, passages)
            print(f"{self.corpus}: {count}")
        if self.to in ("dpr", "contriever", "pyserini"):
            questions = [mark_answers(q._replace(regex=q.regex or self.regex)) for q in questions]
        write_questions(self.out, questions, self.to)
        found = sum(len(question.found) for question in questions)
        print(f"{self.out}: {len(questions):,} questions, {found:,} passages, as {self.to}")


@dataclass(frozen=True)
class ConvertCorpus:
    """Write a corpus, or the passages cut from it, as another program reads it."""

    corpus: Annotated[Positional[str], arg(metavar="CORPUS")]
    """A file, or a folder of files, as for `ralm index`."""
    out: str
    """The file to write; lines are compressed if its name ends in .gz or .zst."""
    to: Literal["pyserini", "beir", "dpr", "parquet"]
    """pyserini: jsonl {id, contents}. beir: jsonl {_id, title, text}. dpr: TSV with the header id, text, title.
    parquet: the columns id, title, text."""
    passages: CorpusOptions = CorpusOptions()
    overwrite: bool = False
    """Replace a file that is there."""

    def run(self) -> None:
        from retrieval.corpus import write_corpus

        check_new_file(self.out, self.overwrite)
        out, corpus = (Path(os.path.realpath(Path(path).expanduser())) for path in (self.out, self.corpus))
        if out.is_relative_to(corpus):
            raise UsageError(f"{self.out}: lies in the corpus {self.corpus}; write it elsewhere")
        passages, count = self.passages.read(self.corpus)
        written = write_corpus(passages, self.out, self.to)
        print(f"{self.corpus}: {count}")
        print(f"{self.out}: {written:,} passages, as {self.to}")
