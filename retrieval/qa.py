"""Questions with their answers, and the passages found for them: one record for question files and retrieval results.

Here are the files of questions; `retrieval.results` has those with passages, and the table of all.
"""

import ast
import functools
import re
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import regex

from ralm_jax.errors import RalmError
from ralm_jax.text import json_line, read_lines
from retrieval.rows import SCROLLS, clean, field, split_input, tsv_line, tsv_rows

ID_FIELDS = ("id", "_id", "qid", "question_id", "QuestionId")
TEXT_FIELDS = ("question", "text", "input", "query", "Question")  # LongBench's input, the paper's query
ANSWER_FIELDS = (  # DPR, NQ-open, FlashRAG, CuratedTREC, TriviaQA, SCROLLS
    "answers", "answer", "golden_answers", "answer_regex", "Answer", "output", "outputs",
)  # fmt: skip
LONGBENCH_FIELDS = ("dataset", "language", "all_classes")
TOKEN = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")  # DPR's SimpleTokenizer
LIMIT = "\x1f"  # between tokens, none of which holds it


class Found(NamedTuple):
    """A passage that was found.

    Attributes:
        text: None where the file names passages without their text.
        has_answer: None where nobody has looked.
        gold: the data say that it is the one with the answer.
    """

    id: str
    score: float
    title: str = ""
    text: str | None = None
    has_answer: bool | None = None
    gold: bool = False


class Question(NamedTuple):
    """A question, and what was found for it, best first.

    Attributes:
        id: its own, or its place in the file, from 0, which is how Pyserini numbers questions without one.
        text: empty where the file names questions without their text.
        regex: the answers are regular expressions (CuratedTREC).
        kept: what only LongBench says of a question, to be written there again: `LONGBENCH_FIELDS` and their values.
    """

    id: str
    text: str
    answers: tuple[str, ...] = ()
    found: tuple[Found, ...] = ()
    regex: bool = False
    kept: tuple[tuple[str, Any], ...] = ()


# --- read ---


def json_question(entry: dict, where: str, id: str) -> Question:
    """The question of any JSON file; `id` counts where it has none of its own.

    Raises:
        RalmError: it has no text, or answers that are not text.
    """
    return Question(
        field(entry, ID_FIELDS, where, default=id),
        split_input(entry, where)[0] if entry.keys() >= SCROLLS else field(entry, TEXT_FIELDS, where),
        json_answers(entry, where),
        regex="answer_regex" in entry,
        kept=tuple((name, entry[name]) for name in LONGBENCH_FIELDS if name in entry and "context" in entry),
    )


def json_answers(entry: dict, where: str) -> tuple[str, ...]:
    for name in ANSWER_FIELDS:
        value = entry.get(name)
        if value is not None:
            return aliases(value, where) if isinstance(value, dict) else texts(value, name, where)
    return ()


def aliases(answer: dict, where: str) -> tuple[str, ...]:
    """TriviaQA's: the value, which the aliases often lack, and they; none where Hugging Face has the value <unk>."""
    value = field(answer, ["value", "Value"], where)
    listed = answer.get("aliases", answer.get("Aliases", []))
    return tuple(dict.fromkeys((value, *texts(listed, "aliases", where)))) if value != "<unk>" else ()


def texts(value: Any, name: str, where: str) -> tuple[str, ...]:
    """A string, or a list of strings."""
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise RalmError(f"{where}: {name}: expected a list of strings")
    return tuple(clean(one, where) for one in value)


def read_csv(file: Path) -> Iterator[Question]:
    """DPR's question\\t['a', 'b'], quoted as CSV; the answers are a Python literal, which is never evaluated.

    Raises:
        RalmError: not two fields, or the second one is not a list of strings; file and line are named.
    """
    for number, (where, row) in enumerate(tsv_rows(file)):
        if len(row) != 2:
            raise RalmError(f"{where}: {len(row)} fields, expected 2 (question, list of answers)")
        question, listed = (clean(column, where) for column in row)
        try:
            with warnings.catch_warnings(action="ignore"):  # backslashes of regular expressions
                answers = ast.literal_eval(listed.strip())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            raise RalmError(f"{where}: answers: expected a list as ['a', 'b'], found {listed[:60]}") from None
        yield Question(str(number), question, texts(answers, "answers", where))


def read_qrels(path: str) -> dict[str, frozenset[str]]:
    """The relevant passages (grade above 0) of each question that has any: BEIR's TSV with its header, or TREC's
    qid 0 docid grade.

    Raises:
        UsageError: there is no such file.
        RalmError: a line of neither kind, or no relevant passage; file and line are named.
    """
    gold: dict[str, set[str]] = {}
    for number, line in read_lines(Path(path).expanduser()):
        fields, where = split_fields(line), f"{path}:{number}"
        if not fields or (number == 1 and len(fields) == 3 and not is_integer(fields[2])):
            continue
        if len(fields) not in (3, 4) or not is_integer(fields[-1]):
            raise RalmError(f"{where}: expected query-id, corpus-id and a whole number, or qid 0 docid and one")
        if int(fields[-1]) > 0:
            gold.setdefault(fields[0], set()).add(fields[-2])
    if not gold:
        raise RalmError(f"{path}: no relevant passages in it")
    return {question: frozenset(passages) for question, passages in gold.items()}


def split_fields(line: str) -> list[str]:
    """What stands between spaces and tabs."""
    return re.findall(r"[^ \t\r]+", line)


def is_integer(field: str) -> bool:
    return re.fullmatch(r"[+-]?\d+", field, re.ASCII) is not None


# --- written ---


def own_id(name: str, question: Question, number: int) -> dict[str, str]:
    """The id, if it is not the place in the file, for files that have none by themselves."""
    return {} if question.id == str(number) else {name: question.id}


def with_text(question: Question) -> str:
    """
    Raises:
        RalmError: the question has none.
    """
    if not question.text:
        raise RalmError(f"question {question.id} has no text; --questions FILE adds it, with its answers")
    return question.text


def nq_lines(questions: Iterable[Question]) -> Iterator[str]:
    for i, question in enumerate(questions):
        yield json_line(own_id("id", question, i) | {"question": with_text(question), "answer": list(question.answers)})


def csv_lines(questions: Iterable[Question]) -> Iterator[str]:
    for question in questions:
        yield tsv_line([with_text(question), repr(list(question.answers))])


def flashrag_lines(questions: Iterable[Question]) -> Iterator[str]:
    for question in questions:
        yield json_line({"id": question.id, "question": with_text(question), "golden_answers": list(question.answers)})


def beir_query_lines(questions: Iterable[Question]) -> Iterator[str]:
    for question in questions:
        yield json_line({"_id": question.id, "text": with_text(question)})


# --- answers in passages ---


def answer_matcher(question: Question) -> Callable[[str], bool]:
    """Whether an answer stands in a text as DPR looks for it (`qa_validation.py`): the same tokens in a row, in NFD
    and lower case; or, of regular expressions, a match in any case. An answer without tokens never matches.

    Regular expressions match in NFC: in NFD, as in DPR, "[zž]" and "\\ě" of CuratedTREC fall apart and never match.

    Raises:
        RalmError: an answer that should be a regular expression is none.
    """
    if question.regex:
        try:
            patterns = [re.compile(nfc(answer), re.IGNORECASE | re.MULTILINE) for answer in question.answers]
        except re.error as error:
            raise RalmError(f"question {question.id}: an answer is not a regular expression ({error})") from None
        return lambda text: any(pattern.search(nfc(text)) for pattern in patterns)
    answers = [tokens for tokens in map(bounded_tokens, question.answers) if tokens != LIMIT]
    return lambda text: any(map(bounded_tokens(text).__contains__, answers))


def bounded_tokens(text: str) -> str:
    """The tokens, each between two limits: the tokens of one text stand in a row in another's as a substring."""
    return LIMIT + "".join(token.lower() + LIMIT for token in TOKEN.findall(nfd(text)))


nfc, nfd = functools.partial(unicodedata.normalize, "NFC"), functools.partial(unicodedata.normalize, "NFD")


def mark_answers(question: Question, *, anew: bool = False) -> Question:
    """`question` with `has_answer` of the passages whose text is there, where it is unknown or `anew`; none without
    answers."""
    if not question.answers:
        return question
    matches = answer_matcher(question)
    found = (
        passage._replace(has_answer=matches(passage.text))
        if passage.text is not None and (anew or passage.has_answer is None)
        else passage
        for passage in question.found
    )
    return question._replace(found=tuple(found))
