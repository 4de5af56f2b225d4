"""Sweeps: the perplexity of a text over readers, retrievers, query lengths, strides, windows and numbers of passages
(In-Context RALM, figures 3 to 6), from tables that are kept and serve every sweep that asks for them."""

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from eval.lm import check_reader, score, score_settings
from eval.metrics import text_perplexity
from eval.sweep_rows import Row
from ralm_jax import ranking
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.ranking import Policy
from ralm_jax.reader import Reader, load_reader, unloaded_reader
from ralm_jax.score_table import Scores, open_scores
from ralm_jax.settings import DenseSearch, Preset, QuerySettings, StrideSettings, WindowSettings
from ralm_jax.storage import Folder
from ralm_jax.text import Text
from ralm_jax.tokenizer import Tokenizer, load_tokenizer
from ralm_jax.weights import flat_state
from ralm_jax.windows import make_schedule
from retrieval.corpus import PassageRows
from retrieval.query import retrieval_settings, retrieve
from retrieval.retriever import Retriever, open_index
from retrieval.table import RetrievalTable, open_retrieval

KIND = "sweep tables"
T = TypeVar("T", RetrievalTable, Scores)
Retrieved = tuple[RetrievalTable, PassageRows]


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
        dtype: of the readers.
        batch_size: windows a forward; None chooses.
        excluded: titles that are left out.
        announce: is told of every table before it is made.
        progress: show progress bars; None for "if there is a terminal".
    """

    out: str
    text: Text
    grid: Grid
    windows: WindowSettings = WindowSettings()
    tokenizer: str | None = None
    dtype: str = "float32"
    batch_size: int | None = None
    excluded: frozenset[str] = frozenset()
    dense_search: DenseSearch = "jax"
    announce: Callable[[str], None] = print
    progress: bool | None = None

    def run(self, strategies: Mapping[str, Policy], configuration: dict[str, Any]) -> list[Row]:
        """The perplexities of every cell; what the folder lacks for them is computed, one reader after another.

        Args:
            configuration: is written into the folder's manifest.

        Raises:
            UsageError: `out` holds something else, sizes do not fit together, or a reader or an index is not there.
            RalmError: a reader or an index cannot be read, or a table cannot be written.
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
        folder = Folder.create(self.out, KIND, {}, "resume")
        folder.manifest["about"] = configuration
        folder.write_manifest()
        rows = []
        while tables:  # a reader is freed before the next one is loaded
            rows += tables.pop(0).rows(strategies)
        return rows


@dataclass(frozen=True)
class Tables:
    """The tables of one reader in a sweep's folder. A table's folder is named after a hash of what it depends on, and
    its passages a stride; it serves for fewer passages as well.

    Attributes:
        reader: without its weights.
    """

    sweep: Sweep
    reader: Reader
    tokenizer: Tokenizer

    @functools.cached_property
    def loaded(self) -> Reader:
        return load_reader(self.reader.name, dtype=self.sweep.dtype)

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        return self.tokenizer.encode(self.sweep.text.content)

    def rows(self, strategies: Mapping[str, Policy]) -> list[Row]:
        """The perplexities of this reader's cells."""
        grid, retrieved = self.sweep.grid, self.retrieved()
        parameters = sum(math.prod(leaf.shape) for leaf in flat_state(self.reader.state).values())
        rows = []
        for strides in grid.strides:
            plain, table = self.scores(strides)
            result = text_perplexity(plain, ranking.none(plain))
            base = Row(
                short(self.reader.name, grid.models), parameters, None, None, strides.stride, None, strides.window,
                "none", table, result, result,
            )  # fmt: skip
            rows += [base] if "none" in strategies else []
            for index, queries in product(grid.indexes, grid.queries):
                scores, table = self.scores(strides, retrieved[index, queries, strides], plain)
                cell = replace(
                    base, retriever=short(index, grid.indexes), query_length=queries.query_length, table=table
                )
                for k, (name, policy) in product(grid.ks, strategies.items()):
                    if name != "none":
                        view = scores.first_k(k)
                        result = text_perplexity(view, policy(view))
                        rows.append(replace(cell, k=k, strategy=name, result=result))
        return rows

    def retrieved(self) -> dict[tuple[str, QuerySettings, StrideSettings], Retrieved]:
        """What every retriever finds. What they search with is freed when all have."""
        found = {}
        for index in self.sweep.grid.indexes:
            retriever = open_index(index, dense_search=self.sweep.dense_search)
            for queries, strides in product(self.sweep.grid.queries, self.sweep.grid.strides):
                found[index, queries, strides] = self.retrieval(retriever, queries, strides), retriever.passages
        return found

    def retrieval(self, retriever: Retriever, queries: QuerySettings, strides: StrideSettings) -> RetrievalTable:
        sweep, count = self.sweep, len(make_schedule(len(self.tokens), strides))
        settings = retrieval_settings(retriever, sweep.text, self.tokenizer, strides, queries, sweep.excluded, count)

        def make(location: str) -> RetrievalTable:
            told = f"{retriever.location}, query length {queries.query_length}"
            self.announce(location, strides, told)
            return retrieve(
                retriever, sweep.text, self.tokenizer, location, strides=strides, queries=queries,
                excluded=sweep.excluded, if_exists="resume", progress=sweep.progress,
            )  # fmt: skip

        name = f"retrieval-{digest(settings | {'k': None})}"
        return kept(Path(sweep.out).expanduser(), name, queries.k, open_retrieval, make)[0]

    def scores(
        self, strides: StrideSettings, retrieved: Retrieved | None = None, plain: Scores | None = None
    ) -> tuple[Scores, str]:
        """A ScoreTable and the name of its folder; without `retrieved` that of "no passage", which the others copy."""
        sweep, k = self.sweep, max(self.sweep.grid.ks) if retrieved else 0
        count, rows = len(make_schedule(len(self.tokens), strides)), np.zeros((0, 0), np.int64)
        settings = score_settings(sweep.text, self.reader, self.tokenizer, strides, sweep.windows, rows, count)
        settings["retrieval"] = retrieved[0].settings | {"k": None} if retrieved else None

        def make(location: str) -> Scores:
            told = "no passage"
            if retrieved:
                index, length = Path(retrieved[0].about["index"]).name, retrieved[0].settings["query_length"]
                told = f"{index}, query length {length}, k {k}"
            self.announce(location, strides, f"{short(self.reader.name, sweep.grid.models)}, {told}")
            return score(
                sweep.text, self.loaded, self.tokenizer, location, strides=strides, windows=sweep.windows,
                retrieved=retrieved, k=k, plain=plain, batch_size=sweep.batch_size, if_exists="resume",
                progress=sweep.progress,
            )  # fmt: skip

        return kept(Path(sweep.out).expanduser(), f"scores-{digest(settings)}", k, open_scores, make)

    def announce(self, location: str, strides: StrideSettings, what: str) -> None:
        self.sweep.announce(f"{location}: window {strides.window}, stride {strides.stride}, {what}")


def digest(settings: dict[str, Any]) -> str:
    return sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def kept(root: Path, name: str, k: int, open_table: Callable[[str], T], make: Callable[[str], T]) -> tuple[T, str]:
    """The finished table `name` of the fewest passages a stride that are at least `k`, or else the one that is made;
    and the name of its folder.

    Raises:
        RalmError: it cannot be made.
    """
    there = [path.name.removeprefix(f"{name}-k") for path in root.glob(f"{name}-k*")]
    for size in sorted(int(size) for size in there if size.isdecimal()):
        if size >= k:
            with suppress(RalmError):
                return open_table(str(root / f"{name}-k{size}")), f"{name}-k{size}"
    try:
        return make(str(root / f"{name}-k{k}")), f"{name}-k{k}"
    except UsageError:
        raise
    except RalmError as error:  # whose advice is for the commands that make one table
        advice = {"with --resume": "with the same command", "with --overwrite": "after removing that folder"}
        message = str(error)
        for theirs, ours in advice.items():
            message = message.replace(theirs, ours)
        raise RalmError(message) from None


def short(name: str, names: Sequence[str]) -> str:
    """The last part of a path, where that tells it from the others."""
    last = Path(name).name
    return last if last and sum(Path(other).name == last for other in names) == 1 else name
