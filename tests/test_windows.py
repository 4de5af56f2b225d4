"""Strides and windows against the protocol written out, one window at a time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ralm_jax.errors import UsageError
from ralm_jax.settings import QuerySettings, StrideSettings, WindowSettings
from ralm_jax.windows import Schedule, aligned_schedule, bucket_length, build_windows, make_schedule, stride_characters

BOS = 999


@st.composite
def cases(draw):
    window = draw(st.integers(2, 24))
    stride = draw(st.integers(1, window - 1))
    return draw(st.integers(2, 90)), window, stride


@given(cases())
@settings(max_examples=200)
def test_schedule_is_the_released_codes_loop(case):
    length, window, stride = case
    expected, previous = [], 0
    for start in range(0, length, stride):  # in_context_ralm.md, a and c
        end = min(start + window, length)
        expected.append((start, previous, end))
        previous = end
        if end == length:
            break
    schedule = make_schedule(length, StrideSettings(window, stride))
    assert list(zip(schedule.starts, schedule.targets, schedule.ends, strict=True)) == expected


@given(cases())
@settings(max_examples=200)
def test_every_token_but_the_first_is_scored_once(case):
    length, window, stride = case
    schedule = make_schedule(length, StrideSettings(window, stride))
    scored = np.zeros(length, int)
    for j, (target, end) in enumerate(zip(schedule.targets, schedule.ends, strict=True)):
        scored[max(target, 1) if j == 0 else target : end] += 1
    assert scored.tolist() == [0] + [1] * (length - 1)


def test_strides_of_another_tokenizer():
    """A token that a beginning falls into is predicted; one that an end falls into is left to the next stride."""
    characters = np.array([[0, 6], [6, 8], [8, 9], [9, 12]])
    #          ab|cd|efg|h|ijk|l: 'efg' has the boundary at 6 inside, 'ijk' those at 9 and 8 inside or at its start
    token_ends = np.array([2, 4, 7, 8, 11, 12])
    schedule = aligned_schedule(characters, token_ends, 3)
    assert list(zip(schedule.starts, schedule.targets, schedule.ends, strict=True)) == [
        (0, 0, 2), (1, 2, 4), (1, 4, 4), (3, 4, 6),
    ]  # fmt: skip


@given(cases())
def test_a_tokenizers_own_strides_are_found_again(case):
    length, window, stride = case
    ends = np.cumsum(1 + np.arange(length) % 3)
    offsets = np.stack([np.append(0, ends[:-1]), ends], axis=1)
    schedule = make_schedule(length, StrideSettings(window, stride))
    again = aligned_schedule(stride_characters(schedule, offsets), ends, window)
    np.testing.assert_array_equal(again.targets, schedule.targets)
    np.testing.assert_array_equal(again.ends, schedule.ends)
    np.testing.assert_array_equal(again.starts[1:], schedule.ends[1:] - window)


def test_a_stride_that_begins_inside_a_character_begins_in_front_of_it():
    offsets = np.array([[0, 1], [1, 2], [2, 3], [2, 3], [2, 3], [3, 5]])  # three bytes of the third character
    schedule = Schedule(6, np.zeros(4, np.int64), np.array([0, 2, 3, 5]), np.array([2, 3, 5, 6]))
    assert stride_characters(schedule, offsets).tolist() == [[0, 2], [2, 2], [2, 3], [3, 5]]


def test_a_passage_has_room_in_front_of_a_short_text():
    """Where the window is not full, the passage pushes the text back and overwrites nothing."""
    windows = build_windows(
        np.arange(10, 30), starts=np.array([-5, -5, -1]), first_labels=np.array([3, 3, 3]), ends=np.array([5, 5, 9]),
        passages=[np.array([1, 2]), np.zeros(0, np.int32), np.array([1, 2, 3])], num_labels=2, length=10, bos=None,
    )  # fmt: skip
    assert windows.tokens.tolist() == [
        [1, 2, 10, 11, 12, 13, 0, 0, 0, 0],
        [10, 11, 12, 13, 0, 0, 0, 0, 0, 0],
        [1, 2, 3, 12, 13, 14, 15, 16, 17, 0],
    ]
    assert windows.positions.tolist() == [[4, 5], [2, 3], [3, 4]]


def test_limit():
    whole, some = (make_schedule(100, StrideSettings(20, 4, limit)) for limit in (None, 3))
    assert len(some) == 3
    np.testing.assert_array_equal(some.ends, whole.ends[:3])
    assert len(make_schedule(100, StrideSettings(20, 4, 1000))) == len(whole)


@given(cases(), st.booleans(), st.data())
@settings(max_examples=300)
def test_windows_show_each_label_what_the_protocol_says(case, with_bos, data):
    """In front of a label: BOS if any, the passage over the window's first tokens, the rest of the prefix."""
    length, window, stride = case
    past = data.draw(st.integers(0, max(0, window - stride - 1)))
    if window - stride - past < 1:
        return
    tokens = np.arange(100, 100 + length)
    schedule = make_schedule(length, StrideSettings(window, stride))
    if len(schedule) < 2:
        return
    which = np.arange(1, len(schedule))
    passages = [np.arange(500, 500 + data.draw(st.integers(0, window - stride - past))) for _ in which]
    windows = build_windows(
        tokens,
        starts=schedule.starts[which],
        first_labels=schedule.targets[which] - past,
        ends=schedule.ends[which],
        passages=passages,
        num_labels=past + stride,
        length=window,
        bos=BOS if with_bos else None,
    )
    for row, j in enumerate(which):
        start, target, end = (int(x[j]) for x in (schedule.starts, schedule.targets, schedule.ends))
        for column in range(past + stride):
            label = target - past + column
            assert windows.scored[row, column] == (label < end)
            if label >= end:
                continue
            prefix = list(tokens[start:label])
            prefix[: len(passages[row])] = passages[row]
            seen = windows.tokens[row, : windows.positions[row, column] + 1].tolist()
            assert seen == ([BOS] if with_bos else []) + prefix
            assert windows.labels[row, column] == tokens[label]


@pytest.mark.parametrize("bos", [None, BOS])
def test_the_first_window_scores_all_but_its_first_token(bos):
    tokens = np.arange(10, 17)
    windows = build_windows(
        tokens, starts=np.array([0]), first_labels=np.array([1]), ends=np.array([7]),
        passages=[np.zeros(0, int)], num_labels=6, length=8, bos=bos,
    )  # fmt: skip
    assert windows.labels[0].tolist() == [11, 12, 13, 14, 15, 16]
    assert windows.scored.all()
    for column, position in enumerate(windows.positions[0]):
        front = [] if bos is None else [bos]
        assert windows.tokens[0, : position + 1].tolist() == front + tokens[: column + 1].tolist()


def test_a_token_that_looks_like_padding_is_scored():
    windows = build_windows(
        np.zeros(6, int), starts=np.array([0]), first_labels=np.array([1]), ends=np.array([6]),
        passages=[np.zeros(0, int)], num_labels=5, length=8, bos=None,
    )  # fmt: skip
    assert windows.scored.sum() == 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StrideSettings(window=0), "window must be at least 1, not 0"),
        (lambda: StrideSettings(stride=0), "stride must be at least 1, not 0"),
        (lambda: StrideSettings(limit_strides=0), "limit strides must be at least 1, not 0"),
        (lambda: StrideSettings(stride=64, window=64), "would leave tokens unscored"),
        (lambda: StrideSettings(stride=80, window=64), "would leave tokens unscored"),
        (lambda: QuerySettings(k=0), "k must be at least 1, not 0"),
        (lambda: QuerySettings(query_length=-1), "query length must be at least 1, not -1"),
        (lambda: WindowSettings(past=-1), "past must be at least 0, not -1"),
        (lambda: WindowSettings(passage_tokens=0), "passage tokens must be at least 1, not 0"),
        (
            lambda: WindowSettings(past=60).passage_limit(StrideSettings(window=64)),
            "a window of 64 has no room beside stride 4 and past 60",
        ),
    ],
)
def test_sizes_that_do_not_fit(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_a_passage_leaves_target_and_past_in_the_window():
    assert WindowSettings().passage_limit(StrideSettings()) == 256
    assert WindowSettings().passage_limit(StrideSettings(window=256)) == 256 - 4 - 32


def test_presets_decide_what_is_not_said():
    assert [WindowSettings().bos_of(preset) for preset in ("default", "ai21")] == ["every-window", "passage"]
    assert [QuerySettings().exclusion_of(preset) for preset in ("default", "ai21")] == ["inside", "after"]
    assert WindowSettings(bos="every-window").bos_of("ai21") == "every-window"
    assert QuerySettings(exclusion="inside").exclusion_of("ai21") == "inside"


def test_buckets():
    assert [bucket_length(n, 1024) for n in (2, 128, 129, 1000, 1024)] == [128, 128, 256, 1024, 1024]
    assert bucket_length(50, 64) == 64
