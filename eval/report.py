"""Perplexities of ScoreTables under ranking policies, as a table and as JSON."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from eval.metrics import PairedDifference, Perplexity, paired_difference, text_perplexity
from ralm_jax import ranking
from ralm_jax.errors import UsageError
from ralm_jax.score_table import Scores, open_scores
from retrieval.ranking_table import open_ranking


@dataclass(frozen=True)
class Report:
    """The perplexities of one ScoreTable, by strategy."""

    location: str
    scores: Scores
    strategies: dict[str, Perplexity]
    comparison: tuple[str, str, PairedDifference] | None = None
    beside: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The object that `ralm report --json` writes."""
        content: dict[str, Any] = {
            "strategies": {
                name: {"token_ppl": result.token_ppl, "word_ppl": result.word_ppl, **dataclasses.asdict(result)}
                for name, result in self.strategies.items()
            },
            "config": {"scores": self.location, **self.scores.settings, **self.scores.about, **self.beside},
        }
        if self.comparison is not None:
            strategy, against, difference = self.comparison
            content["comparison"] = {"strategy": strategy, "against": against, **dataclasses.asdict(difference)}
        return content


@dataclass(frozen=True)
class Beside:
    """What strategies go by beside the ScoreTable.

    Attributes:
        zero_shot_tokens: past tokens that zero-shot reranking goes by.
        seed: of random.
        temperature: of the mixtures' weights.
        values: (J, k) a trained reranker's scores.
        ranker: another reader's scores of the same strides and passages.
    """

    zero_shot_tokens: int = 16
    seed: int = 0
    temperature: float = 1.0
    values: Any = None
    ranker: Any = None


RERANKER = (
    "a RankingTable: make one with `ralm rerank` and name it to `ralm report` with --ranking, or have `ralm sweep` "
    "make it with --reranker"
)
RANKER = (
    "another reader's ScoreTable: make one with `ralm score --strides-of-retrieval` and name it to `ralm report` with "
    "--zero-shot-by, or have `ralm sweep` make it with its --zero-shot-by"
)
NEEDS = {"predictive": RERANKER, "predictive-mixture": RERANKER, "zero-shot-by": RANKER}


def policies(beside: Beside = Beside()) -> dict[str, Callable[[Scores], np.ndarray]]:
    """Every strategy by name. A new idea is a new function in `ralm_jax.ranking` and a line here."""
    values, ranker, tokens, temperature = beside.values, beside.ranker, beside.zero_shot_tokens, beside.temperature
    return {
        "none": ranking.none,
        "first": ranking.first,
        "random": partial(ranking.random, seed=beside.seed),
        "zero-shot": partial(ranking.zero_shot, tokens=tokens),
        "zero-shot-by": partial(ranking.zero_shot_by, ranker=ranker, tokens=tokens),
        "predictive": partial(ranking.predictive, values=values),
        "oracle": ranking.oracle,
        "mixture": partial(ranking.retrieval_mixture, temperature=temperature),
        "predictive-mixture": partial(ranking.mixture, values=values, temperature=temperature),
    }


def check_strategies(listed: str, *, ranked: bool = False, by_another: bool = False) -> list[str]:
    """The strategies of a list with commas.

    Args:
        ranked: whether there is a RankingTable.
        by_another: whether there is another reader's ScoreTable.

    Raises:
        UsageError: an unknown one, or none at all; or one that goes by what is not there.
    """
    names = [name.strip() for name in listed.split(",") if name.strip()]
    if not names or not set(names) <= set(policies()):
        raise UsageError(f"strategies {listed!r}: expected some of {', '.join(policies())}, separated by commas")
    there = {RERANKER: ranked, RANKER: by_another}
    for name in names:
        if name in NEEDS and not there[NEEDS[name]]:
            raise UsageError(f"strategy {name} goes by {NEEDS[name]}")
    return names


def make_report(
    location: str,
    strategies: Sequence[str],
    *,
    beside: Beside = Beside(),
    ranked: str | None = None,
    by_another: str | None = None,
    compare: Sequence[str] = (),
) -> Report:
    """The perplexities of the ScoreTable at `location`.

    Args:
        ranked: where the RankingTable of "predictive" is.
        by_another: where the ScoreTable of "zero-shot-by" is.
        compare: two strategies, the first of which is compared with the second.

    Raises:
        UsageError: there is no table, or it keeps too few past tokens.
        RalmError: a table is not complete, or the RankingTable is of other passages.
    """
    scores = open_scores(location)
    told: dict[str, Any] = {
        name: getattr(beside, name) for name in ("zero_shot_tokens", "seed", "temperature")
    }  # what figures depend on beside the table
    if ranked:
        ranking_table = open_ranking(ranked)
        beside = replace(beside, values=ranking_table.values(scores, location))
        told["ranking"] = {"location": ranked, **ranking_table.settings}
    if by_another:
        ranker = open_scores(by_another)
        beside = replace(beside, ranker=ranker)
        told["zero_shot_by"] = {"location": by_another, "reader": ranker.about["reader"], **ranker.settings}
    known = policies(beside)
    chosen = {name: known[name](scores) for name in {*strategies, *compare}}
    found = {name: text_perplexity(scores, chosen[name]) for name in strategies}
    comparison = None
    if compare:
        strategy, against = compare
        comparison = strategy, against, paired_difference(scores, chosen[strategy], chosen[against])
    return Report(location, scores, found, comparison, told)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3f}"


def format_report(report: Report) -> str:
    """The report for a terminal."""
    scores, results = report.scores, report.strategies
    settings, about = scores.settings, scores.about
    any_result, width = next(iter(results.values())), max(12, 2 + max(map(len, results)))
    lines = [
        f"{report.location}: {about['reader']} on {about['text']}",
        f"window {settings['window']}, stride {settings['stride']}, "
        + (f"windows shared by blocks of {settings['block']} tokens, " if "block" in settings else "")
        + (f"{settings['passages_in_window']} together of " if "passages_in_window" in settings else "")
        + f"{settings['k']} passages a stride, "
        f"{settings.get('dtype', 'scored by a server')}",
        "",
        f"{'strategy':<{width}}{'token ppl':>12}{'word ppl':>12}{'vs none':>10}{'NLL':>14}{'no passage':>12}",
    ]
    base = results.get("none")
    for name, result in results.items():
        change = ""
        if base is not None and base.token_ppl and result.token_ppl:
            change = f"{100 * (result.token_ppl / base.token_ppl - 1):+.1f}%"
        lines.append(
            f"{name:<{width}}{number(result.token_ppl):>12}{number(result.word_ppl):>12}{change:>10}"
            f"{result.nll:>14,.2f}{result.strides_without_passage:>12}"
        )
    lines += [
        "",
        f"{any_result.scored_tokens:,} tokens scored in {any_result.strides:,} strides; token perplexity is over "
        f"{any_result.tokens:,} tokens, word perplexity over {any_result.words:,} words.",
    ]
    first = results.get("first")
    if base is not None and first is not None and base.token_ppl and first.token_ppl:
        gain = 100 * (1 - first.token_ppl / base.token_ppl)
        lines.append(
            f"The first passage {'lowers' if gain >= 0 else 'raises'} token perplexity by {abs(gain):.1f}% "
            f"({base.token_ppl:.3f} to {first.token_ppl:.3f})."
        )
    if report.comparison is not None:
        strategy, against, found = report.comparison
        lines.append(
            f"{strategy} against {against}: {found.mean:+.4f} nats a token, 95% interval [{found.low:+.4f}, "
            f"{found.high:+.4f}], by a bootstrap of {found.strides:,} strides in blocks of {found.block:,}."
        )
    if "overlap" in about:
        lines.append(
            f"{100 * about['overlap']:.1f}% of the text's words stand in a run of {about['overlap_words']} words that "
            "a retrieved passage has too."
        )
    return "\n".join(lines)
