"""Table 4 and figure 8 of the paper (In-Context RALM, Ram et al., 2023), with what `ralm eval qa` found, and figure 1
of Retrieval meets Long Context (Xu et al., 2023): Lost in the Middle (Liu et al., 2023).

`VALUES` are those of table 4 (arXiv:2302.00083); figure 8, exact match over the number of passages on the validation
sets, is drawn there without being stated. A reader is the paper's as in `eval.paper`; data are, if they are a whole
test set named by `--dataset`. The paper's open book is two passages of DPR; ours has any retriever, which is said, and
of several numbers of passages the one nearest to two. Figure 1 is drawn without being stated as well.
"""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from eval.columns import aligned
from eval.paper import paper_model
from eval.qa import FIGURES, KIND
from eval.qa_report import QARow, draw, read_csv
from ralm_jax.errors import UsageError
from ralm_jax.models import READERS
from ralm_jax.storage import Folder

DATA = {"nq": "NQ", "triviaqa": "TriviaQA"}
BOOKS = ("closed", "open")
PASSAGES = 2  # section 7
VALUES = {  # exact match by model and data: closed book, open book
    "LLaMA-7B": {"NQ": (10.3, 28.0), "TriviaQA": (47.5, 56.0)},
    "LLaMA-13B": {"NQ": (12.0, 31.0), "TriviaQA": (54.8, 60.1)},
    "LLaMA-33B": {"NQ": (13.7, 32.3), "TriviaQA": (58.3, 62.7)},
}


@dataclass(frozen=True)
class Run:
    """A folder of answers, and what the paper calls its parts.

    Attributes:
        reader: as it was named.
        model: the paper's name of it; None for another reader.
        data: one of `DATA`'s values, or its own name.
        retrieval: the index's name, or "given" for passages that came with the questions.
    """

    folder: str
    reader: str
    model: str | None
    data: str
    retrieval: str
    prompt_preset: str
    rows: tuple[QARow, ...]


@dataclass(frozen=True)
class Cell:
    """A number of ours, of the paper's, or both.

    Attributes:
        label: of the reader: the paper's name, with its own where several are that; or its own.
        book: "closed" or "open".
        paper: exact match in percent.
    """

    label: str
    book: str
    data: str
    run: Run | None
    row: QARow | None
    paper: float | None

    @property
    def metric(self) -> str:
        """Exact match; where the gold passage has a place of its own, containment."""
        return "em" if self.row is None or self.row.gold_at is None else "contains"

    @property
    def ours(self) -> float | None:
        """In percent."""
        return None if self.row is None else 100 * getattr(self.row, self.metric)


def read_runs(locations: Sequence[str]) -> list[Run]:
    """
    Raises:
        UsageError: there are no finished answers.
        RalmError: they cannot be read.
    """
    return [read_run(location) for location in dict.fromkeys(locations)]


def read_run(location: str) -> Run:
    folder, sheet = Folder.open(location, KIND), Path(location).expanduser() / FIGURES
    about = folder.about
    if not about or not sheet.is_file():
        raise UsageError(f"{location}: has no {FIGURES}; let `ralm eval qa` come to its end")
    config = folder.settings["reader"].get("config", {})
    model = paper_model(config) if config.get("model_type") in READERS else None
    retrieval = Path(about["index"]).name if about["index"] else "given"
    return Run(location, about["model"], model, paper_data(about), retrieval, about["prompt_preset"],
               tuple(read_csv(sheet)))  # fmt: skip


def paper_data(about: Mapping[str, Any]) -> str:
    """Which of `DATA` the questions are, by how they were named; else their own name."""
    asked = about["questions"]
    if asked["dataset"] is None:
        return Path(asked["data"]).name
    known = DATA[asked["dataset"]] if asked["split"] == "test" else f"{DATA[asked['dataset']]} {asked['split']}"
    return known if about["limit_questions"] is None else f"part of {known}"


def labels(runs: Sequence[Run]) -> dict[str, str]:
    """What readers are called, by their own names."""
    models = {run.reader: run.model for run in runs}
    known = list(models.values())
    return {
        reader: reader if model is None else model if known.count(model) == 1 else f"{model} ({reader})"
        for reader, model in models.items()
    }


def refuse_places(runs: Sequence[Run], shown: str) -> None:
    """
    Raises:
        UsageError: answers with the gold passage at places of its own, which `shown` is not of.
    """
    for run in runs:
        if any(row.gold_at is not None for row in run.rows):
            raise UsageError(f"{run.folder}: was made with --gold-at, which {shown} is not of; leave it out")


# --- table 4 ---


def table_cells(runs: Sequence[Run]) -> list[Cell]:
    """The numbers of table 4: the paper's lines, ours in them, and those of readers that the paper has not.

    Raises:
        UsageError: two folders differ on one of them, or one was made with --gold-at.
    """
    refuse_places(runs, "table 4")
    named = labels(runs)
    ours: dict[tuple[str, str, str], tuple[Run, QARow]] = {}
    for run in runs:
        for book, row in books(run.rows).items():
            label = named[run.reader]
            other, there = ours.setdefault((label, book, run.data), (run, row))
            if there.em != row.em:
                raise UsageError(
                    f"{other.folder} and {run.folder} have different results for {label}, {book} book on {run.data}; "
                    "name one of them"
                )
    readers, models = {named[run.reader]: run.model for run in runs}, dict[str, str | None]()
    for model in VALUES:
        own = [label for label, known in readers.items() if known == model]
        models |= dict.fromkeys(own or [model], model)
    models |= readers
    data, cells = dict.fromkeys([*DATA.values(), *(run.data for run in runs)]), []
    for (label, known), (i, book), one in product(models.items(), enumerate(BOOKS), data):
        paper = VALUES.get(known or "", {}).get(one)
        mine, found = ours.get((label, book, one), (None, None))
        cells.append(Cell(label, book, one, mine, found, paper[i] if paper else None))
    return cells


def books(rows: Sequence[QARow]) -> dict[str, QARow]:
    """The rows that stand for closed and open book."""
    by_count = {row.passages: row for row in rows}
    opened = sorted((abs(count - PASSAGES), count) for count in by_count if count)
    found = {"closed": by_count[0]} if 0 in by_count else {}
    return found | ({"open": by_count[opened[0][1]]} if opened else {})


def format_table(cells: Sequence[Cell]) -> str:
    """Table 4 for a terminal: exact match in percent, ours and the paper's."""
    data = dict.fromkeys(cell.data for cell in cells)
    at = {(cell.label, cell.book, cell.data): cell for cell in cells}
    lines = dict.fromkeys((cell.label, cell.book) for cell in cells)
    rows = [["", "", *(f"{one}, EM" for one in data)], ["model", "book", *[f"{'ours':>9}{'paper':>8}"] * len(data)]]
    rows += [[*line, *(format_cell(at[*line, one]) for one in data)] for line in lines]
    return aligned(rows, left=(0, 1))


def format_cell(cell: Cell) -> str:
    ours = "-" if cell.ours is None else f"{cell.ours:.1f}"
    return f"{ours:>9}{'-' if cell.paper is None else f'{cell.paper:.1f}':>8}"


# --- figure 8 ---


def figure_cells(runs: Sequence[Run]) -> list[Cell]:
    """What figure 8 shows.

    Raises:
        UsageError: no folder has several numbers of passages, or one was made with --gold-at.
    """
    refuse_places(runs, "figure 8")
    if not any(len(run.rows) > 1 for run in runs):
        raise UsageError("figure 8: needs answers with several numbers of --passages; these have none")
    return cells_of(runs)


def cells_of(runs: Sequence[Run]) -> list[Cell]:
    """A cell for each row."""
    named = labels(runs)
    return [
        Cell(named[run.reader], "open" if row.passages else "closed", run.data, run, row, None)
        for run in runs
        for row in run.rows
    ]


def draw_figure(cells: Sequence[Cell], path: str) -> None:
    """Writes figure 8 as PNG.

    Raises:
        RalmError: it cannot be written.
    """
    draw(path, lines_of(cells), "figure 8")


def lines_of(cells: Sequence[Cell]) -> dict[str, list[QARow]]:
    """The rows of each folder, by reader and data; of several that share these, by folder as well."""
    lines: dict[str, list[QARow]] = {}
    names = {cell.run.folder: f"{cell.label}, {cell.data}" for cell in cells if cell.run}
    for cell in cells:
        if cell.run and cell.row:
            name = names[cell.run.folder]
            several = list(names.values()).count(name) > 1
            lines.setdefault(f"{name} ({cell.run.folder})" if several else name, []).append(cell.row)
    return lines


# --- lost in the middle ---


def lost_cells(runs: Sequence[Run]) -> list[Cell]:
    """What figure 1 of Retrieval meets Long Context shows: containment by the place of the gold passage.

    Raises:
        UsageError: a folder was made without --gold-at, or none has several places.
    """
    for run in runs:
        if any(row.gold_at is None for row in run.rows):
            raise UsageError(f"{run.folder}: was made without --gold-at, which figure 1 is of; leave it out")
    if not any(len(run.rows) > 1 for run in runs):
        raise UsageError("figure 1: needs answers with several places of --gold-at; these have one")
    return cells_of(runs)


def draw_lost(cells: Sequence[Cell], path: str) -> None:
    """Writes figure 1 as PNG, a line for each folder.

    Raises:
        RalmError: it cannot be written.
    """
    draw(path, lines_of(cells), "lost in the middle")


# --- all ---


def format_matches(cells: Sequence[Cell]) -> str:
    """What was taken for what, and what is not as in the paper."""
    lines = []
    for cell in cells:
        run, row = cell.run, cell.row
        if run is None or row is None:
            continue
        if row.gold_at is not None:
            lines.append(
                f"{run.reader} in {run.folder} has {row.passages} passages, one of them gold, the others of "
                f"{run.retrieval}, asked as {run.prompt_preset} (Lost in the Middle 10, 20 or 30, the others of "
                "Contriever, as liu2023)."
            )
            continue
        shape = f"has the shape of {run.model}" if run.model else "is no reader of the paper's"
        known = "the paper's" if run.data in DATA.values() else "no data of the paper's"
        lines.append(f"{run.reader} in {run.folder} {shape}; its questions, {run.data}, are {known}.")
        if row.passages:
            lines.append(
                f"{run.folder} has {row.passages} passages of {run.retrieval}, asked as {run.prompt_preset} (the paper "
                f"{PASSAGES} of DPR, as ram2023)."
            )
    return "\n".join(dict.fromkeys(lines)) or "The folders have nothing for it."


COLUMNS: dict[str, Callable[[Cell], Any]] = {
    "model": lambda cell: cell.label,
    "book": lambda cell: cell.book,
    "data": lambda cell: cell.data,
    "metric": lambda cell: cell.metric,
    "ours": lambda cell: cell.ours,
    "paper": lambda cell: cell.paper,
    "passages": lambda cell: cell.row and cell.row.passages,
    "gold_at": lambda cell: cell.row and cell.row.gold_at,
    "questions": lambda cell: cell.row and cell.row.questions,
    "f1": lambda cell: cell.row and cell.row.f1,
    "has_answer": lambda cell: cell.row and cell.row.has_answer,
    "retrieval": lambda cell: cell.run and cell.run.retrieval,
    "prompt_preset": lambda cell: cell.run and cell.run.prompt_preset,
    "folder": lambda cell: cell.run and cell.run.folder,
}


def format_cells(cells: Sequence[Cell]) -> str:
    """The numbers as CSV, one a line; empty where there is none."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([value(cell) for value in COLUMNS.values()] for cell in cells)
    return file.getvalue()
