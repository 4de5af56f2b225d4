"""The scores of long-context benchmarks by their own rules (NumPy only): LongBench's, SCROLLS' and those of NVIDIA's
evaluation code (Retrieval meets Long Context, section 3.2).

The three differ in small things that move a score by points, so that each is named by its family wherever it is told.
Texts of an answer are scored one reference at a time and the best counts, part by part; the score of a task is the
geometric mean of the means of its parts, times 100, which for one part is its mean.
"""

import functools
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from ralm_jax.errors import UsageError
from ralm_jax.settings import MetricFamily, RougePackage

Kind = Literal["span", "summary", "choice", "class", "dialogue"]  # of what is to be answered
Judge = Callable[[str, str, Sequence[str]], tuple[float, ...]]  # answer, a reference, all classes

ARTICLES = re.compile(r"\b(a|an|the)\b")
DELETED = str.maketrans("", "", string.punctuation)
SPACED = str.maketrans(string.punctuation, " " * len(string.punctuation))


class Metric(NamedTuple):
    """
    Attributes:
        name: for people.
        parts: that an answer has a score in.
        judge: an answer's scores against one reference, from 0 to 1.
        first_line: only an answer's first line counts.
        package: the Python package that made the numbers; empty for this file.
    """

    name: str
    parts: tuple[str, ...]
    judge: Judge
    first_line: bool = False
    package: RougePackage | Literal[""] = ""

    def score(self, answer: str, references: Sequence[str], classes: Sequence[str] = ()) -> tuple[float, ...]:
        """The best that `answer` does in each part, from 0 to 1.

        Raises:
            UsageError: a package is not installed.
        """
        answer = first_line(answer) if self.first_line else answer
        scores = [self.judge(answer, reference, classes) for reference in references]
        return tuple(map(max, zip(*scores, strict=True)))

    def means(self, scores: Sequence[Sequence[float]]) -> list[float]:
        """Each part's mean over all answers, from 0 to 100."""
        return [float(mean) for mean in 100 * np.mean(np.array(scores, float), axis=0)]

    def total(self, scores: Sequence[Sequence[float]]) -> float:
        """The task's score, from 0 to 100."""
        return geometric_mean(self.means(scores))


def geometric_mean(values: Sequence[float]) -> float:
    return float(np.prod(values) ** (1 / len(values)))


def first_line(text: str) -> str:
    """What follows leading newlines, up to the first newline."""
    return text.lstrip("\n").split("\n")[0]


# --- words ---


def squad_words(text: str) -> list[str]:
    """Lower case; punctuation deleted, so that words on both sides of it grow together; articles dropped."""
    return ARTICLES.sub(" ", text.lower().translate(DELETED)).split()


def nvidia_words(text: str) -> list[str]:
    """As `squad_words`, with a space for punctuation."""
    return ARTICLES.sub(" ", text.lower().translate(SPACED)).split()


def f1(words: Callable[[str], list[str]], answer: str, reference: str, classes: Sequence[str] = ()) -> tuple[float]:
    """Harmonic mean of the shares of words that both have, each as often as it stands; 0 where none is shared."""
    found, wanted = words(answer), words(reference)
    common = (Counter(found) & Counter(wanted)).total()
    return (2 * common / (len(found) + len(wanted)) if common else 0.0,)


def em(words: Callable[[str], list[str]], answer: str, reference: str, classes: Sequence[str] = ()) -> tuple[float]:
    return (float(words(answer) == words(reference)),)


def classification(answer: str, reference: str, classes: Sequence[str]) -> tuple[float]:
    """1/n for the right class among the n that are named in the answer, without those whose name is only a part of the
    right one's; whatever the order of `classes`, which LongBench's own code depends on where it removes several."""
    named = {name for name in classes if name in answer and (name == reference or name not in reference)}
    return (1 / len(named) if reference in named else 0.0,)


# --- ROUGE ---


def rouge_l_by_rouge(answer: str, reference: str, classes: Sequence[str] = ()) -> tuple[float]:
    """ROUGE-L of the package `rouge`: sentences end at ".", case counts. 0, as in LongBench's code, where the package
    refuses: nothing to compare, or sentences of about a thousand words."""
    try:
        (scores,) = rouge_package("rouge").get_scores(answer, reference)
    except (ValueError, RecursionError):
        return (0.0,)
    return (scores["rouge-l"]["f"],)


def rouge_by_rouge_score(
    parts: tuple[str, ...], answer: str, reference: str, classes: Sequence[str] = ()
) -> tuple[float, ...]:
    """F measures of the package `rouge-score`, without stemmer."""
    scores = rouge_package("rouge-score", parts).score(reference, answer)
    return tuple(float(scores[part].fmeasure) for part in parts)


@functools.cache
def rouge_package(name: RougePackage, parts: tuple[str, ...] = ()) -> Any:
    """
    Raises:
        UsageError: it is not installed.
    """
    try:
        if name == "rouge":
            from rouge import Rouge

            return Rouge(metrics=["rouge-l"])
        from rouge_score.rouge_scorer import RougeScorer

        return RougeScorer(list(parts), use_stemmer=False)
    except ImportError:
        raise UsageError(f"this metric needs the package {name}: pip install 'ralm-jax[eval-long]'") from None


# --- which one ---

SCROLLS_PARTS = ("rouge1", "rouge2", "rougeL")
ROUGE_MEAN = Metric(
    "geometric mean of ROUGE-1/2/L", SCROLLS_PARTS, functools.partial(rouge_by_rouge_score, SCROLLS_PARTS),
    package="rouge-score",
)  # fmt: skip
ROUGE_L = Metric("ROUGE-L", ("rougeL",), rouge_l_by_rouge, package="rouge")
SQUAD_F1 = Metric("F1", ("f1",), functools.partial(f1, squad_words))

METRICS: dict[MetricFamily, dict[Kind, Metric]] = {
    "longbench": {
        "span": SQUAD_F1,
        "summary": ROUGE_L,
        "class": Metric("classification accuracy", ("accuracy",), classification, first_line=True),
        "dialogue": ROUGE_L._replace(first_line=True),
    },
    "scrolls": {
        "span": SQUAD_F1,
        "summary": ROUGE_MEAN,
        "choice": Metric("EM", ("em",), functools.partial(em, squad_words)),
    },
    "nvidia": {
        "span": Metric("F1", ("f1",), functools.partial(f1, nvidia_words)),
        "summary": ROUGE_MEAN,
        "choice": Metric("EM", ("em",), functools.partial(em, nvidia_words)),
    },
}


def find_metric(family: MetricFamily, kind: Kind, task: str, rouge: RougePackage | None = None) -> Metric:
    """How a family scores a kind of task.

    Args:
        task: its name, for a message.
        rouge: the package for ROUGE; None for the family's own.

    Raises:
        UsageError: it does not score such a task, or not by that package.
    """
    metric = METRICS[family].get(kind)
    if metric is None:
        others = " or ".join(name for name, kinds in METRICS.items() if kind in kinds)
        raise UsageError(f"--metric-family {family} has no metric for {task}; name {others}")
    if rouge in (None, metric.package):
        return metric
    if not metric.package:
        raise UsageError(f"--rouge {rouge}: {task} is not scored by ROUGE in the family {family}")
    if rouge == "rouge":
        raise UsageError(f"--rouge rouge: the family {family} scores {task} by rouge-score only")
    return metric._replace(judge=functools.partial(rouge_by_rouge_score, metric.parts), package="rouge-score")
