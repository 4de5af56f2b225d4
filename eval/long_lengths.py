"""How long the documents of the long-context tasks are, and what retrieval leaves of them, in a reader's tokens
(Retrieval meets Long Context, table 1 and figure 2)."""

import csv
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from eval.columns import aligned
from eval.long_chunks import Ranker, best_first, pieces_of
from eval.paper_long import SEVEN, SHORT
from eval.tasks import TASKS, Example
from ralm_jax.settings import LongTask
from ralm_jax.text import replacing
from ralm_jax.tokenizer import Tokenizer

PAPER = {  # table 1 (arXiv:2310.03025), by the tasks of `SEVEN`: Llama2-70B's tokens, chunks of the best retrievers
    "documents": (14140, 4912, 84770, 6592, 16198, 13319, 7185),
    "top 5": (2066, 2071, 2549, 2172, 2352, 2322, 2385),
    "top 10": (4137, 3716, 5125, 4018, 4644, 4554, 4305),
    "top 20": (8160, 4658, 10251, 5890, 9133, 8635, 6570),
}
SAMPLES = (200, 1726, 2000, 2000, 200, 200, 150)


class Lengths(NamedTuple):
    """Tokens of a task's examples.

    Attributes:
        tokens: by "documents" and "top N", (n,) each: of whole documents, and of their N best chunks together.
    """

    task: LongTask
    tokens: dict[str, np.ndarray]


def measure(
    task: LongTask, examples: Sequence[Example], tokenizer: Tokenizer, ranker: Ranker | None, tops: Sequence[int]
) -> Lengths:
    """
    Args:
        ranker: of a document's chunks; None for documents only.
    """
    distinct = list(dict.fromkeys(example.document for example in examples))
    whole = dict(zip(distinct, map(len, tokenizer.encode_batch(distinct)), strict=True))
    tokens = {"documents": np.array([whole[example.document] for example in examples])}
    if ranker is not None:
        best = [ranked(task, example, ranker, max(tops)) for example in examples]
        for top in tops:
            given = tokenizer.encode_batch(["\n\n".join(pieces[:top]) for pieces in best])
            tokens[f"top {top}"] = np.array([len(one) for one in given])
    return Lengths(task, tokens)


def ranked(task: LongTask, example: Example, ranker: Ranker, top: int) -> list[str]:
    """The best pieces of an example's document, best first."""
    pieces = pieces_of(TASKS[task].kind, example.document)
    return [pieces[i] for i in best_first(ranker.scores(example.question, pieces), top)] if pieces else []


def rows(found: Sequence[Lengths]) -> list[tuple[str, str, dict[LongTask, float]]]:
    """The lines of table 1: what is counted, whose numbers, and these by task."""
    ours: dict[str, dict[LongTask, float]] = {"examples": {one.task: len(one.tokens["documents"]) for one in found}}
    for one in found:
        for name, tokens in one.tokens.items():
            ours.setdefault(name, {})[one.task] = float(tokens.mean())
    lines = []
    for name, values in ours.items():
        lines.append((name, "ours", values))
        stated = SAMPLES if name == "examples" else PAPER.get(name)
        if stated:
            lines.append((name, "paper", dict(zip(SEVEN, stated, strict=True))))
    return lines


def format_table(found: Sequence[Lengths]) -> str:
    """Table 1 for a terminal: tokens in the mean."""
    tasks = [task for task in SHORT if task in SEVEN or any(one.task == task for one in found)]
    cells = [["", "", *(SHORT[task] for task in tasks)]]
    for name, whose, values in rows(found):
        cells.append([name, whose, *(f"{values[task]:,.0f}" if task in values else "-" for task in tasks)])
    return aligned(cells, left=(0, 1))


def format_csv(found: Sequence[Lengths]) -> str:
    """Every length, one a line."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["task", "of", "tokens"])
    for one in found:
        for name, tokens in one.tokens.items():
            writer.writerows((one.task, name, int(count)) for count in tokens)
    return file.getvalue()


def draw(path: str, found: Sequence[Lengths]) -> None:
    """Writes figure 2 as PNG: how lengths are distributed, a panel for each task.

    Raises:
        RalmError: it cannot be written.
    """
    made = picture(found)
    with replacing(path) as part:
        made.savefig(part, format="png", dpi=150)


def picture(found: Sequence[Lengths]) -> Any:
    from matplotlib.figure import Figure

    across = min(3, len(found))
    down = -(-len(found) // across)
    made = Figure(figsize=(4 * across, 3 * down), layout="constrained")
    panels = made.subplots(down, across, squeeze=False).flat
    for panel, one in zip(panels, found, strict=False):
        longest = max(int(tokens.max()) for tokens in one.tokens.values())
        for name, tokens in one.tokens.items():
            panel.hist(tokens, bins=np.linspace(0, longest + 1, 31), alpha=0.5, label=name)
        panel.set_title(SHORT[one.task])
        panel.set_xlabel("tokens")
        panel.set_ylabel("examples")
    for panel in list(panels)[len(found) :]:
        panel.set_axis_off()
    made.axes[0].legend()
    return made
