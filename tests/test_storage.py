"""Tables' folders: what is refused, resumed, overwritten and left alone."""

import json
import subprocess
import sys
import uuid

import numpy as np
import pytest

from ralm_jax.errors import RalmError, UsageError
from ralm_jax.score_table import KIND, ScoreTable, open_scores
from ralm_jax.storage import Folder


def filled(location, if_exists="refuse"):
    folder = Folder.create(str(location), "scores", {"a": 1}, if_exists)
    array = folder.array("values", (6, 2), (4, 2), "float32", np.nan)
    array[0:4] = np.ones((4, 2), np.float32)
    return folder


def test_chunks_that_are_there_stay(tmp_path):
    filled(tmp_path / "t")
    again = Folder.create(str(tmp_path / "t"), "scores", {"a": 1}, "resume")
    values = again.array("values", (6, 2), (3, 2), "float32", np.nan)[:]
    assert values[:4].tolist() == [[1, 1]] * 4
    assert np.isnan(values[4:]).all()


def test_an_array_that_is_there_keeps_its_chunks(tmp_path):
    filled(tmp_path / "t")
    again = Folder.create(str(tmp_path / "t"), "scores", {"a": 1}, "resume")
    assert again.array("values", (6, 2), (3, 2), "float32", np.nan).chunk == 4


def test_a_taken_folder_is_refused(tmp_path):
    filled(tmp_path / "t")
    with pytest.raises(UsageError, match="holds an earlier run's scores; add --resume to go on, or --overwrite"):
        filled(tmp_path / "t")


def test_overwriting_starts_from_nothing_and_spares_other_files(tmp_path):
    filled(tmp_path / "t")
    (tmp_path / "t" / "notes.txt").write_text("mine")
    folder = Folder.create(str(tmp_path / "t"), "scores", {"a": 2}, "overwrite")
    assert np.isnan(folder.array("values", (6, 2), (4, 2), "float32", np.nan)[:]).all()
    assert (tmp_path / "t" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("if_exists", ["refuse", "resume", "overwrite"])
def test_a_folder_of_something_else_is_never_touched(tmp_path, if_exists):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UsageError, match="does not hold scores of ours; choose another folder"):
        Folder.create(str(tmp_path), "scores", {}, if_exists)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_table_of_another_kind_is_never_touched(tmp_path):
    filled(tmp_path / "t")
    with pytest.raises(UsageError, match="does not hold retrieval of ours"):
        Folder.create(str(tmp_path / "t"), "retrieval", {}, "overwrite")
    with pytest.raises(UsageError, match=r"no retrieval there \(but scores\)"):
        Folder.open(str(tmp_path / "t"), "retrieval")


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "t").write_text("mine")
    with pytest.raises(UsageError, match="exists and is not a folder"):
        Folder.create(str(tmp_path / "t"), "scores", {}, "overwrite")


def test_settings_within_settings_are_named_one_by_one(tmp_path):
    Folder.create(str(tmp_path / "t"), "scores", {"config": {"a": 1, "b": {"c": 2, "d": 3}}, "e": None})
    with pytest.raises(RalmError, match=r"cannot be resumed: config\.b\.c: 2 there, 9 now; e\.f: None there, 4 now$"):
        Folder.create(
            str(tmp_path / "t"), "scores", {"config": {"a": 1, "b": {"c": 9, "d": 3}}, "e": {"f": 4}}, "resume"
        )


def test_other_settings_are_not_resumed(tmp_path):
    filled(tmp_path / "t")
    with pytest.raises(RalmError, match=r"cannot be resumed: a: 1 there, 2 now; b: None there, 'x' now"):
        Folder.create(str(tmp_path / "t"), "scores", {"a": 2, "b": "x"}, "resume")


def test_resuming_what_is_not_there_starts(tmp_path):
    assert filled(tmp_path / "t", "resume").manifest["arrays"] == ["values"]


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
    for read in (lambda: folder.read("values"), lambda: folder.array("values", (6, 2), (4, 2), "float32", np.nan)[:]):
        with pytest.raises(RalmError, match="array 'values' is damaged"):
            read()


def test_nothing_but_numbers_in_a_manifest(tmp_path):
    with pytest.raises(ValueError, match="Out of range float"):
        Folder.create(str(tmp_path / "t"), "scores", {"a": float("nan")})


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 17])
def test_one_format_whatever_the_size(tmp_path, rows):
    Folder.create(str(tmp_path / "t"), "scores", {}).array("values", (rows,), (4,), "float32", 0)
    codecs = json.loads((tmp_path / "t" / "values" / "zarr.json").read_text())["codecs"]
    assert [codec["name"] for codec in codecs] == ["bytes"]


def test_the_same_code_writes_to_other_stores():
    """Buckets go through the same TensorStore calls; its in-memory store stands in for one."""
    location = f"memory://bucket/{uuid.uuid4()}"
    folder = Folder.create(location, "scores", {"a": 1})
    folder.array("values", (3,), (3,), "int64", -1)[:] = np.arange(3)
    assert folder.read("values").tolist() == [0, 1, 2]
    with pytest.raises(UsageError, match="holds an earlier run's scores"):
        Folder.create(location, "scores", {"a": 1})


FULL_DISK = """
import resource, signal, sys
import numpy as np
from ralm_jax.errors import RalmError
from ralm_jax.storage import Folder

folder = Folder.create(sys.argv[1], "scores", {"a": 1})
array = folder.array("values", (4, 100_000), (1, 100_000), "float32", np.nan)
array[0:1] = np.ones((1, 100_000), np.float32)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, 1 << 12))
try:
    array[1:2] = np.random.default_rng(0).random((1, 100_000), np.float32)
except RalmError as error:
    print(error)
"""


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path):
    """A limit on the size of files stands in for the disk."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "t")], capture_output=True, text=True, check=True
    )
    assert done.stdout.count("\n") == 1
    assert "cannot be written" in done.stdout
    assert done.stdout.endswith("finished chunks are kept: make room and go on with --resume\n")
    assert Folder.open(str(tmp_path / "t"), "scores").read("values")[0, :5].tolist() == [1] * 5


class TestScoreTable:
    @pytest.fixture
    def folder(self, tmp_path):
        return Folder.create(str(tmp_path / "t"), KIND, {"past": 1})

    def table(self, folder):
        passages = np.array([[-1], [4], [7], [7], [-1]])
        return ScoreTable(
            folder,
            passages=passages,
            retrieval_scores=np.ones((5, 1), np.float32),
            token_ends=np.arange(9),
            begins=np.arange(5),
            past=1,
            stride=2,
            first=3,
            chunk=2,
        )

    def test_written_in_any_order(self, folder):
        table = self.table(folder)
        assert table.missing() == [range(0, 2), range(2, 4), range(4, 5)]
        table.write(range(2, 4), np.full((2, 2, 3), -2, np.float32))
        assert self.table(folder).missing() == [range(0, 2), range(4, 5)]
        assert table.first_window_missing()
        with pytest.raises(RalmError, match="not complete, 3 of 5 strides are missing"):
            open_scores(folder.location)
        for chunk in table.missing():
            table.write(chunk, np.full((len(chunk), 2, 3), -3, np.float32))
        table.write_first_window(np.full(3, -1, np.float32))
        folder.about["tokens"] = 9
        folder.write_manifest()
        scores = open_scores(folder.location)
        assert scores.target[:, 0, 0].tolist() == [-3, -3, -2, -2, -3]
        assert scores.past.shape == (5, 2, 1)
        assert scores.num_passages.tolist() == [0, 1, 1, 1, 0]
        assert scores.token_ends.tolist() == list(range(9))

    @pytest.mark.parametrize(
        "array", ["passages", "retrieval_scores", "token_ends", "begins", "log_probs", "first_window"]
    )
    def test_a_lost_chunk_is_missed(self, tmp_path, folder, array):
        table = self.table(folder)
        for chunk in table.missing():
            table.write(chunk, np.full((len(chunk), 2, 3), -3, np.float32))
        table.write_first_window(np.full(3, -1, np.float32))
        folder.about["tokens"] = 9
        folder.write_manifest()
        open_scores(folder.location)
        next(path for path in sorted((tmp_path / "t" / array / "c").rglob("*")) if path.is_file()).unlink()
        with pytest.raises(RalmError, match="not complete"):
            open_scores(folder.location)

    def test_nothing_but_a_first_window(self, tmp_path):
        folder = Folder.create(str(tmp_path / "t"), KIND, {"past": 1})
        table = ScoreTable(
            folder, passages=np.zeros((0, 0), np.int64), retrieval_scores=np.zeros((0, 0), np.float32),
            token_ends=np.arange(4), begins=np.zeros(0, np.int64), past=1, stride=2, first=3, chunk=2,
        )  # fmt: skip
        assert table.missing() == []
        table.write_first_window(np.full(3, -1, np.float32))
        folder.about["tokens"] = 4
        folder.write_manifest()
        assert open_scores(folder.location).target.shape == (0, 1, 2)

    def test_not_there_or_not_begun(self, tmp_path, folder):
        with pytest.raises(UsageError, match="no scores there"):
            open_scores(str(tmp_path / "none"))
        with pytest.raises(RalmError, match="nothing is scored yet"):
            open_scores(folder.location)
