"""Queries of strides, retrieval tables, and the paper's JSON."""

import gzip
import json
import math

import numpy as np
import pyarrow as pa
import pytest

from eval.lm import open_retrieved
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.settings import QuerySettings, StrideSettings
from ralm_jax.text import Text
from ralm_jax.windows import first_characters, make_schedule
from retrieval.bm25 import build_index
from retrieval.corpus import Passage, read_corpus
from retrieval.interchange import export_json, import_json
from retrieval.overlap import overlap
from retrieval.query import retrieve, stride_queries
from retrieval.retriever import search
from retrieval.table import open_retrieval
from tests import tiny

STRIDES = StrideSettings(window=64, stride=4)
QUERIES = QuerySettings(k=5, query_length=10)


def stride(begin, end):
    """An entry of the paper's file."""
    return {"begin_location": begin, "end_location": end, "retrieved_docs": []}


def zstd(data):
    return pa.Codec("zstd").compress(data, asbytes=True)


@pytest.fixture
def index(tmp_path, corpus_file):
    return build_index(read_corpus(str(corpus_file)), str(tmp_path / "index"), progress=False)


@pytest.fixture
def tokenizer():
    return tiny.tokenizer()


@pytest.fixture
def text():
    return Text(tiny.text(300), "text.txt")


def run(tmp_path, index, text, tokenizer, **options):
    options = {"strides": STRIDES, "queries": QUERIES, "progress": False} | options
    return retrieve(index, text, tokenizer, str(tmp_path / "table"), **options)


def test_queries_are_the_tokens_strictly_before_the_target(tokenizer):
    tokens = tokenizer.encode(tiny.text(100))
    schedule = make_schedule(100, StrideSettings(20, 4))
    queries = stride_queries(tokens, schedule.targets, 6, tokenizer)
    assert queries[0] == ""
    assert queries[1] == tokenizer.decode(tokens[14:20])
    assert queries[2] == tokenizer.decode(tokens[18:24])


def test_nothing_is_known_of_what_a_stride_begins_with():
    """Neither the space that a token has but leaves out of its offsets, nor a character that it begins within."""
    text = "ba bé der"
    tokens, offsets = tiny.trimming_tokenizer().encode_with_offsets(text)
    begins = np.arange(len(tokens))
    known = [text[:end] for end in first_characters(offsets, begins).tolist()]
    assert known == ["", "b", "ba", "ba b", "ba b", "ba bé", "ba bé d", "ba bé de"]


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
    calls = []

    def interrupted(retriever, queries, *rest):
        calls.append(len(queries))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return search(retriever, queries, *rest)

    monkeypatch.setattr("retrieval.query.search", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, index, text, tokenizer)
    with pytest.raises(RalmError, match="not complete, 28 of 60 strides are missing"):
        open_retrieval(str(tmp_path / "table"))
    monkeypatch.setattr("retrieval.table.CHUNK", 32)  # a table keeps the chunks that it was made with
    again = run(tmp_path, index, text, tokenizer, if_exists="resume")
    assert sum(calls) == 60 + 16
    np.testing.assert_array_equal(again.rows, whole.rows)
    np.testing.assert_array_equal(again.begins, whole.begins)


@pytest.mark.parametrize("array", ["begins", "ends", "rows", "scores"])
def test_a_lost_chunk_is_missed_and_made_again(tmp_path, index, text, tokenizer, monkeypatch, array):
    monkeypatch.setattr("retrieval.table.CHUNK", 16)
    whole = run(tmp_path, index, text, tokenizer)
    chunk = next(path for path in sorted((tmp_path / "table" / array / "c").rglob("*")) if path.is_file())
    chunk.unlink()
    with pytest.raises(RalmError, match="not complete, 16 of 60 strides are missing"):
        open_retrieval(str(tmp_path / "table"))
    again = run(tmp_path, index, text, tokenizer, if_exists="resume")
    np.testing.assert_array_equal(again.rows, whole.rows)


def test_not_resumed_with_other_settings(tmp_path, index, text, tokenizer):
    run(tmp_path, index, text, tokenizer)
    with pytest.raises(UsageError, match="holds an earlier run's retrieval"):
        run(tmp_path, index, text, tokenizer)
    for options, message in (
        ({"queries": QuerySettings(k=5, query_length=12)}, "query_length: 10 there, 12 now"),
        ({"excluded": frozenset(["x"])}, "excluded_sha256: .*; excluded_titles: 0 there, 1 now"),
    ):
        with pytest.raises(RalmError, match=message):
            run(tmp_path, index, text, tokenizer, if_exists="resume", **options)


class TestExclusion:
    @pytest.fixture
    def large(self, tmp_path):
        """300 passages; one in three is "Kept"."""
        passages = [Passage(str(i), "Kept" if i % 3 == 0 else "Out", tiny.text(31, i)) for i in range(300)]
        return build_index(passages, str(tmp_path / "large"), progress=False)

    def test_inside_leaves_k_where_after_may_not(self, large):
        query, out = [tiny.text(40)], frozenset(["Out"])
        inside = search(large, query, 60, out, "inside").rows[0]
        after = search(large, query, 60, out, "after").rows[0]
        everything = large.search(query, 240).rows[0]
        kept = [row for row in everything if row >= 0 and row % 3 == 0]
        assert inside.tolist() == kept[:60]
        assert after.tolist() == (kept + [-1] * 60)[:60]
        few = search(large, query, 40, out, "after").rows[0]
        first = [row for row in everything[:160] if row >= 0 and row % 3 == 0]
        assert few.tolist() == (first + [-1] * 40)[:40]

    def test_after_drops_from_max_100_and_4k_hits(self, large):
        """Of the first 100 hits about a third are kept, fewer than 50."""
        hits = search(large, [tiny.text(40)], 25, frozenset(["Kept"]), "after")
        assert (hits.rows[0] >= 0).all()
        hits = search(large, [tiny.text(40)], 25, frozenset(["Out"]), "after")
        found = int((hits.rows[0] >= 0).sum())
        deep = large.search([tiny.text(40)], 100).rows[0]
        assert found == min(25, sum(1 for row in deep if row >= 0 and row % 3 == 0))
        assert (hits.rows[0][found:] == -1).all()
        assert (hits.scores[0][found:] == 0).all()

    def test_the_preset_decides(self, tmp_path, large, text, tokenizer):
        options = {"excluded": frozenset(["Out"]), "queries": QuerySettings(k=60)}
        ours = run(tmp_path / "a", large, text, tokenizer, **options)
        theirs = run(tmp_path / "b", large, text, tokenizer, strides=StrideSettings(64, 4, preset="ai21"), **options)
        assert (ours.settings["exclusion"], theirs.settings["exclusion"]) == ("inside", "after")
        large_enough = (ours.rows[1:] >= 0).sum() >= (theirs.rows[1:] >= 0).sum()
        assert large_enough
        for j in range(1, len(ours.begins)):
            kept = theirs.rows[j][theirs.rows[j] >= 0]
            assert kept.tolist() == ours.rows[j][: len(kept)].tolist()


class TestJson:
    def test_round_trip(self, tmp_path, index, text, tokenizer):
        table = run(tmp_path, index, text, tokenizer)
        path = str(tmp_path / "out.json")
        export_json(path, table, index.passages, text, tokenizer)
        entries = json.loads((tmp_path / "out.json").read_text())
        assert list(entries[1]) == ["begin_location", "end_location", "future", "query", "retrieved_docs"]
        assert entries[1]["query"] == tokenizer.decode(tokenizer.encode(text.content)[54:64])
        assert entries[1]["future"] == tokenizer.decode(tokenizer.encode(text.content)[64:68])
        again, passages = import_json(path)
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
        table, passages = import_json(str(tmp_path / "r.json"))
        assert table.rows.tolist() == [[0, 1, 0]]
        assert passages.contents([0, 1]) == ["T\nx", "y"]

    @pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".zst", zstd)])
    def test_compressed(self, tmp_path, suffix, compress):
        content = json.dumps([stride(0, 4), stride(4, 8)], indent=4).encode()
        (tmp_path / "r.json").write_bytes(content)
        (tmp_path / f"r.json{suffix}").write_bytes(compress(content))
        plain, packed = (import_json(str(tmp_path / name))[0] for name in ("r.json", f"r.json{suffix}"))
        assert packed.ends.tolist() == [4, 8]
        assert packed.settings == plain.settings

    def test_no_passages_at_all(self, tmp_path):
        entry = {"begin_location": 0, "end_location": 4, "future": "", "query": "", "retrieved_docs": []}
        (tmp_path / "r.json").write_text(json.dumps([entry]))
        table, passages = import_json(str(tmp_path / "r.json"))
        assert table.rows.tolist() == [[-1]]
        assert len(passages) == 0

    @pytest.mark.parametrize(
        ("content", "message"),
        [("{", "not JSON"), ("{}", "expected a list"), ("[]", "expected a list"),
         ('[{"begin_location": 0, "end_location": 4}]', "entry 0 .*retrieved_docs"),
         ('[{"begin_location": 0, "end_location": 4, "retrieved_docs": [{"score": 1}]}]', "field 'text' is missing"),
         ('[{"begin_location": 0, "end_location": 4, "retrieved_docs": [{"text": 5.5}]}]', "field 'text' is float"),
         ('[{"begin_location": 0, "end_location": 4, "retrieved_docs": [{"text": ["a"]}]}]', "field 'text' is list"),
         ('[{"begin_location": 0, "end_location": 4, "retrieved_docs": [{"text": null, "title": "T"}]}]', "missing"),
         ('[{"begin_location": 0, "end_location": 4, "retrieved_docs": [{"text": "\\ud800"}]}]', "lone surrogate"),
         *((json.dumps([stride(0, 4), stride(*second)]), "entry 1 is tokens .* which is no stride from token 4 on")
           for second in ((0, 4), (3, 8), (-4, -2), (8, 4), (4, 4), (4, 2**70))),
         (json.dumps([stride(-4, 4)]), "entry 0 is tokens -4 to 4"),
         (json.dumps([stride(0, math.inf)]), "entry 0 is not a stride"),
         ("[" * 100_000, "not JSON"),
         ("[5]", "entry 0")],
    )  # fmt: skip
    def test_refusals(self, tmp_path, content, message):
        (tmp_path / "r.json").write_text(content)
        with pytest.raises(RalmError, match=message):
            import_json(str(tmp_path / "r.json"))

    def test_cannot_be_written(self, tmp_path, index, text, tokenizer):
        table = run(tmp_path, index, text, tokenizer)
        with pytest.raises(RalmError, match="cannot be written"):
            export_json("/dev/full", table, index.passages, text, tokenizer)


class TestMatching:
    def test_other_strides_are_refused(self, tmp_path, index, text, tokenizer):
        table = run(tmp_path, index, text, tokenizer)
        table.check_schedule(make_schedule(300, STRIDES), "x")
        table.check_schedule(make_schedule(300, StrideSettings(64, 4, 7)), "x")
        with pytest.raises(RalmError, match="stride 1 is tokens 64 to 68 here, but 64 to 72 by window 64 and stride 8"):
            table.check_schedule(make_schedule(300, StrideSettings(64, 8)), "window 64 and stride 8")

    def test_too_few_strides(self, tmp_path, index, text, tokenizer):
        table = run(tmp_path, index, text, tokenizer, strides=StrideSettings(64, 4, 9))
        with pytest.raises(RalmError, match="has 9 strides, the text has 60"):
            table.check_schedule(make_schedule(300, STRIDES), "x")

    def test_another_text_or_tokenizer(self, tmp_path, index, text, tokenizer):
        table, tokens = run(tmp_path, index, text, tokenizer), tokenizer.encode(text.content)
        table.check_text(text, tokens, tokenizer)
        with pytest.raises(RalmError, match=r"retrieved with the text of text\.txt, not of other\.txt"):
            table.check_text(Text("other", "other.txt"), tokens, tokenizer)
        with pytest.raises(RalmError, match="retrieved with the tokenizer of tiny, not of tiny"):
            table.check_text(text, tokens, tiny.tokenizer(bos=True))

    def test_the_papers_json_of_another_text(self, tmp_path, index, text, tokenizer):
        table = run(tmp_path, index, text, tokenizer)
        export_json(str(tmp_path / "r.json"), table, index.passages, text, tokenizer)
        table, _ = import_json(str(tmp_path / "r.json"))
        table.check_text(text, tokenizer.encode(text.content), tokenizer)
        other = Text(tiny.text(300, seed=5), "other.txt")
        with pytest.raises(RalmError, match=r"stride 0 is '.*', which other\.txt does not have there"):
            table.check_text(other, tokenizer.encode(other.content), tokenizer)
        again, _ = import_json(str(tmp_path / "r.json"))
        assert again.settings == table.settings != {}

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


class TestOverlap:
    TEXT = "One two three, four five six seven eight."

    def test_the_share_of_words_in_shared_runs(self):
        assert overlap(self.TEXT, ["zero ONE two three four nine"], run=3) == 4 / 8
        assert overlap(self.TEXT, ["one two", "two three four", "six seven eight"], run=3) == 6 / 8
        assert overlap(self.TEXT, [self.TEXT], run=8) == 1
        assert overlap(self.TEXT, [self.TEXT], run=9) == 0

    def test_nothing_shared_and_nothing_there(self):
        assert overlap(self.TEXT, ["eight seven six five"], run=3) == 0
        assert overlap(self.TEXT, [], run=3) == 0
        assert overlap("", [self.TEXT]) == 0

    def test_of_some_words_of_a_text(self):
        """The runs go beyond the words that count."""
        spans = np.array([[0, 0], [4, 7], [15, 24], [38, 41]])  # two | four five | eight
        assert self.TEXT[15:24] == "four five"
        assert overlap(self.TEXT, ["one two three four nine"], spans, run=3) == 2 / 4
        assert overlap(self.TEXT, ["six seven eight"], spans, run=3) == 1 / 4
        assert overlap(self.TEXT, ["one two", "five six"], spans, run=3) == 0
        assert overlap(self.TEXT, [self.TEXT], spans, run=8) == 1
        assert overlap(self.TEXT, [self.TEXT], spans[:0], run=3) == 0

    def test_against_every_run_compared(self, monkeypatch):
        monkeypatch.setattr("retrieval.overlap.PASSAGES_AT_ONCE", 7)
        own, rng = tiny.text(2000).split(), np.random.default_rng(0)
        passages = [" ".join(own[at : at + 12]) for at in rng.integers(0, len(own), 20)] + [tiny.text(200, 3)] * 3
        bounds = np.sort(rng.choice(len(own), (15, 2), replace=False).ravel()).reshape(-1, 2)
        ends = np.cumsum([len(word) + 1 for word in own])
        runs = {tuple(passage.split()[i : i + 4]) for passage in passages for i in range(len(passage.split()) - 3)}
        covered = np.zeros(len(own), bool)
        for i in range(len(own) - 3):
            covered[i : i + 4] |= tuple(own[i : i + 4]) in runs
        inside = np.concatenate([np.arange(first, last) for first, last in bounds])
        assert 0.05 < covered[inside].mean() < 0.5
        found = overlap(" ".join(own), passages, np.append(0, ends)[bounds], run=4)
        assert found == pytest.approx(covered[inside].mean())

    def test_text_without_spaces(self):
        assert overlap("日本語の文章はここにある", ["これは日本語の文章です"], run=5) == 6 / 12
