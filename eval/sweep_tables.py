"""The tables of a sweep: each is made once, and kept in the sweep's folder for every sweep that asks for it."""

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from eval.lm import score, score_settings
from eval.metrics import text_perplexity
from eval.report import Beside, policies
from eval.sweep_rows import Row
from ralm_jax import ranking
from ralm_jax.cross_encoder import CrossEncoder, load_cross_encoder
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.reader import Reader, load_reader
from ralm_jax.score_table import Scores, open_scores
from ralm_jax.settings import QuerySettings, StrideSettings
from ralm_jax.tokenizer import Tokenizer
from ralm_jax.weights import flat_state
from ralm_jax.windows import make_schedule
from retrieval.corpus import PassageRows
from retrieval.query import retrieval_settings, retrieve
from retrieval.ranking_table import RankingTable, open_ranking
from retrieval.reranker import rerank, rerank_settings
from retrieval.retriever import Retriever, open_index
from retrieval.table import RetrievalTable, open_retrieval

if TYPE_CHECKING:
    from eval.sweep import Sweep

T = TypeVar("T", RetrievalTable, Scores, RankingTable)
Retrieved = tuple[RetrievalTable, PassageRows]
Cells = dict[tuple[str, QuerySettings, StrideSettings], Retrieved]


class Ranked(NamedTuple):
    """What another model makes of everything that was retrieved.

    Attributes:
        ranker: its name.
        names: from where a RetrievalTable is to the folder of the table that ranks its passages.
    """

    ranker: str
    names: dict[str, str]


@dataclass(frozen=True)
class Tables:
    """The tables of one reader in a sweep's folder. A table's folder is named after a hash of what it depends on, and
    its passages a stride; it serves for fewer passages as well.

    Attributes:
        reader: without its weights.
    """

    sweep: "Sweep"
    reader: Reader
    tokenizer: Tokenizer

    @property
    def name(self) -> str:
        return self.reader.name

    @functools.cached_property
    def loaded(self) -> Reader:
        return load_reader(self.name, dtype=self.sweep.dtype, attention=self.sweep.attention)

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        return self.tokenizer.encode(self.sweep.text.content)

    def rows(
        self, retrieved: Cells, ranked: Mapping[str, Ranked], strategies: Sequence[str], beside: Beside
    ) -> list[Row]:
        """The perplexities of this reader's cells.

        Args:
            ranked: by the strategies that go by another model, whose mixtures go by the same.
        """
        grid = self.sweep.grid
        parameters = sum(math.prod(leaf.shape) for leaf in flat_state(self.reader.state).values())
        rows = []
        for strides in grid.strides:
            plain, table = self.scores(strides)
            result = text_perplexity(plain, ranking.none(plain))
            base = Row(
                short(self.name, grid.models), parameters, None, None, strides.stride, None, strides.window,
                "none", table, result, result,
            )  # fmt: skip
            rows += [base] if "none" in strategies else []
            for index, queries in product(grid.indexes, grid.queries):
                found = retrieved[index, queries, strides]
                scores, table = self.scores(strides, found, plain)
                cell = replace(
                    base, retriever=short(index, grid.indexes), query_length=queries.query_length, table=table
                )
                rankers = {kind: (made.ranker, made.names[found[0].origin]) for kind, made in ranked.items()}
                at = {kind: str(self.sweep.root / name) for kind, (_, name) in rankers.items()}
                other = open_scores(at["zero-shot-by"]) if "zero-shot-by" in at else None
                order = open_ranking(at["predictive"]) if "predictive" in at else None
                for k, name in product(grid.ks, strategies):
                    if name != "none":
                        view = scores.first_k(k)
                        values = order.values(view, table) if order else None
                        policy = policies(replace(beside, ranker=other, values=values))[name]
                        ranker, place = rankers.get(name.removesuffix("-mixture"), ("", ""))
                        result = text_perplexity(view, policy(view))
                        rows.append(replace(cell, k=k, strategy=name, result=result, ranker=ranker, ranker_table=place))
        return rows

    def retrieved(self) -> Cells:
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
        table = kept(sweep.root, name, queries.k, open_retrieval, make)[0]
        rows, scores = table.rows[:, : queries.k], table.scores[:, : queries.k]
        return replace(table, rows=rows, scores=scores, settings=table.settings | {"k": queries.k})

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
            self.announce(location, strides, f"{short(self.name, sweep.grid.models)}, {told}")
            return score(
                sweep.text, self.loaded, self.tokenizer, location, strides=strides, windows=sweep.windows,
                retrieved=retrieved, k=k, plain=plain, batch_size=sweep.batch_size, if_exists="resume",
                progress=sweep.progress,
            )  # fmt: skip

        return kept(sweep.root, f"scores-{digest(settings)}", k, open_scores, make)

    def own_windows(self, strides: StrideSettings) -> StrideSettings:
        """The windows in which this reader ranks passages for another one that has `strides`."""
        window = self.sweep.ranker_window or min(strides.window, self.reader.config.max_positions)
        return replace(strides, window=window)

    def rank(self, retrieved: Retrieved, tokenizer: Tokenizer, strides: StrideSettings) -> str:
        """The name of this reader's ScoreTable of the strides of `retrieved`, whose `tokenizer` may be another one:
        the table that this reader's own cell has, if tokenizer and windows are the same."""
        sweep, table, own = self.sweep, retrieved[0], self.own_windows(strides)
        if own == strides and tokenizer.fingerprint == self.tokenizer.fingerprint:
            return self.scores(strides, retrieved, self.scores(strides)[0])[1]
        k, windows = table.k, replace(sweep.windows, block=None)  # whose tokens a block of the reader's is not
        count, rows = len(table.begins), np.zeros((0, 0), np.int64)
        settings = score_settings(sweep.text, self.reader, self.tokenizer, own, windows, rows, count)
        settings |= {"retrieval": table.settings | {"k": None}, "strides_of_retrieval": True}

        def make(location: str) -> Scores:
            self.announce(location, own, f"{self.name} ranks {Path(table.origin).name}, k {k}")
            return score(
                sweep.text, self.loaded, self.tokenizer, location, strides=own, windows=windows, retrieved=retrieved,
                k=k, strides_of_retrieval=True, batch_size=sweep.batch_size, if_exists="resume",
                progress=sweep.progress,
            )  # fmt: skip

        return kept(sweep.root, f"scores-{digest(settings)}", k, open_scores, make)[1]

    def announce(self, location: str, strides: StrideSettings, what: str) -> None:
        self.sweep.announce(f"{location}: window {strides.window}, stride {strides.stride}, {what}")


@dataclass(frozen=True)
class Rankings:
    """The RankingTables of a sweep's folder.

    Attributes:
        cross_encoder: without its weights.
        tokenizer: its own.
    """

    sweep: "Sweep"
    cross_encoder: CrossEncoder
    tokenizer: Tokenizer

    @property
    def name(self) -> str:
        return self.cross_encoder.name

    @functools.cached_property
    def loaded(self) -> CrossEncoder:
        return load_cross_encoder(self.name, dtype=self.sweep.dtype)

    def rank(self, retrieved: Retrieved, tokenizer: Tokenizer, strides: StrideSettings) -> str:
        """The name of the RankingTable of `retrieved`, whose strides are of `tokenizer`; it serves all readers."""
        sweep, (table, passages) = self.sweep, retrieved
        settings = rerank_settings(self.cross_encoder, self.tokenizer, sweep.rerank)
        settings["retrieval"] = table.settings | {"k": None}

        def make(location: str) -> RankingTable:
            told = f"{self.name} ranks {Path(table.origin).name}, k {table.k}"
            sweep.announce(f"{location}: window {strides.window}, stride {strides.stride}, {told}")
            return rerank(
                self.loaded, self.tokenizer, table, passages, sweep.text, tokenizer, location, settings=sweep.rerank,
                batch_size=sweep.batch_size, if_exists="resume", progress=sweep.progress,
            )  # fmt: skip

        return kept(sweep.root, f"ranking-{digest(settings)}", table.k, open_ranking, make)[1]


def rank_all(ranker: Tables | Rankings, retrieved: Iterable[tuple[Tokenizer, Cells]]) -> Ranked:
    """Ranks what was retrieved for every tokenizer."""
    names = {
        cell[0].origin: ranker.rank(cell, tokenizer, strides)
        for tokenizer, cells in retrieved
        for (_, _, strides), cell in cells.items()
    }
    return Ranked(short(ranker.name, [ranker.name]), names)


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
