"""What answers to a long-context task are worth, with all that the number depends on beside it: as JSON, and for a
terminal."""

from collections.abc import Sequence
from typing import Any

from eval.long import LongPrediction, LongSettings
from eval.long_metrics import Metric
from eval.tasks import TASKS, Example
from ralm_jax.errors import RalmError
from ralm_jax.settings import MetricFamily


def report(
    examples: Sequence[Example],
    predictions: Sequence[LongPrediction],
    settings: LongSettings,
    family: MetricFamily,
    metric: Metric,
    config: dict[str, Any],
) -> dict[str, Any]:
    """The result of a run, with the scores of each example from 0 to 1.

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
    lines = [
        f"{result['task']}: {result['metric']} {result['score']:.2f}",
        f"  metric family {result['metric_family']}{package}; prompt preset {result['prompt_preset']}",
        f"  {result['examples']:,} examples; the paper has {result['paper_examples']:,}",
        f"  window {result['window']:,}: {result['cut_prompts']:,} prompts cut ({result['truncation']}), "
        f"{result['cut_tokens']:,} tokens lost; {result['prompt_tokens']:,.1f} tokens a prompt",
        f"  {result['seconds']:,.1f} s for all answers, {result['seconds_an_answer']:,.2f} s each",
    ]
    if len(result["parts"]) > 1:
        lines.insert(1, "  " + ", ".join(f"{name} {value:.2f}" for name, value in result["parts"].items()))
    if result["empty_answers"]:
        lines.append(f"  {result['empty_answers']:,} answers are empty")
    return "\n".join(lines)
