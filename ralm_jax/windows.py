"""Strides and windows of the protocol (In-Context RALM, sections 3 and 4; the released code's `eval_lm.py`).

Window j is tokens[s j : s j + W]. Window 0 scores all but its first token, every later window its last s tokens (the
last window perhaps fewer). A passage overwrites the first tokens of its window, so that the length stays W: tokens are
lost at the start of the prefix, never from the passage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ralm_jax.errors import UsageError

Bos = Literal["every-window", "passage"]


@dataclass(frozen=True)
class Protocol:
    """How text and passages become windows.

    Attributes:
        window: W, tokens a window.
        stride: s, tokens that each window after the first predicts.
        past: tokens before the target whose log-probability is kept as well, for zero-shot reranking.
        passage_tokens: a passage is cut to this many tokens.
        bos: "every-window": the tokenizer's BOS, if it adds one by default, stands once in front of every window, and
            no special token inside. "passage": as the paper's code, passages carry whatever special tokens the
            tokenizer adds by default, and text carries none.
    """

    window: int = 1024
    stride: int = 4
    past: int = 32
    passage_tokens: int = 256
    bos: Bos = "every-window"

    def __post_init__(self) -> None:
        for name in ("window", "stride", "passage_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name.replace('_', ' ')} must be at least 1, not {getattr(self, name)}")
        if self.past < 0:
            raise UsageError(f"past must be at least 0, not {self.past}")
        if self.stride >= self.window:
            raise UsageError(
                f"stride {self.stride} in windows of {self.window} would leave tokens unscored; the stride must be "
                "smaller than the window"
            )
        if self.passage_room < 1:
            raise UsageError(
                f"a window of {self.window} has no room beside stride {self.stride} and past {self.past}; "
                "use a larger window or a smaller past"
            )

    @property
    def passage_room(self) -> int:
        """The longest passage that leaves the target and the past tokens in the window."""
        return self.window - self.stride - self.past


PRESETS: dict[str, Bos] = {"default": "every-window", "ai21": "passage"}


@dataclass(frozen=True)
class Schedule:
    """The strides of a text: window j holds tokens[starts[j] : ends[j]] and predicts tokens[targets[j] : ends[j]].

    targets[0] is 0 as in the paper's files, although token 0 has no prefix and is never scored.
    """

    num_tokens: int
    starts: np.ndarray  # (J,) int64
    targets: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)


def make_schedule(num_tokens: int, window: int, stride: int, limit: int | None = None) -> Schedule:
    """The strides of a text of `num_tokens` tokens; only the first `limit` if given.

    Raises:
        UsageError: `limit` is below 1.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"the limit of strides must be at least 1, not {limit}")
    count = 1 + max(0, -(-(num_tokens - window) // stride))
    if limit is not None:
        count = min(count, limit)
    starts = stride * np.arange(count, dtype=np.int64)
    ends = np.minimum(starts + window, num_tokens)
    targets = np.concatenate([[0], ends[:-1]])
    return Schedule(num_tokens, starts, targets, ends)


@dataclass(frozen=True)
class Windows:
    """Fixed-shape windows for a reader; n windows of T tokens, R log-probabilities asked of each.

    Attributes:
        tokens: (n, T) int32, padded on the right with 0.
        positions: (n, R) int32, the position in the window whose hidden state predicts each label.
        labels: (n, R) int32.
        scored: (n, R) bool, False where there is no label.
    """

    tokens: np.ndarray
    positions: np.ndarray
    labels: np.ndarray
    scored: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, start: int, count: int) -> "Windows":
        """Windows start … start + count, the last one repeated where they run out."""
        rows = np.minimum(np.arange(start, start + count), len(self) - 1)
        return Windows(self.tokens[rows], self.positions[rows], self.labels[rows], self.scored[rows])


def build_windows(
    tokens: np.ndarray,
    *,
    starts: np.ndarray,
    first_labels: np.ndarray,
    ends: np.ndarray,
    passages: Sequence[np.ndarray],
    num_labels: int,
    length: int,
    bos: int | None,
) -> Windows:
    """Windows over text `tokens`; each row of the arguments is one window.

    Args:
        starts: (n,) first text token of the window.
        first_labels: (n,) first text token whose log-probability is asked for; `num_labels` follow, up to `ends`.
        passages: tokens that overwrite the start of each window; empty for none.
        length: T. The last label itself need not be in the window: its predecessor predicts it.
        bos: a token to put in front of every window, or None.
    """
    shift = 0 if bos is None else 1
    columns = np.arange(length)[None, :]
    index = starts[:, None] + columns - shift
    inside = (index >= starts[:, None]) & (index < ends[:, None] - 1)
    rows = np.where(inside, tokens[np.minimum(np.maximum(index, 0), len(tokens) - 1)], 0)
    if bos is not None:
        rows[:, 0] = bos
    for row, passage in zip(rows, passages, strict=True):
        row[shift : shift + len(passage)] = passage

    label_index = first_labels[:, None] + np.arange(num_labels)[None, :]
    scored = label_index < ends[:, None]
    labels = np.where(scored, tokens[np.minimum(label_index, len(tokens) - 1)], 0)
    positions = np.where(scored, label_index - starts[:, None] - 1 + shift, 0)
    return Windows(rows.astype(np.int32), positions.astype(np.int32), labels.astype(np.int32), scored)


def bucket_length(needed: int, window: int) -> int:
    """The window length to compile for: `window`, or for shorter texts the next multiple of 128."""
    return min(window, -(-needed // 128) * 128)
