"""Lucene's English analyser, case by case. The right sides are what Lucene 9.9's own analyser prints."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval.analyzer import PIECE, analyze, chunk_terms, terms

CASES = {
    "The quick brown foxes' tails": ["quick", "brown", "fox", "tail"],
    "possibly possible": ["possibl", "possibl"],
    "archaeology archaeologist": ["archaeolog", "archaeologist"],
    "is as by": [],
    "U.S.A. 3.14 1,000 10:30 a_b don't": ["u.s.a", "3.14", "1,000", "10", "30", "a_b", "don't"],
    "John's JOHN'S john’s johns'": ["john", "john", "john", "john"],
    "s us is ss": ["s", "us", "ss"],
    "C++ e-mail @user #tag": ["c", "e", "mail", "user", "tag"],
    "日本語 テスト ひらがな 한국어": ["日", "本", "語", "テスト", "ひ", "ら", "が", "な", "한국어"],
    "ภาษาไทย abc": ["ภาษาไทย", "abc"],
    "İstanbul ΙΗΣΟΥΣ": ["istanbul", "ιησουσ"],
    "x² ½ m²": ["x", "m"],
    "\U0001f1eb\U0001f1f7 \U0001f600 © ★ ♯": ["\U0001f1eb\U0001f1f7", "\U0001f600", "©", "★", "♯"],
    "": [],
    " .,;!? ": [],
    "a\u2028b\tc\nd": ["b", "c", "d"],
}


@pytest.mark.parametrize("text", CASES)
def test_cases(text):
    assert analyze(text) == CASES[text]


def test_very_long_words_are_cut():
    assert [len(term) for term in analyze("x" * 600)] == [255, 255, 90]


def test_long_text_without_spaces_is_not_kept():
    def kept(text):
        before = chunk_terms.cache_info().currsize, terms.cache_info().currsize
        analyze(text)
        return chunk_terms.cache_info().currsize - before[0], terms.cache_info().currsize - before[1]

    assert kept("麤ゑ") == (1, 2)
    assert kept("麤ゑ" * 33) == (0, 0)  # cut by character
    assert kept("ย" * 64) == (1, 1)
    assert kept("ย" * 65) == (0, 0)  # not cut


def test_more_terms_than_1024():
    assert len(analyze("word " * 5000)) == 5000


ODD = "ab's’. \u0301\u200d\u00ad1,2กข日あア\u2640\ufe0f\U0001f600\U0001f1e6\n\t\u2028_-אב"


@given(st.text(st.sampled_from(ODD), max_size=24))
def test_spaces_part_words(text):
    """Analysing between spaces, which is what makes it fast, changes nothing."""
    assert analyze(text) == [term for piece in PIECE.findall(text) for term in terms(piece)]
