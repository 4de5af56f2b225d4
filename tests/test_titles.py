"""Titles to leave out, as a list or by a text's headings."""

import pytest

from retrieval.titles import heading_titles, read_titles, spellings


def test_a_list(tmp_path):
    (tmp_path / "t.txt").write_text("One\n Two \n\n")
    assert read_titles(str(tmp_path / "t.txt")) == {"One", "Two"}


@pytest.mark.parametrize(
    ("heading", "title"),
    [
        ("Robert Boulter", "Robert Boulter"),
        ("Kiss You ( One Direction song )", "Kiss You (One Direction song)"),
        ("Ise @-@ class battleship", "Ise-class battleship"),
        ("Weevils Wobble But They Don 't Go Down", "Weevils Wobble But They Don't Go Down"),
        ("Temple Beth Israel ( Eugene , Oregon )", "Temple Beth Israel (Eugene, Oregon)"),
        ("Kirby 's Block Ball", "Kirby's Block Ball"),
        ("Come What ( ever ) May", "Come What(ever) May"),
        ("2011 – 12 Columbus Blue Jackets season", "2011–12 Columbus Blue Jackets season"),
        ("Johnson – Corey – Chaykovsky reaction", "Johnson–Corey–Chaykovsky reaction"),
        ('The " Weird " One', 'The "Weird" One'),
        ("The Portage to San Cristobal of A.H.", "The Portage to San Cristobal of A.H."),
        ("St. Paul 's Church , Birmingham", "St. Paul's Church, Birmingham"),
        ("100 @,@ 000 Years", "100,000 Years"),
    ],
)
def test_a_heading_is_spelt_as_the_article_is(heading, title):
    assert title in spellings(heading)


def test_only_headings_of_the_first_level_count():
    text = "\n = One = \n \n = = Career = = \n x = y = z\n # Two #\r\n## Three\n = <unk> ( palm ) = \n"
    assert heading_titles(text).spellings == {"One", "Two"}
    assert heading_titles(text).unknown == ("<unk> ( palm )",)
