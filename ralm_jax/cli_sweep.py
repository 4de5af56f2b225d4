"""The commands that draw figures. As in `cli`, nothing heavy is imported before they run."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, cast

from tyro.conf import create_mutex_group

from ralm_jax.cli_options import (
    ExcludeOptions,
    ReaderOptions,
    ReportOptions,
    TextOptions,
    check_output_file,
    distinct,
    refuse_set,
)
from ralm_jax.errors import UsageError
from ralm_jax.settings import (
    DenseSearch,
    Exclusion,
    Preset,
    QuerySettings,
    QueryTokens,
    RerankSettings,
    StrideSettings,
    WindowSettings,
    at_least,
)

if TYPE_CHECKING:
    from eval.sweep import Grid

ONE_OF_PAPER = create_mutex_group(required=True, title="what of the paper")


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
    zero_shot_by: str | None = None
    """Another reader, of any vocabulary, for the strategy zero-shot-by: it ranks what is retrieved for all readers."""
    ranker_window: int | None = None
    """Tokens a window of --zero-shot-by. Default: as the readers', or its number of positions if these are fewer."""
    reranker: str | None = None
    """A cross-encoder, as of `ralm rerank`, for the strategies predictive and predictive-mixture."""
    rerank: RerankSettings = RerankSettings()
    windows: WindowSettings = WindowSettings()
    reader: ReaderOptions = ReaderOptions()
    report: ReportOptions = ReportOptions()

    def run(self) -> None:
        from eval import plots, sweep
        from eval.report import Beside
        from eval.sweep_rows import format_csv, format_rows
        from ralm_jax.text import write_text

        refuse_set(self.reader.devices, "`ralm score` and the other commands; a sweep is one process")
        strategies = self.strategies()
        self.report.check_past(strategies, self.windows)
        beside = Beside(self.report.zero_shot_tokens, self.report.seed, self.report.temperature)
        grid = self.grid(retrieves=set(strategies) != {"none"})
        x = plots.x_axis(grid.sizes, self.x)
        text = self.text.read()
        made = sweep.Sweep(
            self.out, text, grid, self.windows, tokenizer=self.reader.tokenizer,
            dtype=self.reader.dtype, attention=self.reader.attention, batch_size=self.reader.windows_a_batch(),
            excluded=self.exclude.titles(self.text),
            zero_shot_by=self.zero_shot_by, ranker_window=self.ranker_window, reranker=self.reranker,
            rerank=self.rerank, dense_search=self.dense_search, announce=lambda line: print(line, flush=True),
        )  # fmt: skip
        rows = made.run(strategies, beside, dataclasses.asdict(self))
        out = Path(self.out).expanduser()
        write_text(str(out / "sweep.csv"), format_csv(rows))
        plots.draw(str(out / "sweep.png"), rows, x, Path(text.origin).name)
        print(f"{format_rows(rows)}\n\nTables, sweep.csv and sweep.png are in {self.out}.")

    def strategies(self) -> list[str]:
        """
        Raises:
            UsageError: one that goes by a model that is not named, or a model that none goes by.
        """
        at_least(1, ranker_window=self.ranker_window)
        if self.ranker_window is not None and not self.zero_shot_by:
            raise UsageError("--ranker-window is for --zero-shot-by")
        if self.rerank != RerankSettings() and not self.reranker:
            raise UsageError("--prefix-tokens and --pair-tokens are for --reranker")
        names = self.report.names(ranked=bool(self.reranker), by_another=bool(self.zero_shot_by))
        users = {"--zero-shot-by": (self.zero_shot_by, "zero-shot-by"), "--reranker": (self.reranker, "predictive")}
        for option, (model, strategy) in users.items():
            if model and not any(name.startswith(strategy) for name in names):
                raise UsageError(f"{option} {model}: nothing goes by it; add {strategy} to --strategies")
        return names

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


PAPER_PARTS: dict[str, tuple[tuple[int | str, ...], tuple[int, ...]]] = {  # what folders have: tables, figures
    "sweep": ((1, 2, 3, 5), (1, 4, 5, 6, 7)),
    "qa": ((4,), (1, 8)),
    "long": ((2, 3, 4, 5, 6, "time"), ()),
}


@dataclass(frozen=True)
class Paper:
    """Tables and figures of the two papers, with what sweeps and answers have beside what these state: of In-Context
    RALM for --sweep and --qa, of Retrieval meets Long Context for --long and, figure 1, for --qa. Table 1 and figure 2
    of the latter are made by `ralm eval lengths`."""

    sweep: tuple[str, ...] = ()
    """Folders that `ralm sweep` made. Tables: GPT-2 on five texts (1), LLaMA (2), small models that rerank for large
    ones (3), GPT-Neo and GPT-J (5). Figures: perplexity by reader (1), over reader size (4), stride (5), query length
    (6) and passages to choose from (7)."""
    qa: tuple[str, ...] = ()
    """Folders that `ralm eval qa` made. Table: closed and open book (4). Figures: exact match over passages in the
    prompt (8); answers over the place of the gold passage (1)."""
    long: tuple[str, ...] = ()
    """Folders that `ralm eval long` made. Tables: window and retrieval (2), readers on a server beside ours (3),
    retrievers (4), numbers of chunks (5), few-shot tasks (6), seconds an answer with and without retrieval (time)."""
    table: Annotated[Literal[1, 2, 3, 4, 5, 6, "time"] | None, ONE_OF_PAPER] = None
    """A table of that paper."""
    figure: Annotated[Literal[1, 4, 5, 6, 7, 8] | None, ONE_OF_PAPER] = None
    """A figure of that paper."""
    csv: str | None = None
    """Also write a table's numbers to this file."""
    out: str | None = None
    """PNG for a figure; its numbers go into a CSV of the same name."""

    def run(self) -> None:
        from ralm_jax.text import write_text

        kind = self.kind()
        if (self.figure is None) != (self.out is None) or (self.figure is not None and self.csv is not None):
            raise UsageError("--figure needs --out for its PNG, and --table takes --csv")
        out = Path(self.out).with_suffix(".csv") if self.out else None
        if out is not None and str(out) == self.out:
            raise UsageError(f"{self.out}: is for the figure's numbers; name its PNG with --out")
        for file in (self.csv, self.out):
            check_output_file(file)
        shown = {"sweep": self.of_sweeps, "qa": self.of_answers, "long": self.of_long}[kind]()
        if self.out:
            cast(Callable[[str], None], shown.draw)(self.out)
            write_text(str(out), shown.csv)
            print(f"{self.out}: figure {self.figure}; its numbers are in {out}\n\n{shown.matches}")
        else:
            print(f"{shown.table}\n\n{shown.matches}")
            if self.csv:
                write_text(self.csv, shown.csv)

    def kind(self) -> str:
        """What kind of folders are named.

        Raises:
            UsageError: none, several kinds, or one without this table or figure.
        """
        named = [kind for kind in PAPER_PARTS if getattr(self, kind)]
        asked = f"table {self.table}" if self.table else f"figure {self.figure}"
        having = [
            f"--{kind}" for kind, (tables, figures) in PAPER_PARTS.items()
            if self.table in tables or self.figure in figures
        ]  # fmt: skip
        if len(named) != 1 or f"--{named[0]}" not in having:
            raise UsageError(
                f"{asked}: name the folders that it is made from with {' or '.join(having)}, and no others"
            )
        return named[0]

    def of_sweeps(self) -> "Shown":
        from eval import paper

        found, number = paper.read_sweeps(self.sweep), cast(int, self.table or self.figure)
        cells = paper.table_cells(number, found) if self.table else paper.figure_cells(number, found)
        table = paper.format_table(number, cells) if self.table else ""
        return Shown(
            table, paper.format_matches(cells), paper.format_cells(cells), partial(paper.draw_figure, number, cells)
        )

    def of_answers(self) -> "Shown":
        from eval import paper_qa

        runs = paper_qa.read_runs(self.qa)
        if self.table:
            cells, draw = paper_qa.table_cells(runs), None
        elif self.figure == 1:
            cells, draw = paper_qa.lost_cells(runs), paper_qa.draw_lost
        else:
            cells, draw = paper_qa.figure_cells(runs), paper_qa.draw_figure
        table = paper_qa.format_table(cells) if self.table else ""
        return Shown(table, paper_qa.format_matches(cells), paper_qa.format_cells(cells), draw and partial(draw, cells))

    def of_long(self) -> "Shown":
        from eval import paper_long

        found = paper_long.read_lines(self.long)
        if self.table == "time":
            return Shown(paper_long.format_time(found), paper_long.TIME_TOLD, paper_long.format_cells(found))
        number = cast(int, self.table)
        lines = paper_long.table_lines(number, found)
        table = paper_long.format_table(number, lines)
        return Shown(table, paper_long.format_matches(lines), paper_long.format_cells(lines))


class Shown(NamedTuple):
    """A table or a figure.

    Attributes:
        table: for a terminal; empty for a figure.
        matches: what was taken for what.
        draw: writes a figure as PNG; None for a table.
    """

    table: str
    matches: str
    csv: str
    draw: Callable[[str], None] | None = None
