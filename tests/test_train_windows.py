"""Documents cut into pieces, and pieces packed into windows."""

import gzip
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ralm_jax.errors import RalmError, UsageError
from tests import tiny
from train.windows import Piece, cut, make_windows, pack, read_documents, split

LENGTHS = (150, 3, 64, 1, 70, 129)


def documents(lengths=LENGTHS):
    return [tiny.text(length, seed) for seed, length in enumerate(lengths)]


def pieces(*, bos, length=64, lengths=LENGTHS):
    return cut(documents(lengths), tiny.tokenizer(bos=bos), length)


def numbered(sizes):
    """Pieces of such sizes, whose labels are all different."""
    ends = np.cumsum(sizes)
    return [
        Piece(np.arange(end - size, end + 1, dtype=np.int32), np.ones(size, bool))
        for size, end in zip(sizes, ends, strict=True)
    ]


class TestPieces:
    @pytest.mark.parametrize("bos", [True, False])
    def test_every_token_is_predicted_once_from_its_own_document(self, bos):
        tokenizer, expected = tiny.tokenizer(bos=bos), []
        for text in documents():
            tokens = [*tokenizer.encode(text), *tokenizer.suffix]
            for begin in range(0 if bos else 1, len(tokens), 64):
                labels = tokens[begin : begin + 64]
                expected.append([tokenizer.bos if bos else tokens[begin - 1], *labels])
        made = pieces(bos=bos)
        assert [[*piece.tokens] for piece in made] == expected
        assert all(piece.learned.all() and len(piece.tokens) == len(piece.learned) + 1 for piece in made)

    def test_nothing_to_predict(self):
        with pytest.raises(RalmError, match="nothing to predict"):
            pieces(bos=False, lengths=[1, 1])

    def test_the_last_are_held_out(self):
        made = pieces(bos=True, length=16)
        training, held = split(made, 0.25)
        assert len(training) == round(0.75 * len(made))
        assert [*training, *held] == made
        assert len(split(made, 0.0)[1]) == 0
        with pytest.raises(RalmError, match="leave 1 to train on and 0 held out"):
            split(pieces(bos=True, lengths=[10]), 0.1)

    def test_documents_of_files(self, tmp_path):
        (tmp_path / "book.txt").write_text("ba\nbe")
        with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
            file.write('{"text": "da"}\n"de"\n')
        pq.write_table(pa.table({"text": ["fa", "fe"], "other": [1, 2]}), tmp_path / "rows.parquet")
        data = [str(tmp_path / name) for name in ("rows.jsonl.gz", "rows.parquet")]
        assert [*read_documents([str(tmp_path / "book.txt")], data)] == ["ba\nbe", "da", "de", "fa", "fe"]
        with pytest.raises(UsageError, match=r"book.txt: --data takes .jsonl and .parquet"):
            [*read_documents([], [str(tmp_path / "book.txt")])]
        (tmp_path / "bad.jsonl").write_text('{"text": "da"}\n{"texts": "de"}\n')
        with pytest.raises(RalmError, match=r"bad.jsonl:2: expected a string or an object"):
            [*read_documents([], [str(tmp_path / "bad.jsonl")])]


def best_fit(sizes, length):
    """As `pack`, by trying every window."""
    windows, rooms = [], []
    for number in np.argsort([-size for size in sizes], kind="stable"):
        fitting = [window for window, room in enumerate(rooms) if room >= sizes[number]]
        if not fitting:
            windows.append([])
            rooms.append(length)
            fitting = [len(windows) - 1]
        best = min(fitting, key=lambda window: rooms[window])
        windows[best].append(number)
        rooms[best] -= sizes[number]
    return rooms


class TestPacking:
    @given(st.lists(st.integers(1, 20), max_size=40), st.integers(20, 32))
    def test_each_piece_goes_where_it_leaves_the_least_room(self, sizes, length):
        rows = pack(sizes, length)
        assert sorted(number for row in rows for number in row) == [*range(len(sizes))]
        rooms = [length - sum(sizes[number] for number in row) for row in rows]
        assert sorted(rooms) == sorted(best_fit(sizes, length))
        assert min(rooms, default=0) >= 0
        assert all(left[0] < right[0] for left, right in pairwise(rows))
        assert all(row == sorted(row) for row in rows)

    @given(st.lists(st.integers(1, 12), min_size=1, max_size=20))
    def test_every_label_is_in_one_window_with_the_token_before_it(self, sizes):
        made = numbered(sizes)
        (windows,) = make_windows([made], 12, together=True)
        labels = []
        for row in range(len(windows)):
            batch = windows(row)
            real = batch.weight > 0
            labels += [*batch.labels[real]]
            np.testing.assert_array_equal(batch.labels[real], batch.tokens[real] + 1)
            assert not any(part is not None and part[~real].any() for part in batch)
            if windows.marked:
                assert [*np.unique(batch.documents[real])] == [*range(1, len(windows.rows[row]) + 1)]
                for number, piece in enumerate(windows.rows[row], 1):
                    np.testing.assert_array_equal(batch.tokens[batch.documents == number], made[piece].tokens[:-1])
        assert sorted(labels) == [*range(1, sum(sizes) + 1)]
        assert windows.padding == pytest.approx(1 - sum(sizes) / (12 * len(windows)))

    def test_nothing_that_has_no_company_is_marked(self):
        for sizes, together in (([12, 7, 6], True), ([3, 4], False)):
            (windows,) = make_windows([numbered(sizes)], 12, together=together)
            assert windows.rows == [[row] for row in range(len(sizes))]
            assert windows(0).documents is None

    def test_one_shared_window_marks_all_sets(self):
        """The batches of several sources are of the same kind; but no window has pieces of two."""
        first, second = make_windows([numbered([12, 3]), numbered([4, 2])], 12, together=True)
        assert (first.rows, second.rows) == ([[0], [1]], [[0, 1]])
        assert [*first(1).documents] == [1] * 3 + [0] * 9
        assert [*second(0).documents] == [1] * 4 + [2] * 2 + [0] * 6
        assert [str(part.dtype) for part in second(0)] == ["int32", "int32", "float32", "int32"]

    def test_windows_without_company_are_as_they_were(self):
        made = pieces(bos=True)
        (windows,) = make_windows([made], 64, together=False)
        assert len(windows) == len(made)
        for row, (tokens, _) in enumerate(made):
            padding = [0] * (65 - len(tokens))
            read, labels, weight, _ = windows(row)
            assert ([*read], [*labels]) == ([*tokens[:-1], *padding], [*tokens[1:], *padding])
            assert [*weight] == [1] * (len(tokens) - 1) + padding

    def test_windows_are_known_by_their_fingerprint(self):
        def made(sizes, length=12, together=True):
            (windows,) = make_windows([numbered(sizes)], length, together=together)
            return windows.fingerprint

        assert made([5, 6, 3]) == made([5, 6, 3])
        others = {made([5, 6, 3]), made([5, 6, 3], together=False), made([5, 3, 6]), made([5, 6, 3], 14)}
        assert len(others) == 4

    def test_a_few_are_spread_evenly(self):
        (windows,) = make_windows([numbered([12] * 7)], 12, together=True)
        assert windows.spread(3).rows == [[0], [3], [6]]
        assert windows.spread(9).rows == windows.rows
