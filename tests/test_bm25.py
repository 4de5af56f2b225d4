"""The embedded BM25: Lucene's numbers, its edges, and what the search promises."""

import errno
import gzip
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import bm25s
import numpy as np
import pytest

from ralm_jax.errors import RalmError, UsageError
from retrieval.analyzer import analyze
from retrieval.bm25 import BM25Index, build_index
from retrieval.bm25_build import make_part, new_array, quantised_length, write_parts
from retrieval.bm25_search import Queries, can_slide, search_postings
from retrieval.corpus import Passage, read_corpus
from retrieval.retriever import look_up
from tests import tiny

ZIPF = 1 / np.arange(3, 3 + len(tiny.WORDS)) / sum(1 / np.arange(3, 3 + len(tiny.WORDS)))


def index(tmp_path, *texts, name="index", **options):
    passages = [
        Passage(str(i), *text) if isinstance(text, tuple) else Passage(str(i), "", text) for i, text in enumerate(texts)
    ]
    return build_index(passages, str(tmp_path / name), progress=False, **options)


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def hits(built, query, k=10, **options):
    found = built.search([query], k, **options)
    return found.rows[0][found.rows[0] >= 0].tolist()


def killed(*_):
    os._exit(1)


def slow(*_):
    os.write(1, f"{os.getpid()}\n".encode())  # in one piece
    time.sleep(60)


def reference(texts, query, k1=0.9, b=0.4):
    """BM25 written out: the formula of the module's first lines, in float64."""
    documents = [analyze(text) for text in texts]
    lengths = [quantised_length(len(d)) for d in documents]
    count = sum(1 for d in documents if d)
    average = sum(map(len, documents)) / max(1, count)
    scores = np.zeros(len(texts))
    for term in analyze(query):
        n = sum(term in d for d in documents)
        idf = math.log(1 + (count - n + 0.5) / (n + 0.5))
        for i, document in enumerate(documents):
            tf = document.count(term)
            scores[i] += idf * tf / (tf + k1 * (1 - b + b * lengths[i] / average)) if tf else 0
    return scores


def test_scores_are_the_formula(tmp_path):
    texts = [row["text"] for row in tiny.passages(50)] + ["", "ba " * 130, "the of"]
    built = index(tmp_path, *texts)
    for seed in range(20):
        query = tiny.text(9, seed)
        expected = reference(texts, query)
        found = built.search([query], len(texts))
        rows = found.rows[0][found.rows[0] >= 0]
        assert set(rows) == set(np.flatnonzero(expected > 0))
        np.testing.assert_allclose(found.scores[0][: len(rows)], expected[rows], rtol=1e-5)


def test_lengths_are_lucenes():
    known = {0: 0, 1: 1, 23: 23, 39: 39, 40: 40, 41: 40, 57: 56, 101: 96, 150: 144, 1000: 984}
    assert {n: quantised_length(n) for n in known} == known
    values = [quantised_length(n) for n in range(100_000)]
    assert values == sorted(values)
    assert len(set(values[:2000])) < 100


def test_lengths_can_be_exact(tmp_path):
    texts = ["a " + "filler " * 40, "a " + "filler " * 41]
    coarse, exact = index(tmp_path, *texts), index(tmp_path, *texts, name="exact", quantise_lengths=False)
    assert coarse.search(["filler"], 2).scores[0][0] != exact.search(["filler"], 2).scores[0][0]
    assert coarse.fingerprint != exact.fingerprint


class TestEdges:
    def test_k_larger_than_the_corpus(self, tmp_path):
        found = index(tmp_path, "red fish", "blue fish").search(["fish"], 16)
        assert found.rows.tolist() == [[0, 1] + [-1] * 14]
        assert (found.scores[0][2:] == 0).all()

    @pytest.mark.parametrize("k", [10**14, 10**18])
    def test_k_beyond_memory(self, tmp_path, k):
        built = index(tmp_path, "red fish", "blue fish")
        assert len(look_up(built, ["fish"], k)[0]["hits"]) == 2
        with pytest.raises(UsageError, match=r"k is 10*,[0,]*: so many hits do not fit into memory"):
            built.search(["fish"], k)

    def test_queries_that_analyse_to_nothing(self, tmp_path):
        found = index(tmp_path, "red fish").search(["", "the of and", "?!", "unseen"], 4)
        assert (found.rows == -1).all()

    def test_no_queries(self, tmp_path):
        assert index(tmp_path, "red fish").search([], 4).rows.shape == (0, 4)

    def test_empty_passages_keep_their_row_and_never_match(self, tmp_path):
        built = index(tmp_path, "", "red fish", "the", "blue fish")
        assert hits(built, "fish") == [1, 3]
        assert built.passages.rows([3])[0].text == "blue fish"

    def test_empty_passages_do_not_change_scores(self, tmp_path):
        with_empty = index(tmp_path, "red fish", "", "blue bird", "the")
        without = index(tmp_path, "red fish", "blue bird", name="other")
        assert with_empty.search(["fish"], 1).scores == without.search(["fish"], 1).scores

    def test_a_term_in_half_the_corpus_or_all_of_it_still_counts(self, tmp_path):
        built = index(tmp_path, "fish red", "fish blue", "bird green", "bird fish")
        assert (built.search(["fish"], 3).scores[0] > 0).all()

    def test_no_hit_scores_zero(self, tmp_path):
        built = index(tmp_path, *(row["text"] for row in tiny.passages(30)))
        found = built.search([tiny.text(5, seed) for seed in range(20)], 30)
        assert ((found.rows >= 0) == (found.scores > 0)).all()

    def test_equals_go_to_the_lower_row(self, tmp_path):
        built = index(tmp_path, *["red fish"] * 9, "fish red", "blue bird")
        assert hits(built, "fish", 4) == [0, 1, 2, 3]
        assert hits(built, "red fish", 20) == list(range(10))

    def test_the_top_k_begins_the_top_2k(self, tmp_path):
        built = index(tmp_path, *(row["text"] for row in tiny.passages(200)))
        queries = [tiny.text(12, seed) for seed in range(60)]
        short, long = built.search(queries, 8), built.search(queries, 16)
        np.testing.assert_array_equal(short.rows, long.rows[:, :8])
        np.testing.assert_array_equal(short.scores, long.scores[:, :8])

    def test_threads_and_batches_change_nothing(self, tmp_path):
        built = index(tmp_path, *(row["text"] for row in tiny.passages(200)))
        queries = [tiny.text(12, seed) for seed in range(40)]
        together = built.search(queries, 8)
        for i, query in enumerate(queries):
            np.testing.assert_array_equal(together.rows[i], built.search([query], 8).rows[0])

    def test_a_repeated_query_term_counts_again(self, tmp_path):
        built = index(tmp_path, "red fish", "blue bird")
        once, twice = built.search(["fish"], 1), built.search(["fish fish"], 1)
        assert twice.scores[0, 0] == pytest.approx(2 * once.scores[0, 0])

    def test_long_queries(self, tmp_path):
        assert hits(index(tmp_path, "red fish", "blue bird"), "fish bird " * 2000) == [0, 1]

    def test_cjk_is_searched_by_character(self, tmp_path):
        assert hits(index(tmp_path, "日本語", "中国語", "한국어"), "日本") == [0]

    def test_titles_are_indexed(self, tmp_path):
        assert hits(index(tmp_path, ("Fish", "red"), ("Bird", "blue")), "fish") == [0]

    @pytest.mark.parametrize("k", [0, -3])
    def test_k_below_one(self, tmp_path, k):
        with pytest.raises(UsageError, match="k must be at least 1"):
            index(tmp_path, "red fish").search(["fish"], k)


class TestExclusion:
    @pytest.fixture
    def built(self, tmp_path):
        return index(tmp_path, *[(f"T{i % 4}", f"fish {'x ' * i}") for i in range(40)])

    def test_inside_the_search_leaves_k(self, built):
        found = built.search(["fish"], 12, frozenset(["T0", "T1"]))
        titles = {passage.title for passage in built.passages.rows(found.rows[0])}
        assert (found.rows >= 0).all()
        assert titles == {"T2", "T3"}

    def test_the_rest_keeps_its_order(self, built):
        everything = hits(built, "fish", 40)
        kept = [row for row in everything if row % 4 != 1]
        assert hits(built, "fish", 40, excluded=frozenset(["T1"])) == kept

    def test_everything_excluded(self, built):
        assert hits(built, "fish", excluded=frozenset(["T0", "T1", "T2", "T3"])) == []


class TestFolder:
    def test_reopened(self, tmp_path):
        built = index(tmp_path, "red fish", "blue bird")
        again = BM25Index.open(built.location)
        assert isinstance(again.postings.data, np.memmap)
        assert again.fingerprint == built.fingerprint
        assert look_up(again, ["bird"], 2) == [
            {
                "query": "bird",
                "hits": [{"id": "1", "score": pytest.approx(0.36, abs=0.1), "title": "", "text": "blue bird"}],
            }
        ]

    def test_bm25s_reads_it(self, tmp_path):
        built = index(tmp_path, "red fish", "blue bird", "fish soup")
        theirs = bm25s.BM25.load(tmp_path / "index" / "bm25")
        scores = theirs.get_scores(["fish"])
        ours = built.search(["fish"], 2)
        np.testing.assert_allclose(scores[ours.rows[0]], ours.scores[0])

    def test_fingerprints_tell_corpora_apart(self, tmp_path):
        one, two = index(tmp_path, "red fish", name="a"), index(tmp_path, "red fish", name="b")
        assert one.fingerprint == two.fingerprint
        assert index(tmp_path, "red bird", name="c").fingerprint != one.fingerprint

    def test_another_analyser_is_refused(self, tmp_path):
        built = index(tmp_path, "red fish")
        manifest = tmp_path / "index" / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"analyzer_version": 1', '"analyzer_version": 0'))
        with pytest.raises(
            RalmError, match="indexed with analyser lucene-english 0, queries would use lucene-english 1"
        ):
            BM25Index.open(built.location)

    def test_a_broken_corpus_leaves_no_folder(self, tmp_path):
        (tmp_path / "c.jsonl").write_text("{")
        with pytest.raises(RalmError, match=r"c\.jsonl:1"):
            build_index(read_corpus(str(tmp_path / "c.jsonl")), str(tmp_path / "index"), progress=False)
        assert not (tmp_path / "index").exists()

    def test_a_corpus_that_breaks_half_way_is_not_taken_for_whole(self, tmp_path):
        (tmp_path / "c.jsonl").write_text('{"_id": "1", "text": "a fish"}\n{')
        with pytest.raises(RalmError, match=r"c\.jsonl:2"):
            build_index(read_corpus(str(tmp_path / "c.jsonl")), str(tmp_path / "index"), progress=False)
        with pytest.raises(RalmError, match="the index was not finished; repeat the command with --resume"):
            BM25Index.open(str(tmp_path / "index"))
        assert index(tmp_path, "red fish", if_exists="overwrite").about["passages"] == 1

    def test_no_passages(self, tmp_path):
        with pytest.raises(RalmError, match="the corpus has no passages"):
            index(tmp_path)

    def test_a_taken_folder(self, tmp_path):
        index(tmp_path, "red fish")
        with pytest.raises(UsageError, match=r"holds an earlier run's index; add --resume to go on, or --overwrite$"):
            index(tmp_path, "blue bird")

    def test_parts_make_the_same_bytes(self, tmp_path, monkeypatch):
        texts = [" ".join(np.random.default_rng(i).choice(tiny.WORDS, i % 9)) for i in range(50)]
        whole = index(tmp_path, *texts, name="whole")
        monkeypatch.setattr("retrieval.bm25_build.PART", 7)
        for workers in (1, 2):
            monkeypatch.setattr("retrieval.bm25.numba.get_num_threads", lambda workers=workers: workers)
            parts = index(tmp_path, *texts, name=f"by {workers}")
            assert files(tmp_path / "whole") == files(Path(parts.location))
        assert whole.about["terms"] > 50

    def test_parts_of_long_passages_have_fewer(self, tmp_path, monkeypatch):
        texts = ["ba be", "ba", ("日本", "ba"), "ba " * 30, "be", "", "bi bo", "bu"]  # 5, 2, 9, 90, 2, 0, 5, 2 bytes
        whole = index(tmp_path, *texts, name="whole")
        monkeypatch.setattr("retrieval.bm25_build.PART", 3)
        monkeypatch.setattr("retrieval.bm25_build.PART_BYTES", 10)
        made = []
        monkeypatch.setattr("retrieval.bm25.write_parts", lambda _, parts, *rest: made.extend(parts.values()) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            index(tmp_path, *texts)
        assert [(part.start, part.stop) for part in made] == [(0, 2), (2, 3), (3, 4), (4, 7), (7, 8)]
        monkeypatch.setattr("retrieval.bm25.write_parts", write_parts)
        monkeypatch.setattr("retrieval.bm25.numba.get_num_threads", lambda: 1)
        assert files(tmp_path / "whole") == files(Path(index(tmp_path, *texts, if_exists="resume").location))
        assert whole.about["terms"] == 6

    def test_processes_that_make_parts_do_without_jax(self):
        loaded = "import sys, retrieval.bm25_build; print(sorted({'jax', 'numba', 'bm25s'} & set(sys.modules)))"
        assert subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True).stdout == "[]\n"

    def test_a_single_part_needs_no_process(self, tmp_path, monkeypatch):
        monkeypatch.setattr(
            "retrieval.bm25_build.ProcessPoolExecutor", lambda *_: pytest.fail("a process for one part")
        )
        monkeypatch.setattr("retrieval.bm25.numba.get_num_threads", lambda: 2)
        assert hits(index(tmp_path, "red fish", "blue bird"), "bird") == [1]

    def test_a_process_that_was_killed(self, tmp_path, monkeypatch):
        monkeypatch.setattr("retrieval.bm25_build.PART", 10)
        monkeypatch.setattr("retrieval.bm25.numba.get_num_threads", lambda: 2)
        monkeypatch.setattr("retrieval.bm25_build.make_part", killed)
        with pytest.raises(RalmError, match=r"was killed \(free some memory, and go on with --resume\)"):
            index(tmp_path, *["red fish"] * 30)
        monkeypatch.undo()
        assert hits(index(tmp_path, *["red fish"] * 30, if_exists="resume"), "red", 3) == [0, 1, 2]

    def test_a_script_that_its_workers_would_run_again(self, tmp_path):
        (tmp_path / "build.py").write_text(
            "from retrieval import bm25, bm25_build; from retrieval.corpus import Passage\n"
            "bm25_build.PART, bm25.numba.get_num_threads = 1, lambda: 2\n"
            f"bm25.build_index([Passage('', '', 'a b')] * 2, {str(tmp_path / 'i')!r}, if_exists='overwrite')"
        )
        ran = subprocess.run(
            [sys.executable, tmp_path / "build.py"],
            env={**os.environ, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
        )
        guard = 'needs `if __name__ == "__main__":` around what it does'
        assert (
            f"UsageError: a script that builds an index is imported by the processes that help it, and {guard}\n"
            in (ran.stderr)
        )
        assert ran.stderr.endswith(f"or could not start (a script that builds an index {guard})\n")
        assert "corpus" in json.loads((tmp_path / "i/manifest.json").read_text())["about"]  # the parent's, whole

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
    @pytest.mark.slow
    def test_no_process_outlives_a_build(self, tmp_path, number):
        """Ctrl-C and a kill; what one types at a terminal goes to the workers as well."""
        code = (
            "from retrieval import bm25, bm25_build; from tests.test_bm25 import Passage, slow\n"
            "bm25_build.make_part, bm25_build.PART = slow, 1\n"
            "bm25.numba.get_num_threads = lambda: 2\n"
            f"bm25.build_index([Passage('', '', 'a b')] * 9, {str(tmp_path / 'i')!r}, progress=False)"
        )
        with subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as started:
            workers = {int(started.stdout.readline()) for _ in range(2)}
            if number == signal.SIGINT:
                os.killpg(started.pid, number)
            else:
                started.kill()
            errors = started.communicate(timeout=30)[1]  # ends when nobody has the pipe
        assert len(workers) == 2
        assert errors.count("Traceback") == (number == signal.SIGINT)  # the one of this script

    def test_killed_and_resumed(self, tmp_path, monkeypatch):
        """Finished parts are not analysed again, and the index is the same to the byte."""
        texts = [f"ba{i} fish" for i in range(50)]
        index(tmp_path, *texts, name="whole")
        monkeypatch.setattr("retrieval.bm25_build.PART", 10)
        monkeypatch.setattr("retrieval.bm25_build.WORKERS", 1)
        seen = []

        def interrupted(source, path, rows):
            seen.append(rows.start)
            if len(seen) == 4:
                raise KeyboardInterrupt
            return make_part(source, path, rows)

        monkeypatch.setattr("retrieval.bm25_build.make_part", interrupted)
        with pytest.raises(KeyboardInterrupt):
            index(tmp_path, *texts)
        with pytest.raises(RalmError, match="not finished; repeat the command with --resume"):
            BM25Index.open(str(tmp_path / "index"))
        with pytest.raises(RalmError, match="made from another corpus"):
            index(tmp_path, *texts[1:], if_exists="resume")
        index(tmp_path, *texts, if_exists="resume")
        assert seen == [0, 10, 20, 30, 30, 40]
        assert files(tmp_path / "index") == files(tmp_path / "whole")
        index(tmp_path, *texts, if_exists="resume")
        assert len(seen) == 6

    def test_parts_of_another_run_are_not_taken(self, tmp_path, monkeypatch):
        monkeypatch.setattr("retrieval.bm25.merge_parts", lambda *_: exec("raise KeyboardInterrupt"))
        with pytest.raises(KeyboardInterrupt):
            index(tmp_path, "red fish")
        monkeypatch.undo()
        assert index(tmp_path, "blue bird", if_exists="overwrite").search(["bird"], 1).rows.tolist() == [[0]]

    def test_parts_of_a_corpus_that_nobody_wrote_down_are_not_taken(self, tmp_path, monkeypatch):
        monkeypatch.setattr("retrieval.bm25.merge_parts", lambda *_: exec("raise KeyboardInterrupt"))
        with pytest.raises(KeyboardInterrupt):
            index(tmp_path, "red fish")
        monkeypatch.undo()
        manifest = tmp_path / "index/manifest.json"
        content = json.loads(manifest.read_text())
        manifest.write_text(json.dumps(content | {"about": {}}))  # killed just after --overwrite began
        assert index(tmp_path, "blue bird", if_exists="resume").search(["bird"], 1).rows.tolist() == [[0]]

    def test_a_damaged_part(self, tmp_path, monkeypatch):
        monkeypatch.setattr("retrieval.bm25.merge_parts", lambda *_: exec("raise KeyboardInterrupt"))
        with pytest.raises(KeyboardInterrupt):
            index(tmp_path, "red fish")
        monkeypatch.undo()
        part = tmp_path / "index/parts/0-1.npz"
        part.write_bytes(part.read_bytes()[:40])
        with pytest.raises(RalmError, match=r"0-1\.npz: damaged .*; delete this part, and go on with --resume"):
            index(tmp_path, "red fish", if_exists="resume")
        part.unlink()
        index(tmp_path, "red fish", if_exists="resume")

    def test_its_size_is_said_before(self, tmp_path, monkeypatch):
        said = []
        index(tmp_path, "red fish", "red", announce=said.append)
        assert said == []
        monkeypatch.setattr("retrieval.bm25_build.WORTH_SAYING", 0)
        index(tmp_path, "red fish", "red", announce=said.append, if_exists="overwrite")
        assert said[0].endswith("2 passages, about 0.0 MB of postings, and 0.0 MB of disk while it is built")
        monkeypatch.setattr("ralm_jax.storage.shutil.disk_usage", lambda path: type("Usage", (), {"free": 20}))
        with pytest.raises(RalmError, match="are needed and the disk has"):
            index(tmp_path, "red fish", "red", if_exists="overwrite")

    def test_what_parts_already_take_is_not_asked_for_again(self, tmp_path, monkeypatch):
        monkeypatch.setattr("retrieval.bm25.merge_parts", lambda *_: exec("raise KeyboardInterrupt"))
        with pytest.raises(KeyboardInterrupt):
            index(tmp_path, *["red fish"] * 1000)
        monkeypatch.undo()
        monkeypatch.setattr("ralm_jax.storage.shutil.disk_usage", lambda path: type("Usage", (), {"free": 20_000}))
        with pytest.raises(RalmError, match=r"0\.0 MB are needed and the disk has 0\.0 MB"):  # 32,000 bytes
            index(tmp_path, *["red fish"] * 1000, name="other")
        assert hits(index(tmp_path, *["red fish"] * 1000, if_exists="resume"), "fish", 2) == [0, 1]

    def test_a_disk_that_fills_up_is_an_error(self, tmp_path, monkeypatch):
        """Not a signal: what is mapped has its disk before it is written."""
        new_array(tmp_path / "x.npy", "int32", 1 << 18)
        assert (tmp_path / "x.npy").stat().st_blocks * 512 >= 4 << 18

        def full(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("os.posix_fallocate", full)
        with pytest.raises(RalmError, match=r"index/bm25: cannot be written \(No space left on device\)"):
            index(tmp_path, "red fish", "red")
        monkeypatch.undo()
        assert hits(index(tmp_path, "red fish", "red", if_exists="resume"), "fish") == [0]

    @pytest.mark.parametrize("victim", ["bm25/data.csc.index.npy", "bm25/vocab.index.json", "passages.arrow"])
    def test_damage(self, tmp_path, victim):
        built = index(tmp_path, "red fish")
        (tmp_path / "index" / victim).write_bytes(b"x")
        with pytest.raises(RalmError, match=r"damaged|cannot be read"):
            BM25Index.open(built.location)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Passages over several blocks of bounds, many of them equal."""
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(tiny.WORDS, rng.integers(0, 12), p=ZIPF)) for _ in range(900)]
    texts = [texts[i] for i in rng.integers(0, 900, 1000)]
    return index(tmp_path_factory.mktemp("large"), *texts)


class TestSliding:
    """Neighbouring queries scored by what changes between them: the same hits to the last bit."""

    def queries(self, seed, count=300, words=16, stride=2):
        text = np.random.default_rng(seed).choice(tiny.WORDS, words + stride * count, p=ZIPF)
        return [" ".join(text[i * stride : i * stride + words]) for i in range(count)]

    def both(self, built, queries, k, excluded=frozenset()):
        wanted, hits = built._terms(queries), []
        allowed = ~built.passages.titled(excluded) if excluded else np.zeros(0, bool)
        for sliding in (False, True):
            rows, scores = np.full((len(queries), k), -1, np.int64), np.zeros((len(queries), k), np.float32)
            search_postings(built.postings, len(built.passages), wanted, allowed, rows, scores, sliding=sliding)
            hits.append((rows, scores))
        assert can_slide(wanted, *built.about["score_range"])
        return hits

    @pytest.mark.parametrize("k", [1, 3, 16, 2000])
    @pytest.mark.parametrize("seed", [1, 2])
    def test_long_runs(self, large, k, seed):
        (rows, scores), (slid, slid_scores) = self.both(large, self.queries(seed), k)
        np.testing.assert_array_equal(slid, rows)
        np.testing.assert_array_equal(slid_scores, scores)
        assert (rows[:, 0] >= 0).all()

    @pytest.mark.parametrize("tile", [70, 256])
    def test_tiles_change_nothing(self, large, monkeypatch, tile):
        queries = self.queries(4, count=50)
        whole = self.both(large, queries, 16)
        monkeypatch.setattr("retrieval.bm25_search.TILE", tile)
        for tiled, expected in zip(self.both(large, queries, 16), whole, strict=True):
            np.testing.assert_array_equal(tiled[0], expected[0])
            np.testing.assert_array_equal(tiled[1], expected[1])

    def test_queries_that_have_nothing_in_common(self, large):
        queries = ["ba ba ba be", "", "zzz", "so tu", "so tu so", "ba", "", "lan"] * 5
        (rows, scores), (slid, slid_scores) = self.both(large, queries, 5)
        np.testing.assert_array_equal(slid, rows)
        np.testing.assert_array_equal(slid_scores, scores)

    def test_titles_left_out(self, tmp_path):
        words = [" ".join(tiny.WORDS[j] for j in (i % 50, i % 9, i % 4)) for i in range(600)]
        passages = [Passage(str(i), f"t{i % 7}", text) for i, text in enumerate(words)]
        built = build_index(passages, str(tmp_path / "i"), progress=False)
        (rows, scores), (slid, slid_scores) = self.both(built, self.queries(3), 8, frozenset(["t1", "t5"]))
        np.testing.assert_array_equal(slid, rows)
        np.testing.assert_array_equal(slid_scores, scores)
        assert not set(rows.ravel() % 7) & {1, 5}

    def test_chosen_by_itself(self, large, monkeypatch):
        chosen = []
        monkeypatch.setattr("retrieval.bm25.search_postings", lambda *_, sliding: chosen.append(sliding))
        large.search(self.queries(1), 3)
        large.search(["ba be", "so tu", "lan fil"], 3)
        assert chosen == [True, False]

    def test_an_index_that_does_not_know_its_scores_is_searched_from_scratch(self, large):
        old = replace(large, about={key: value for key, value in large.about.items() if key != "score_range"})
        queries = self.queries(1)
        np.testing.assert_array_equal(old.search(queries, 3).rows, large.search(queries, 3).rows)

    def test_not_where_sums_could_be_rounded(self):
        queries = Queries(np.arange(3), np.array([1.0, 2.0, 3.0]), np.array([0, 3]))
        assert can_slide(queries, 0.5, 10.0)
        assert not can_slide(queries, 1e-9, 10.0)
        assert not can_slide(queries, 0.0, 10.0)
        assert can_slide(Queries(np.zeros(0, np.int64), np.zeros(0), np.array([0, 0])), 0.5, 10.0)
        assert can_slide(Queries(np.arange(1), np.ones(1), np.array([0, 1, 1])), 0.5, 10.0)  # the last one is empty


def test_golden_lucene(shared, tmp_path):
    """3,000 real queries over 36,474 real passages against Lucene's own top 20."""
    built = build_index(
        read_corpus(str(shared / "data/corpus/wiki_passages_100w.jsonl.gz")), str(tmp_path / "index"), progress=False
    )
    with gzip.open(shared / "golden/bm25/wikitext_queries_lucene_top20.jsonl.gz", "rt") as file:
        golden = [json.loads(line) for line in file]
    found = built.search([entry["query"] for entry in golden], 20)
    tops = sets = 0
    for entry, rows, scores in zip(golden, found.rows, found.scores, strict=True):
        expected_rows = np.array([row for row, _ in entry["hits"]], np.int64)
        expected_scores = np.array([score for _, score in entry["hits"]])
        count = len(expected_rows)
        assert (rows[count:] == -1).all()
        assert (rows[:count] >= 0).all()
        np.testing.assert_allclose(scores[:count], expected_scores, atol=1e-3)
        if not count:
            tops, sets = tops + 1, sets + 1
            continue
        # equal scores may stand in any order: Lucene broke ties by the spelling of the id
        tops += rows[0] in expected_rows[expected_scores == expected_scores[0]]
        last = expected_scores[min(15, count - 1)]
        differing = set(rows[:16]) ^ set(expected_rows[:16])
        score_of = dict(zip(expected_rows, expected_scores, strict=True)) | dict(zip(rows, scores, strict=True))
        sets += all(abs(score_of[row] - last) < 1e-4 for row in differing if row >= 0)
    assert (tops, sets) == (3000, 3000)
