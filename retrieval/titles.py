"""Titles that a search leaves out: from a list, or from the headings of the evaluated text itself, which the corpus may
hold (In-Context RALM, section 4.3: the articles of WikiText-103's development and test sets).
"""

import re
from pathlib import Path
from typing import NamedTuple

from ralm_jax.text import read_lines

TITLE = re.compile(r"[ \t]*(?:= (?!=)(.+?)(?<!=) =|# +(.+?) *#*)[ \t\r]*")  # WikiText's and Markdown's first level
UNKNOWN = "<unk>"

# WikiText's tokens, put together again: what stands between @ had no spaces, and most marks have one on one side
JOINS = [
    (r" @(.)@ ", r"\1"),
    (r" (n?['’](?:s|t|re|ve|ll|d|m)\b)", r"\1"),
    (r"\" (.+?) \"", r'"\1"'),
    (r" ([,;:!?.)\]%])", r"\1"),
    (r"([(\[$#]) ", r"\1"),
]


class Titles(NamedTuple):
    """The titles of a text's headings.

    Attributes:
        spellings: every way in which they may be written.
        unknown: headings with <unk>, which name no article.
    """

    spellings: frozenset[str]
    unknown: tuple[str, ...]


def read_titles(path: str) -> frozenset[str]:
    """One title a line, as the paper's list of removed articles."""
    return frozenset(line.strip() for _, line in read_lines(Path(path).expanduser()) if line.strip())


def heading_titles(content: str) -> Titles:
    """The headings of the first level in `content`, "= Title =" of WikiText or "# Title" of Markdown."""
    matches = (TITLE.fullmatch(line) for line in content.split("\n"))
    headings = [match.group(1) or match.group(2) for match in matches if match]
    known = (spelling for heading in headings if UNKNOWN not in heading for spelling in spellings(heading))
    return Titles(frozenset(known), tuple(heading for heading in headings if UNKNOWN in heading))


def spellings(heading: str) -> set[str]:
    """A heading as it stands, and as the title of an article: "2011 – 12 season" is "2011–12 season" there."""
    joined = heading
    for pattern, replacement in JOINS:
        joined = re.sub(pattern, replacement, joined)
    tight = re.sub(r" ?([–—/]) ?", r"\1", joined)
    return {heading, joined, tight, re.sub(r" (\(\w+\))", r"\1", joined)}
