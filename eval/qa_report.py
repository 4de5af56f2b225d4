"""What answers are worth, by the number of passages in the prompt: for a terminal, as CSV and JSON, and as a picture
(In-Context RALM, figure 8)."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from eval import plots
from eval.qa import Prediction
from ralm_jax.errors import RalmError


@dataclass(frozen=True)
class QARow:
    """The answers with one number of passages.

    Attributes:
        passages: that were asked for.
        questions: that the shares are of.
        em, f1, rouge_l, contains, has_answer: means from 0 to 1, as in `Prediction`; None where no question has one.
        prompt_tokens: of a prompt, in the mean.
        cut_prompts: that did not fit and lost their start.
        cut_tokens: that these lost.
        short: questions with fewer passages.
    """

    passages: int
    questions: int
    em: float
    f1: float | None
    rouge_l: float | None
    contains: float
    has_answer: float | None
    prompt_tokens: float
    cut_prompts: int
    cut_tokens: int
    short: int


def qa_rows(predictions: Sequence[Prediction]) -> list[QARow]:
    """A row for each number of passages, in their order."""
    by_count: dict[int, list[Prediction]] = {}
    for one in predictions:
        by_count.setdefault(one.passages, []).append(one)
    return [
        QARow(
            count, len(group), share(group, "em") or 0.0, share(group, "f1"), share(group, "rouge_l"),
            share(group, "contains") or 0.0, share(group, "has_answer"), share(group, "prompt_tokens") or 0.0,
            sum(one.cut > 0 for one in group), sum(one.cut for one in group),
            sum(one.given < one.passages for one in group),
        )
        for count, group in by_count.items()
    ]  # fmt: skip


def share(predictions: Sequence[Prediction], name: str) -> float | None:
    """The mean of a field over the predictions that have it."""
    values = [getattr(one, name) for one in predictions if getattr(one, name) is not None]
    return sum(values) / len(values) if values else None


def format_rows(rows: Sequence[QARow]) -> str:
    """The rows as a table for a terminal, with the mean length of a prompt and the number of those that did not fit;
    below it what else there is to know."""
    header = ["passages", "questions", "EM", "F1", "ROUGE-L", "contains", "has answer", "prompt tokens", "cut"]
    cells = [
        [f"{row.passages}", f"{row.questions:,}",
         *map(percent, (row.em, row.f1, row.rouge_l, row.contains, row.has_answer)),
         f"{row.prompt_tokens:,.1f}", f"{row.cut_prompts:,}"]
        for row in rows
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in (header, *cells)
    ]
    lines += [
        f"{row.short:,} of {row.questions:,} questions have fewer than {row.passages} passages in the prompt."
        for row in rows
        if row.short
    ]
    return "\n".join(lines)


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def format_csv(rows: Sequence[QARow]) -> str:
    """The rows as CSV with a header; empty where there is no value."""
    file = io.StringIO()
    writer = csv.DictWriter(file, [field.name for field in fields(QARow)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(asdict, rows))
    return file.getvalue()


def read_csv(path: Path) -> list[QARow]:
    """The rows that `format_csv` wrote.

    Raises:
        RalmError: another file, or a broken row.
    """
    kinds = {field.name: int if field.type is int else float for field in fields(QARow)}
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        rows = []
        for cells in reader:
            try:
                values: dict[str, Any] = {
                    name: kind(cells[name]) if cells[name] else None for name, kind in kinds.items()
                }
            except (KeyError, TypeError, ValueError) as error:
                raise RalmError(
                    f"{path}:{reader.line_num}: not a row of `ralm eval qa` ({error}); run it anew with --resume"
                ) from None
            rows.append(QARow(**values))
    return rows


def to_json(rows: Sequence[QARow], config: Mapping[str, Any]) -> dict[str, Any]:
    """The object that `ralm eval qa --json` writes."""
    return {"rows": [asdict(row) for row in rows], "config": dict(config)}


def draw(path: str, lines: Mapping[str, Sequence[QARow]], title: str) -> None:
    """Writes exact match over the number of passages as PNG, a line for each of `lines`.

    Raises:
        RalmError: it cannot be written.
    """
    curves = {name: sorted((float(row.passages), 100 * row.em) for row in rows) for name, rows in lines.items()}
    plots.draw_curves(path, curves, "passages in the prompt", "exact match (%)", title, whole=True)
