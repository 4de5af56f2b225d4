"""Commands about corpora and retrieval results in files. As in `cli`, nothing heavy is imported before one runs."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg, create_mutex_group

from ralm_jax.cli_options import CorpusOptions, check_new_file, check_output_file, refuse_set
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.settings import QuestionDataset, Split

Dialect = Literal[  # the keys of retrieval.results.DIALECTS
    "dpr", "contriever", "pyserini", "longbench", "ralm", "trec", "msmarco", "nq-open", "csv", "flashrag",
    "beir-queries",
]  # fmt: skip
ONE_OF_FOUND = create_mutex_group(required=True, title="what is judged")
QUESTIONS = create_mutex_group(required=False, title="questions")


@dataclass(frozen=True)
class EvalRetrieval:
    """Judge a retriever: how often are the gold passages, or the answers, among the first k?"""

    results: Annotated[str | None, ONE_OF_FOUND] = None
    """A file of retrieval results: DPR's, Contriever's, Pyserini's or the paper's, or a TREC or MS MARCO run."""
    index: Annotated[str | None, ONE_OF_FOUND] = None
    """Folder that `ralm index` made; the questions of --data are searched for."""
    data: Annotated[str | None, QUESTIONS] = None
    """A file of questions: NQ-open, DPR's JSON or CSV, FlashRAG, CuratedTREC, TriviaQA, LongBench, SCROLLS, BEIR's
    queries. With --results: its answers count, for the same question ids."""
    dataset: Annotated[QuestionDataset | None, QUESTIONS] = None
    """The questions of a data set of the paper, from --data-path or the Hugging Face hub."""
    split: Split = "test"
    """Split of --dataset."""
    data_path: str | None = None
    """File or folder where --dataset lies. Default: the Hugging Face hub (needs ralm-jax[data])."""
    qrels: str | None = None
    """Gold passages: BEIR's TSV, or TREC's."""
    k: Annotated[str, arg(metavar="K,K,…")] = "1,5,20,100"
    """Passages that count; several numbers, separated by commas."""
    regex: bool = False
    """The answers are regular expressions, as in DPR's file of CuratedTREC."""
    json: str | None = None
    """Also write the figures to this file."""

    def run(self) -> None:
        from eval.retrievers import evaluate, format_recalls, search_questions
        from ralm_jax.text import write_text
        from retrieval.datasets import dataset_questions
        from retrieval.qa import read_qrels
        from retrieval.results import join_questions, read_questions
        from retrieval.retriever import open_index

        check_output_file(self.json)
        if self.dataset is None:
            refuse_set(self, "--dataset", "split", "data_path")
        ks, gold = self.ks(), read_qrels(self.qrels) if self.qrels else None
        asked = read_questions(self.data) if self.data else []
        if self.dataset:
            asked = dataset_questions(self.dataset, self.split, self.data_path)
        if self.index:
            if not asked:
                raise UsageError("--index needs questions: add --data FILE, or --dataset")
            questions = search_questions(open_index(self.index), asked, max(ks))
        else:
            questions = read_questions(self.results or "")
            if not any(question.found for question in questions):
                raise RalmError(f"{self.results}: no passages in it, only questions; add them as --data")
            questions = join_questions(questions, asked) if asked else questions
        if self.regex:
            questions = [question._replace(regex=True) for question in questions]
        recalls = evaluate(questions, ks, gold)
        if self.json:
            report: dict[str, Any] = {
                "results": self.results,
                "index": self.index,
                "data": self.data or self.dataset,
                "qrels": self.qrels,
            }
            report |= {recall.kind: recall.to_json() for recall in recalls}
            write_text(self.json, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
        print(format_recalls(recalls))

    def ks(self) -> list[int]:
        """
        Raises:
            UsageError: not numbers of 1 and more.
        """
        words = self.k.split(",")
        if not all(word.strip().isdecimal() and int(word) for word in words):
            raise UsageError(f"--k {self.k}: expected numbers from 1, separated by commas")
        return sorted({int(word) for word in words})


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
