"""Tables 2 to 6 of Retrieval meets Long Context Large Language Models (Xu et al., 2023), with what `ralm eval long`
found, and what answers cost with and without retrieval.

`VALUES` are those of its tables (arXiv:2310.03025). A reader is the paper's, if family, sizes and vocabulary are, so
that fine-tuned and interpolated ones count; others stand under their own names. Table 1 and figure 2 are those of
`eval.long_lengths`, figure 1 is in `eval.paper_qa`.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eval.columns import aligned
from eval.long import KIND
from eval.long_report import read_results
from eval.paper import SHAPE, shaped_like
from eval.tasks import TASKS
from ralm_jax.errors import UsageError
from ralm_jax.models import READERS
from ralm_jax.settings import LongTask
from ralm_jax.storage import Folder

MODELS = {"GPT-43B": "gpt-43b", "Llama2-70B": "llama2-70b", "Llama2-7B": "llama2-7b"}
SHORT: dict[LongTask, str] = {
    "qmsum": "QM", "qasper": "QASP", "narrativeqa": "NQA", "quality": "QLTY", "musique": "MSQ", "hotpotqa": "HQA",
    "multifieldqa_en": "MFQA", "trec": "TREC", "samsum": "SAMSum",
}  # fmt: skip
SEVEN, FEW_SHOT = tuple(SHORT)[:7], tuple(SHORT)[7:]
FOUR = SEVEN[:4]  # of ZeroSCROLLS, in table 3
TOP = 5  # chunks, in all tables but the fifth
TIME_TOLD = (
    "Seconds an answer are those of generation and, with retrieval, of ranking chunks; compilation does not count.\n"
    "The paper tells of about 4 times on NarrativeQA, Llama2-70B in a window of 32,768 (section 1)."
)


class Line(NamedTuple):
    """A line of a table.

    Attributes:
        model: as the paper calls it, or its own name.
        window: tokens; None where the paper states none.
        retrieval: what the prompt has in place of the document; "-" for the document.
        scores: by task.
        results: of `ralm eval long`, by task; empty for the paper's lines.
        stated: averages where the paper's own are not those of its scores, which are rounded more.
    """

    model: str
    window: int | None
    retrieval: str
    scores: Mapping[LongTask, float]
    results: Mapping[LongTask, Mapping[str, Any]] = {}
    stated: tuple[float, ...] = ()


def seven(
    model: str, window: int | None, retrieval: str, *scores: float | None, stated: tuple[float, ...] = ()
) -> Line:
    known = {task: score for task, score in zip(SEVEN, scores, strict=True) if score is not None}
    return Line(model, window, retrieval, known, stated=stated)


K4, K16, K32, BEST = 4096, 16384, 32768, "the best, top 5"
WHOLE = {  # Llama2-70B, in tables 2, 4 and 5
    K4: seven("Llama2-70B", K4, "-", 16.34, 27.70, 19.07, 63.55, 15.40, 34.64, 44.55),
    K16: seven("Llama2-70B", K16, "-", 16.72, 30.92, 22.32, 76.10, 18.78, 43.97, 48.63),
    K32: seven("Llama2-70B", K32, "-", 15.37, 31.88, 23.59, 73.80, 19.07, 49.49, 48.35),
}
CHUNKS = {  # the same, by retriever and number of chunks, in tables 4 and 5; the best of them in table 2
    (K4, "Dragon", 5): (18.14, 29.20, 23.39, 70.30, 20.09, 41.54, 47.45),
    (K4, "Contriever", 5): (17.41, 28.74, 23.41, 70.15, 21.39, 42.06, 48.96),
    (K4, "OpenAI-embedding", 5): (17.76, 28.85, 23.57, 70.70, 19.92, 41.76, 47.99),
    (K4, "Dragon", 10): (16.54, 28.67, 24.38, 68.70, 19.00, 42.18, 42.84),
    (K4, "Dragon", 20): (16.52, 28.67, 24.38, 68.70, 19.00, 42.18, 42.84),
    (K16, "Dragon", 5): (18.70, 29.54, 23.12, 70.90, 23.28, 44.81, 50.24),
    (K16, "Dragon", 10): (18.41, 30.20, 25.53, 73.60, 22.78, 47.72, 49.91),
    (K16, "Dragon", 20): (17.26, 29.60, 25.81, 72.30, 22.69, 41.36, 47.23),
    (K32, "Dragon", 5): (18.34, 31.27, 24.53, 69.55, 26.72, 53.89, 52.91),
    (K32, "Contriever", 5): (17.60, 31.56, 23.88, 69.00, 26.61, 49.65, 53.66),
    (K32, "OpenAI-embedding", 5): (18.24, 32.07, 24.36, 69.45, 24.90, 51.64, 54.75),
    (K32, "Dragon", 10): (17.71, 30.34, 25.94, 70.45, 22.80, 55.73, 49.88),
    (K32, "Dragon", 20): (16.36, 30.42, 24.42, 69.60, 24.51, 54.67, 48.65),
}


def with_chunks(window: int, retriever: str, top: int, name: str = "") -> Line:
    """The line of `CHUNKS`; `name` for the retriever's."""
    return seven("Llama2-70B", window, name or f"{retriever}, top {top}", *CHUNKS[window, retriever, top])


VALUES: dict[int, tuple[Line, ...]] = {
    2: (
        seven("GPT-43B", K4, "-", 15.56, 23.66, 15.64, 49.35, 11.08, 28.91, 40.90),
        seven("GPT-43B", K4, BEST, 16.60, 23.45, 19.81, 51.55, 14.95, 34.26, 44.63),
        seven("GPT-43B", K16, "-", 16.09, 25.75, 16.94, 50.05, 14.74, 37.48, 45.08),
        seven("GPT-43B", K16, BEST, 15.69, 23.82, 21.11, 47.90, 15.52, 36.14, 47.39),
        WHOLE[K4],
        with_chunks(K4, "Contriever", 5, BEST),
        WHOLE[K16],
        with_chunks(K16, "Dragon", 5, BEST),
        WHOLE[K32],
        with_chunks(K32, "Dragon", 5, BEST),
        seven("Llama2-7B", K4, "-", 14.25, 22.07, 14.38, 40.90, 8.66, 23.13, 35.20),
        seven("Llama2-7B", K4, BEST, 16.45, 22.97, 18.18, 43.25, 14.68, 26.62, 40.10),
        seven("Llama2-7B", K32, "-", 16.09, 23.66, 19.07, 44.50, 15.74, 31.63, 46.71),
        seven("Llama2-7B", K32, BEST, 17.11, 23.25, 19.12, 43.70, 15.67, 29.55, 45.03),
    ),
    3: (  # the first four tasks are those of ZeroSCROLLS' test sets
        seven("Davinci003", None, "-", 16.9, 52.7, 24.6, 69.0, 22.1, 41.2, 47.8, stated=(39.2, 40.8)),
        seven("GPT-3.5-turbo", K4, "-", 15.6, 49.3, 25.1, 66.6, 21.2, 40.9, 49.2, stated=(38.4, 39.2)),
        seven("GPT-3.5-turbo", K4, BEST, None, None, None, None, 24.4, 49.5, 49.5),
        seven("GPT-3.5-turbo-16k", K16, "-", 17.6, 50.5, 28.8, 72.6, 26.9, 51.6, 52.3, stated=(42.8, 42.4)),
        seven("GPT-3.5-turbo-16k", K16, BEST, None, None, None, None, 30.4, 46.6, 52.8),
        seven("Llama2-70B", K32, "-", 15.6, 45.9, 28.4, 79.6, 19.1, 49.5, 48.4, stated=(40.9, 42.4)),
        seven("Llama2-70B", K32, BEST, 18.5, 46.3, 31.5, 75.6, 26.7, 53.9, 52.9, stated=(43.6, 43.0)),
    ),
    4: tuple(
        line
        for window in (K4, K32)
        for line in (
            WHOLE[window],
            *(with_chunks(window, name, 5) for name in ("Dragon", "Contriever", "OpenAI-embedding")),
        )
    ),
    5: tuple(
        line
        for window in (K4, K16, K32)
        for line in (WHOLE[window], *(with_chunks(window, "Dragon", top) for top in (5, 10, 20)))
    ),
    6: (
        Line("GPT-3.5-turbo-16k", K16, "-", {"trec": 68, "samsum": 41.7}),
        Line("Llama2-70B", K32, "-", {"trec": 73, "samsum": 46.5}),
        Line("Llama2-70B", K32, BEST, {"trec": 76, "samsum": 47.3}),
    ),
}


# --- what `ralm eval long` has ---


def read_lines(locations: Sequence[str]) -> list[Line]:
    """The lines that folders of `ralm eval long` make, with all their tasks.

    Raises:
        UsageError: a folder has no results; or two differ on one of them.
        RalmError: one cannot be read.
    """
    lines: dict[tuple[str, int, str], dict[LongTask, dict[str, Any]]] = {}
    for location in dict.fromkeys(locations):
        found = read_results(location)
        if not found:
            raise UsageError(f"{location}: has no results of `ralm eval long`")
        for result in usual(found):
            result["folder"] = str(Path(location) / result["folder"])
            own = lines.setdefault((reader(result), result["window"], retrieval(result)), {})
            other = own.setdefault(result["task"], result)
            if (other["score"], other["metric"]) != (result["score"], result["metric"]):
                raise UsageError(
                    f"{other['folder']} and {result['folder']} have different scores of {result['task']} for the same "
                    "reader, window and retrieval; name one of them"
                )
    return [Line(*key, {task: own[task]["score"] for task in SHORT if task in own}, own) for key, own in lines.items()]


def usual(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each folder the result by the rules of the task's benchmark; where it has none by these, the first one."""
    found: dict[str, dict[str, Any]] = {}
    for result in sorted(results, key=lambda one: one["metric_family"] != TASKS[one["task"]].source):
        found.setdefault(result["folder"], result)
    return [result for result in results if result is found[result["folder"]]]


def reader(result: Mapping[str, Any]) -> str:
    """One of `MODELS`, with its own name beside it; or its own name."""
    name = Path(result["config"]["model"]).name
    config = Folder.open(result["folder"], KIND).settings["reader"].get("config", {})
    known = shaped_like(config, MODELS, SIZED) if config.get("model_type") in READERS else None
    return f"{known} ({name})" if known else name


SIZED = tuple(name for name in SHAPE if name != "max_positions")  # of which there are more in a longer window


def retrieval(result: Mapping[str, Any]) -> str:
    return f"{Path(result['retriever']).name}, top {result['top']}" if result["top"] else "-"


# --- tables ---


def table_lines(number: int, found: Sequence[Line]) -> list[Line]:
    """The lines of a table: ours, and the paper's.

    Raises:
        UsageError: ours have none of its tasks.
    """
    tasks = FEW_SHOT if number == 6 else SEVEN
    ours = [one for one in found if any(task in one.scores for task in tasks)]
    if not ours:
        raise UsageError(f"table {number}: is of {', '.join(tasks)}, and the folders have none of these")
    return [*(ours if number == 5 else nearest(ours)), *VALUES[number]]


def nearest(lines: Sequence[Line]) -> list[Line]:
    """Of lines that differ in the number of chunks only, those with the number that is nearest to `TOP`."""

    def distance(line: Line) -> int:
        return abs(next(iter(line.results.values()))["top"] - TOP) if line.retrieval != "-" else 0

    def key(line: Line) -> tuple[str, int | None, str]:
        return line.model, line.window, line.retrieval.rsplit(", top ")[0]

    least: dict[tuple[str, int | None, str], int] = {}
    for line in lines:
        least[key(line)] = min(distance(line), least.get(key(line), distance(line)))
    return [line for line in lines if distance(line) == least[key(line)]]


def average(line: Line, tasks: Sequence[LongTask]) -> float | None:
    """None where a task is missing."""
    values = [line.scores[task] for task in tasks if task in line.scores]
    return sum(values) / len(values) if len(values) == len(tasks) else None


def averages(number: int) -> Mapping[str, Sequence[LongTask]]:
    """The averages of a table, and what they are over."""
    return {2: {"avg": SEVEN}, 3: {"avg-7": SEVEN, "avg-4": FOUR}, 4: {"avg": SEVEN}, 5: {"avg": SEVEN}}.get(number, {})


def format_table(number: int, lines: Sequence[Line]) -> str:
    """A table for a terminal."""
    tasks, means = FEW_SHOT if number == 6 else SEVEN, averages(number)
    rows = [["", "reader", "window", "retrieval", *means, *(SHORT[task] for task in tasks)]]
    for line in lines:
        own = line.stated or [average(line, over) for over in means.values()]
        scores = [*own, *(line.scores.get(task) for task in tasks)]
        rows.append([
            "ours" if line.results else "paper", line.model, f"{line.window:,}" if line.window else "-", line.retrieval,
            *("-" if score is None else f"{score:.2f}" for score in scores),
        ])  # fmt: skip
    return aligned(rows, left=(0, 1, 3))


def format_matches(lines: Sequence[Line]) -> str:
    """What of ours is not as in the paper."""
    results = [one for line in lines for one in line.results.values()]
    counts = dict.fromkeys(
        f"{one['task']} {one['examples']:,} (the paper {one['paper_examples']:,})"
        for one in results
        if one["examples"] != one["paper_examples"]
    )
    rules = dict.fromkeys(
        f"{one['folder']} by {one['metric_family']} (the paper {TASKS[one['task']].source})"
        for one in results
        if one["metric_family"] != TASKS[one["task"]].source
    )
    asked = dict.fromkeys(
        f"{Path(one['config']['model']).name} as {one['prompt_preset']}{' in its chat template' if one['chat'] else ''}"
        for one in results
        if one["prompt_preset"] != "xu2023" or one["chat"]
    )
    told = [
        f"{what}: {', '.join(listed)}."
        for what, listed in (("Examples", counts), ("Scored", rules), ("Asked (the paper as xu2023)", asked))
        if listed
    ]
    return "\n".join(told) or "All are scored, asked and counted as in the paper."


# --- time ---


def time_rows(lines: Sequence[Line]) -> list[tuple[Line, Mapping[str, Any], Mapping[str, Any]]]:
    """Every line with retrieval, and what it and the whole documents took for a task that both have.

    Raises:
        UsageError: there is none.
    """
    whole = {(line.model, line.window): line for line in lines if line.retrieval == "-"}
    pairs = [
        (line, line.results[task], whole[line.model, line.window].results[task])
        for line in lines
        if line.retrieval != "-" and (line.model, line.window) in whole
        for task in line.results
        if task in whole[line.model, line.window].results
    ]
    if not pairs:
        raise UsageError("table time: needs answers of one reader in one window with a --retriever and with none")
    return pairs


def format_time(lines: Sequence[Line]) -> str:
    """Seconds an answer with and without retrieval, for a terminal."""
    rows = [
        ["reader", "window", "task", "retrieval", "prompt tokens", "s an answer", "without retrieval", "times as fast"]
    ]
    for line, one, other in time_rows(lines):
        own = one["seconds_an_answer"] + one["retrieval_seconds"] / one["examples"]
        rows.append([
            line.model, f"{line.window:,}", one["task"], line.retrieval,
            f"{one['prompt_tokens']:,.0f} of {other['prompt_tokens']:,.0f}", f"{own:,.2f}",
            f"{other['seconds_an_answer']:,.2f}", f"{other['seconds_an_answer'] / own:.2f}" if own else "-",
        ])  # fmt: skip
    return aligned(rows, left=(0, 2, 3))


COLUMNS = ("from", "model", "window", "retrieval", "task", "score")
OF_RESULTS = ("metric", "metric_family", "prompt_preset", "chat", "truncation", "examples", "cut_prompts", "cut_tokens",
              "prompt_tokens", "seconds_an_answer", "retrieval_seconds", "folder")  # fmt: skip


def format_cells(lines: Sequence[Line]) -> str:
    """The numbers as CSV, one a line; empty where there is none."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*COLUMNS, *OF_RESULTS])
    for line in lines:
        for task, score in line.scores.items():
            own = line.results.get(task, {})
            writer.writerow(["ours" if own else "paper", line.model, line.window, line.retrieval, task, score,
                             *(own.get(name) for name in OF_RESULTS)])  # fmt: skip
    return file.getvalue()
