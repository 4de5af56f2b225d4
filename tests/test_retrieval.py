"""Queries of strides, retrieval tables, and the paper's JSON."""

import json

import numpy as np
import pytest

from eval.lm import check_retrieved, open_retrieved
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.text import Text
from ralm_jax.tokenizer import plain
from ralm_jax.windows import make_schedule
from retrieval.bm25 import build_index
from retrieval.corpus import read_corpus
from retrieval.query import Retrieval, retrieve
from retrieval.table import open_retrieval, read_json, stride_queries, write_json
from tests import tiny

SETTINGS = Retrieval(stride=4, window=64, query_length=10, k=5)


@pytest.fixture
def index(tmp_path, corpus_file):
    return build_index(read_corpus(str(corpus_file)), str(tmp_path / "index"), progress=False)


@pytest.fixture
def tokenizer():
    return plain(tiny.tokenizer(), (), (), "tiny")


@pytest.fixture
def text():
    return Text(tiny.text(300), "text.txt")


def run(tmp_path, index, text, tokenizer, settings=SETTINGS, **options):
    return retrieve(index, text, tokenizer, settings, str(tmp_path / "table"), progress=False, **options)


def test_queries_are_the_tokens_strictly_before_the_target(tokenizer):
    tokens = tokenizer.encode(tiny.text(100))
    schedule = make_schedule(100, 20, 4)
    queries = stride_queries(tokens, schedule.targets, 6, tokenizer)
    assert queries[0] == ""
    assert queries[1] == tokenizer.decode(tokens[14:20])
    assert queries[2] == tokenizer.decode(tokens[18:24])


def test_a_table_holds_what_the_search_finds(tmp_path, index, text, tokenizer):
    table = run(tmp_path, index, text, tokenizer)
    tokens = tokenizer.encode(text.content)
    queries = stride_queries(tokens, table.begins, 10, tokenizer)
    found = index.search(queries, 5)
    np.testing.assert_array_equal(table.rows, found.rows)
    np.testing.assert_array_equal(table.scores, found.scores)
    assert (table.rows[0] == -1).all()
    again = open_retrieval(str(tmp_path / "table"))
    np.testing.assert_array_equal(again.rows, table.rows)
    assert again.settings["query_length"] == 10


def test_resumed_where_it_stopped(tmp_path, index, text, tokenizer, monkeypatch):
    monkeypatch.setattr("retrieval.table.CHUNK", 16)
    whole = run(tmp_path / "whole", index, text, tokenizer)
    search, calls = Retrieval.search, []

    def interrupted(self, retriever, queries):
        calls.append(len(queries))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return search(self, retriever, queries)

    monkeypatch.setattr(Retrieval, "search", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, index, text, tokenizer)
    with pytest.raises(RalmError, match="not complete, 28 of 60 strides are missing"):
        open_retrieval(str(tmp_path / "table"))
    again = run(tmp_path, index, text, tokenizer, resume=True)
    assert sum(calls) == 60 + 16
    np.testing.assert_array_equal(again.rows, whole.rows)
    np.testing.assert_array_equal(again.begins, whole.begins)


def test_not_resumed_with_other_settings(tmp_path, index, text, tokenizer):
    run(tmp_path, index, text, tokenizer)
    with pytest.raises(UsageError, match="holds an earlier run's retrieval"):
        run(tmp_path, index, text, tokenizer)
    other = Retrieval(stride=4, window=64, query_length=12, k=5)
    with pytest.raises(RalmError, match="query_length: 10 there, 12 now"):
        run(tmp_path, index, text, tokenizer, other, resume=True)


class TestExclusion:
    def titles(self, index, count):
        passages = index.passages.rows(range(len(index.passages)))
        return frozenset(passage.title for passage in passages[:count])

    def test_inside_keeps_k_and_after_may_not(self, tmp_path, index, text, tokenizer):
        excluded = self.titles(index, 36)
        inside = run(tmp_path / "a", index, text, tokenizer, Retrieval(4, 64, 10, 4, excluded, "inside"))
        after = run(tmp_path / "b", index, text, tokenizer, Retrieval(4, 64, 10, 4, excluded, "after"))
        for table in (inside, after):
            assert set(np.unique(table.rows)) <= {-1, 36, 37, 38, 39}
        # 40 passages are fewer than max(100, 4 k), so both find the same here
        np.testing.assert_array_equal(inside.rows, after.rows)

    def test_after_takes_max_100_and_4k_hits_first(self, index):
        asked = []

        class Deep:
            location, settings, fingerprint, passages = index.location, {}, "x", index.passages

            def search(self, queries, k, excluded):
                asked.append((k, excluded))
                return index.search(queries, k, excluded)

        excluded = self.titles(index, 20)
        hits = Retrieval(k=30, excluded=excluded, exclusion="after").search(Deep(), [tiny.text(20)])
        assert asked == [(120, frozenset())]
        kept = hits.rows[0][hits.rows[0] >= 0]
        assert (kept >= 20).all()
        assert len(kept) < 30
        assert (hits.rows[0][len(kept) :] == -1).all()
        assert (hits.scores[0][len(kept) :] == 0).all()
        assert (np.diff(hits.scores[0][: len(kept)]) <= 0).all()
        Retrieval(k=16, excluded=excluded, exclusion="after").search(Deep(), ["ba"])
        assert asked[-1] == (100, frozenset())


@pytest.mark.parametrize(
    ("values", "message"),
    [({"k": 0}, "k must be at least 1"), ({"query_length": 0}, "query length must be at least 1"),
     ({"stride": 64, "window": 64}, "must be smaller than the window")],
)  # fmt: skip
def test_sizes(values, message):
    with pytest.raises(UsageError, match=message):
        Retrieval(**values)


class TestJson:
    def test_round_trip(self, tmp_path, index, text, tokenizer):
        table = run(tmp_path, index, text, tokenizer)
        path = str(tmp_path / "out.json")
        write_json(path, table, index.passages, text, tokenizer)
        entries = json.loads((tmp_path / "out.json").read_text())
        assert list(entries[1]) == ["begin_location", "end_location", "future", "query", "retrieved_docs"]
        assert entries[1]["query"] == tokenizer.decode(tokenizer.encode(text.content)[54:64])
        assert entries[1]["future"] == tokenizer.decode(tokenizer.encode(text.content)[64:68])
        again, passages = read_json(path)
        np.testing.assert_array_equal(again.begins, table.begins)
        np.testing.assert_array_equal(again.ends, table.ends)
        np.testing.assert_array_equal(again.rows >= 0, table.rows >= 0)
        np.testing.assert_array_equal(again.scores, table.scores)
        theirs, ours = passages.contents(again.rows[1]), index.passages.contents(table.rows[1])
        assert theirs == ours

    def test_titles_stand_above_texts(self, tmp_path):
        entry = {
            "begin_location": 0,
            "end_location": 4,
            "future": "",
            "query": "",
            "retrieved_docs": [{"title": "T", "text": "x", "score": 2}, {"text": "y"}, {"title": "T", "text": "x"}],
        }
        (tmp_path / "r.json").write_text(json.dumps([entry]))
        table, passages = read_json(str(tmp_path / "r.json"))
        assert table.rows.tolist() == [[0, 1, 0]]
        assert passages.contents([0, 1]) == ["T\nx", "y"]

    def test_no_passages_at_all(self, tmp_path):
        entry = {"begin_location": 0, "end_location": 4, "future": "", "query": "", "retrieved_docs": []}
        (tmp_path / "r.json").write_text(json.dumps([entry]))
        table, passages = read_json(str(tmp_path / "r.json"))
        assert table.rows.tolist() == [[-1]]
        assert len(passages) == 0

    @pytest.mark.parametrize(
        ("content", "message"),
        [("{", "not JSON"), ("{}", "expected a list"), ("[]", "expected a list"),
         ('[{"begin_location": 0, "end_location": 4}]', "entry 0 .*retrieved_docs"),
         ('[{"begin_location": 0, "end_location": 4, "retrieved_docs": [{"score": 1}]}]', "entry 0 .*text"),
         ("[5]", "entry 0")],
    )  # fmt: skip
    def test_refusals(self, tmp_path, content, message):
        (tmp_path / "r.json").write_text(content)
        with pytest.raises(RalmError, match=message):
            read_json(str(tmp_path / "r.json"))

    def test_cannot_be_written(self, tmp_path, index, text, tokenizer):
        table = run(tmp_path, index, text, tokenizer)
        with pytest.raises(RalmError, match="cannot be written"):
            write_json("/dev/full", table, index.passages, text, tokenizer)


class TestMatching:
    def test_other_strides_are_refused(self, tmp_path, index, text, tokenizer):
        table = run(tmp_path, index, text, tokenizer)
        table.check_schedule(make_schedule(300, 64, 4), "x")
        table.check_schedule(make_schedule(300, 64, 4, limit=7), "x")
        with pytest.raises(RalmError, match="stride 1 is tokens 64 to 68 here, but 64 to 72 by window 64 and stride 8"):
            table.check_schedule(make_schedule(300, 64, 8), "window 64 and stride 8")

    def test_too_few_strides(self, tmp_path, index, text, tokenizer):
        table = run(tmp_path, index, text, tokenizer, limit_strides=9)
        with pytest.raises(RalmError, match="has 9 strides, the text has 60"):
            table.check_schedule(make_schedule(300, 64, 4), "x")

    def test_another_text_or_tokenizer(self, tmp_path, index, text, tokenizer):
        table = run(tmp_path, index, text, tokenizer)
        check_retrieved(table, tokenizer, text)
        with pytest.raises(RalmError, match=r"retrieved with the text of text\.txt, not of other\.txt"):
            check_retrieved(table, tokenizer, Text("other", "other.txt"))
        with pytest.raises(RalmError, match="retrieved with the tokenizer of tiny, not of bos"):
            check_retrieved(table, plain(tiny.tokenizer(bos=True), (1,), (2,), "bos"), text)

    def test_the_index_is_found_moved_or_refused(self, tmp_path, index, text, tokenizer, corpus_file):
        run(tmp_path, index, text, tokenizer)
        where = str(tmp_path / "table")
        assert len(open_retrieved(where)[1]) == 40
        (tmp_path / "index").rename(tmp_path / "moved")
        with pytest.raises(UsageError, match="say where it is with --index"):
            open_retrieved(where)
        open_retrieved(where, str(tmp_path / "moved"))
        tiny.write_corpus(corpus_file, 39)
        build_index(read_corpus(str(corpus_file)), str(tmp_path / "other"), progress=False)
        with pytest.raises(RalmError, match="not the index that"):
            open_retrieved(where, str(tmp_path / "other"))
