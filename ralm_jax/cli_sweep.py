"""The command that draws figures. As in `cli`, nothing heavy is imported before it runs."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from ralm_jax.cli_options import ExcludeOptions, ReaderOptions, ReportOptions, TextOptions
from ralm_jax.errors import UsageError
from ralm_jax.settings import (
    DenseSearch,
    Exclusion,
    Preset,
    QuerySettings,
    QueryTokens,
    StrideSettings,
    WindowSettings,
    at_least,
)

if TYPE_CHECKING:
    from eval.sweep import Grid

T = TypeVar("T")


@dataclass(frozen=True)
class Sweep:
    """Perplexity over a grid of settings, as a table, a CSV and a plot.

    --model, --index, --query-length, --stride, --k and --window take one value or several. Tables that an earlier sweep
    left in the folder are used again, and unfinished ones finished."""

    model: tuple[str, ...]
    """Readers: folders, .gguf files or Hugging Face ids."""
    out: str
    """Folder for the tables, sweep.csv and sweep.png."""
    text: TextOptions = TextOptions()
    index: tuple[str, ...] = ()
    """Retrievers: folders that `ralm index` or `ralm fuse` made; none for --strategies none."""
    query_length: tuple[int, ...] = (QuerySettings.query_length,)
    """Tokens before the target that make the query."""
    stride: tuple[int, ...] = (StrideSettings.stride,)
    """Tokens that each window after the first predicts."""
    k: tuple[int, ...] = (QuerySettings.k,)
    """Passages a stride; the largest is retrieved and scored."""
    window: tuple[int, ...] = (StrideSettings.window,)
    """Tokens a window."""
    x: Literal["query-length", "stride", "k", "window", "reader"] | None = None
    """What the plot's lines are drawn over. Default: the first of these with several values; bars if there is none."""
    limit_strides: int | None = None
    """Only the first so many strides, of the largest stride in the largest window; the others predict the same tokens,
    and up to a stride more. Default: all."""
    preset: Preset = "default"
    """ai21: special tokens and title exclusion as in the paper's released code."""
    query_tokens: QueryTokens = "reader"
    """Whose tokens these are: the reader's, or those of a dense retriever's own tokenizer."""
    exclusion: Exclusion | None = None
    """Leave titles out inside the search (k hits guaranteed) or after it. Default: inside; ai21: after."""
    exclude: ExcludeOptions = ExcludeOptions()
    dense_search: DenseSearch = "jax"
    """What searches a dense index; the hits are the same."""
    windows: WindowSettings = WindowSettings()
    reader: ReaderOptions = ReaderOptions()
    report: ReportOptions = ReportOptions()

    def run(self) -> None:
        from eval import plots, sweep
        from eval.report import Beside, policies
        from eval.sweep_rows import format_csv, format_rows
        from ralm_jax.text import write_text

        self.report.check_past(self.windows)
        known = policies(Beside(self.report.zero_shot_tokens, self.report.seed, self.report.temperature))
        strategies = {name: known[name] for name in self.report.names()}
        grid = self.grid(retrieves=strategies.keys() != {"none"})
        x = plots.x_axis(grid.sizes, self.x)
        text = self.text.read()
        made = sweep.Sweep(
            self.out, text, grid, self.windows, tokenizer=self.reader.tokenizer,
            dtype=self.reader.dtype, batch_size=self.reader.windows_a_batch(), excluded=self.exclude.titles(self.text),
            dense_search=self.dense_search, announce=lambda line: print(line, flush=True),
        )  # fmt: skip
        rows = made.run(strategies, dataclasses.asdict(self))
        out = Path(self.out).expanduser()
        write_text(str(out / "sweep.csv"), format_csv(rows))
        plots.draw(str(out / "sweep.png"), rows, x, Path(text.origin).name)
        print(f"{format_rows(rows)}\n\nTables, sweep.csv and sweep.png are in {self.out}.")

    def grid(self, retrieves: bool) -> "Grid":
        """
        Raises:
            UsageError: an axis without a value, or with one that cannot be.
        """
        from eval.sweep import Grid, stride_grid

        models, ks, lengths = (
            distinct("model", self.model), distinct("k", self.k), distinct("query-length", self.query_length)
        )  # fmt: skip
        for k in ks:
            at_least(1, k=k)
        queries = tuple(QuerySettings(max(ks), length, self.query_tokens, self.exclusion) for length in lengths)
        strides = stride_grid(
            distinct("window", self.window), distinct("stride", self.stride), self.limit_strides, self.preset
        )
        if not retrieves:
            return Grid(models, (), strides, (), ())
        if not self.index:
            raise UsageError("--index: name at least one, or ask for --strategies none alone")
        return Grid(models, distinct("index", self.index), strides, queries, ks)


def distinct(name: str, values: tuple[T, ...]) -> tuple[T, ...]:
    """
    Raises:
        UsageError: there are none.
    """
    if not values:
        raise UsageError(f"--{name}: name at least one")
    return tuple(dict.fromkeys(values))
