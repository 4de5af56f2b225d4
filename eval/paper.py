"""The tables and figures of the paper (In-Context RALM, Ram et al., 2023), with what sweeps found in them.

`VALUES` are those of its tables 1, 2, 3 and 5 (arXiv:2302.00083); figure 1 shows some of table 1. What is drawn in
figures 4 to 7, and with it all of OPT, is stated nowhere in the text: there only ours are drawn.

What is the paper's is told by three rules. A reader is, if family, sizes, vocabulary and positions are, so that
fine-tuned variants count. A text is, if the sweep was made with `--dataset` on the whole test split. A retriever is its
BM25, if the engine is ours or Lucene's. Of several windows, strides, query lengths and numbers of passages in a sweep,
those nearest to the paper's are taken.
"""

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from eval import plots
from eval.columns import aligned
from eval.sweep import KIND
from eval.sweep_rows import Row, read_csv
from ralm_jax.config import ConfigFile
from ralm_jax.errors import UsageError
from ralm_jax.models import READERS, SIZES
from ralm_jax.score_table import KIND as SCORES
from ralm_jax.storage import Folder

MODELS = {
    "GPT-2 S": "gpt2", "GPT-2 M": "gpt2-medium", "GPT-2 L": "gpt2-large", "GPT-2 XL": "gpt2-xl",
    "GPT-Neo 1.3B": "gpt-neo-1.3b", "GPT-Neo 2.7B": "gpt-neo-2.7b", "GPT-J 6B": "gpt-j-6b",
    "LLaMA-7B": "llama-7b", "LLaMA-13B": "llama-13b", "LLaMA-33B": "llama-33b",
    **{f"OPT-{size.upper()}": f"opt-{size}" for size in ("125m", "350m", "1.3b", "2.7b", "6.7b", "13b", "30b", "66b")},
}  # fmt: skip
SHAPE = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "mlp_size",
    "max_positions",
)
TEXTS = {"wikitext-103": "WikiText-103", "realnews": "RealNews", "arxiv": "ArXiv", "stackexchange": "Stack Exchange",
         "freelaw": "FreeLaw"}  # fmt: skip
SETTINGS = {"window": 1024, "stride": 4, "query_length": 32, "k": 16}  # sections 4.2 and 5; k in section 6
RANKER = "GPT-2 S"  # of table 3

# by model and strategy, in the order of `TEXTS`: perplexity per word on WikiText-103, per token elsewhere
VALUES: dict[str, dict[str, tuple[float, ...]]] = {
    "GPT-2 S": {
        "none": (37.5, 21.3, 12.0, 12.8, 13.0),
        "first": (29.6, 16.1, 10.9, 11.3, 9.6),
        "zero-shot": (28.6, 15.5, 10.1, 10.6, 8.8),
        "predictive": (26.8,),
    },
    "GPT-2 M": {
        "none": (26.3, 15.7, 9.3, 8.8, 9.6),
        "first": (21.5, 12.4, 8.6, 8.1, 7.4),
        "zero-shot": (20.8, 12.0, 8.0, 7.7, 6.9),
        "predictive": (19.7,),
        "zero-shot-by": (20.8, 12.1),
    },
    "GPT-2 L": {
        "none": (22.0, 13.6, 8.4, 8.5, 8.7),
        "first": (18.1, 10.9, 7.8, 7.8, 6.8),
        "zero-shot": (17.6, 10.6, 7.3, 7.4, 6.4),
        "predictive": (16.6,),
        "zero-shot-by": (17.7, 10.7),
    },
    "GPT-2 XL": {
        "none": (20.0, 12.4, 7.8, 8.0, 8.0),
        "first": (16.6, 10.1, 7.2, 7.4, 6.4),
        "zero-shot": (16.1, 9.8, 6.8, 7.1, 6.0),
        "predictive": (15.4,),
        "zero-shot-by": (16.2, 9.9),
    },
    "LLaMA-7B": {"none": (9.9,), "first": (8.8,)},
    "LLaMA-13B": {"none": (8.5,), "first": (7.6,)},
    "LLaMA-33B": {"none": (6.3,), "first": (6.1,)},
    "GPT-Neo 1.3B": {"none": (17.5, 12.3), "first": (14.6, 9.9)},
    "GPT-Neo 2.7B": {"none": (15.1, 11.0), "first": (12.8, 9.0)},
    "GPT-J 6B": {"none": (11.6, 9.2), "first": (10.0, 7.7)},
}


class Table(NamedTuple):
    """What a table of the paper is of.

    Attributes:
        texts: how many of `TEXTS`.
        columns: of "retrieval", "reranking" and "reranked by".
    """

    models: tuple[str, ...]
    strategies: tuple[str, ...]
    texts: int
    columns: tuple[str, ...]


GPT2 = ("GPT-2 S", "GPT-2 M", "GPT-2 L", "GPT-2 XL")
TABLES = {
    1: Table(GPT2, ("none", "first", "zero-shot", "predictive"), 5, ("retrieval", "reranking")),
    2: Table(("LLaMA-7B", "LLaMA-13B", "LLaMA-33B"), ("none", "first"), 1, ("retrieval",)),
    3: Table(GPT2[1:], ("zero-shot-by", "zero-shot"), 2, ("reranked by",)),
    5: Table(("GPT-Neo 1.3B", "GPT-Neo 2.7B", "GPT-J 6B"), ("none", "first"), 2, ("retrieval",)),
}
FIGURES = {  # what they are drawn over, and the strategies in them
    1: ("reader", ("none", "first", "zero-shot", "predictive")),
    4: ("reader", ("none", "first")),
    5: ("stride", ("none", "first")),
    6: ("query-length", ("none", "first")),
    7: ("k", ("none", "first", "oracle")),
}


@dataclass(frozen=True)
class Found:
    """A row of a sweep, and what the paper calls its parts.

    Attributes:
        sweep: folder that it is from.
        text: one of `TEXTS`'s values, or its own name.
        model: one of `MODELS`; None for another reader.
        retrieval: "-" for none, "BM25", or the retriever's own name.
        ranker: of the strategy zero-shot-by: one of `MODELS`, or its own name.
        label: the reader: `model`, with its own name where several are that; or its own name.
    """

    row: Row
    sweep: str
    text: str
    model: str | None
    retrieval: str
    ranker: str
    label: str = ""

    @property
    def ppl(self) -> float | None:
        return self.row.result.token_ppl if measure(self.text) == "token" else self.row.result.word_ppl

    @property
    def line(self) -> "Line":
        return Line(self.label, self.row.strategy, self.retrieval, self.ranker)

    @property
    def where(self) -> str:
        return f"{self.sweep} ({self.row.retriever or 'no passage'}, window {self.row.window})"


class Line(NamedTuple):
    """A line of a table; as in `Found`."""

    label: str
    strategy: str
    retrieval: str
    ranker: str

    def column(self, name: str) -> str:
        """What stands in the table's column of this name."""
        if name == "retrieval":
            return self.retrieval
        if name == "reranked by":
            return self.ranker or self.label
        return "-" if self.strategy in ("none", "first") else self.strategy


class Cell(NamedTuple):
    """A number of ours, of the paper's, or both."""

    line: Line
    text: str
    found: Found | None
    paper: float | None


def measure(text: str) -> str:
    """Per what the perplexity of a text is; of one that the paper has not, per word."""
    return "token" if text in list(TEXTS.values())[1:] else "word"


def paper_value(model: str | None, line: Line, text: str) -> float | None:
    """What the paper states of one of `MODELS`; None where it does not."""
    texts, values = list(TEXTS.values()), VALUES.get(model or "", {}).get(line.strategy, ())
    at = texts.index(text) if text in texts else len(values)
    there = at < len(values) and line.retrieval in ("-", "BM25") and line.ranker in ("", RANKER)
    return values[at] if there else None


# --- what sweeps have ---


def read_sweeps(locations: Sequence[str]) -> list[Found]:
    """The rows of all sweeps, each once.

    Raises:
        UsageError: there is no finished sweep, or two differ on the same cell.
        RalmError: one cannot be read.
    """
    found = [one for location in dict.fromkeys(locations) for one in read_sweep(location)]
    names = {(one.model, one.row.reader) for one in found if one.model}
    several = {model for model, _ in names if sum(model == other for other, _ in names) > 1}
    for i, one in enumerate(found):
        label = f"{one.model} ({one.row.reader})" if one.model in several else one.model
        found[i] = replace(one, label=label or one.row.reader)
    fields = ("retriever", "query_length", "stride", "k", "window", "strategy")
    return once(found, lambda one: (one.text, one.label, one.ranker, *(getattr(one.row, field) for field in fields)))


def read_sweep(location: str) -> list[Found]:
    """
    Raises:
        UsageError, RalmError: as `read_sweeps`.
    """
    about, root = Folder.open(location, KIND).about, Path(location).expanduser()
    if not (root / "sweep.csv").is_file():
        raise UsageError(f"{location}: has no sweep.csv; let `ralm sweep` come to its end")

    @cache
    def settings(table: str) -> dict[str, Any]:
        try:
            return Folder.open(str(root / table), SCORES).settings
        except UsageError:
            raise UsageError(f"{location}: its table {table} has gone; run the sweep anew") from None

    found = []
    for row in read_csv(root / "sweep.csv"):
        made, by = settings(row.table), row.strategy == "zero-shot-by"
        ranker = (paper_model(settings(row.ranker_table)["config"]) or row.ranker) if by else ""
        bm25 = made["retrieval"] and made["retrieval"]["retriever"]["engine"] in ("bm25", "lucene")
        retrieval = "-" if row.retriever is None else "BM25" if bm25 else row.retriever
        found.append(Found(row, location, paper_text(about), paper_model(made["config"]), retrieval, ranker))
    return found


def paper_model(config: dict[str, Any]) -> str | None:
    """Which of `MODELS` a ScoreTable's `config` is."""
    return shaped_like(config, MODELS, SHAPE)


def shaped_like(config: dict[str, Any], models: Mapping[str, str], shape: Sequence[str]) -> str | None:
    """Which of `models`, which name sizes, has the family of `config` and agrees with it in `shape`."""
    made = READERS[config["model_type"]].config.from_hf(ConfigFile(config, "config"))
    for model, size in models.items():
        ours = SIZES[size]
        if type(ours) is type(made) and all(getattr(ours, name) == getattr(made, name) for name in shape):
            return model
    return None


def paper_text(about: dict[str, Any]) -> str:
    """Which of `TEXTS` a sweep is of, by how it was made; else its own name."""
    text = about["text"]
    if text["dataset"] is None:
        return Path(text["text"]).name
    whole = text["limit_rows"] is None and about["limit_strides"] is None
    known = TEXTS[text["dataset"]] if text["split"] == "test" else f"{text['dataset']} {text['split']}"
    return known if whole else f"part of {known}"


def once(found: Sequence[Found], key: Callable[[Found], tuple[Any, ...]]) -> list[Found]:
    """The first of each `key`.

    Raises:
        UsageError: others of the same key have other results.
    """
    kept: dict[tuple[Any, ...], Found] = {}
    for one in found:
        first = kept.setdefault(key(one), one)
        if not math.isclose(first.row.result.nll, one.row.result.nll, rel_tol=1e-5):
            raise UsageError(
                f"{first.where} and {one.where} have different results for {one.label}, {one.row.strategy} on "
                f"{one.text}; name sweeps with one of them"
            )
    return list(kept.values())


def settled(found: Sequence[Found], free: str | None = None) -> list[Found]:
    """Of each sweep the rows with the settings nearest to the paper's.

    Args:
        free: a setting that may be any.
    """
    chosen = []
    for sweep in dict.fromkeys(one.sweep for one in found):
        own = [one for one in found if one.sweep == sweep]
        for setting, paper in SETTINGS.items():
            values = {getattr(one.row, setting) for one in own} - {None}
            if setting != free and values:
                nearest = min(values, key=lambda value: (abs(math.log(value / paper)), value))
                own = [one for one in own if getattr(one.row, setting) in (None, nearest)]
        chosen += own
    return chosen


# --- tables ---


def table_cells(number: int, found: Sequence[Found]) -> list[Cell]:
    """The numbers of a table: the paper's lines, ours in them, and those of readers that the paper has not.

    Raises:
        UsageError: sweeps that differ on one of them.
    """
    table = TABLES[number]
    ours = [
        one
        for one in settled(found)
        if one.row.strategy in table.strategies and (one.model in table.models or one.model not in VALUES)
    ]
    there = {(one.line, one.text): one for one in once(ours, lambda one: (one.line, one.text))}
    models = {one.label: one.model for one in ours}
    named = {model: [label for label, known in models.items() if known == model] or [model] for model in table.models}
    models |= {label: model for model, labels in named.items() for label in labels}
    labels = list(dict.fromkeys([label for own in named.values() for label in own] + list(models)))
    lines = {line for line, _ in there}
    for label in labels:
        for strategy in VALUES.get(models[label] or "", {}).keys() & set(table.strategies):
            ranker = RANKER if strategy == "zero-shot-by" else ""
            lines.add(Line(label, strategy, "-" if strategy == "none" else "BM25", ranker))
    known = list(TEXTS.values())
    texts = dict.fromkeys([*known[: table.texts], *(one.text for one in ours)])
    order = sorted(lines, key=lambda line: (labels.index(line.label), table.strategies.index(line.strategy), *line[2:]))
    return [
        Cell(line, text, there.get((line, text)), paper_value(models[line.label], line, text))
        for line in order
        for text in texts
    ]


def format_table(number: int, cells: Sequence[Cell]) -> str:
    """A table for a terminal: for every text, ours and the paper's."""
    columns, texts = TABLES[number].columns, dict.fromkeys(cell.text for cell in cells)
    lines = dict.fromkeys(cell.line for cell in cells)
    at = {(cell.line, cell.text): format_cell(cell) for cell in cells}
    rows = [["", *([""] * len(columns)), *(f"{text}, {measure(text)} ppl" for text in texts)]]
    rows += [["model", *columns, *[f"{'ours':>9}{'paper':>8}"] * len(texts)]]
    for line in lines:
        rows.append([line.label, *map(line.column, columns), *(at[line, text] for text in texts)])
    return aligned(rows, left=range(1 + len(columns)))


def format_cell(cell: Cell) -> str:
    ours = cell.found.ppl if cell.found else None
    paper = "-" if cell.paper is None else f"{cell.paper:.1f}"
    return f"{'-' if ours is None else f'{ours:,.2f}':>9}{paper:>8}"


def format_matches(cells: Sequence[Cell]) -> str:
    """What was taken for what, and which settings are not the paper's."""
    found = [cell.found for cell in cells if cell.found]
    if not found:
        return "The sweeps have nothing for it."
    lines = []
    for one in found:
        shape = f"has the shape of {one.model}" if one.model else "is no reader of the paper's"
        lines.append(f"{one.row.reader} in {one.sweep} {shape}.")
    for one in found:
        known = "the paper's" if one.text in TEXTS.values() else "no text of the paper's"
        lines.append(f"The text of {one.sweep}, {one.text}, is {known}.")
    lines += [f"{one.row.strategy} in {one.sweep} goes by {one.row.ranker}." for one in found if one.row.ranker]
    for sweep in dict.fromkeys(one.sweep for one in found):
        rows = [one.row for one in found if one.sweep == sweep]
        used = {setting: {getattr(row, setting) for row in rows} - {None} for setting in SETTINGS}
        if all(row.strategy in ("none", "first") for row in rows):
            used["k"] = set()  # on which these do not depend
        others = [
            f"{setting.replace('_', ' ')} {', '.join(map(str, sorted(values)))} (the paper {SETTINGS[setting]})"
            for setting, values in used.items()
            if values - {SETTINGS[setting]}
        ]
        lines.append(f"{sweep} has {', '.join(others) or 'the settings of the paper'}.")
    return "\n".join(dict.fromkeys(lines))


COLUMNS: dict[str, Callable[[Cell], Any]] = {
    "model": lambda cell: cell.line.label,
    "strategy": lambda cell: cell.line.strategy,
    "retrieval": lambda cell: cell.line.retrieval,
    "ranker": lambda cell: cell.line.ranker or (cell.found and cell.found.row.ranker),
    "text": lambda cell: cell.text,
    "measure": lambda cell: f"{measure(cell.text)} ppl",
    "ours": lambda cell: cell.found and cell.found.ppl,
    "paper": lambda cell: cell.paper,
    "sweep": lambda cell: cell.found and cell.found.sweep,
}
OF_ROWS = ("reader", "retriever", "query_length", "stride", "k", "window", "table")


def format_cells(cells: Sequence[Cell]) -> str:
    """The numbers as CSV, one a line; empty where there is none."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*COLUMNS, *OF_ROWS])
    for cell in cells:
        row = [cell.found and getattr(cell.found.row, name) for name in OF_ROWS]
        writer.writerow([*(value(cell) for value in COLUMNS.values()), *row])
    return file.getvalue()


# --- figures ---


def figure_cells(number: int, found: Sequence[Found]) -> list[Cell]:
    """What a figure shows.

    Raises:
        UsageError: nothing, of several texts, or too few for a curve.
    """
    x, strategies = FIGURES[number]
    chosen = [one for one in settled(found, x.replace("-", "_")) if one.row.strategy in strategies]
    if number == 1:
        chosen = [one for one in chosen if one.retrieval in ("-", "BM25")]
        if any(one.row.strategy == "predictive" for one in chosen):
            chosen = [one for one in chosen if one.row.strategy != "zero-shot"]
        chosen = once(chosen, lambda one: (one.text, one.label, one.row.strategy))
    texts = list(dict.fromkeys(one.text for one in chosen))
    if len(texts) > 1:
        raise UsageError(f"figure {number}: the sweeps are of {', '.join(texts)}; name those of one text")
    several = len({one.label if x == "reader" else plots.value(one.row, x) for one in chosen} - {None})
    if not any(one.row.strategy != "none" for one in chosen) or (number != 1 and several < 2):
        option = "--model" if x == "reader" else f"--{x}"
        needed = f"several values of {option}" if number != 1 else "BM25"
        raise UsageError(
            f"figure {number}: needs a sweep with {needed} and --strategies {','.join(strategies)}; these have none"
        )
    stated = [paper_value(one.model, one.line, one.text) if number == 1 else None for one in chosen]
    return [Cell(one.line, one.text, one, value) for one, value in zip(chosen, stated, strict=True)]


def draw_figure(number: int, cells: Sequence[Cell], path: str) -> None:
    """Writes a figure as PNG.

    Raises:
        RalmError: it cannot be written.
    """
    rows = [replace(cell.found.row, reader=cell.line.label) for cell in cells if cell.found]
    text, words = cells[0].text, measure(cells[0].text) == "word" and all(row.result.word_ppl for row in rows)
    stated = {cell.line[:2]: cell.paper for cell in cells if cell.paper is not None}
    x = None if number == 1 else FIGURES[number][0]
    plots.draw(path, rows, x, f"{text} (figure {number})", words=words, bars="reader", stated=stated)
