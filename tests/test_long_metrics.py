"""Scores of long-context benchmarks, on cases written from the definitions."""

import builtins
import itertools

import pytest

from eval.long_metrics import METRICS, find_metric, first_line, geometric_mean, nvidia_words, rouge_package, squad_words
from ralm_jax.errors import UsageError


def score(family, kind, answer, *references, classes=(), rouge=None):
    return find_metric(family, kind, "task", rouge).score(answer, references, classes)


class TestF1:
    def test_words(self):
        assert squad_words("The U.S.-led an  Atheneum,\n a Bee") == ["usled", "atheneum", "bee"]
        assert nvidia_words("The U.S.-led an  Atheneum,\n a Bee") == ["u", "s", "led", "atheneum", "bee"]

    @pytest.mark.parametrize(
        ("answer", "references", "value"),
        [
            ("the Cat sat.", ["a cat sat"], 1),
            ("cat cat dog", ["cat bird"], 2 / 5),  # a word counts as often as both have it
            ("cat cat dog", ["bird", "cat cat"], 4 / 5),  # the best reference
            ("yes it is", ["Yes"], 1 / 2),  # no rule for yes and no
            ("", ["cat"], 0),
            ("the", ["a"], 0),  # nothing is left of either
        ],
    )
    def test_longbench(self, answer, references, value):
        assert score("longbench", "span", answer, *references) == pytest.approx((value,))
        assert score("scrolls", "span", answer, *references) == pytest.approx((value,))

    def test_families_differ(self):
        assert score("longbench", "span", "well-known", "well known") == (0,)
        assert score("nvidia", "span", "well-known", "well known") == (1,)

    def test_em(self):
        assert score("scrolls", "choice", "The end!", "no", "end") == (1,)
        assert score("scrolls", "choice", "The end of it", "end") == (0,)  # containment is no match

    def test_all_lines_count(self):
        assert score("longbench", "span", "\nx\ncat", "cat") == pytest.approx((2 / 3,))


class TestClassification:
    classes = ["Order", "rank", "Order, rank", "Date", "Food", "Other"]

    @pytest.mark.parametrize(
        ("answer", "gold", "value"),
        [
            ("Date", "Date", 1),
            (" Date or Food", "Date", 1 / 2),
            ("Order, rank", "Order, rank", 1),  # two names are parts of the right one
            ("Order, rank", "Order", 1 / 3),  # nothing is a part of "Order", and all three are named
            ("date", "Date", 0),  # case counts
            ("Food", "Date", 0),
            ("\n\nFood\nDate", "Date", 0),  # only the first line
            ("\n\nDate\nFood", "Date", 1),
        ],
    )
    def test_any_order_of_classes(self, answer, gold, value):
        for classes in itertools.permutations(self.classes, len(self.classes)):
            assert score("longbench", "class", answer, gold, classes=classes) == pytest.approx((value,))


class TestRouge:
    def test_check_vector(self):
        assert geometric_mean([72.2222, 33.3333, 72.2222]) == pytest.approx(55.8136, abs=1e-4)
        answers = ["exact match example", "hello there", "general kenobi"]
        references = [["exact match example"], ["hello", "hi there"], ["commander kenobi"]]
        metric = METRICS["scrolls"]["summary"]
        scores = [metric.score(answer, own) for answer, own in zip(answers, references, strict=True)]
        assert metric.means(scores) == pytest.approx([72.2222, 33.3333, 72.2222], abs=1e-4)
        assert metric.total(scores) == pytest.approx(55.8136, abs=1e-4)

    def test_best_reference_of_each_part(self):
        # "a b" shares more single words with the first reference, and a pair with the second only
        found = score("scrolls", "summary", "a b", "b a", "a b c d e f")
        assert found == pytest.approx((1, 2 / 6, 1 / 2))  # rougeL: one word of two, against two of six and two

    def test_not_stemmed_any_case(self):
        assert score("scrolls", "summary", "CATS", "cats")[0] == 1
        assert score("scrolls", "summary", "cats", "cat")[0] == 0

    def test_packages_differ(self):
        metric = METRICS["longbench"]["dialogue"]
        assert (metric.package, metric.name) == ("rouge", "ROUGE-L")
        assert score("longbench", "dialogue", "The cat", "the cat") == pytest.approx((1 / 2,), abs=1e-6)  # case counts
        assert score("longbench", "dialogue", "The cat", "the cat", rouge="rouge-score") == (1,)
        # sentences end at ".": words in another order of sentences are still found
        assert score("longbench", "summary", "b.a", "a.b") == pytest.approx((1,), abs=1e-6)
        assert score("longbench", "summary", "b.a", "a.b", rouge="rouge-score") == (1 / 2,)
        assert find_metric("longbench", "summary", "qmsum", "rouge-score").package == "rouge-score"

    @pytest.mark.parametrize("answer", ["", "...", "\n\n"])
    def test_nothing_written(self, answer):
        assert score("longbench", "dialogue", answer, "a summary") == (0,)

    def test_first_line(self):
        assert first_line("\n\n a b\nc") == " a b"
        assert score("longbench", "dialogue", "\na b\nc d e", "a b") == pytest.approx((1,), abs=1e-6)
        assert score("longbench", "summary", "a b\nc d e", "a b")[0] < 1

    @pytest.mark.parametrize(("family", "package"), [("longbench", "rouge"), ("scrolls", "rouge-score")])
    def test_not_installed(self, monkeypatch, family, package):
        rouge_package.cache_clear()
        real = builtins.__import__

        def absent(name, *rest, **more):
            if name.startswith("rouge"):
                raise ImportError(name)
            return real(name, *rest, **more)

        monkeypatch.setattr(builtins, "__import__", absent)
        with pytest.raises(UsageError, match=rf"needs the package {package}: pip install 'ralm-jax\[eval-long\]'"):
            score(family, "summary", "a", "a")


class TestFamilies:
    def test_total(self):
        metric = METRICS["longbench"]["span"]
        assert metric.total([(0.5,), (1.0,), (0.0,)]) == pytest.approx(50)

    def test_refused(self):
        with pytest.raises(UsageError, match="--metric-family longbench has no metric for quality; name scrolls or nv"):
            find_metric("longbench", "choice", "quality")
        with pytest.raises(UsageError, match="--metric-family scrolls has no metric for trec; name longbench"):
            find_metric("scrolls", "class", "trec")
        with pytest.raises(UsageError, match="hotpotqa is not scored by ROUGE in the family longbench"):
            find_metric("longbench", "span", "hotpotqa", "rouge")
        with pytest.raises(UsageError, match="the family scrolls scores qmsum by rouge-score only"):
            find_metric("scrolls", "summary", "qmsum", "rouge")
