"""Generation with retrieval (In-Context RALM, section 3): every s tokens, the passage found for the last ones takes the
place of the one before in front of the text, which is encoded anew. Every token's passage is known afterwards."""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np

from ralm_jax.generate.decoding import Written, decode, keys_of
from ralm_jax.generate.generator import Generation
from ralm_jax.generate.local import LocalGenerator
from ralm_jax.generate.sampling import Sampling
from ralm_jax.generate.writing import Writer
from ralm_jax.scoring import Scorer
from ralm_jax.settings import GenerateSettings
from ralm_jax.windows import bucket_length, build_windows

AHEAD = 64  # tokens that there is room for at once, which a passage that stays may go on for


class PassageSource(Protocol):
    """What finds passages for texts that are being written."""

    def find(self, prefixes: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """(n,) rows of the passages for what comes after each of `prefixes` (int32 tokens), -1 for none, and their (n,)
        scores."""

    def tokens(self, rows: np.ndarray) -> list[np.ndarray]:
        """int32 tokens of each of `rows`, as they go into a window; empty where the row is -1."""


class Segment(NamedTuple):
    """What was written from one retrieval to the next.

    Attributes:
        text: the segments' texts together are the text.
        begin: the first of its tokens among the new ones.
        tokens: the end of text among them, if there is one.
        row: of the passage in front; -1 for none.
        score: of the passage, by the retriever or reranker.
        log_probs: of the tokens.
        plain: the same without a passage, as `ralm score` has it; None if that was not asked for.
    """

    text: str
    begin: int
    tokens: tuple[int, ...]
    row: int
    score: float
    log_probs: tuple[float, ...]
    plain: tuple[float, ...] | None = None

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)


class Attributed(NamedTuple):
    """What was written after a prompt, and where it came from; every new token is in one segment."""

    generation: Generation
    segments: list[Segment]


class Story:
    """A text that is being written: prompt, new tokens, and the segments that are done."""

    def __init__(self, prompt: np.ndarray, writer: Writer):
        self.prompt, self.writer = prompt, writer
        self.segments: list[Segment] = []
        self._told = 0

    @property
    def tokens(self) -> np.ndarray:
        return np.concatenate([self.prompt, np.array(self.writer.tokens, np.int32)])

    def close(self, row: int, score: float) -> None:
        """Makes a segment of what is new."""
        begin = self.segments[-1].end if self.segments else 0
        if begin == len(self.writer.tokens):
            return
        text, self._told = self.writer.text[self._told :], len(self.writer.text)
        tokens, log_probs = tuple(self.writer.tokens[begin:]), tuple(self.writer.log_probs[begin:])
        self.segments.append(Segment(text, begin, tokens, row, score, log_probs))


def generate_with_retrieval(
    local: LocalGenerator,
    source: PassageSource,
    prompts: Sequence[str],
    settings: GenerateSettings,
    *,
    stride: int,
    compare: bool = False,
    tell: Callable[[int, str], None] | None = None,
) -> list[Attributed]:
    """What follows each of `prompts`, which make a batch.

    Args:
        stride: tokens from one retrieval to the next. A passage that is found again stays as it stands, with all that
            is known of it.
        compare: also score the new tokens without passages.
        tell: is told a prompt's place and a piece of text as soon as it is known.

    Raises:
        UsageError: a prompt without tokens, or a window without room for passages and text.
        RalmError: the reader gives NaN.
    """
    stories = [
        Story(prompt, local.writer(prompt, settings, place, tell)) for place, prompt in enumerate(local.encode(prompts))
    ]
    keys, sampling = keys_of(settings.seed, len(stories)), Sampling.of(settings)
    rows, steps, ahead = np.full(len(stories), -2), iter(list[Written]()), 0
    for drawn in range(0, settings.max_new_tokens, stride):
        count = min(stride, settings.max_new_tokens - drawn)
        found, scores = source.find([story.tokens for story in stories])
        going = np.array([story.writer.finish is None for story in stories])
        if ahead < count or (found != rows)[going].any():
            rows = found
            passages = source.tokens(rows)
            ahead = min(room_ahead(local, stories, passages, count), settings.max_new_tokens - drawn)
            windows = [local.windowed(s.tokens, ahead, passage) for s, passage in zip(stories, passages, strict=True)]
            steps = decode(local.reader, windows, ahead, sampling, keys=keys, drawn=drawn)
        for written in islice(steps, count):
            for story, token, log_prob in zip(stories, written.tokens, written.log_probs, strict=True):
                story.writer.add(int(token), float(log_prob))
        ahead -= count
        for story, row, score in zip(stories, rows, scores, strict=True):
            story.close(int(row), float(score))
        if all(story.writer.finish for story in stories):
            break
    if compare:
        add_plain(local, stories, stride)
    return [
        Attributed(story.writer.generation(len(local.specials) + len(story.prompt)), story.segments)
        for story in stories
    ]


def room_ahead(local: LocalGenerator, stories: Sequence[Story], passages: Sequence[np.ndarray], count: int) -> int:
    """New tokens that there is room for before texts lose some at their start; the next `count` may cost them some."""
    taken = max(len(passage) + len(story.tokens) for story, passage in zip(stories, passages, strict=True))
    return max(count, min(AHEAD, local.window - taken))


def add_plain(local: LocalGenerator, stories: Sequence[Story], stride: int) -> None:
    """Gives every segment its tokens' log-probabilities without a passage, in windows as `ralm score` has them."""
    scorer: Scorer | None = None
    for story in stories:
        tokens, first = story.tokens, len(story.prompt)
        begins, ends = (np.array([first + getattr(s, name) for s in story.segments]) for name in ("begin", "end"))
        windows = build_windows(
            tokens,
            starts=np.maximum(0, ends - local.window),
            first_labels=begins,
            ends=ends,
            passages=[np.zeros(0, np.int32)] * len(begins),
            num_labels=stride,
            length=bucket_length(len(tokens) + len(local.specials), local.window),
            bos=local.tokenizer.bos,
        )
        scorer = scorer or Scorer(local.reader, windows.tokens.shape[1], stride)
        plain = scorer.score(windows)
        story.segments = [
            segment._replace(plain=tuple(values[: len(segment.tokens)].tolist()))
            for segment, values in zip(story.segments, plain, strict=True)
        ]
