"""Training examples for a predictive reranker: a sample of a text's strides, retrieved for and scored as any other
(In-Context RALM, section 6.2). They are a RetrievalTable and a ScoreTable."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eval.lm import check_reader, score
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.reader import Reader
from ralm_jax.reader_api import APIReader
from ralm_jax.settings import IfExists, QuerySettings, StrideSettings, WindowSettings, at_least
from ralm_jax.text import Text
from ralm_jax.tokenizer import Tokenizer
from ralm_jax.windows import Schedule, make_schedule
from retrieval.overlap import shared_spans
from retrieval.query import retrieve
from retrieval.retriever import Retriever

log = logging.getLogger("ralm")

RETRIEVAL, SCORES = "retrieval", "scores"  # folders of a set of examples


@dataclass(frozen=True)
class Sample:
    """Strides to learn from.

    Attributes:
        schedule: the first window, which is no example, and the strides.
        strides: that the text has after the first window.
        left_out: of these, that share a run of words with an evaluated text.
    """

    schedule: Schedule
    strides: int
    left_out: int


def collect(
    text: Text,
    reader: Reader | APIReader,
    tokenizer: Tokenizer,
    index: Retriever,
    out: str,
    *,
    examples: int,
    seed: int = 0,
    without: Sequence[Text] = (),
    strides: StrideSettings,
    queries: QuerySettings,
    windows: WindowSettings,
    excluded: frozenset[str] = frozenset(),
    batch_size: int | None = None,
    if_exists: IfExists = "refuse",
    progress: bool | None = None,
) -> Sample:
    """Retrieves for `examples` strides of `text` and scores them with the frozen `reader`, in the folders retrieval and
    scores of `out`.

    Args:
        seed: of the sample.
        without: evaluated texts; no stride is taken that shares a run of words with them.
        excluded: titles that are left out of the search.

    Raises:
        UsageError: `out` is taken and `if_exists` refuses; or as `retrieve` and `score` do.
        RalmError: no stride is left; or as these do.
    """
    check_windows(strides, windows)
    tokens, offsets = tokenizer.encode_with_offsets(text.content)
    check_reader(text, reader, tokenizer, tokens, strides.window)
    sample = sample_strides(text, offsets, examples, seed, without, strides, queries)
    table = retrieve(
        index,
        text,
        tokenizer,
        str(Path(out) / RETRIEVAL),
        strides=strides,
        queries=queries,
        schedule=sample.schedule,
        excluded=excluded,
        if_exists=if_exists,
        progress=progress,
    )
    score(
        text,
        reader,
        tokenizer,
        str(Path(out) / SCORES),
        strides=strides,
        windows=windows,
        retrieved=(table, index.passages),
        k=queries.k,
        schedule=sample.schedule,
        batch_size=batch_size,
        if_exists=if_exists,
        progress=progress,
    )
    return sample


def check_windows(strides: StrideSettings, windows: WindowSettings) -> None:
    """Refuses what cannot be scored for a reranker to learn from, before anything is retrieved.

    Raises:
        UsageError: windows that passages or strides share, or that have no room for a passage.
    """
    if windows.passages_in_window > 1:
        raise UsageError("a reranker learns what each passage is worth alone; leave --passages-in-window out")
    if windows.block_strides(strides) > 1:
        raise UsageError("a sample of strides has no neighbours to share windows with; leave --block out")
    windows.passage_limit(strides)


def sample_strides(
    text: Text,
    offsets: np.ndarray,
    examples: int,
    seed: int,
    without: Sequence[Text],
    strides: StrideSettings,
    queries: QuerySettings,
) -> Sample:
    """`examples` strides after the first window, drawn by `seed` from those whose query and target have no run of words
    that a text of `without` has too.

    Args:
        offsets: (L, 2) characters of the text's tokens, first and one past the last.

    Raises:
        UsageError: none is asked for, or the seed is negative.
        RalmError: there is none.
    """
    at_least(1, examples=examples)
    at_least(0, seed=seed)
    whole = make_schedule(len(offsets), strides)
    candidates = np.arange(1, len(whole))
    first, last = offsets[np.maximum(0, whole.targets - queries.query_length), 0], offsets[whole.ends - 1, 1]
    spans = shared_spans(text.content, [other.content for other in without])
    clean = candidates[~touched(first, last, spans)[1:]]
    if not len(clean):
        raise RalmError(
            f"{text.origin}: no stride to learn from: {len(candidates):,} after the first window of {strides.window} "
            "tokens, all of them in the texts to be left out"
        )
    if len(clean) < examples:
        log.warning("%s: has %d strides to learn from, not %d", text.origin, len(clean), examples)
    chosen = np.random.default_rng(seed).choice(clean, min(examples, len(clean)), replace=False)
    return Sample(whole.only(np.sort(chosen)), len(candidates), len(candidates) - len(clean))


def touched(first: np.ndarray, last: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """(n,) bool: which of the characters first[i] to last[i] meet one of `spans`, which ascend in both columns."""
    if not len(spans):
        return np.zeros(len(first), bool)
    after = np.searchsorted(spans[:, 1], first, side="right")  # the first span that ends in or behind
    return (after < len(spans)) & (spans[np.minimum(after, len(spans) - 1), 0] < last)
