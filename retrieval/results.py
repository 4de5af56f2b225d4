"""Questions and what was found for them, in other programs' files; `DIALECTS` is the table of all."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ralm_jax.errors import RalmError, UsageError
from ralm_jax.text import json_line, read_lines, write_lines
from retrieval.corpus import Passage, join_contents, split_contents
from retrieval.qa import (
    Found,
    Question,
    beir_query_lines,
    csv_lines,
    flashrag_lines,
    is_integer,
    json_question,
    nq_lines,
    own_id,
    read_csv,
    split_fields,
    with_text,
)
from retrieval.rows import SCROLLS, field, json_entries

LISTS = (  # of passages: DPR's and Contriever's, Pyserini's, the paper's, DPR's for training
    "ctxs", "contexts", "retrieved_docs", "positive_ctxs",
)  # fmt: skip

# --- read ---


def read_json(file: Path) -> Iterator[Question]:
    """Every JSON dialect: the fields say which. A list, an object by question id, or jsonl.

    SCROLLS has a row for each reference: those of one id are one question. The paper's file has no ids: passages of the
    same title and text get the same number. Its strides without query and passages are left out. Of DPR's training data
    come the first positive passage, which is the gold one, and then the hard negatives.

    Raises:
        RalmError: not JSON, or a field is missing or of a wrong kind; file and line are named.
    """
    questions: dict[str | int, Question] = {}
    numbers: dict[tuple, str] = {}
    for number, (where, key, entry) in enumerate(json_entries(file)):
        question = json_question(entry, where, str(number) if key is None else key)
        name = next((name for name in LISTS if name in entry), "")
        papers, found = name == "retrieved_docs", json_passages(entry, name, where)
        if papers and not (found or question.text):
            continue
        if name == "positive_ctxs":
            gold = [passage._replace(gold=True) for passage in found[:1]]
            found = gold + json_passages(entry, "hard_negative_ctxs", where)
        question = question._replace(found=tuple(numbered(found, numbers) if papers else found))
        place = question.id if entry.keys() >= SCROLLS else number
        questions[place] = join_answers(questions[place], question, where) if place in questions else question
    yield from questions.values()


def join_answers(question: Question, other: Question, where: str) -> Question:
    """`question` with the answers of both.

    Raises:
        RalmError: the other one is not the same question.
    """
    if question.text != other.text:
        raise RalmError(f"{where}: the id {other.id} is that of another question above")
    return question._replace(answers=tuple(dict.fromkeys(question.answers + other.answers)))


def numbered(found: Iterable[Found], numbers: dict[tuple, str]) -> Iterator[Found]:
    """`found` with `numbers` by title and text, which are added to, for ids; what comes again has another one."""
    times: Counter[tuple] = Counter()
    for passage in found:
        contents = passage.title, passage.text
        times[contents] += 1
        yield passage._replace(id=numbers.setdefault((*contents, times[contents]), str(len(numbers))))


def json_passages(entry: dict, name: str, where: str) -> list[Found]:
    """Those of a list of `entry`; none where it has no such list."""
    listed = entry.get(name, [])
    if not isinstance(listed, list):
        raise RalmError(f"{where}: {name}: expected a list")
    ranks, joined = enumerate(listed, start=1), name == "retrieved_docs"
    return [json_found(context, f"{where}: passage {rank}", rank, joined=joined) for rank, context in ranks]


def json_found(context: Any, where: str, rank: int, *, joined: bool = False) -> Found:
    """A passage of `LISTS`. Without title, the text of Pyserini's, or if `joined`, is "title\\ntext"."""
    id = field(context, ["id", "docid", "passage_id", "psg_id"], where, default="")
    title = field(context, ["title"], where, default="")
    text = None if context.get("text") is None else field(context, ["text"], where)
    if text is not None and (joined or "docid" in context) and "title" not in context:
        title, text = split_contents(text)
    score = context.get("score")
    return Found(
        id, 1 / rank if score is None else number(score, where), title, text,
        flag(context, ["has_answer", "hasanswer"], where), flag(context, ["isgold"], where) or False,
    )  # fmt: skip


def flag(context: dict, names: Sequence[str], where: str) -> bool | None:
    """The first of `names` that `context` has, true or false."""
    value = next((context[name] for name in names if context.get(name) is not None), None)
    if value is not None and not isinstance(value, bool):
        raise RalmError(f"{where}: {names[0]} is {type(value).__name__}, expected true or false")
    return value


def number(value: Any, where: str) -> float:
    """A finite number, or a string that says one."""
    try:
        result = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        result = math.nan
    if not math.isfinite(result):
        raise RalmError(f"{where}: score {value!r} is not a finite number")
    return result


def read_trec(file: Path) -> Iterator[Question]:
    """qid Q0 docid rank score tag, in any order; a question's passages come by rank."""
    return read_run(file, ("qid", "Q0", "docid", "rank", "score", "tag"))


def read_msmarco(file: Path) -> Iterator[Question]:
    """qid docid rank, in any order; 1/rank stands in for the score, as in Pyserini."""
    return read_run(file, ("qid", "docid", "rank"))


def read_run(file: Path, columns: tuple[str, ...]) -> Iterator[Question]:
    """
    Raises:
        RalmError: a line that is not of the format, or a passage twice; file and line are named.
    """
    runs: dict[str, dict[str, tuple[int, Found]]] = {}
    for line_number, line in read_lines(file):
        fields, where = split_fields(line), f"{file}:{line_number}"
        if not fields:
            continue
        row = dict(zip(columns, fields, strict=False))
        if len(fields) != len(columns) or not is_integer(row["rank"]):
            raise RalmError(f"{where}: expected {' '.join(columns)}; found {line.strip()[:60]!r}")
        run, docid, rank = runs.setdefault(row["qid"], {}), row["docid"], int(row["rank"])
        if docid in run:
            raise RalmError(f"{where}: passage {docid} stands twice under question {row['qid']}")
        score = number(row["score"], where) if "score" in row else 1 / max(1, rank)
        run[docid] = rank, Found(docid, score)
    for qid, run in runs.items():
        ranked = sorted(run.values(), key=lambda found: found[0])
        yield Question(qid, "", found=tuple(passage for _, passage in ranked))


# --- written ---


def dpr_lines(questions: Iterable[Question]) -> Iterator[str]:
    """A list with an entry a line."""
    before = "["
    for i, question in enumerate(questions):
        yield before
        before = json_line(dpr_entry(question, i, "has_answer")) + ","
    yield before.removesuffix(",")
    yield "]"


def contriever_lines(questions: Iterable[Question]) -> Iterator[str]:
    for i, question in enumerate(questions):
        entry = dpr_entry(question, i, "hasanswer")
        yield json_line(entry | {"ctxs": [context | {"score": str(context["score"])} for context in entry["ctxs"]]})


def dpr_entry(question: Question, number: int, label: str) -> dict[str, Any]:
    """
    Raises:
        RalmError: question or passage has no text.
    """
    contexts = (
        passage_with_text(p, question)._asdict() | {"score": p.score} | labels(p, label) for p in question.found
    )
    entry = own_id("id", question, number) | {"question": with_text(question), "answers": list(question.answers)}
    return entry | {"ctxs": list(contexts)}


def longbench_lines(questions: Iterable[Question]) -> Iterator[str]:
    """The context is what was found, best first; its length is in words."""
    for question in with_passages(questions):
        context = "\n\n".join(passage_with_text(passage, question).contents for passage in question.found)
        entry: dict[str, Any] = {"input": with_text(question), "context": context, "answers": list(question.answers)}
        entry |= {"length": len(context.split()), "dataset": "", "language": "en", "all_classes": None}
        yield json_line(entry | dict(question.kept) | {"_id": question.id})


def ralm_lines(questions: Iterable[Question]) -> Iterator[str]:
    """
    Raises:
        UsageError: always: other files do not know where in a text the strides are.
    """
    raise UsageError(
        "--to ralm: the paper's file has an entry a stride, with its place in a text's tokens, which questions do not "
        "have; ralm retrieve --export-json writes it"
    )


def pyserini_lines(questions: Iterable[Question]) -> Iterator[str]:
    """An object by question id with an entry a line; passages may have no text."""
    before = "{"
    for question in questions:
        yield before
        contexts = [
            {"docid": p.id, "score": str(p.score)}
            | known("text", None if p.text is None else join_contents(Passage(p.id, p.title, p.text)))
            | labels(p, "has_answer")
            for p in question.found
        ]
        entry = {"question": with_text(question), "answers": list(question.answers), "contexts": contexts}
        before = f"{json_line(question.id)}: {json_line(entry)},"
    yield before.removesuffix(",")
    yield "}"


def trec_lines(questions: Iterable[Question]) -> Iterator[str]:
    for question in with_passages(questions):
        for rank, passage in enumerate(question.found, start=1):
            yield f"{word(question.id)} Q0 {word(passage.id)} {rank} {passage.score!r} ralm"


def msmarco_lines(questions: Iterable[Question]) -> Iterator[str]:
    for question in with_passages(questions):
        for rank, passage in enumerate(question.found, start=1):
            yield f"{word(question.id)}\t{word(passage.id)}\t{rank}"


def known(name: str, value: Any) -> dict[str, Any]:
    return {} if value is None else {name: value}


def labels(found: Found, answer: str) -> dict[str, bool]:
    """What is known of it, with the name of `has_answer`."""
    return known(answer, found.has_answer) | known("isgold", found.gold or None)


def passage_with_text(found: Found, question: Question) -> Passage:
    """
    Raises:
        RalmError: it has no text.
    """
    if found.text is None:
        raise RalmError(f"passage {found.id} of question {question.id} has no text; --corpus FILE adds it")
    return Passage(found.id, found.title, found.text)


def with_passages(questions: Iterable[Question]) -> Iterator[Question]:
    """
    Raises:
        RalmError: none of them has passages.
    """
    some = False
    for question in questions:
        some = some or bool(question.found)
        yield question
    if not some:
        raise RalmError("the questions have no passages to write")


def word(id: str) -> str:
    """
    Raises:
        RalmError: the id is empty or has spaces, which would shift the columns of a run.
    """
    if split_fields(id) != [id] or "\n" in id:
        raise RalmError(f"id {id!r} cannot stand in a run: it is empty or has spaces")
    return id


# --- the table ---


class Dialect(NamedTuple):
    """How a kind of file is read, and written line by line."""

    read: Callable[[Path], Iterator[Question]]
    lines: Callable[[Iterable[Question]], Iterator[str]]


DIALECTS = {
    "dpr": Dialect(read_json, dpr_lines),
    "contriever": Dialect(read_json, contriever_lines),
    "pyserini": Dialect(read_json, pyserini_lines),
    "longbench": Dialect(read_json, longbench_lines),
    "ralm": Dialect(read_json, ralm_lines),
    "trec": Dialect(read_trec, trec_lines),
    "msmarco": Dialect(read_msmarco, msmarco_lines),
    "nq-open": Dialect(read_json, nq_lines),
    "csv": Dialect(read_csv, csv_lines),
    "flashrag": Dialect(read_json, flashrag_lines),
    "beir-queries": Dialect(read_json, beir_query_lines),
}


def read_questions(path: str, dialect: str = "auto") -> list[Question]:
    """The questions of a file, and what was found for them if it says.

    Args:
        dialect: a name of `DIALECTS`, or "auto", by the first line.

    Raises:
        UsageError: there is no such file.
        RalmError: it is not of the dialect, or of none; an id or a passage stands in it twice; or it has no questions.
    """
    file = Path(path).expanduser()
    read = DIALECTS[dialect].read if dialect != "auto" else detect(file)
    questions = list(read(file))
    if not questions:
        raise RalmError(f"{path}: no questions in it")
    refuse_twice(path, "question", [question.id for question in questions])
    for question in questions:
        refuse_twice(f"{path}: question {question.id}", "passage", [p.id for p in question.found if p.id])
    return questions


def refuse_twice(where: str, kind: str, ids: list[str]) -> None:
    """
    Raises:
        RalmError: an id stands twice among `ids`.
    """
    if len(set(ids)) < len(ids):
        seen: set[str] = set()
        twice = next(id for id in ids if id in seen or seen.add(id))  # type: ignore[func-returns-value]
        raise RalmError(f"{where}: {kind} {twice} stands in it twice")


def detect(file: Path) -> Callable[[Path], Iterator[Question]]:
    """The reader of the dialect that the first line is of.

    Raises:
        RalmError: it is of none.
    """
    place, line = next(((number, line) for number, line in read_lines(file) if line.strip()), (1, ""))
    fields = split_fields(line)
    if not line or line.lstrip()[:1] in ("{", "["):
        return read_json
    if len(fields) == 6 and is_integer(fields[3]):
        return read_trec
    if len(fields) == 3 and is_integer(fields[2]):
        return read_msmarco
    if "\t" in line:
        return read_csv
    raise RalmError(f"{file}:{place}: none of the dialects {', '.join(DIALECTS)}; found {line.strip()[:60]!r}")


def write_questions(path: str, questions: Iterable[Question], dialect: str) -> None:
    """Writes a file of `dialect`, a name of `DIALECTS`, compressed if its name ends in .gz or .zst.

    Raises:
        RalmError: it cannot be written, or the dialect needs what is not there: texts, or passages.
    """
    write_lines(path, DIALECTS[dialect].lines(questions))


def join_questions(found: list[Question], asked: list[Question]) -> list[Question]:
    """`found` with the texts and answers that the same ids have in `asked`.

    Raises:
        RalmError: an id is not among them, or is that of another question there.
    """
    by_id = {question.id: question for question in asked}
    missing = [question.id for question in found if question.id not in by_id]
    if missing:
        raise RalmError(f"{len(missing):,} questions are not in the file of questions, {missing[0]} the first")
    for question in found:
        other = by_id[question.id].text
        if question.text not in ("", other):
            raise RalmError(f"question {question.id} is {question.text!r}, but {other!r} in the file of questions")
    return [by_id[question.id]._replace(found=question.found) for question in found]


def join_passages(found: list[Question], corpus: Iterable[Passage]) -> list[Question]:
    """`found` with the titles and texts that its passages' ids have in `corpus`.

    Raises:
        RalmError: an id is not in it.
    """
    wanted = {passage.id for question in found for passage in question.found}
    texts = {passage.id: passage for passage in corpus if passage.id in wanted}
    if len(texts) < len(wanted):
        missing = sorted(wanted - texts.keys())
        raise RalmError(f"{len(missing):,} passages are not in the corpus, {missing[0]!r} the first")
    return [
        question._replace(
            found=tuple(p._replace(title=texts[p.id].title, text=texts[p.id].text) for p in question.found)
        )
        for question in found
    ]
