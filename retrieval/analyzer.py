"""Text to BM25 terms as Lucene's English analyser does it (Pyserini's DefaultEnglishAnalyzer).

Unicode word segmentation (UAX #29) without the pieces that hold no letter, digit or emoji; possessive 's removed;
lower case; Lucene's 33 stop words; the Porter stemmer in Martin Porter's own later version, which Lucene has.
`tests/test_bm25.py` holds the scores to Lucene's own on 3,000 real queries, `tests/test_analyzer.py` single terms.
"""

import functools
from collections.abc import Iterator
from typing import Any

import regex

NAME, VERSION = "lucene-english", 1

STOP_WORDS = frozenset(
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "
    "to was will with".split()
)
REMEMBERED = 64  # characters, at most, of text whose terms are kept: Chinese has no space in a whole paragraph
MAX_TERM_LENGTH = 255  # longer words are cut into pieces, as Lucene's tokenizer does

# Scripts without spaces (Thai, Khmer, …) stay together up to the next space; all else is cut at word boundaries.
PIECE = regex.compile(
    r"(?V1ws)\p{LB=SA}[\p{LB=SA}\p{WB=Extend}\p{WB=Format}]*|.+?(?:\b|(?=[\p{LB=SA}--\p{WB=Extend}]))"
)
# The last ranges are pictographs by Unicode 12.1, which Lucene's grammar was made from, and no longer today.
TERM = regex.compile(
    r"[\p{WB=ALetter}\p{WB=Hebrew_Letter}\p{WB=Numeric}\p{WB=Katakana}\p{Script=Hiragana}\p{Script=Han}\p{LB=SA}"
    r"\p{Extended_Pictographic}\u2605\u2607-\u260D\u260F\u2610\u2612\u2616-\u2685\u2690-\u2704]"
    r"|\p{Regional_Indicator}{2}"
)
POSSESSIVES = ("'s", "'S", "’s", "’S", "＇s", "＇S")


def analyze(text: str) -> list[str]:
    """The terms of `text`, in order."""
    return [
        term
        for chunk in text.split(" ")  # no word crosses a space
        for term in (chunk_terms if len(chunk) <= REMEMBERED else chunk_terms.__wrapped__)(chunk)
    ]


def words(text: str) -> list[str]:
    """The words of `text` in lower case, neither stemmed nor stopped."""
    return [word for word, _, _ in placed_words(text)]


def placed_words(text: str) -> Iterator[tuple[str, int, int]]:
    """`words`, each with its first character and one past its last."""
    for piece in PIECE.finditer(text):
        if TERM.search(piece[0]):
            yield lower(piece[0]), piece.start(), piece.end()


@functools.lru_cache(maxsize=1 << 20)
def chunk_terms(chunk: str) -> tuple[str, ...]:
    """The terms of what stands between two spaces: much of it is seen again and again."""
    return tuple(
        term
        for piece in PIECE.findall(chunk)
        for term in (terms if len(piece) <= REMEMBERED else terms.__wrapped__)(piece)
    )


@functools.lru_cache(maxsize=1 << 20)
def terms(piece: str) -> tuple[str, ...]:
    """The terms of one piece of text: none, one, or several of a very long word."""
    if not TERM.search(piece):
        return ()
    parts = (piece[start : start + MAX_TERM_LENGTH] for start in range(0, len(piece), MAX_TERM_LENGTH))
    lowered = (lower(part[:-2] if part.endswith(POSSESSIVES) else part) for part in parts)
    return tuple(stemmer().stem(word, to_lowercase=False) for word in lowered if word and word not in STOP_WORDS)


def lower(word: str) -> str:
    """Lower case, character by character as Java does: no final sigma, no combining dot."""
    return word.lower() if word.isascii() else "".join(character.lower()[0] for character in word)


@functools.cache
def stemmer() -> Any:
    from nltk.stem.porter import PorterStemmer

    return PorterStemmer(mode=PorterStemmer.MARTIN_EXTENSIONS)
