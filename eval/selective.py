"""Retrieval only where it pays: what fewer retrievals cost in perplexity, as a table, CSV and plot."""

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from eval import plots
from eval.metrics import perplexity
from ralm_jax import ranking
from ralm_jax.score_table import Scores

SIGNALS: dict[str, Callable[[Scores, np.ndarray, int], np.ndarray]] = {
    "surprise": lambda scores, chosen, tokens: ranking.surprise(scores, tokens),
    "past-gain": ranking.past_gain,
}
SHOWN = 11  # points of the curve on the terminal


@dataclass(frozen=True)
class Point:
    """One threshold.

    Attributes:
        threshold: strides whose signal is above it retrieve.
        share: of the strides after the first window that do.
        nll: of the whole text.
        token_ppl: None where it is not a finite number.
    """

    threshold: float
    share: float
    nll: float
    token_ppl: float | None


def selective_points(scores: Scores, chosen: np.ndarray, signal: np.ndarray) -> list[Point]:
    """The curve from "never" to "always".

    Args:
        chosen: (J,) the candidates of the strides that retrieve.
        signal: (J,) as `SIGNALS` give it.
    """
    counts, thresholds, nll = ranking.selective_curve(scores, chosen, signal)
    whole = nll - scores.first_window.sum(dtype=np.float64)
    shares = counts / max(1, len(chosen))
    return [
        Point(float(threshold), float(share), float(total), perplexity(float(total), scores.about["tokens"]))
        for threshold, share, total in zip(thresholds, shares, whole, strict=True)
    ]


def format_points(points: list[Point]) -> str:
    """Points at equal distances for a terminal, and the lowest one."""
    shares = np.array([point.share for point in points])
    places = sorted({int(np.abs(shares - share).argmin()) for share in np.linspace(0, 1, SHOWN)})
    lines = [f"{'retrievals':>10}{'threshold':>12}{'token ppl':>12}"]
    lines += [f"{points[i].share:>10.0%}{points[i].threshold:>12.3f}{told(points[i]):>12}" for i in places]
    lowest = min(points, key=lambda point: point.nll)
    lines += ["", f"Lowest, with hindsight: {told(lowest)} where {lowest.share:.0%} of the strides retrieve."]
    return "\n".join(lines)


def told(point: Point) -> str:
    return "-" if point.token_ppl is None else f"{point.token_ppl:,.3f}"


def format_csv(points: list[Point]) -> str:
    """Every point."""
    sheet = io.StringIO()
    writer = csv.writer(sheet, lineterminator="\n")
    writer.writerow(["threshold", "share", "nll", "token_ppl"])
    writer.writerows([point.threshold, point.share, point.nll, point.token_ppl] for point in points)
    return sheet.getvalue()


def draw(path: str, points: list[Point], signal: str, title: str) -> None:
    """Writes the curve as PNG.

    Raises:
        RalmError: it cannot be written.
    """
    known = [(100 * point.share, point.token_ppl) for point in points if point.token_ppl is not None]
    x_label = f"strides that retrieve, those with the highest {signal} first (%)"
    plots.draw_curves(path, {"": known}, x_label, "perplexity per token", title)
