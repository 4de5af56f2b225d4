"""How good an answer is: exact match, F1, ROUGE-L and containment, over all the answers that count as right.

Answers are compared as SQuAD does (Rajpurkar et al., 2016), and with it the paper's code: lower case, without
punctuation, without the words a, an and the, spaces folded. Four things are decided here that it leaves open:

- Unicode. Forms that look equal are equal: NFKC, case folding, punctuation of every script, no invisible characters.
- Nothing left. What is nothing but articles, or nothing but punctuation, keeps them ("A", "+"). An empty answer is
  right only where an empty one is among the references, as in SQuAD 2.
- Yes and no are right or wrong, never half right, as in HotpotQA.
- Regular expressions (CuratedTREC) have to match the whole answer for an exact match; inside of it is containment.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ralm_jax.errors import RalmError

ARTICLES = {"a", "an", "the"}
YES_NO = (["yes"], ["no"])
PUNCTUATION = set(
    string.punctuation + "\u2044\u2212\u02bc\u02b9"
)  # fraction slash, minus, apostrophes that are letters
ACUTE = str.maketrans("", "", "\u00b4")  # stands for an apostrophe; NFKC would make a space of it


class Quality(NamedTuple):
    """How good an answer is, by several measures; what counts is the reference it does best by.

    Attributes:
        em: it is one of the references.
        f1: of the words it shares with a reference, from 0 to 1; None where references are regular expressions.
        rouge_l: likewise, of the words that both have in the same order.
        contains: a reference stands in it. Long answers have it easier: this is never an exact match.
    """

    em: bool
    f1: float | None
    rouge_l: float | None
    contains: bool


def judge(answer: str, references: Sequence[str], *, regex: bool = False) -> Quality:
    """
    Args:
        references: all that count as right, one or more.
        regex: they are regular expressions.

    Raises:
        RalmError: one that should be a regular expression is none.
    """
    if regex:
        em, found = regex_match(answer, references)
        return Quality(em, None, None, found)
    words, gold = normalize(answer).split(), [normalize(reference).split() for reference in references]
    return Quality(
        em=words in gold,
        f1=max(token_f1(words, reference) for reference in gold),
        rouge_l=max(rouge_l(rouge_words(answer), rouge_words(reference)) for reference in references),
        contains=any(contains(words, reference) for reference in gold),
    )


def normalize(text: str) -> str:
    """The form in which answers are compared."""
    text = folded(text)
    kept = "".join(c for c in text if c not in PUNCTUATION and unicodedata.category(c)[0] != "P")
    words = (kept if kept.strip() else text).split()
    return " ".join([word for word in words if word not in ARTICLES] or words)


def folded(text: str) -> str:
    """In NFKC, without the difference of upper and lower case and without soft hyphens, joiners and their like."""
    visible = "".join(c for c in text.translate(ACUTE) if unicodedata.category(c) != "Cf")
    return nfkc(nfkc(visible).casefold())  # case folding undoes NFKC here and there


def nfkc(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


def token_f1(words: Sequence[str], reference: Sequence[str]) -> float:
    """Harmonic mean of the shares of `words` and `reference` that the other has as well, each as often as it stands."""
    if not words or not reference or words in YES_NO or reference in YES_NO:
        return float(words == reference)
    common = (Counter(words) & Counter(reference)).total()
    return 2 * common / (len(words) + len(reference))


def contains(words: Sequence[str], reference: Sequence[str]) -> bool:
    """Whether `reference` stands in `words` in a row; an empty one stands only in an empty answer."""
    return f" {' '.join(reference)} " in f" {' '.join(words)} "


def rouge_words(text: str) -> list[str]:
    """What ROUGE counts: runs of letters and digits in lower case, articles among them, unstemmed."""
    return "".join(c if unicodedata.category(c)[0] in "LNM" else " " for c in folded(text)).split()


def rouge_l(words: Sequence[str], reference: Sequence[str]) -> float:
    """Harmonic mean of the shares that the longest common subsequence has of both (Lin, 2004); 0 where one is empty."""
    lengths = [0] * (1 + len(reference))  # of the words so far, with each beginning of the reference
    for word in words:
        before = 0
        for i, other in enumerate(reference, start=1):
            before, lengths[i] = lengths[i], before + 1 if word == other else max(lengths[i], lengths[i - 1])
    return 2 * lengths[-1] / (len(words) + len(reference)) if words and reference else 0.0


def regex_match(answer: str, expressions: Sequence[str]) -> tuple[bool, bool]:
    """Whether an expression matches the whole answer, but for a leading article and the punctuation of a sentence; and
    whether one matches inside of it. In NFC and in any case, as `retrieval.qa.answer_matcher` does.

    DrQA counts a match at the beginning of the answer, which is between the two.

    Raises:
        RalmError: one of them is no regular expression.
    """
    answer = unicodedata.normalize("NFC", answer).strip()
    bare = re.sub(r"^(an?|the)\s+", "", answer.strip(" .,;:!?\"'"), flags=re.IGNORECASE)
    em = found = False
    for expression in expressions:
        try:
            pattern = re.compile(unicodedata.normalize("NFC", expression), re.IGNORECASE | re.MULTILINE)
        except re.error as error:
            raise RalmError(f"answer {expression!r} is not a regular expression ({error})") from None
        em = em or bool(pattern.fullmatch(answer) or pattern.fullmatch(bare))
        found = found or bool(pattern.search(answer))
    return em, found or em
