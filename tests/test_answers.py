"""The measures of an answer: a table of cases from the definitions, properties, and other people's implementations."""

import string
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.answers import contains, judge, normalize, rouge_l, rouge_words, token_f1
from ralm_jax.errors import RalmError

NORMALIZED = [
    # lower case, spaces
    ("Paris", "paris"),
    ("  New \t York\n", "new york"),
    ("", ""),
    (" \n", ""),
    # articles, as words only
    ("The Beatles", "beatles"),
    ("an apple and a pear", "apple and pear"),
    ("Theatre of another banana", "theatre of another banana"),
    ("Vitamin A", "vitamin"),
    # ... and where nothing else is left
    ("A", "a"),
    ("The The", "the the"),
    ("the.", "the"),
    # punctuation is taken out, not replaced
    ("U.S.A.", "usa"),
    ("Jay-Z", "jayz"),
    ("don't", "dont"),
    ("a.m.", "am"),
    ("$1,000", "1000"),
    ("under_score", "underscore"),
    ("rock & roll", "rock roll"),
    ("The 'A' Team", "team"),
    # ... and where nothing else is left
    ("+", "+"),
    (" ? ", "?"),
    # punctuation of every script
    ("“Rock ’n’ Roll”", "rock n roll"),
    ("1914–18", "191418"),
    ("¿Qué?", "qué"),
    ("東京。", "東京"),
    ("ʻOkina ʼn", "ʻokina n"),
    ("O´Brien", "obrien"),
    ("−5", "5"),
    # forms that look equal
    ("Beyonce\u0301", "beyoncé"),
    ("ﬁre", "fire"),
    ("ＡＢＣ　１２", "abc 12"),
    ("m²", "m2"),
    ("½", "12"),
    ("1/2", "12"),
    ("10\u00a0000", "10 000"),
    ("co\u00adop", "coop"),
    ("zero\u200bwidth\ufeff", "zerowidth"),
    ("Straße", "strasse"),
    ("ΟΔΥΣΣΕΎΣ", "οδυσσεύσ"),
    ("İstanbul", "i\u0307stanbul"),
    # others stay apart
    ("Beyonce", "beyonce"),
    ("€5", "€5"),
]


@pytest.mark.parametrize(("text", "expected"), NORMALIZED)
def test_normalize(text, expected):
    assert normalize(text) == expected
    assert normalize(expected) == expected


CASES = [  # answer, references, em, f1, rouge_l, contains
    # exact
    ("Wilhelm Conrad Röntgen", ["Wilhelm Conrad Röntgen"], True, 1, 1, True),
    ("the eiffel tower!", ["Eiffel Tower"], True, 1, 4 / 5, True),
    ("Rontgen", ["Röntgen"], False, 0, 0, False),
    ("May 18 2018", ["May 18, 2018"], True, 1, 1, True),
    # any of the references, not the first alone
    ("UK", ["United Kingdom", "UK", "Britain"], True, 1, 1, True),
    ("december 1972", ["14 December 1972 UTC", "December 1972"], True, 1, 1, True),
    ("in December", ["14 December 1972 UTC", "December 1972"], False, 1 / 2, 1 / 2, False),
    # containment is no exact match
    ("It was Röntgen, in 1901.", ["Röntgen"], False, 2 / 6, 2 / 6, True),
    ("He lived in Paris and New York", ["New York"], False, 4 / 9, 4 / 9, True),
    ("concatenate", ["cat"], False, 0, 0, False),
    ("York New", ["New York"], False, 1, 1 / 2, False),
    # words count as often as they stand
    ("no no no", ["no no"], False, 4 / 5, 4 / 5, True),
    ("b a c b", ["b b"], False, 4 / 5, 4 / 6, False),
    # articles
    ("a", ["A"], True, 1, 1, True),
    ("the", ["A"], False, 0, 0, False),
    ("", ["A"], False, 0, 0, False),
    ("the A", ["the"], False, 2 / 3, 2 / 3, True),
    # empty
    ("", ["Paris"], False, 0, 0, False),
    ("", [""], True, 1, 0, True),
    ("Paris", [""], False, 0, 0, False),
    ("", ["Paris", ""], True, 1, 0, True),
    ("...", ["Paris"], False, 0, 0, False),
    # yes and no
    ("Yes.", ["yes"], True, 1, 1, True),
    ("no", ["yes"], False, 0, 0, False),
    ("yes, it is", ["yes"], False, 0, 1 / 2, True),
    ("yes", ["yes it is"], False, 0, 1 / 2, False),
    ("unanswerable", ["Unanswerable"], True, 1, 1, True),
    # numbers
    ("1,000", ["1000"], True, 1, 0, True),
    ("3", ["three", "Three", "3"], True, 1, 1, True),
    ("3.0", ["3"], False, 0, 2 / 3, False),
    # symbols
    ("co\u00adop", ["coop"], True, 1, 1, True),
    ("+", ["+"], True, 1, 0, True),
    ("-", ["+"], False, 0, 0, False),
    ("C++", ["C#"], True, 1, 1, True),  # as in SQuAD
]


@pytest.mark.parametrize(("answer", "references", "em", "f1", "rouge", "inside"), CASES)
def test_cases(answer, references, em, f1, rouge, inside):
    found = judge(answer, references)
    assert (found.em, found.contains) == (em, inside)
    assert (found.f1, found.rouge_l) == (pytest.approx(f1), pytest.approx(rouge))
    assert judge(answer, references[::-1]) == found


HEIGHT = r"20\s?,?\s?(32|40)0\s?-?\s?f(ee|oo)t|6,194-meter|20,?237\s*f(oo|ee)?t"  # CuratedTREC's answer 1669, in part


@pytest.mark.parametrize(
    ("answer", "expressions", "em", "inside"),
    [
        ("20,320 feet", [HEIGHT], True, True),
        (" 20320 FEET. ", [HEIGHT], True, True),
        ("20,320 feet high", [HEIGHT], False, True),
        ("it is 20237 ft tall", [HEIGHT], False, True),
        ("20,321 feet", [HEIGHT], False, False),
        ("the 6,194-meter", [HEIGHT], True, True),
        ("After the Fall", ["After the Fall|Finishing the Play"], True, True),
        ("the fall", ["After the Fall"], False, False),
        ("Dvorák", ["Dvo[rř]ák"], True, True),
        ("Dvor\u030ca\u0301k", ["Dvo[rř]ák"], True, True),
        ("$20.", [r"\$20"], True, True),
        ("", ["a"], False, False),
        ("two", ["one", "two"], True, True),
        ("a.c", ["abc"], False, False),
    ],
)
def test_regular_expressions(answer, expressions, em, inside):
    assert judge(answer, expressions, regex=True) == (em, None, None, inside)


def test_what_is_no_regular_expression():
    with pytest.raises(RalmError, match=r"answer '\(' is not a regular expression \(missing \)"):
        judge("x", ["fine", "("], regex=True)


WORDS = st.lists(st.sampled_from("a an the yes no New York new . - é e\u0301 ﬁ fi 3".split()), max_size=6).map(" ".join)


class TestProperties:
    @given(WORDS, st.lists(WORDS, min_size=1, max_size=3))
    def test_of_all_measures(self, answer, references):
        found = judge(answer, references)
        assert found.contains or not found.em
        assert (found.f1 == 1) or not found.em
        assert 0 <= found.f1 <= 1
        assert 0 <= found.rouge_l <= 1
        for form in ("NFC", "NFD", "NFKC", "NFKD"):
            assert judge(unicodedata.normalize(form, answer), references) == found
        more = judge(answer, [*references, "another one"])
        assert all(a <= b for a, b in zip(found, more, strict=True))

    @given(st.text(), st.text())
    def test_of_any_text(self, answer, reference):
        assert normalize(normalize(answer)) == normalize(answer)
        assert judge(answer, [answer]).em
        assert judge(answer, [reference]).em == judge(reference, [answer]).em

    @given(st.text(string.ascii_letters + string.digits + string.punctuation + " \n"))
    def test_is_squads_where_that_leaves_something(self, text):
        """Its definition, word for word, in another way."""
        import re

        squad = "".join(c for c in text.lower() if c not in string.punctuation)
        squad = " ".join(re.sub(r"\b(a|an|the)\b", " ", squad).split())
        assert normalize(text) == squad or not squad

    @given(st.lists(st.sampled_from("abcd"), max_size=8), st.lists(st.sampled_from("abcd"), max_size=8))
    def test_rouge_l_is_below_f1(self, words, reference):
        assert rouge_l(words, reference) <= token_f1(words, reference) or not words
        assert rouge_l(words, reference) == rouge_l(reference, words)
        if words and contains(reference, words):
            assert rouge_l(words, reference) == pytest.approx(token_f1(words, reference))


PAIRS = [
    ("The quick brown fox jumps over the lazy dog.", "a quick, brown dog jumped over the fox"),
    ("police killed the gunman", "police kill the gunman"),
    ("the gunman kill police", "police kill the gunman"),
    ("b c b c a b", "b a b c c"),
    ("May 18, 2018", "18 May 2018"),
    ("x", "y"),
]


def test_rouge_score():
    """ROUGE-1 is the F1 of the same words; ROUGE-L is ROUGE-L."""
    scorer = pytest.importorskip("rouge_score.rouge_scorer", reason="needs rouge-score (make test installs it)")
    for answer, reference in PAIRS:
        theirs = scorer.RougeScorer(["rouge1", "rougeL"]).score(reference, answer)
        one, other = rouge_words(answer), rouge_words(reference)
        assert token_f1(one, other) == pytest.approx(theirs["rouge1"].fmeasure)
        assert judge(answer, [reference]).rouge_l == pytest.approx(theirs["rougeL"].fmeasure)
        plain = scorer.RougeScorer(["rouge1"]).score(normalize(reference), normalize(answer))
        assert judge(answer, [reference]).f1 == pytest.approx(plain["rouge1"].fmeasure)


@pytest.mark.filterwarnings("ignore")
def test_tensorflow_text():
    """Its ROUGE-L is ours on words that its operations cut; its Unicode forms and words are those of `normalize`."""
    text = pytest.importorskip("tensorflow_text", reason="needs ralm-jax[tf-text]")
    tensorflow = pytest.importorskip("tensorflow")

    def folded(raw):
        return text.normalize_utf8(text.case_fold_utf8(text.normalize_utf8(raw, "NFKC")), "NFKC")

    for answer, reference in [*PAIRS, *((raw, expected) for raw, expected in NORMALIZED if raw.strip(" ?+"))]:
        pair = [side.replace("´", "") for side in (answer, reference)]  # whose NFKC form is a space
        cut = text.regex_split([folded(side).numpy() for side in pair], r"[^\p{L}\p{N}\p{M}]+")
        words = [[word.decode() for word in row] for row in cut.to_list()]
        assert words == [rouge_words(answer), rouge_words(reference)]
        ragged = (tensorflow.ragged.constant([row], dtype=tensorflow.string) for row in words)
        theirs = text.metrics.rouge_l(*ragged).f_measure.numpy()[0]
        assert judge(answer, [reference]).rouge_l == pytest.approx(theirs, abs=1e-6)
    for raw, _ in NORMALIZED:
        kept = tensorflow.strings.regex_replace(folded(raw.replace("´", "")), r"\p{P}|\p{Cf}|[$+<=>^`|~⁄−ʼʹ]", "")
        words = [word.decode() for word in text.WhitespaceTokenizer().tokenize(kept).numpy()]
        left = [word for word in words if word not in ("a", "an", "the")]
        assert normalize(raw).split() == left or not left
