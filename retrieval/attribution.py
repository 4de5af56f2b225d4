"""Where a text came from: which passage stood in front of which tokens, and what it did for them."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from ralm_jax.generate.ralm import Attributed, Segment
from retrieval.generation import PassageFinder

SHOWN = 70  # characters of a passage


def attributed_row(prompt: str, found: Attributed, finder: PassageFinder) -> dict[str, Any]:
    """The row of a prompt: generation and segments, with passages by id, title and text, and log-probabilities a
    token."""
    segments = []
    for segment in found.segments:
        passage = None
        if segment.row >= 0:
            id, title, text = finder.passage(segment.row)
            passage = {"id": id, "title": title, "text": text, "score": segment.score}
        row: dict[str, Any] = {
            "text": segment.text,
            "begin": segment.begin,
            "tokens": segment.tokens,
            "passage": passage,
            "log_probs": segment.log_probs,
        }
        segments.append(row if segment.plain is None else row | {"log_probs_without_passage": segment.plain})
    return {"prompt": prompt} | found.generation._asdict() | {"segments": segments}


def format_attribution(found: Attributed, finder: PassageFinder) -> str:
    """A paragraph for each stretch of text with one passage in front."""
    return "\n".join(line for _, group in groupby(found.segments, key=row_of) for line in stretch(list(group), finder))


def row_of(segment: Segment) -> int:
    return segment.row


def stretch(segments: list[Segment], finder: PassageFinder) -> Iterator[str]:
    first, last = segments[0], segments[-1]
    tokens = f"tokens {first.begin + 1}-{last.end}"
    gain = ""
    if first.plain is not None:
        total = sum(sum(segment.log_probs) - sum(segment.plain or ()) for segment in segments)
        gain = f", {total / (last.end - first.begin):+.2f} nats a token"
    if first.row < 0:
        yield f"{tokens}: no passage"
    else:
        id, title, text = finder.passage(first.row)
        said = " ".join(f"{title}: {text}".split() if title else text.split())
        yield f"{tokens}: [{id}] {said[:SHOWN]}{'…' * (len(said) > SHOWN)} (score {first.score:.2f}{gain})"
    yield f"    {''.join(segment.text for segment in segments)!r}"
