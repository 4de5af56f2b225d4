"""Strides and windows of the protocol (In-Context RALM, sections 3 and 4; the released code's `eval_lm.py`).

Window j is tokens[s j : s j + W]. Window 0 scores all but its first token, every later window its last s tokens (the
last window perhaps fewer). A passage overwrites the first tokens of its window, so that the length stays W: tokens are
lost at the start of the prefix, never from the passage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from ralm_jax.settings import StrideSettings


@dataclass(frozen=True)
class Schedule:
    """The strides of a text: window j holds tokens[starts[j] : ends[j]] and predicts tokens[targets[j] : ends[j]].
    A start below 0 is room in front of the text.

    targets[0] is 0 as in the paper's files, although token 0 has no prefix and is never scored.
    """

    num_tokens: int
    starts: np.ndarray  # (J,) int64
    targets: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    def only(self, strides: np.ndarray) -> "Schedule":
        """The first window and `strides` (indices after it, ascending)."""
        kept = np.concatenate([[0], strides]).astype(np.int64)
        return Schedule(self.num_tokens, self.starts[kept], self.targets[kept], self.ends[kept])

    @property
    def fingerprint(self) -> str:
        """Of which tokens are predicted."""
        return sha256(np.stack([self.targets, self.ends]).tobytes()).hexdigest()


def make_schedule(num_tokens: int, settings: StrideSettings) -> Schedule:
    """The strides of a text of `num_tokens` tokens."""
    count = 1 + max(0, -(-(num_tokens - settings.window) // settings.stride))
    count = min(count, settings.limit_strides or count)
    starts = settings.stride * np.arange(count, dtype=np.int64)
    ends = np.minimum(starts + settings.window, num_tokens)
    targets = np.concatenate([[0], ends[:-1]])
    return Schedule(num_tokens, starts, targets, ends)


def stride_characters(schedule: Schedule, offsets: np.ndarray) -> np.ndarray:
    """(J, 2) int64, the character at which each stride begins, and one past its last.

    A stride that begins inside a character, of which the tokenizer makes several tokens, begins in front of it: whoever
    reads up to a stride's beginning must not see what it predicts.

    Args:
        offsets: (L, 2) the characters that each token stands for: first, one past the last.
    """
    return np.stack([first_characters(offsets, places) for places in (schedule.targets, schedule.ends)], axis=1)


def first_characters(offsets: np.ndarray, places: np.ndarray) -> np.ndarray:
    """(J,) int64, where in the text what is known before tokens `places` ends.

    A token may leave out the space before it, which tells of it; and it may begin within a character, which then is not
    known yet. `offsets` (L, 2) as `stride_characters` has them.
    """
    ends = np.concatenate([[0], offsets[:, 1]])
    return np.minimum(ends, np.append(offsets[:, 0], ends[-1]))[places]


def aligned_schedule(characters: np.ndarray, token_ends: np.ndarray, window: int) -> Schedule:
    """The strides of another tokenizer (`stride_characters`) in this one's tokens.

    A stride predicts the tokens that end within it: one that its beginning falls into is its own, one that its end
    falls into is not, so that no prefix tells of what comes after it.

    Args:
        token_ends: (L,) one past the last character of each token.
        window: tokens a window has at most; where the first stride has more, its first ones are left out.
    """
    targets, ends = np.searchsorted(token_ends, characters, side="right").T
    starts = ends - window
    starts[0] = max(0, starts[0])
    return Schedule(len(token_ends), starts, targets, ends)


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
        """Windows start … start + count, the last one repeated where they run out; empty ones where there are none."""
        parts = (self.tokens, self.positions, self.labels, self.scored)
        if not len(self):
            return Windows(*(np.zeros((count, part.shape[1]), part.dtype) for part in parts))
        rows = np.minimum(np.arange(start, start + count), len(self) - 1)
        return Windows(*(part[rows] for part in parts))


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
        starts: (n,) first text token of the window; below 0 where a passage of so many tokens has room in front.
        first_labels: (n,) first text token whose log-probability is asked for; `num_labels` follow, up to `ends`.
        passages: tokens that overwrite the start of each window; empty for none.
        length: T. The last label itself need not be in the window: its predecessor predicts it.
        bos: a token to put in front of every window, or None.
    """
    shift = 0 if bos is None else 1
    starts = np.maximum(starts, -np.fromiter(map(len, passages), np.int64, len(passages)))
    columns = np.arange(length)[None, :]
    index = starts[:, None] + columns - shift
    inside = (index >= np.maximum(starts, 0)[:, None]) & (index < ends[:, None] - 1)
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
