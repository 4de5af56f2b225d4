"""Reciprocal-rank fusion: its formula, its edges, and a fused index as any other."""

import json
from collections import defaultdict
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from ralm_jax import cli
from ralm_jax.errors import RalmError, UsageError
from retrieval.bm25 import build_index
from retrieval.corpus import Passage
from retrieval.dense import build_dense_index
from retrieval.hybrid import FusedIndex, fuse, fused
from retrieval.retriever import open_index, search
from tests import tiny
from tests.test_cli import refused


def passages(count=150, seed=1):
    return [Passage(row["id"], row["title"], row["text"]) for row in tiny.passages(count, seed)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with two BM25 indexes, a dense one, and one of another corpus."""
    root = tmp_path_factory.mktemp("indexes")
    build_index(passages(), str(root / "words"), progress=False)
    build_index(passages(), str(root / "short"), b=0.9, progress=False)
    build_index(passages(149), str(root / "other"), progress=False)
    encoder = tiny.save_encoder(root / "encoder")
    build_dense_index(passages(), str(root / "vectors"), str(encoder), pooling="mean", progress=False)
    return root


def by_hand(ranked, k):
    """The formula in fractions, query by query."""
    rows = []
    for lists in zip(*ranked, strict=True):
        scores = defaultdict(Fraction)
        for found in lists:
            for rank, row in enumerate(found, start=1):
                if row >= 0:
                    scores[int(row)] += Fraction(1, 60 + rank)
        best = sorted(scores, key=lambda row: (-scores[row], row))[:k]
        rows.append((best + [-1] * k)[:k])
    return rows


def test_the_formula():
    rng = np.random.default_rng(0)
    ranked = [np.stack([rng.permutation(30)[:12] for _ in range(25)]) for _ in range(3)]
    for part in ranked:
        for row in part:
            row[rng.integers(0, 13) :] = -1
    found = fused(ranked, 10)
    assert found.rows.tolist() == by_hand(ranked, 10)
    assert found.scores.dtype == np.float32
    assert ((found.rows >= 0) == (found.scores > 0)).all()
    assert found.scores[(ranked[0][:, 0] >= 0)].max() < 3 / 61


def test_edges():
    nothing = np.full((2, 5), -1)
    assert (fused([nothing, nothing], 3).rows == -1).all()
    assert fused([nothing[:0], nothing[:0]], 3).rows.shape == (0, 3)
    assert fused([np.array([[4, 2]]), np.array([[2, 4]])], 3).rows.tolist() == [[2, 4, -1]]  # equals: the lower row


class TestFusedIndex:
    QUERIES = ["", "zzz", *(tiny.text(9, seed) for seed in range(20))]

    def test_it_is_the_formula_over_its_parts(self, place, tmp_path):
        built = fuse([str(place / name) for name in ("words", "vectors", "short")], str(tmp_path / "all"), depth=20)
        ranked = [part.search(self.QUERIES, 20).rows for part in built.parts]
        assert built.search(self.QUERIES, 8).rows.tolist() == by_hand(ranked, 8)
        assert (built.search([""], 8).rows == -1).all()

    def test_the_top_k_begins_the_top_2k(self, place, tmp_path):
        built = fuse([str(place / "words"), str(place / "vectors")], str(tmp_path / "all"))
        short, long = built.search(self.QUERIES, 5), built.search(self.QUERIES, 10)
        np.testing.assert_array_equal(short.rows, long.rows[:, :5])
        np.testing.assert_array_equal(short.scores, long.scores[:, :5])

    def test_excluded_titles_leave_k(self, place, tmp_path):
        built = fuse([str(place / "words"), str(place / "vectors")], str(tmp_path / "all"))
        titles = frozenset(passage.title for passage in passages()[::2])
        found = built.search(self.QUERIES[2:], 40, titles).rows
        assert (found % 2 == 1).all()
        after = search(built, self.QUERIES[2:], 25, titles, "after").rows
        assert ((after % 2 == 1) | (after == -1)).all()

    def test_refusals(self, place, tmp_path):
        with pytest.raises(RalmError, match=r"other: is of another corpus than .*words"):
            fuse([str(place / "words"), str(place / "other")], str(tmp_path / "x"))
        with pytest.raises(UsageError, match="two indexes at least"):
            fuse([str(place / "words")], str(tmp_path / "x"))
        with pytest.raises(UsageError, match="none: no index there"):
            fuse([str(place / "words"), str(tmp_path / "none")], str(tmp_path / "x"))
        assert not (tmp_path / "x").exists()
        built = fuse([str(place / "words"), str(place / "short")], str(tmp_path / "x"), depth=7)
        with pytest.raises(UsageError, match=r"fuses the first 7 hits of each index and is asked for 8"):
            built.search(["ba"], 8)
        with pytest.raises(UsageError, match="holds an earlier run's index; add --overwrite"):
            fuse([str(place / "words"), str(place / "short")], str(tmp_path / "x"))

    def test_a_part_that_is_not_what_it_was(self, place, tmp_path):
        build_index(passages(9), str(tmp_path / "a"), progress=False)
        build_index(passages(9), str(tmp_path / "b"), b=0.9, progress=False)
        fuse([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "x"))
        build_index(passages(9), str(tmp_path / "b"), b=0.8, if_exists="overwrite", progress=False)
        with pytest.raises(RalmError, match="b is not the index that was fused"):
            open_index(str(tmp_path / "x"))

    def test_fingerprints(self, place, tmp_path):
        made = [
            fuse([str(place / name) for name in names], str(tmp_path / str(i)), depth=depth).fingerprint
            for i, (names, depth) in enumerate(
                [(("words", "short"), 100), (("words", "vectors"), 100), (("words", "short"), 50)]
            )
        ]
        assert len(set(made)) == 3
        assert FusedIndex.open(str(tmp_path / "0")).fingerprint == made[0]


def test_commands(place, tmp_path, monkeypatch, text_file, tiny_model, capsys):
    monkeypatch.chdir(tmp_path)
    cli.main(["fuse", "--index", str(place / "words"), str(place / "vectors"), "--out", "all"])
    assert "all: 150 passages, by bm25, dense" in capsys.readouterr().out
    sizes = ["--window", "64", "--stride", "16", "--k", "3"]
    cli.main(["retrieve", "--index", "all", "--text", "text.txt", "--tokenizer", str(tiny_model), "--out", "r", *sizes])
    cli.main(["score", "--model", str(tiny_model), "--text", "text.txt", "--retrieval", "r", "--out", "s", *sizes])
    cli.main(["search", "--index", "all", "--query", "ba be", "--k", "2", "--json", "hits.json"])
    (row,) = [json.loads(line) for line in Path("hits.json").read_text().splitlines()]
    assert len(row["hits"]) == 2
    code, line = refused(capsys, "fuse", "--index", str(place / "words"), str(place / "other"), "--out", "x")
    assert (code, "is of another corpus" in line) == (1, True)
