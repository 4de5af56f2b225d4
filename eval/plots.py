"""A sweep as a picture: lines over one of its axes, or bars (matplotlib, which is imported when one is drawn)."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from eval.sweep_rows import Row
from ralm_jax.errors import UsageError
from ralm_jax.text import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELS = {
    "query-length": "query length (tokens)",
    "stride": "stride (tokens)",
    "k": "passages that are ranked, k",
    "window": "window (tokens)",
    "reader": "reader (parameters)",
}
FIELDS = {"reader": "{}", "retriever": "{}", "query-length": "query length {}", "stride": "stride {}", "k": "k {}",
          "window": "window {}"}  # fmt: skip
LINES = ("-", "-.", ":", (0, (1, 3)))
STYLES = tuple(zip("os^DvPX*", LINES * 2, strict=True))  # marker and line of each strategy
NONE = (0, (6, 3))  # its line, dashed


def x_axis(sizes: Mapping[str, int], asked: str | None = None) -> str | None:
    """The axis that lines are drawn over: the one asked for, or the first of `LABELS` that has several values; None if
    none has, and bars stand side by side.

    Raises:
        UsageError: the axis asked for has one value.
    """
    several = [name for name in LABELS if sizes[name] > 1]
    if asked is not None and asked not in several:
        raise UsageError(f"--x {asked}: has one value in this sweep; {', '.join(several) or 'none'} can be the x axis")
    return asked or next(iter(several), None)


def draw(path: str, rows: Sequence[Row], x: str | None, text: str, **options: Any) -> None:
    """Writes the picture of a sweep as PNG; `options` are those of `picture`.

    Raises:
        RalmError: it cannot be written.
    """
    made = picture(rows, x, text, **options)
    with replacing(path) as part:
        made.savefig(part, format="png", dpi=150)


def draw_curves(
    path: str,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    x_label: str,
    y_label: str,
    title: str,
    *,
    whole: bool = False,
) -> None:
    """Writes lines through points (x, y) as PNG, with their names if there are several.

    Args:
        whole: points are marked, and each of their x, a whole number, has a tick.

    Raises:
        RalmError: it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), marker="o" if whole else None, label=name)
    if whole:
        places = sorted({x for points in curves.values() for x, _ in points})
        axes.set_xticks(places, labels=[f"{x:,.0f}" for x in places])
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_title(title, fontsize="medium")
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(curves) > 1:
        axes.legend(frameon=False, fontsize="small")
    with replacing(path) as part:
        figure.savefig(part, format="png", dpi=150)


def picture(
    rows: Sequence[Row],
    x: str | None,
    text: str,
    *,
    words: bool | None = None,
    bars: str = "retriever",
    stated: Mapping[tuple[str, str], float] = MappingProxyType({}),
) -> "Figure":
    """The figure of a sweep.

    Args:
        x: of `x_axis`.
        text: what was predicted, for the title.
        words: perplexity per word, not per token; None for "of several readers, if they have it".
        bars: what bars stand for, where there is no `x`.
        stated: perplexities by reader and strategy that are marked at the bars, as the paper's.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if words is None:
        words = len({row.reader for row in rows}) > 1 and all(row.result.word_ppl for row in rows)
    if x is None:
        draw_bars(axes, rows, bars, words, stated)
    else:
        draw_lines(axes, rows, x, words)
        axes.set_xlabel(LABELS[x])
    axes.set_ylabel(f"perplexity per {'word' if words else 'token'}")
    axes.set_title(f"{text}\n{', '.join(shared(rows))}", fontsize="medium")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    return figure


def value(row: Row, field: str) -> Any:
    return getattr(row, field.replace("-", "_"))


def values(rows: Sequence[Row], field: str) -> list[Any]:
    """What a field of the rows has, in their order; the strategy "none" has no retriever, query length and k."""
    found = dict.fromkeys(value(row, field) for row in rows)
    return [one for one in found if one is not None]


def shared(rows: Sequence[Row]) -> list[str]:
    """What all rows have in common."""
    own = {field: values(rows, field) for field in FIELDS}
    return [FIELDS[field].format(found[0]) for field, found in own.items() if len(found) == 1]


def grouped(rows: Sequence[Row], x: str | None) -> dict[str, list[Row]]:
    """The rows by what else than `x` varies among them."""
    fields = [field for field in FIELDS if field != x and len(values(rows, field)) > 1]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(", ".join(FIELDS[field].format(value(row, field)) for field in fields), []).append(row)
    return groups


def ppl(row: Row, words: bool) -> float:
    found = row.result.word_ppl if words else row.result.token_ppl
    return float("nan") if found is None else found


def draw_lines(axes: "Axes", rows: Sequence[Row], x: str, words: bool) -> None:
    """A line for whatever else varies and every strategy; dashed ones without passages."""
    places = {one: float(one) for one in values(rows, x)} if x != "reader" else reader_places(rows)
    ranked = [row for row in rows if row.strategy != "none"]
    styles = dict(zip(dict.fromkeys(row.strategy for row in ranked), cycle(STYLES), strict=False))
    for i, (label, group) in enumerate(grouped(ranked, x).items()):
        for strategy in dict.fromkeys(row.strategy for row in group):
            points = sorted((places[value(row, x)], ppl(row, words)) for row in group if row.strategy == strategy)
            axes.plot(
                *zip(*points, strict=True), color=f"C{i}", marker=styles[strategy][0], linestyle=styles[strategy][1],
                label=", ".join(filter(None, (label, strategy))),
            )  # fmt: skip
    greys = cycle(("0.3", "0.5", "0.7"))
    for label, group in grouped([row for row in rows if row.strategy == "none"], x).items():
        style: dict[str, Any] = {"color": next(greys), "linestyle": NONE, "label": f"{label}, none".strip(", ")}
        if value(group[0], x) is None:
            axes.axhline(ppl(group[0], words), **style)
        else:
            points = sorted((places[value(row, x)], ppl(row, words)) for row in group)
            axes.plot(*zip(*points, strict=True), marker=".", **style)
    if x == "reader":
        sizes = {row.reader: row.parameters for row in rows}
        labels = [f"{name}\n{sizes[name] / 1e6:,.4g} M" for name in places]
        axes.set_xscale("log" if set(places.values()) == set(sizes.values()) else "linear")
    else:
        labels = [f"{one:,}" for one in places]
        if all(int(place) & (int(place) - 1) == 0 for place in places.values()):
            axes.set_xscale("log", base=2)
    axes.set_xticks(list(places.values()), labels=labels)
    axes.minorticks_off()


def reader_places(rows: Sequence[Row]) -> dict[str, float]:
    """Where readers stand: at their sizes, or one after another where two have the same."""
    sizes = {row.reader: float(row.parameters) for row in rows}
    return sizes if len(set(sizes.values())) == len(sizes) else {name: float(i) for i, name in enumerate(sizes)}


def draw_bars(
    axes: "Axes", rows: Sequence[Row], field: str, words: bool, stated: Mapping[tuple[str, str], float]
) -> None:
    """A bar for every value of a field and every strategy, and a dashed level for rows that have no value."""
    own = [row for row in rows if value(row, field) is not None]
    names, strategies = values(rows, field), list(dict.fromkeys(row.strategy for row in own))
    width = 0.8 / max(1, len(strategies))
    marks = []
    for i, strategy in enumerate(strategies):
        group = [row for row in own if row.strategy == strategy]
        places = [names.index(value(row, field)) + (i - (len(strategies) - 1) / 2) * width for row in group]
        bars = axes.bar(places, [ppl(row, words) for row in group], 0.9 * width, label=strategy)
        axes.bar_label(bars, fmt="{:,.2f}", fontsize="small")
        found = [(place, stated.get((row.reader, strategy))) for place, row in zip(places, group, strict=True)]
        marks += [(place, level) for place, level in found if level is not None]
    if marks:
        axes.plot(*zip(*marks, strict=True), "k_", markersize=16, label="paper")
    for row in rows:
        if value(row, field) is None:
            axes.axhline(ppl(row, words), color="0.3", linestyle=NONE, label=row.strategy)
    axes.set_xticks(range(len(names)), labels=names)
