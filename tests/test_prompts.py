"""Prompts to the letter, and what of a text is the answer."""

from typing import get_args

import pytest

from eval.prompts import PRESETS, asked
from ralm_jax.settings import Prompts
from retrieval.qa import Found

ONE = Found("1", 2.0, "Nobel Prize", "It was {first} awarded in 1901.")
TWO = Found("2", 1.0, "X-rays", "Röntgen found them.\nIn 1895.")
BARE = Found("3", 1.0, "", "No title.")
WHO = "Who got the first nobel prize in physics"


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        (WHO, "who got the first nobel prize in physics?"),
        ("what is X?", "what is X?"),
        ("NASA was founded when", "nASA was founded when?"),
        ("Éire?", "éire?"),
        ("is it so ? ", "is it so ?"),
        ("q", "q?"),
        ("{x}", "{x}?"),
    ],
)
def test_asked(question, expected):
    assert asked(question) == expected


class TestRam2023:
    """Section 7, appendix C and the released code."""

    @pytest.mark.parametrize(
        ("passages", "expected"),
        [
            ((), "Answer these questions:\nQ: who got the first nobel prize in physics?\nA:"),
            (
                (ONE,),
                "Nobel Prize\n\nIt was {first} awarded in 1901.\n\nBased on this text, answer these questions:\n"
                "Q: who got the first nobel prize in physics?\nA:",
            ),
            (
                (ONE, TWO),
                "Nobel Prize\n\nIt was {first} awarded in 1901.\n\nX-rays\n\nRöntgen found them.\nIn 1895.\n\n"
                "Based on these texts, answer these questions:\nQ: who got the first nobel prize in physics?\nA:",
            ),
            (
                (BARE, ONE, TWO),
                "No title.\n\nNobel Prize\n\nIt was {first} awarded in 1901.\n\nX-rays\n\nRöntgen found them.\n"
                "In 1895.\n\nBased on these texts, answer these questions:\n"
                "Q: who got the first nobel prize in physics?\nA:",
            ),
        ],
    )
    def test_prompts(self, passages, expected):
        assert PRESETS["ram2023"].prompt(WHO, passages) == expected

    def test_is_greedy_and_short(self):
        settings = PRESETS["ram2023"].settings
        assert (settings.max_new_tokens, settings.stop, settings.temperature) == (10, ("\n",), 0)

    @pytest.mark.parametrize(
        ("text", "answer"),
        [
            (" Wilhelm Röntgen", "Wilhelm Röntgen"),
            (" Röntgen\nQ: who else?\nA: Curie", "Röntgen"),
            ("\n Röntgen", ""),
            ("", ""),
            (" \\n is not a line end", "\\n is not a line end"),
            (" a\u2028b\r\nc", "a\u2028b"),
        ],
    )
    def test_the_answer_is_the_first_line(self, text, answer):
        assert PRESETS["ram2023"].answer(text) == answer


def test_liu2023():
    preset = PRESETS["liu2023"]
    assert preset.prompt("who?", ()) == "Question: who?\nAnswer:"
    assert preset.prompt("who?", (ONE, BARE)) == (
        "Write a high-quality answer for the given question using only the provided search results (some of which "
        "might be irrelevant).\n\nDocument [1](Title: Nobel Prize) It was {first} awarded in 1901.\n"
        "Document [2] No title.\n\nQuestion: who?\nAnswer:"
    )
    assert preset.prompt("who?", (ONE,)).count("Document [") == 1


def test_instruct():
    preset = PRESETS["instruct"]
    end = "answer the question in a few words.\n\nQuestion: who?\nAnswer:"
    assert preset.prompt("Who", ()) == "A" + end[1:]
    assert preset.prompt("Who", (ONE,)) == (
        f"Nobel Prize\n\nIt was {{first}} awarded in 1901.\n\nBased on this text, {end}"
    )
    assert preset.prompt("Who", (ONE, BARE)) == (
        f"Nobel Prize\n\nIt was {{first}} awarded in 1901.\n\nNo title.\n\nBased on these texts, {end}"
    )


def test_the_command_line_has_them_all():
    assert set(PRESETS) == set(get_args(Prompts))
    for preset in PRESETS.values():
        for template in (preset.closed, preset.one, preset.several):
            assert "{question}" in template
            assert "\\n" not in template
        assert "{passages}" not in preset.closed
