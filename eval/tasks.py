"""The nine long-context tasks (Retrieval meets Long Context, section 3.2) and their public files: LongBench's rows,
SCROLLS' and ZeroSCROLLS', and the original releases of HotpotQA, Qasper, QMSum and QuALITY."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from eval.long_metrics import Kind
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.settings import LongTask, MetricFamily
from ralm_jax.text import data_suffix
from retrieval.qa import json_answers
from retrieval.results import refuse_twice
from retrieval.rows import SCROLLS, field, json_entries, split_input

LONGBENCH = "https://huggingface.co/datasets/zai-org/LongBench: data.zip"
ROWS = (".jsonl", ".json")


class Task(NamedTuple):
    """
    Attributes:
        kind: of what is to be answered.
        source: the benchmark that the paper takes it from, by whose metric it is scored unless another one is named.
        samples: questions that the paper's numbers are over.
        new_tokens: that an answer may have, as in LongBench.
        scrolls: its name in SCROLLS; empty where that does not have it.
    """

    kind: Kind
    source: MetricFamily
    samples: int
    new_tokens: int
    scrolls: str = ""


TASKS: dict[LongTask, Task] = {
    "qmsum": Task("summary", "scrolls", 200, 512, "qmsum"),
    "qasper": Task("span", "scrolls", 984, 128, "qasper"),
    "narrativeqa": Task("span", "scrolls", 2000, 128, "narrative_qa"),
    "quality": Task("choice", "scrolls", 2000, 64, "quality"),  # the tokens are ours: its options are sentences
    "musique": Task("span", "longbench", 200, 32),
    "hotpotqa": Task("span", "longbench", 200, 32),
    "multifieldqa_en": Task("span", "longbench", 150, 64),
    "trec": Task("class", "longbench", 200, 64),
    "samsum": Task("dialogue", "longbench", 200, 128),
}


class Example(NamedTuple):
    """A question about a document.

    Attributes:
        question: with the options where there are some. Of few-shot tasks, what the document's examples go on with.
        document: the text to be read; of few-shot tasks, worked examples.
        answers: all that count as right.
        classes: of a classification, the names of all.
        separator: what ZeroSCROLLS writes where the document's end is cut off; empty in other files.
    """

    id: str
    question: str
    document: str
    answers: tuple[str, ...]
    classes: tuple[str, ...] = ()
    separator: str = ""


def read_examples(name: LongTask, path: str) -> list[Example]:
    """The examples of a task.

    SCROLLS has a row for each reference: those of one id are one example.

    Args:
        path: a file, or a folder that has a file named after the task, as `task_file` finds it.

    Raises:
        UsageError: no such file, which is told with what to download; or a row has no answer, as in test sets.
        RalmError: a row that is of no known kind, or broken, or an id twice; file and line are named.
    """
    file, found = task_file(name, path), dict[str, Example]()
    for where, key, row in json_entries(file):
        for grouped, example in row_examples(row, where, key):
            if not example.answers:
                raise UsageError(
                    f"{where}: no answer to judge by; test sets come without, and SCROLLS' validation sets with answers"
                )
            if name == "trec" and not example.classes:
                raise RalmError(f"{where}: field 'all_classes' is missing, which LongBench's rows of TREC have")
            id = example.id or str(len(found))
            if id in found and not grouped:
                refuse_twice(str(file), "example", [id, id])
            found[id] = joined(found[id], example, where) if id in found else example._replace(id=id)
    if not found:
        raise RalmError(f"{file}: no examples in it")
    return list(found.values())


def joined(example: Example, other: Example, where: str) -> Example:
    """`example` with the answers of both.

    Raises:
        RalmError: the other one is not the same example.
    """
    if (example.question, example.document) != (other.question, other.document):
        raise RalmError(f"{where}: the id {other.id} is that of another example above")
    return example._replace(answers=tuple(dict.fromkeys(example.answers + other.answers)))


# --- files ---


def task_file(name: LongTask, path: str) -> Path:
    """`path` if it is a file; of a folder the file with the task's name, in LongBench's spelling or in SCROLLS', then
    the validation set in a folder of that name, then the one file whose name begins with it.

    Raises:
        UsageError: there is none, or more than one.
    """
    root, names = Path(path).expanduser(), list(dict.fromkeys(filter(None, (name, TASKS[name].scrolls))))
    if root.is_file():
        return root
    files = sorted(file for file in root.rglob("*") if data_suffix(file) in ROWS and file.is_file())
    stems = {file: file.name.removesuffix(file.suffix).removesuffix(data_suffix(file)) for file in files}
    choices = (
        [file for file in files if stems[file] in names],
        [file for file in files if file.parent.name in names and stems[file] == "validation"],
        [file for file in files if stems[file].startswith(tuple(f"{own}_" for own in names))],
    )
    found = next(filter(None, choices), [])
    if len(found) > 1:
        listed = ", ".join(str(file.relative_to(root)) for file in found)
        raise UsageError(f"{path}: {name} is in it more than once ({listed}); name the file with --data")
    if not found:
        what = "no such file or folder" if not root.exists() else f"no file of {name}"
        raise UsageError(f"{path}: {what}; download {where_to_get(name)}, and name the unpacked folder with --data")
    return found[0]


def where_to_get(name: LongTask) -> str:
    scrolls = TASKS[name].scrolls
    places = [f"https://huggingface.co/datasets/tau/scrolls: {scrolls}.zip"] if scrolls else []
    return " or ".join(places if name == "quality" else [*places, LONGBENCH])


# --- rows ---


def row_examples(row: dict, where: str, key: str | None) -> Iterator[tuple[bool, Example]]:
    """The examples of a row of any file, each with whether others of its id are the same one with more answers.

    Args:
        key: of the row, where the file is an object of objects.

    Raises:
        RalmError: a row that is of no known kind, or broken.
    """
    if row.keys() >= SCROLLS:
        yield True, scrolls_example(row, where)
        return
    for names, read in RELEASES:
        if row.keys() >= names:
            try:
                yield from ((False, example) for example in read(row, where, key))
            except (TypeError, KeyError, ValueError, AttributeError, IndexError) as error:
                raise RalmError(f"{where}: not as in the original release ({type(error).__name__}: {error})") from None
            return
    if row.keys() >= {"input", "context"}:
        yield False, longbench_example(row, where)
        return
    raise RalmError(
        f"{where}: not a row of LongBench, SCROLLS, or of the original HotpotQA, Qasper, QMSum or QuALITY; its fields "
        f"are {', '.join(row)[:80]}"
    )


def longbench_example(row: dict, where: str) -> Example:
    classes = row.get("all_classes") or []
    if not isinstance(classes, list) or not all(isinstance(one, str) for one in classes):
        raise RalmError(f"{where}: all_classes: expected a list of strings")
    return Example(
        field(row, ["_id"], where, default=""), field(row, ["input"], where), field(row, ["context"], where),
        json_answers(row, where), tuple(classes),
    )  # fmt: skip


def scrolls_example(row: dict, where: str) -> Example:
    """QuALITY's options stay with its question."""
    question, document = split_input(row, where)
    if row.get("document_start_index") is None:
        question = field(row, ["input"], where).strip().removesuffix(document).strip()
    separator = field(row, ["truncation_seperator"], where, default="")  # as it is spelled there
    return Example(field(row, ["id"], where), question, document, json_answers(row, where), separator=separator)


def hotpotqa_release(row: dict, where: str, key: str | None) -> Iterator[Example]:
    """Paragraphs as LongBench writes them."""
    passages = (
        f"Passage {number}:\n{title}\n{''.join(sentences)}"
        for number, (title, sentences) in enumerate(row["context"], 1)
    )
    question = field(row, ["question"], where)
    yield Example(field(row, ["_id"], where), question, "\n\n".join(passages), json_answers(row, where))


def qasper_release(row: dict, where: str, key: str | None) -> Iterator[Example]:
    """A paper with its questions, whose answers are written as SCROLLS writes them. The ids are the paper's with a
    count: the release has some question ids twice."""
    sections = ["\n".join([part["section_name"] or "", *part["paragraphs"]]).strip() for part in row["full_text"]]
    document = "\n\n".join([row["title"], row["abstract"], *sections])
    for number, asked in enumerate(row["qas"]):
        answers = tuple(dict.fromkeys(qasper_answer(given["answer"]) for given in asked["answers"]))
        yield Example(f"{key or where}-{number}", asked["question"], document, answers)


def qasper_answer(answer: dict[str, Any]) -> str:
    if answer["unanswerable"]:
        return "Unanswerable"
    if answer["yes_no"] is not None:
        return "Yes" if answer["yes_no"] else "No"
    return ", ".join(answer["extractive_spans"]) or answer["free_form_answer"]


def qmsum_release(row: dict, where: str, key: str | None) -> Iterator[Example]:
    """A meeting with its queries, the general ones first."""
    document = "\n".join(f"{turn['speaker']}: {turn['content']}" for turn in row["meeting_transcripts"])
    for query in row["general_query_list"] + row["specific_query_list"]:
        yield Example("", query["query"], document, (query["answer"],))


def quality_release(row: dict, where: str, key: str | None) -> Iterator[Example]:
    """An article with its questions, or with one of them. Options are listed as in SCROLLS; the answer is the text of
    the right one."""
    for asked in row.get("questions", [row]):
        options = [option.strip() for option in asked["options"]]
        listed = "\n".join(f"({letter}) {option}" for letter, option in zip("ABCD", options, strict=True))
        id = field(asked, ["question_unique_id"], where, default="")
        yield Example(
            id, f"{asked['question'].strip()}\n\n{listed}", row["article"], (options[asked["gold_label"] - 1],)
        )


Release = Callable[[dict, str, str | None], Iterator[Example]]
RELEASES: tuple[tuple[set[str], Release], ...] = (  # fields that no other file has together, and what reads them
    ({"question", "context", "supporting_facts"}, hotpotqa_release),
    ({"full_text", "qas"}, qasper_release),
    ({"meeting_transcripts", "specific_query_list"}, qmsum_release),
    ({"article", "article_id"}, quality_release),
)
