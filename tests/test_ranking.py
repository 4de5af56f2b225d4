"""Ranking policies and perplexities on tables written by hand."""

import dataclasses
import math

import numpy as np
import pytest

from eval.metrics import paired_difference, perplexity, text_perplexity
from eval.report import Beside, Report, check_strategies, format_report, policies
from ralm_jax import ranking
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.score_table import Scores

NAN = float("nan")


@pytest.fixture
def scores():
    """Three strides after the first window, two passages, two past and two target tokens. The second stride has one
    passage, the third has none and one target token."""
    past = np.array([
        [[-9, -9], [-1, -4], [-3, -1]],
        [[-9, -9], [-5, -5], [NAN, NAN]],
        [[-9, -9], [NAN, NAN], [NAN, NAN]],
    ], np.float32)  # fmt: skip
    target = np.array([
        [[-2, -2], [-1, -2], [-3, -3]],
        [[-1, -1], [-4, -4], [NAN, NAN]],
        [[-5, NAN], [NAN, NAN], [NAN, NAN]],
    ], np.float32)  # fmt: skip
    return Scores(
        first_window=np.array([-1, -2, -3], np.float32),
        past=past,
        target=target,
        passages=np.array([[7, 8], [3, -1], [-1, -1]]),
        token_ends=np.arange(9),
        begins=np.array([4, 6, 8]),
        settings={"window": 4, "stride": 2, "k": 2, "dtype": "float32"},
        about={"tokens": 9, "words": 4, "reader": "r", "text": "t", "overlap": 0.25, "overlap_words": 13},
    )


def test_policies(scores):
    assert ranking.none(scores).tolist() == [0, 0, 0]
    assert ranking.first(scores).tolist() == [1, 1, 0]
    assert ranking.zero_shot(scores, 1).tolist() == [2, 1, 0]  # -1 beats -4
    assert ranking.zero_shot(scores, 2).tolist() == [2, 1, 0]  # -4 beats -5
    assert ranking.oracle(scores).tolist() == [1, 1, 0]
    assert ranking.oracle(scores, k=1).tolist() == [1, 1, 0]


class TestByAnotherReader:
    """Zero-shot reranking by a reader whose tokens are others: strides are the same where they begin."""

    def test_its_past_tokens_decide(self, scores):
        past = scores.past.repeat(2, axis=2)  # twice as many tokens
        past[0, 1:] = past[0, :0:-1]
        ranker = dataclasses.replace(scores, past=past, target=scores.target[:, :, :1], token_ends=np.arange(20))
        assert ranking.zero_shot(scores, 2).tolist() == [2, 1, 0]
        assert ranking.zero_shot_by(scores, ranker, 4).tolist() == [1, 1, 0]
        assert ranking.zero_shot_by(scores.first_k(1), ranker, 4).tolist() == [1, 1, 0]

    def test_of_other_strides(self, scores):
        ranker = dataclasses.replace(scores, begins=np.array([4, 7, 8]))
        with pytest.raises(RalmError, match="r scored other strides; use `ralm score --strides-of-retrieval`"):
            ranking.zero_shot_by(scores, ranker)

    def test_of_other_passages(self, scores):
        ranker = dataclasses.replace(scores, passages=scores.passages[:, ::-1])
        with pytest.raises(RalmError, match="r scored other passages; use the same RetrievalTable"):
            ranking.zero_shot_by(scores, ranker)


def test_equals_go_to_the_higher_rank(scores):
    scores.past[0, 2] = scores.past[0, 1]
    assert ranking.zero_shot(scores, 2).tolist() == [1, 1, 0]


def test_predictive(scores):
    values = np.array([[-2.0, -1.0], [0.0, 9.0], [3.0, 3.0]], np.float32)
    assert ranking.predictive(scores, values).tolist() == [2, 1, 0]
    assert ranking.predictive(scores, np.zeros((3, 2), np.float32)).tolist() == [1, 1, 0]
    assert policies(Beside(values=values))["predictive"](scores).tolist() == [2, 1, 0]


def test_the_oracle_is_never_worse_than_a_passage(scores):
    scores.target[0, 2] = [-0.1, -0.1]
    assert ranking.oracle(scores).tolist() == [2, 1, 0]
    assert ranking.oracle(scores, k=1).tolist() == [1, 1, 0]
    with pytest.raises(UsageError, match="among at least 1 passage"):
        ranking.oracle(scores, k=0)


def test_random_is_seeded_and_takes_only_what_is_there(scores):
    draws = np.array([ranking.random(scores, seed) for seed in range(50)])
    assert (draws[:, 0] == 1).any()
    assert (draws[:, 0] == 2).any()
    assert (draws[:, 1] == 1).all()
    assert (draws[:, 2] == 0).all()
    np.testing.assert_array_equal(ranking.random(scores, 3), ranking.random(scores, 3))


def test_a_table_without_passages(scores):
    bare = dataclasses.replace(scores, retrieval_scores=np.zeros((3, 2), np.float32)).first_k(0)
    for name, policy in policies(Beside(2, values=np.zeros((3, 0)), ranker=bare)).items():
        if name.endswith("mixture"):
            np.testing.assert_array_equal(policy(bare), scores.target[:, 0])
        else:
            assert policy(bare).tolist() == [0, 0, 0]


@pytest.mark.parametrize("tokens", [0, 3])
def test_zero_shot_needs_its_past_tokens(scores, tokens):
    with pytest.raises(UsageError, match="--past"):
        ranking.zero_shot(scores, tokens)


def test_perplexities_and_their_denominators(scores):
    result = text_perplexity(scores, ranking.first(scores))
    assert result.nll == pytest.approx(6 + 3 + 8 + 5)
    assert result.scored_tokens == 3 + 2 + 2 + 1
    assert (result.tokens, result.words) == (9, 4)
    assert result.token_ppl == pytest.approx(math.exp(22 / 9))
    assert result.word_ppl == pytest.approx(math.exp(22 / 4))
    assert (result.strides, result.strides_without_passage) == (4, 2)
    plain = text_perplexity(scores, ranking.none(scores))
    assert plain.nll == pytest.approx(6 + 4 + 2 + 5)
    assert plain.scored_tokens == result.scored_tokens
    assert plain.strides_without_passage == 4


def test_perplexities_that_are_no_number():
    assert perplexity(10.0, 0) is None
    assert perplexity(1e9, 1) is None
    assert perplexity(0.0, 5) == 1.0


def test_report(scores):
    known = policies(Beside(2))
    names = ("none", "first", "random", "zero-shot", "oracle")
    report = Report("tables/x", scores, {name: text_perplexity(scores, known[name](scores)) for name in names})
    printed = format_report(report)
    assert "The first passage raises token perplexity by 74.3% (6.612 to 11.524)." in printed
    assert "8 tokens scored in 4 strides; token perplexity is over 9 tokens, word perplexity over 4 words." in printed
    assert "25.0% of the text's words" in printed
    figures = report.to_json()["strategies"]["first"]
    assert figures["nll"] == pytest.approx(22)
    assert {"token_ppl", "word_ppl", "nll", "tokens", "words", "strides", "strides_without_passage"} <= figures.keys()


def test_strategies_are_checked():
    assert check_strategies("none, first") == ["none", "first"]
    for listed in ("none,best", "", ","):
        with pytest.raises(UsageError, match="expected some of none, first, random, zero-shot, zero-shot-by, predic"):
            check_strategies(listed)
    assert check_strategies("predictive", ranked=True) == ["predictive"]
    with pytest.raises(UsageError, match="predictive goes by a RankingTable: make one with `ralm rerank`"):
        check_strategies("first,predictive")
    with pytest.raises(UsageError, match="strategy zero-shot-by goes by another reader's ScoreTable: make one with"):
        check_strategies("zero-shot-by", ranked=True)


def test_report_of_a_comparison(scores):
    found = paired_difference(scores, ranking.oracle(scores), ranking.none(scores))
    figures = {"none": text_perplexity(scores, ranking.none(scores))}
    report = Report("x", scores, figures, ("oracle", "none", found))
    assert found.mean == pytest.approx((3 + 8 + 5 - 4 - 2 - 5) / 5)
    line = f"oracle against none: +1.0000 nats a token, 95% interval [{found.low:+.4f}, {found.high:+.4f}], by a "
    assert f"{line}bootstrap of 3 strides in blocks of 1." in format_report(report)
    told = report.to_json()["comparison"]
    assert (told["strategy"], told["against"], told["mean"], told["block"]) == ("oracle", "none", found.mean, 1)


class TestBeyondThePaper:
    def test_a_mixture_is_of_probabilities(self, scores):
        values = np.array([[1.0, 3.0], [5.0, 9.0], [0, 0]])
        weights = np.exp([1, 3]) / np.exp([1, 3]).sum()
        mixed = ranking.mixture(scores, values)
        np.testing.assert_allclose(mixed[0], np.log(weights @ np.exp(scores.target[0, 1:].astype(float))))
        np.testing.assert_allclose(mixed[1], [-4, -4])  # one passage
        np.testing.assert_allclose(mixed[2], [-5, NAN])  # none
        np.testing.assert_allclose(ranking.mixture(scores, values, 1e-3)[0], [-3, -3])
        result = text_perplexity(scores, mixed)
        assert result.nll == pytest.approx(-(-6 + np.nansum(mixed)))
        assert (result.scored_tokens, result.strides_without_passage) == (8, 2)

    def test_the_retrievers_mixture(self, scores):
        values = np.array([[1.0, 3.0], [5.0, 0.0], [0, 0]], np.float32)
        kept = dataclasses.replace(scores, retrieval_scores=values)
        np.testing.assert_array_equal(ranking.retrieval_mixture(kept, 2.0), ranking.mixture(scores, values, 2.0))
        assert paired_difference(kept, ranking.retrieval_mixture(kept), ranking.none(kept)).tokens == 5
        with pytest.raises(UsageError, match="which this table does not keep; score anew"):
            ranking.retrieval_mixture(scores)

    def test_a_mixture_of_very_small_probabilities(self, scores):
        scores.target[0, 1:] = -2000
        np.testing.assert_allclose(ranking.mixture(scores, np.zeros((3, 2)))[0], [-2000, -2000])

    def test_signals(self, scores):
        np.testing.assert_allclose(ranking.surprise(scores, 2), [9, 9, 9])
        np.testing.assert_allclose(ranking.past_gain(scores, ranking.first(scores), 1), [5, 4, 0])
        for signal in (lambda: ranking.surprise(scores, 3), lambda: ranking.past_gain(scores, np.zeros(3, int), 3)):
            with pytest.raises(UsageError, match="needs a table scored with --past 3 or more; this one has 2"):
                signal()

    def test_every_point_of_the_curve_is_a_policy(self, scores):
        chosen, signal = ranking.first(scores), np.array([0.5, 2.0, 1.0])
        counts, thresholds, nll = ranking.selective_curve(scores, chosen, signal)
        assert counts.tolist() == [0, 1, 2, 3]
        assert thresholds.tolist() == [2.0, 1.0, 0.5, -np.inf]
        for threshold, expected in zip(thresholds, nll, strict=True):
            policy = ranking.selective(chosen, signal, threshold)
            assert text_perplexity(scores, policy).nll - 6 == pytest.approx(expected)
        assert ranking.selective(chosen, signal, 2.0).tolist() == [0, 0, 0]
        assert ranking.selective(chosen, signal, -np.inf).tolist() == chosen.tolist()

    def test_equal_signals_retrieve_together(self, scores):
        counts, thresholds, _ = ranking.selective_curve(scores, ranking.first(scores), np.array([1.0, 2.0, 1.0]))
        assert counts.tolist() == [0, 1, 3]
        assert thresholds.tolist() == [2.0, 1.0, -np.inf]
