"""Question answering with and without passages (In-Context RALM, section 7): from questions to a file of predictions.

A prediction is one line, written as soon as it is there. What is in the file is not asked again, so that a run goes on
after a kill, and another number of passages costs only its own answers.
"""

import fcntl
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tqdm import tqdm

from eval.answers import judge
from eval.prompts import PromptPreset
from eval.retrievers import search_questions
from ralm_jax import processes
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.generate.generator import Generation, Generator
from ralm_jax.settings import GenerateSettings, IfExists, at_least
from ralm_jax.storage import Folder
from ralm_jax.text import json_line, read_rows, writing
from retrieval.qa import Question, answer_matcher, mark_answers
from retrieval.results import refuse_twice
from retrieval.retriever import Retriever

log = logging.getLogger("ralm")

KIND = "answers"
PREDICTIONS, FIGURES, PLOT = "predictions.jsonl", "qa.csv", "qa.png"  # in the folder

Key = tuple[str, int, int | None]  # of an answer: question, passages, place of the gold one


@dataclass(frozen=True)
class Prediction:
    """What was answered to a question in one prompt.

    Attributes:
        question: its id.
        passages: that were asked for.
        gold_at: the place of the gold one among them, from 1; None where it has none of its own.
        given: that the prompt has; fewer where fewer were found.
        prompt_sha256: of the prompt.
        prompt_tokens, new_tokens, finish, text: as in `Generation`.
        cut: tokens that the prompt lost at its start.
        answer: what of `text` is the answer.
        em, f1, rouge_l, contains: as in `Quality`.
        has_answer: an answer stands in a passage, as DPR looks for it; None where no passages were asked for.
    """

    question: str
    passages: int
    gold_at: int | None
    given: int
    prompt_sha256: str
    prompt_tokens: int
    cut: int
    new_tokens: int
    finish: str
    text: str
    answer: str
    em: bool
    f1: float | None
    rouge_l: float | None
    contains: bool
    has_answer: bool | None

    @property
    def key(self) -> Key:
        return self.question, self.passages, self.gold_at


class Job(NamedTuple):
    """A question, with the passages of its prompt in their order; how many these should be, and where the gold one."""

    question: Question
    passages: int
    gold_at: int | None
    prompt: str

    @property
    def key(self) -> Key:
        return self.question.id, self.passages, self.gold_at

    @property
    def prompt_sha256(self) -> str:
        return sha256(self.prompt.encode()).hexdigest()


# --- questions and their passages ---


def with_answers(questions: Sequence[Question], limit: int | None = None) -> list[Question]:
    """The first `limit` questions that can be judged; those without answers are left out, and said.

    Raises:
        UsageError: `limit` is below 1, or none has an answer.
        RalmError: an id stands twice, a question has no text, or an answer is no regular expression and should be one.
    """
    at_least(1, limit_questions=limit)
    refuse_twice("the data", "question", [question.id for question in questions])
    asked = [question for question in questions if question.answers]
    if not asked:
        raise UsageError("the questions have no answers to judge by; name a file that has them with --data")
    if len(asked) < len(questions):
        without = len(questions) - len(asked)
        log.warning("%s of %s questions have no answers and are left out", f"{without:,}", f"{len(questions):,}")
    asked = asked[:limit]
    for question in asked:
        if not question.text.strip():
            raise RalmError(f"question {question.id} has no text")
        answer_matcher(question)
    return asked


def with_passages(
    questions: list[Question], most: int, retriever: Retriever | None = None, *, progress: bool | None = None
) -> list[Question]:
    """`questions` with up to `most` passages of `retriever` each, or of their own where there is none, in which answers
    have been looked for.

    Raises:
        UsageError: the index has not so many, or where there is none, no question has.
        RalmError: a passage has no text.
    """
    if retriever is not None and most > len(retriever.passages):
        raise UsageError(f"--passages {most}: {retriever.location} has {len(retriever.passages):,} passages")
    if retriever is not None and most:
        questions = search_questions(retriever, questions, most, progress=progress)
    questions = [question._replace(found=question.found[:most]) for question in questions]
    largest = max(len(question.found) for question in questions)
    if largest < most and retriever is None:
        told = f"no question has more than {largest:,}" if largest else "the questions have none"
        raise UsageError(f"--passages {most}: {told}; name an index to search with --index, or ask for fewer")
    return [marked(question) for question in questions]


def marked(question: Question) -> Question:
    """`question` with passages in which answers have been looked for, whatever the data say.

    Raises:
        RalmError: a passage has no text.
    """
    for passage in question.found:
        if passage.text is None:
            raise RalmError(
                f"passage {passage.id} of question {question.id} has no text; `ralm convert-retrieval --to dpr "
                "--corpus` adds it"
            )
    return mark_answers(question, anew=True)


def questions_sha256(questions: Iterable[Question]) -> str:
    digest = sha256()
    for question in questions:
        digest.update(json_line([question.id, question.text, question.answers, question.regex]).encode() + b"\n")
    return digest.hexdigest()


# --- answers ---


def answer_questions(
    questions: Sequence[Question],
    passages: Sequence[int],
    generator: Generator,
    preset: PromptPreset,
    location: str,
    *,
    settings: GenerateSettings,
    gold_at: Sequence[int | None] = (None,),
    made_with: dict[str, Any],
    about: dict[str, Any],
    if_exists: IfExists = "refuse",
    progress: bool | None = None,
) -> list[Prediction]:
    """Asks every question with each number of passages, and judges the answers.

    Args:
        questions: of `with_passages`, or with `gold_at`, of `eval.gold.with_gold`.
        passages: how many of them a prompt has, several numbers.
        location: a local folder; predictions are appended to a file in it.
        settings: of generation; stop strings are those of `preset`.
        gold_at: places of the gold passage, from 1; each is asked with each number of passages.
        made_with: what the answers depend on beside reader and generation, which a run that resumes has to share.
        about: is written into the folder's manifest when all answers are there.
        progress: show a progress bar; None for "if there is a terminal".

    Returns:
        The predictions by number of passages and place, in the order of the questions.

    Raises:
        UsageError: `location` is taken and `if_exists` refuses, or it is not a local folder.
        RalmError: what is there was made in another way, is damaged, or is being written by another run; or the reader
            fails, or the disk is full.
    """
    if "://" in location:
        raise UsageError(f"{location}: answers need a local disk")
    jobs = [prompted(q, count, place, preset) for count in passages for place in gold_at for q in questions]
    root = Path(location).expanduser()
    if if_exists == "overwrite":
        processes.once(lambda: remove_earlier(location))
    depends = {"reader": generator.identity, "generate": asdict(settings)} | made_with
    folder = Folder.create(location, KIND, depends, if_exists)
    with appending(root / PREDICTIONS) if processes.first() else nullcontext() as file:
        done = processes.once(lambda: {one.key: one for one in recovered(root / PREDICTIONS, file)} if file else {})
        check_prompts(root / PREDICTIONS, jobs, done)
        todo = [job for job in jobs if job.key not in done]
        with tqdm(
            total=len(jobs),
            initial=len(jobs) - len(todo),
            unit="answer",
            disable=processes.bar_hidden(progress),
        ) as bar:
            for place, made in generator.generate([job.prompt for job in todo], settings) if todo else ():
                prediction = judged(todo[place], made, preset)
                if file is not None:  # process 0 writes
                    with writing(root / PREDICTIONS):
                        file.write(json_line(asdict(prediction)).encode() + b"\n")
                        file.flush()
                done[prediction.key] = prediction
                bar.update()
    folder.manifest["about"] = about
    folder.write_manifest()
    found = [done[job.key] for job in jobs]
    cut = [one.cut for one in found if one.cut]
    if cut:
        log.warning(
            "%s of %s prompts did not fit and lost %s tokens at their start; ask for fewer --passages, or shorter ones",
            f"{len(cut):,}", f"{len(found):,}", f"{sum(cut):,}",
        )  # fmt: skip
    return found


def prompted(question: Question, passages: int, gold_at: int | None, preset: PromptPreset) -> Job:
    """The first `passages` of `question` in a prompt; the first of all, which is the gold one, at place `gold_at`, if
    that is given, or last where there are too few before it."""
    used = list(question.found[:passages])
    if gold_at is not None:
        used.insert(gold_at - 1, used.pop(0))
    return Job(question._replace(found=tuple(used)), passages, gold_at, preset.prompt(question.text, used))


def judged(job: Job, made: Generation, preset: PromptPreset) -> Prediction:
    question, used = job.question, job.question.found
    text = made.text.encode("utf-8", "replace").decode()  # a server can send lone surrogates, which no file takes
    answer = preset.answer(text)
    return Prediction(
        question.id, job.passages, job.gold_at, len(used), job.prompt_sha256, made.prompt_tokens, made.cut,
        made.new_tokens, made.finish, text, answer, **judge(answer, question.answers, regex=question.regex)._asdict(),
        has_answer=any(passage.has_answer for passage in used) if job.passages else None,
    )  # fmt: skip


# --- the file of predictions ---


def remove_earlier(location: str) -> None:
    """Removes what an earlier run wrote into its folder; others' folders are left as they are."""
    try:
        Folder.open(location, KIND)
    except UsageError:
        return
    for name in (PREDICTIONS, FIGURES, PLOT):
        (Path(location).expanduser() / name).unlink(missing_ok=True)


@contextmanager
def appending(path: Path) -> Iterator[BinaryIO]:
    """The file, to append to; no other process does so meanwhile, which would give every answer twice.

    Raises:
        RalmError: another one does, or it cannot be written.
    """
    with writing(path):
        file = path.open("ab")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, however that ends
        except BlockingIOError:
            raise RalmError(f"{path}: another run is writing it; wait for its end") from None
        yield file


def recovered(path: Path, file: BinaryIO) -> list[Prediction]:
    """The predictions in the file; what follows the last line end, which a killed run left half-written, is cut off.

    Raises:
        RalmError: another line is broken, or a prediction stands twice; file and line are named.
    """
    content = path.read_bytes()
    with writing(path):
        file.truncate(content.rfind(b"\n") + 1)
    found: dict[Key, Prediction] = {}
    for where, row in read_rows(path):
        prediction = parse_prediction(row, where)
        if prediction.key in found:
            raise RalmError(f"{where}: question {prediction.question} stands twice with {prediction.passages} passages")
        found[prediction.key] = prediction
    return list(found.values())


def parse_prediction(row: Any, where: str) -> Prediction:
    columns = {field.name: field.type for field in fields(Prediction)}
    if isinstance(row, dict) and row.keys() == columns.keys():
        wrong = [name for name, kind in columns.items() if not isinstance(row[name], kind)]  # type: ignore[arg-type]
        if not wrong:
            return Prediction(**row)
    raise RalmError(f"{where}: not a prediction; delete the line to have its question asked again, or add --overwrite")


def check_prompts(path: Path, jobs: Sequence[Job], done: dict[Key, Prediction]) -> None:
    """
    Raises:
        RalmError: a question was asked in another prompt than now.
    """
    for job in jobs:
        if job.key in done and done[job.key].prompt_sha256 != job.prompt_sha256:
            raise RalmError(
                f"{path}: question {job.question.id} was asked with {job.passages} other passages, or in other words, "
                "and cannot be resumed; add --overwrite"
            )
