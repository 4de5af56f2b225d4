"""`ralm eval`: commands that judge something. As in `cli`, nothing heavy is imported before one runs."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import arg, create_mutex_group

from ralm_jax import processes
from ralm_jax.cli_long import EvalLengths, EvalLong
from ralm_jax.cli_options import APIOptions, ReaderOptions, RerunOptions, check_output_file, refuse_set
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.settings import DenseSearch, Prompts, QuestionDataset, Split, at_least

if TYPE_CHECKING:
    from retrieval.qa import Question

ONE_OF_FOUND = create_mutex_group(required=True, title="what is judged")
QUESTIONS = create_mutex_group(required=False, title="questions")


@dataclass(frozen=True)
class QuestionOptions:
    """Questions and their answers."""

    data: Annotated[str | None, QUESTIONS] = None
    """A file of questions: NQ-open, DPR's JSON or CSV, FlashRAG, CuratedTREC, TriviaQA, LongBench, SCROLLS, BEIR's
    queries, or retrieval results."""
    dataset: Annotated[QuestionDataset | None, QUESTIONS] = None
    """The questions of a data set of the paper, from --data-path or the Hugging Face hub."""
    split: Split = "test"
    """Split of --dataset."""
    data_path: str | None = None
    """File or folder where --dataset lies. Default: the Hugging Face hub (needs ralm-jax[data])."""
    regex: bool = False
    """The answers are regular expressions, as in DPR's file of CuratedTREC."""

    def read(self) -> "list[Question]":
        """The questions; none where none are named."""
        from retrieval.datasets import dataset_questions
        from retrieval.results import read_questions

        if self.dataset is None:
            refuse_set(self, "--dataset", "split", "data_path")
            questions = read_questions(self.data) if self.data else []
        else:
            questions = dataset_questions(self.dataset, self.split, self.data_path)
        return self.marked(questions)

    def marked(self, questions: "list[Question]") -> "list[Question]":
        """`questions`, their answers taken for regular expressions if these are said to be."""
        return [question._replace(regex=question.regex or self.regex) for question in questions]


@dataclass(frozen=True)
class EvalRetrieval:
    """Judge a retriever: how often are the gold passages, or the answers, among the first k?"""

    results: Annotated[str | None, ONE_OF_FOUND] = None
    """A file of retrieval results: DPR's, Contriever's, Pyserini's or the paper's, or a TREC or MS MARCO run. With
    --data, the answers there count, for the same question ids."""
    index: Annotated[str | None, ONE_OF_FOUND] = None
    """Folder that `ralm index` made; the questions of --data are searched for."""
    questions: QuestionOptions = QuestionOptions()
    qrels: str | None = None
    """Gold passages: BEIR's TSV, or TREC's."""
    k: Annotated[str, arg(metavar="K,K,…")] = "1,5,20,100"
    """Passages that count; several numbers, separated by commas."""
    json: str | None = None
    """Also write the figures to this file."""

    def run(self) -> None:
        from eval.retrievers import evaluate, format_recalls, search_questions
        from ralm_jax.text import write_text
        from retrieval.qa import read_qrels
        from retrieval.results import join_questions, read_questions
        from retrieval.retriever import open_index

        check_output_file(self.json)
        ks, gold = numbers("--k", self.k, 1), read_qrels(self.qrels) if self.qrels else None
        asked = self.questions.read()
        if self.index:
            if not asked:
                raise UsageError("--index needs questions: add --data FILE, or --dataset")
            questions = search_questions(open_index(self.index), asked, max(ks))
        else:
            questions = read_questions(self.results or "")
            if not any(question.found for question in questions):
                raise RalmError(f"{self.results}: no passages in it, only questions; add them as --data")
            questions = self.questions.marked(join_questions(questions, asked) if asked else questions)
        recalls = evaluate(questions, ks, gold)
        if self.json:
            report: dict[str, Any] = {
                "results": self.results,
                "index": self.index,
                "data": self.questions.data or self.questions.dataset,
                "qrels": self.qrels,
            }
            report |= {recall.kind: recall.to_json() for recall in recalls}
            write_text(self.json, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
        print(format_recalls(recalls))


@dataclass(frozen=True)
class EvalQA:
    """Have a reader answer questions, with and without passages: exact match, F1 and more by the number of passages.

    Answers that are in the folder are not asked for again; --resume with other --passages, or --gold-at, adds to
    them."""

    model: str
    """The reader: a folder, a .gguf file, a Hugging Face id, or openai:NAME or openai-chat:NAME for a server's."""
    out: str
    """Folder for predictions.jsonl, qa.csv and qa.png."""
    questions: QuestionOptions = QuestionOptions()
    index: str | None = None
    """Folder that `ralm index` made, to be searched for every question. Default: the passages that --data has."""
    dense_search: DenseSearch = "jax"
    """What searches a dense index; the hits are the same."""
    passages: Annotated[str, arg(metavar="N,N,…")] = "0,1,2"
    """Passages in the prompt, 0 for closed book; several numbers, separated by commas."""
    gold_at: Annotated[str | None, arg(metavar="P,P,…")] = None
    """Places of the gold passage in the prompt, from 1, separated by commas; --passages is a single number then. The
    others are the best in which no answer stands (Lost in the Middle). Gold is the passage that --data marks ("isgold",
    or the first of positive_ctxs), or with --index its first one."""
    prompt_preset: Prompts = "ram2023"
    """How questions are asked. ram2023: as in the paper. instruct: the same for readers that follow instructions.
    liu2023: an instruction and numbered passages, as in Lost in the Middle."""
    limit_questions: int | None = None
    """Only the first so many questions that have answers. Default: all."""
    max_new_tokens: int | None = None
    """Tokens of an answer at most; it ends with its first line. Default: 10 for ram2023, 32 for
    instruct, 100 for liu2023."""
    window: int | None = None
    """Tokens that prompt and answer may have together. Default: as many as the reader takes."""
    json: str | None = None
    """Also write the figures to this file."""
    reader: ReaderOptions = ReaderOptions()
    api: APIOptions = APIOptions()
    rerun: RerunOptions = RerunOptions()

    def run(self) -> None:
        from dataclasses import replace

        from eval import gold, qa, qa_report
        from eval.prompts import PRESETS
        from ralm_jax.text import write_text
        from retrieval.retriever import open_index

        check_output_file(self.json)
        at_least(1, max_new_tokens=self.max_new_tokens, window=self.window)
        counts = numbers("--passages", self.passages, 0)
        places = self.places(counts)
        if self.questions == QuestionOptions():
            raise UsageError("--data: name a file of questions, or --dataset")
        read = self.questions.read()
        asked = qa.with_answers(read, self.limit_questions)
        index = open_index(self.index, dense_search=self.dense_search) if self.index else None
        asked = (gold.with_gold if places else qa.with_passages)(asked, max(counts), index)
        preset = PRESETS[self.prompt_preset]
        settings = replace(preset.settings, max_new_tokens=self.max_new_tokens or preset.settings.max_new_tokens)
        about = asdict(self) | {"passages": counts, "gold_at": places}
        del about["rerun"], about["json"], about["api"], about["reader"]["devices"]
        generator = self.reader.generator(self.model, self.window, self.api)
        with self.api.accounting(generator):
            predictions = qa.answer_questions(
                asked,
                counts,
                generator,
                preset,
                self.out,
                settings=settings,
                gold_at=places or (None,),
                made_with={
                    "questions_sha256": qa.questions_sha256(read),
                    "retriever_sha256": index.fingerprint if index else None,
                    "prompt_preset": self.prompt_preset,
                },
                about=about,
                if_exists=self.rerun.if_exists,
            )
        rows, out = qa_report.qa_rows(predictions), Path(self.out).expanduser()
        if not processes.first():
            return
        write_text(str(out / qa.FIGURES), qa_report.format_csv(rows))
        if len(rows) > 1:
            title = f"{Path(self.model).name} on {Path(str(self.questions.data or self.questions.dataset)).name}"
            qa_report.draw(str(out / qa.PLOT), {self.prompt_preset: rows}, title)
        if self.json:
            write_text(self.json, json.dumps(qa_report.to_json(rows, about), indent=2, ensure_ascii=False) + "\n")
        print(f"{qa_report.format_rows(rows)}\n\nPredictions and figures are in {self.out}.")

    def places(self, counts: list[int]) -> list[int] | None:
        """Those of --gold-at; None without it.

        Raises:
            UsageError: they are not places in a prompt of `counts` passages, of which there is one.
        """
        if self.gold_at is None:
            return None
        found = numbers("--gold-at", self.gold_at, 1)
        if len(counts) > 1 or counts == [0]:
            raise UsageError(f"--gold-at: needs a single number of --passages, from 1, not {self.passages}")
        if max(found) > counts[0]:
            raise UsageError(f"--gold-at {max(found)}: there are --passages {counts[0]}; name places from 1 to these")
        return found


@dataclass(frozen=True)
class Eval:
    """Judge retrievers by what they find, and readers by their answers."""

    task: (
        Annotated[EvalRetrieval, tyro.conf.subcommand("retrieval", prefix_name=False)]
        | Annotated[EvalQA, tyro.conf.subcommand("qa", prefix_name=False)]
        | Annotated[EvalLong, tyro.conf.subcommand("long", prefix_name=False)]
        | Annotated[EvalLengths, tyro.conf.subcommand("lengths", prefix_name=False)]
    )

    @property
    def rerun(self) -> RerunOptions:
        """Of `ralm eval qa` and `ralm eval long`; the others have none."""
        return self.task.rerun  # type: ignore[union-attr]

    def run(self) -> None:
        self.task.run()


def numbers(option: str, listed: str, least: int) -> list[int]:
    """The numbers of a list with commas, each once, in their order by size.

    Raises:
        UsageError: something else, or below `least`.
    """
    words = [word.strip() for word in listed.split(",")]
    if not all(word.isdecimal() and int(word) >= least for word in words):
        raise UsageError(f"{option} {listed}: expected numbers from {least}, separated by commas")
    return sorted({int(word) for word in words})
