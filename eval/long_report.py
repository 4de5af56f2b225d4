"""What answers to long-context tasks are worth, with all that the numbers depend on beside them: as JSON, as CSV, and
for a terminal."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.columns import aligned
from eval.long import KIND, LongPrediction, LongSettings
from eval.long_metrics import Metric
from eval.tasks import TASKS, Example
from ralm_jax.errors import RalmError
from ralm_jax.settings import MetricFamily
from ralm_jax.storage import MANIFEST
from ralm_jax.text import read_object


def report(
    examples: Sequence[Example],
    predictions: Sequence[LongPrediction],
    settings: LongSettings,
    retriever: str,
    family: MetricFamily,
    metric: Metric,
    config: dict[str, Any],
) -> dict[str, Any]:
    """The result of a run, with the scores of each example from 0 to 1.

    Args:
        retriever: "none", or its name.

    Raises:
        RalmError: a prediction was asked by another preset.
        UsageError: a package is not installed.
    """
    mixed = {one.prompt_preset for one in predictions} - {settings.prompt_preset}
    if mixed:
        raise RalmError(f"answers to prompts of {mixed.pop()} are among those to prompts of {settings.prompt_preset}")
    scores = [
        metric.score(prediction.text, example.answers, example.classes)
        for example, prediction in zip(examples, predictions, strict=True)
    ]
    cut = [one.cut_tokens for one in predictions if one.cut_tokens]
    seconds = [one.seconds for one in predictions]
    return {
        "task": settings.task,
        "prompt_preset": settings.prompt_preset,
        "chat": settings.chat,
        "retriever": retriever,
        "top": settings.top,
        "metric_family": family,
        "metric": metric.name,
        "metric_package": metric.package or None,
        "score": metric.total(scores),
        "parts": dict(zip(metric.parts, metric.means(scores), strict=True)),
        "examples": len(examples),
        "paper_examples": TASKS[settings.task].samples,
        "empty_answers": sum(not one.text.strip() for one in predictions),
        "window": settings.window,
        "truncation": settings.truncation,
        "cut_prompts": len(cut),
        "cut_tokens": sum(cut),
        "prompt_tokens": sum(one.prompt_tokens for one in predictions) / len(predictions),
        "document_words": sum(one.document_words for one in predictions) / len(predictions),
        "retrieval_seconds": sum(one.retrieval_seconds for one in predictions),
        "seconds": sum(seconds),
        "seconds_an_answer": sum(seconds) / len(seconds),
        "scores": {example.id: list(own) for example, own in zip(examples, scores, strict=True)},
        "config": config,
    }


def result_name(family: MetricFamily, metric: Metric, usual: Metric) -> str:
    """The file of a report; scores by a ROUGE package that is not the family's `usual` one have their own."""
    return f"result-{family}{f'-{metric.package}' if metric.package != usual.package else ''}.json"


def format_report(result: dict[str, Any]) -> str:
    """The figures for a terminal."""
    package = f", package {result['metric_package']}" if result["metric_package"] else ""
    chat = " in the reader's chat template" if result["chat"] else ""
    lines = [
        f"{result['task']}, {given(result)}: {result['metric']} {result['score']:.2f}",
        f"  metric family {result['metric_family']}{package}; prompt preset {result['prompt_preset']}{chat}",
        f"  {result['examples']:,} examples; the paper has {result['paper_examples']:,}",
        f"  window {result['window']:,}: {result['cut_prompts']:,} prompts cut ({result['truncation']}), "
        f"{result['cut_tokens']:,} tokens lost; {result['prompt_tokens']:,.1f} tokens a prompt",
        f"  {result['seconds']:,.1f} s for all answers, {result['seconds_an_answer']:,.2f} s each",
    ]
    if len(result["parts"]) > 1:
        lines.insert(1, "  " + ", ".join(f"{name} {value:.2f}" for name, value in result["parts"].items()))
    if result["top"]:
        lines[-1] += f"; {result['retrieval_seconds']:,.1f} s to rank chunks"
    if result["empty_answers"]:
        lines.append(f"  {result['empty_answers']:,} answers are empty")
    return "\n".join(lines)


def given(result: Mapping[str, Any]) -> str:
    """What prompts were made from."""
    return f"{Path(result['retriever']).name} top {result['top']}" if result["top"] else "whole documents"


# --- several results ---


def read_results(location: str) -> list[dict[str, Any]]:
    """The results in the folder that `ralm eval long` made, each with its own "folder", which is in it.

    Raises:
        RalmError: one is broken.
    """
    found = []
    for file in sorted(Path(location).expanduser().glob("*/result-*.json")):
        if read_object(file.parent / MANIFEST).get("kind") != KIND:
            continue
        result = read_object(file)
        missing = [name for name in COLUMNS if name not in result and name != "folder"]
        if missing:
            raise RalmError(f"{file}: has no {missing[0]!r}; make it anew with --resume")
        found.append(result | {"folder": file.parent.name})

    def order(one: dict[str, Any]) -> tuple[Any, ...]:
        return list(TASKS).index(one["task"]), one["window"], one["top"] > 0, one["retriever"], one["top"]

    return sorted(found, key=order)


COLUMNS = (
    "task", "window", "retriever", "top", "score", "metric", "metric_family", "metric_package", "prompt_preset", "chat",
    "truncation", "examples", "paper_examples", "cut_prompts", "cut_tokens", "prompt_tokens", "document_words",
    "empty_answers", "retrieval_seconds", "seconds", "seconds_an_answer", "folder",
)  # fmt: skip


def format_csv(results: Sequence[Mapping[str, Any]]) -> str:
    """The results as CSV, one a line."""
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(results)
    return file.getvalue()


def format_table(results: Sequence[Mapping[str, Any]]) -> str:
    """The results for a terminal, one a line."""
    header = ["task", "window", "prompt from", "score", "metric", "examples", "cut", "tokens lost", "prompt tokens",
              "empty", "s an answer", "s to rank"]  # fmt: skip
    rows = [
        [
            one["task"], f"{one['window']:,}", given(one), f"{one['score']:.2f}",
            f"{one['metric']} ({one['metric_family']})", f"{one['examples']:,}", f"{one['cut_prompts']:,}",
            f"{one['cut_tokens']:,}", f"{one['prompt_tokens']:,.0f}", f"{one['empty_answers']:,}",
            f"{one['seconds_an_answer']:,.2f}", f"{one['retrieval_seconds']:,.1f}" if one["top"] else "-",
        ]
        for one in results
    ]  # fmt: skip
    return aligned([header, *rows], left=(0, 2, 4))
