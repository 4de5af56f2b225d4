"""Sweeps: the perplexity of a text over readers, retrievers, query lengths, strides, windows and numbers of passages
(In-Context RALM, figures 3 to 6), from tables that are kept and serve every sweep that asks for them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from eval.lm import check_reader
from eval.report import Beside
from eval.sweep_rows import Row
from eval.sweep_tables import Cells, Rankings, Tables, rank_all
from ralm_jax.cross_encoder import unloaded_cross_encoder
from ralm_jax.errors import UsageError
from ralm_jax.reader import unloaded_reader
from ralm_jax.settings import (
    AttentionName,
    DenseSearch,
    Preset,
    QuerySettings,
    RerankSettings,
    StrideSettings,
    WindowSettings,
)
from ralm_jax.storage import Folder
from ralm_jax.text import Text
from ralm_jax.tokenizer import Tokenizer, load_tokenizer
from retrieval.reranker import checked_format
from retrieval.retriever import open_index

KIND = "sweep tables"


@dataclass(frozen=True)
class Grid:
    """What a sweep is the product of.

    Attributes:
        models: readers.
        indexes: retrievers; none where nothing is retrieved.
        strides: strides and windows.
        queries: query lengths, all with the largest of `ks`.
        ks: numbers of passages.
    """

    models: tuple[str, ...]
    indexes: tuple[str, ...]
    strides: tuple[StrideSettings, ...]
    queries: tuple[QuerySettings, ...]
    ks: tuple[int, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """How many values each axis has."""
        return {
            "query-length": len(self.queries),
            "stride": len({strides.stride for strides in self.strides}),
            "k": len(self.ks),
            "window": len({strides.window for strides in self.strides}),
            "reader": len(self.models),
        }


def stride_grid(
    windows: Sequence[int], strides: Sequence[int], limit_strides: int | None, preset: Preset
) -> tuple[StrideSettings, ...]:
    """The product of windows and strides, over the same tokens and, where strides are limited, up to a stride more.

    Args:
        limit_strides: of the largest stride in the largest window; None for the whole text.

    Raises:
        UsageError: a value below 1, or a stride that is not smaller than its window.
    """
    whole = [StrideSettings(window, stride, limit_strides, preset) for window, stride in product(windows, strides)]
    if limit_strides is None:
        return tuple(whole)
    end = max(windows) + max(strides) * (limit_strides - 1)
    return tuple(StrideSettings(s.window, s.stride, 1 + -(-(end - s.window) // s.stride), preset) for s in whole)


@dataclass(frozen=True)
class Sweep:
    """A grid over a text, and the folder that keeps its tables.

    Attributes:
        out: a local folder.
        windows: passage and past tokens.
        tokenizer: where it is, if not with the models.
        dtype, attention: of the readers.
        batch_size: windows a forward; None chooses.
        excluded: titles that are left out.
        zero_shot_by: the reader that zero-shot-by goes by; None for none.
        ranker_window: its windows; None for the readers', or its number of positions if these are fewer.
        reranker: the cross-encoder that predictive and predictive-mixture go by; None for none.
        rerank: what it reads.
        announce: is told of every table before it is made.
        progress: show progress bars; None for "if there is a terminal".
    """

    out: str
    text: Text
    grid: Grid
    windows: WindowSettings = WindowSettings()
    tokenizer: str | None = None
    dtype: str = "float32"
    attention: AttentionName = "auto"
    batch_size: int | None = None
    excluded: frozenset[str] = frozenset()
    zero_shot_by: str | None = None
    ranker_window: int | None = None
    reranker: str | None = None
    rerank: RerankSettings = RerankSettings()
    dense_search: DenseSearch = "jax"
    announce: Callable[[str], None] = print
    progress: bool | None = None

    def run(self, strategies: Sequence[str], beside: Beside, configuration: dict[str, Any]) -> list[Row]:
        """The perplexities of every cell; what the folder lacks for them is computed: what is retrieved, then its
        rankings, then one reader after another.

        Args:
            beside: what strategies go by, apart from tables.
            configuration: is written into the folder's manifest when the rows are there.

        Raises:
            UsageError: `out` holds something else, sizes do not fit together, or a model or an index is not there.
            RalmError: a model or an index cannot be read, or a table cannot be written.
        """
        if "://" in self.out:
            raise UsageError(f"{self.out}: a sweep needs a local disk")
        for strides in self.grid.strides:
            self.windows.passage_limit(strides)
        for index in self.grid.indexes:
            open_index(index, dense_search=self.dense_search)
        readers = [unloaded_reader(model, dtype=self.dtype) for model in self.grid.models]
        tables = [Tables(self, reader, load_tokenizer(self.tokenizer or reader.name)) for reader in readers]
        longest = max(strides.window for strides in self.grid.strides)
        for own in tables:
            check_reader(self.text, own.reader, own.tokenizer, own.tokens, longest)
        rankers = self.rankers()
        folder = Folder.create(self.out, KIND, {}, "resume")
        retrieved: dict[str, tuple[Tokenizer, Cells]] = {}  # by tokenizer
        for own in tables:
            if own.tokenizer.fingerprint not in retrieved:
                retrieved[own.tokenizer.fingerprint] = own.tokenizer, own.retrieved()
        cells = [retrieved[own.tokenizer.fingerprint][1] for own in tables]
        ranked, rows = {}, []
        while rankers:  # a model is freed before the next one is loaded
            kind = next(iter(rankers))
            ranked[kind] = rank_all(rankers.pop(kind), retrieved.values())
        while tables:
            rows += tables.pop(0).rows(cells.pop(0), ranked, strategies, beside)
        folder.manifest["about"] = configuration
        folder.write_manifest()
        return rows

    def rankers(self) -> dict[str, Tables | Rankings]:
        """What ranks passages beside readers and retrievers, without its weights, by the strategy that goes by it.

        Raises:
            UsageError, RalmError: as `run`.
        """
        found: dict[str, Tables | Rankings] = {}
        if self.zero_shot_by:
            reader = unloaded_reader(self.zero_shot_by, dtype=self.dtype)
            positions = reader.config.max_positions
            if (self.ranker_window or 0) > positions and reader.config.learned_positions:
                raise UsageError(f"--ranker-window {self.ranker_window}: {reader.name} has {positions} positions")
            found["zero-shot-by"] = ranker = Tables(self, reader, load_tokenizer(reader.name))
            for strides in self.grid.strides:
                self.windows.passage_limit(ranker.own_windows(strides))
            check_reader(self.text, reader, ranker.tokenizer, ranker.tokens, min(positions, self.ranker_window or 1))
        if self.reranker:
            if self.windows.passages_in_window > 1:
                raise UsageError("--reranker: ranks single passages, not --passages-in-window several")
            cross_encoder = unloaded_cross_encoder(self.reranker, dtype=self.dtype)
            found["predictive"] = Rankings(self, cross_encoder, load_tokenizer(self.reranker))
            checked_format(cross_encoder, found["predictive"].tokenizer, self.rerank)
        return found

    @property
    def root(self) -> Path:
        return Path(self.out).expanduser()
