"""What a sweep finds, row by row: for a terminal and as CSV."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.columns import aligned
from eval.metrics import Perplexity
from eval.report import number
from ralm_jax.errors import RalmError


@dataclass(frozen=True)
class Row:
    """The perplexity of one cell under one strategy.

    Attributes:
        retriever, query_length, k: None for the strategy "none", which does not depend on them.
        parameters: of the reader.
        table: name of the ScoreTable's folder.
        none: the perplexity without passages.
        ranker: the other reader or the reranker that the strategy goes by; empty for none.
        ranker_table: name of the folder of its ScoreTable or RankingTable.
    """

    reader: str
    parameters: int
    retriever: str | None
    query_length: int | None
    stride: int
    k: int | None
    window: int
    strategy: str
    table: str
    result: Perplexity
    none: Perplexity
    ranker: str = ""
    ranker_table: str = ""

    @property
    def vs_none(self) -> float | None:
        """Change of the token perplexity in percent."""
        ours, plain = self.result.token_ppl, self.none.token_ppl
        return 100 * (ours / plain - 1) if ours and plain else None


COLUMNS: dict[str, Callable[[Row], Any]] = {
    "reader": lambda row: row.reader,
    "retriever": lambda row: row.retriever,
    "query_length": lambda row: row.query_length,
    "stride": lambda row: row.stride,
    "k": lambda row: row.k,
    "window": lambda row: row.window,
    "strategy": lambda row: row.strategy,
    "token_ppl": lambda row: row.result.token_ppl,
    "word_ppl": lambda row: row.result.word_ppl,
    "vs_none_percent": lambda row: row.vs_none,
    "strides_without_passage": lambda row: row.result.strides_without_passage,
    "strides": lambda row: row.result.strides,
    "tokens": lambda row: row.result.tokens,
    "scored_tokens": lambda row: row.result.scored_tokens,
    "words": lambda row: row.result.words,
    "nll": lambda row: row.result.nll,
    "parameters": lambda row: row.parameters,
    "table": lambda row: row.table,
    "ranker": lambda row: row.ranker,
    "ranker_table": lambda row: row.ranker_table,
    "nll_none": lambda row: row.none.nll,
}


def format_csv(rows: Sequence[Row]) -> str:
    """The rows as CSV with a header; empty where there is no value."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([value(row) for value in COLUMNS.values()] for row in rows)
    return file.getvalue()


def read_csv(path: Path) -> list[Row]:
    """The rows that `format_csv` wrote.

    Raises:
        RalmError: the file has other columns, or a broken row.
    """
    rows = []
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        lacking = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if lacking:
            raise RalmError(f"{path}: has no column {lacking[0]}; run the sweep anew, which keeps its tables")
        for cells in reader:
            try:
                rows.append(parse_row(cells))
            except (TypeError, ValueError) as error:
                raise RalmError(f"{path}:{reader.line_num}: not a row of a sweep ({error})") from None
    return rows


def parse_row(cells: Mapping[str, str]) -> Row:
    """
    Raises:
        ValueError, TypeError: a number is missing or is none.
    """
    counts = {name: int(cells[name]) for name in ("tokens", "scored_tokens", "words", "strides")}
    return Row(
        cells["reader"], int(cells["parameters"]), cells["retriever"] or None, optional(cells["query_length"]),
        int(cells["stride"]), optional(cells["k"]), int(cells["window"]), cells["strategy"], cells["table"],
        Perplexity(float(cells["nll"]), **counts, strides_without_passage=int(cells["strides_without_passage"])),
        Perplexity(float(cells["nll_none"]), **counts, strides_without_passage=counts["strides"]),
        cells["ranker"], cells["ranker_table"],
    )  # fmt: skip


def optional(cell: str) -> int | None:
    return int(cell) if cell else None


def format_rows(rows: Sequence[Row]) -> str:
    """The rows as a table for a terminal."""
    header = ["reader", "retriever", "query", "stride", "k", "window", "strategy",
              "token ppl", "word ppl", "vs none", "no passage"]  # fmt: skip
    cells = [
        [
            *(("-" if value is None else f"{value}") for value in
              (row.reader, row.retriever, row.query_length, row.stride, row.k, row.window, row.strategy)),
            number(row.result.token_ppl), number(row.result.word_ppl),
            "-" if row.vs_none is None else f"{row.vs_none:+.1f}%", f"{row.result.strides_without_passage:,}",
        ]
        for row in rows
    ]  # fmt: skip
    lines = [aligned([header, *cells], left=(0, 1, 6))]
    covered = {(row.result.tokens, row.result.words) for row in rows}
    tokens, words = zip(*sorted(covered), strict=True)
    lines += ["", f"Token perplexity is over {span(tokens)} tokens, word perplexity over {span(words)} words."]
    if len(set(words)) > 1:
        lines.append("These are different parts of the text: compare the cells with care.")
    return "\n".join(lines)


def span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
