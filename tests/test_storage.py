"""Tables' folders: what is refused, resumed, overwritten and left alone."""

import json
import resource
import signal

import numpy as np
import pytest

from ralm_jax.errors import RalmError, UsageError
from ralm_jax.score_table import KIND, ScoreTable, open_scores
from ralm_jax.storage import Folder


def filled(location, **flags):
    folder = Folder.create(str(location), "scores", {"a": 1}, **flags)
    array = folder.array("values", (6, 2), (4, 2), "float32", np.nan)
    array[0:4] = np.ones((4, 2), np.float32)
    return folder


def test_chunks_that_are_there_stay(tmp_path):
    filled(tmp_path / "t")
    again = Folder.create(str(tmp_path / "t"), "scores", {"a": 1}, resume=True)
    values = again.array("values", (6, 2), (3, 2), "float32", np.nan)[:]
    assert values[:4].tolist() == [[1, 1]] * 4
    assert np.isnan(values[4:]).all()


def test_an_array_that_is_there_keeps_its_chunks(tmp_path):
    filled(tmp_path / "t")
    again = Folder.create(str(tmp_path / "t"), "scores", {"a": 1}, resume=True)
    assert again.array("values", (6, 2), (3, 2), "float32", np.nan).chunk == 4


def test_a_taken_folder_is_refused(tmp_path):
    filled(tmp_path / "t")
    with pytest.raises(UsageError, match="holds an earlier run's scores; add --resume to go on, or --overwrite"):
        filled(tmp_path / "t")


def test_overwriting_starts_from_nothing_and_spares_other_files(tmp_path):
    filled(tmp_path / "t")
    (tmp_path / "t" / "notes.txt").write_text("mine")
    folder = Folder.create(str(tmp_path / "t"), "scores", {"a": 2}, overwrite=True)
    assert np.isnan(folder.array("values", (6, 2), (4, 2), "float32", np.nan)[:]).all()
    assert (tmp_path / "t" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("flags", [{}, {"resume": True}, {"overwrite": True}])
def test_a_folder_of_something_else_is_never_touched(tmp_path, flags):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UsageError, match="does not hold scores of ours; choose another folder"):
        Folder.create(str(tmp_path), "scores", {}, **flags)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_table_of_another_kind_is_never_touched(tmp_path):
    filled(tmp_path / "t")
    with pytest.raises(UsageError, match="does not hold retrieval of ours"):
        Folder.create(str(tmp_path / "t"), "retrieval", {}, overwrite=True)
    with pytest.raises(UsageError, match=r"no retrieval there \(but scores\)"):
        Folder.open(str(tmp_path / "t"), "retrieval")


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "t").write_text("mine")
    with pytest.raises(UsageError, match="exists and is not a folder"):
        Folder.create(str(tmp_path / "t"), "scores", {}, overwrite=True)


def test_other_settings_are_not_resumed(tmp_path):
    filled(tmp_path / "t")
    with pytest.raises(RalmError, match=r"cannot be resumed: a: 1 there, 2 now; b: None there, 'x' now"):
        Folder.create(str(tmp_path / "t"), "scores", {"a": 2, "b": "x"}, resume=True)


def test_resuming_what_is_not_there_starts(tmp_path):
    assert filled(tmp_path / "t", resume=True).manifest["arrays"] == ["values"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"kind": "scores"}'])
def test_a_damaged_manifest(tmp_path, content):
    filled(tmp_path / "t")
    (tmp_path / "t" / "manifest.json").write_text(content)
    with pytest.raises(RalmError):
        Folder.open(str(tmp_path / "t"), "scores")


def test_a_damaged_chunk(tmp_path):
    folder = filled(tmp_path / "t")
    chunk = next(path for path in (tmp_path / "t" / "values" / "c").rglob("0") if path.is_file())
    chunk.write_bytes(b"x")
    with pytest.raises(RalmError, match="array 'values' cannot be read"):
        folder.read("values")


def test_nothing_but_numbers_in_a_manifest(tmp_path):
    with pytest.raises(ValueError, match="Out of range float"):
        Folder.create(str(tmp_path / "t"), "scores", {"a": float("nan")})


def test_the_same_code_writes_to_other_stores():
    """Buckets go through the same TensorStore calls; its in-memory store stands in for one."""
    folder = Folder.create("memory://bucket/table", "scores", {"a": 1})
    folder.array("values", (3,), (3,), "int64", -1)[:] = np.arange(3)
    assert folder.read("values").shape == (3,)


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path):
    folder = Folder.create(str(tmp_path / "t"), "scores", {"a": 1})
    array = folder.array("values", (4, 100_000), (1, 100_000), "float32", np.nan)
    array[0:1] = np.ones((1, 100_000), np.float32)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))
        with pytest.raises(RalmError, match="make room, then add --resume") as caught:
            array[1:2] = np.random.default_rng(0).random((1, 100_000), np.float32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert "\n" not in str(caught.value)
    assert folder.read("values")[0, :5].tolist() == [1] * 5


class TestScoreTable:
    @pytest.fixture
    def folder(self, tmp_path):
        return Folder.create(str(tmp_path / "t"), KIND, {"strides": 5, "k": 1, "past": 1})

    def table(self, folder):
        return ScoreTable(folder, strides=5, passages=1, past=1, stride=2, first=3, chunk=2)

    def test_written_in_any_order(self, folder):
        table = self.table(folder)
        assert table.missing() == [range(0, 2), range(2, 4), range(4, 5)]
        table.write(range(2, 4), np.full((2, 2, 3), -2, np.float32), np.full((2, 1), 7))
        assert self.table(folder).missing() == [range(0, 2), range(4, 5)]
        assert table.first_window_missing()
        with pytest.raises(RalmError, match="not complete, 3 of 5 strides are missing"):
            open_scores(folder.location)
        for chunk in table.missing():
            table.write(chunk, np.full((len(chunk), 2, 3), -3, np.float32), np.full((len(chunk), 1), -1))
        table.write_first_window(np.full(3, -1, np.float32))
        folder.about["tokens"] = 9
        folder.write_manifest()
        scores = open_scores(folder.location)
        assert scores.target[:, 0, 0].tolist() == [-3, -3, -2, -2, -3]
        assert scores.past.shape == (5, 2, 1)
        assert scores.num_passages.tolist() == [0, 0, 1, 1, 0]

    def test_not_there(self, tmp_path):
        with pytest.raises(UsageError, match="no scores there"):
            open_scores(str(tmp_path / "none"))

    def test_folder_manifest_is_plain_json(self, folder, tmp_path):
        self.table(folder)
        manifest = json.loads((tmp_path / "t" / "manifest.json").read_text())
        assert manifest["kind"] == "scores"
        assert manifest["arrays"] == ["first_window", "log_probs", "passages"]
