"""What answers are worth, by the number of passages in the prompt or by the place of the gold one: for a terminal, as
CSV and JSON, and as a picture (In-Context RALM, figure 8; Retrieval meets Long Context, figure 1)."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from eval import plots
from eval.columns import aligned
from eval.qa import Prediction
from ralm_jax.errors import RalmError


@dataclass(frozen=True)
class QARow:
    """The answers with one number of passages, and one place of the gold one.

    Attributes:
        passages: that were asked for.
        gold_at: as in `Prediction`.
        questions: that the shares are of.
        em, f1, rouge_l, contains, has_answer: means from 0 to 1, as in `Prediction`; None where no question has one.
        prompt_tokens: of a prompt, in the mean.
        cut_prompts: that did not fit and lost their start.
        cut_tokens: that these lost.
        short: questions with fewer passages.
    """

    passages: int
    gold_at: int | None
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
    """A row for each number of passages and place of the gold one, in their order."""
    groups: dict[tuple[int, int | None], list[Prediction]] = {}
    for one in predictions:
        groups.setdefault((one.passages, one.gold_at), []).append(one)
    return [
        QARow(
            count, place, len(group), share(group, "em") or 0.0, share(group, "f1"), share(group, "rouge_l"),
            share(group, "contains") or 0.0, share(group, "has_answer"), share(group, "prompt_tokens") or 0.0,
            sum(one.cut > 0 for one in group), sum(one.cut for one in group),
            sum(one.given < one.passages for one in group),
        )
        for (count, place), group in groups.items()
    ]  # fmt: skip


def share(predictions: Sequence[Prediction], name: str) -> float | None:
    """The mean of a field over the predictions that have it."""
    values = [getattr(one, name) for one in predictions if getattr(one, name) is not None]
    return sum(values) / len(values) if values else None


def format_rows(rows: Sequence[QARow]) -> str:
    """The rows as a table for a terminal, with the mean length of a prompt and the number of those that did not fit;
    below it what else there is to know."""
    placed = any(row.gold_at is not None for row in rows)
    header = ["passages", *["gold at"] * placed, "questions", "EM", "F1", "ROUGE-L", "contains", "has answer",
              "prompt tokens", "cut"]  # fmt: skip
    cells = [
        [f"{row.passages}", *[f"{row.gold_at}"] * placed, f"{row.questions:,}",
         *map(percent, (row.em, row.f1, row.rouge_l, row.contains, row.has_answer)),
         f"{row.prompt_tokens:,.1f}", f"{row.cut_prompts:,}"]
        for row in rows
    ]  # fmt: skip
    lines = [aligned([header, *cells])]
    short = (
        f"{row.short:,} of {row.questions:,} questions have fewer than {row.passages} passages in the prompt."
        for row in rows
        if row.short
    )
    return "\n".join([*lines, *dict.fromkeys(short)])


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
    kinds = {field.name: int if field.type in (int, int | None) else float for field in fields(QARow)}
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
    """Writes exact match over the number of passages as PNG, a line for each of `lines`; where the gold passage has
    places, containment over these, as Lost in the Middle does.

    Raises:
        RalmError: it cannot be written.
    """
    x, x_label, y, y_label = "passages", "passages in the prompt", "em", "exact match (%)"
    if any(row.gold_at is not None for rows in lines.values() for row in rows):
        x, x_label = "gold_at", "place of the gold passage"
        y, y_label = "contains", "answers that contain the gold answer (%)"
    curves = {name: sorted((getattr(row, x), 100 * getattr(row, y)) for row in rows) for name, rows in lines.items()}
    plots.draw_curves(path, curves, x_label, y_label, title, whole=True)
