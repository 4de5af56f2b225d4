"""Corpora in every format, and every way in which a row can be broken."""

import gzip
import json
from itertools import product
from typing import get_args, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ralm_jax.cli_options import CorpusOptions
from ralm_jax.cli_retrieval import ConvertCorpus
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.text import read_text
from retrieval import corpus
from retrieval.corpus import (
    Passage,
    Passages,
    describe_corpus,
    read_corpus,
    read_field,
    write_corpus,
    write_passages,
)
from retrieval.rows import RowCount
from tests import tiny


def zstd(data):
    return pa.Codec("zstd").compress(data, asbytes=True)


def write(path, content):
    data = content if isinstance(content, bytes) else content.encode()
    path.write_bytes({".gz": gzip.compress, ".zst": zstd}.get(path.suffix, bytes)(data))
    return str(path)


def rows(*objects):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in objects)


DPR = 'id\ttext\ttitle\n1\t"a ""quoted"" text"\tT one\n2\tplain text\t"T ""two"""\n'


class TestFormats:
    def test_pyserini(self, tmp_path):
        path = write(
            tmp_path / "c.jsonl", rows({"id": "a", "contents": "Title\nfirst\nsecond"}, {"id": 2, "contents": "bare"})
        )
        found = list(read_corpus(path))
        assert found == [Passage("a", "Title", "first\nsecond"), Passage("2", "", "bare")]
        assert [passage.contents for passage in found] == ["Title\nfirst\nsecond", "bare"]

    def test_beir(self, tmp_path):
        path = write(
            tmp_path / "c.jsonl", rows({"_id": "a", "title": "T", "text": "x"}, {"_id": "b", "title": None, "text": ""})
        )
        assert list(read_corpus(path)) == [Passage("a", "T", "x"), Passage("b", "", "")]

    def test_rows_with_id_title_text_and_more(self, tmp_path):
        path = write(tmp_path / "c.jsonl", rows({"id": "0", "title": "T", "text": "x", "src": "nq"}))
        assert list(read_corpus(path)) == [Passage("0", "T", "x")]

    def test_dpr(self, tmp_path):
        assert list(read_corpus(write(tmp_path / "psgs.tsv", DPR))) == [
            Passage("1", "T one", 'a "quoted" text'),
            Passage("2", 'T "two"', "plain text"),
        ]

    def test_dpr_text_may_hold_newlines_and_tabs_in_quotes(self, tmp_path):
        path = write(tmp_path / "psgs.tsv", 'id\ttext\ttitle\r\n1\t"two\nlines\tand a tab"\tT\r\n')
        assert list(read_corpus(path)) == [Passage("1", "T", "two\nlines\tand a tab")]

    def test_dpr_line_ends_in_quotes_are_content(self, tmp_path):
        path = write(tmp_path / "psgs.tsv", 'id\ttext\ttitle\r\n1\t"two\r\nlines"\tT\r\n\r\n2\t"\u2028"\tT\n')
        assert [p.text for p in read_corpus(path)] == ["two\r\nlines", "\u2028"]

    def test_text_is_cut_into_words(self, tmp_path):
        path = write(tmp_path / "notes.txt", "one two three\nfour\n\nfive six seven")
        assert list(read_corpus(path, passage_words=3)) == [
            Passage("notes-0", "notes", "one two three"),
            Passage("notes-1", "notes", "four five six"),
            Passage("notes-2", "notes", "seven"),
        ]

    def test_headings_start_a_passage_and_title_it(self, tmp_path):
        path = write(tmp_path / "wiki.txt", "intro\n = Robert Boulter = \nab c\n## Early life ##\nd\n")
        assert [(p.title, p.text) for p in read_corpus(path)] == [
            ("wiki", "intro"), ("Robert Boulter", "ab c"), ("Early life", "d"),
        ]  # fmt: skip

    def test_a_folder_in_the_order_of_names(self, tmp_path):
        (tmp_path / "sub").mkdir()
        write(tmp_path / "b.txt", "first")
        write(tmp_path / "sub" / "c.txt.gz", "second")
        write(tmp_path / "sub" / "d.md.zst", "third")
        found = list(read_corpus(str(tmp_path)))
        assert [(p.id, p.text) for p in found] == [("b-0", "first"), ("sub/c-0", "second"), ("sub/d-0", "third")]

    def test_running_text_beside_rows_is_left_out(self, tmp_path, caplog):
        (tmp_path / "sub").mkdir()
        write(tmp_path / "a.jsonl.gz", rows({"_id": "1", "text": "first"}))
        write(tmp_path / "sub" / "e.tsv.zst", "id\ttext\ttitle\n1\tsecond\tT\n")
        for name in ("README.md", "LICENSE", "notes.txt.gz"):
            write(tmp_path / name, "no passage")
        passages = read_corpus(str(tmp_path))
        assert "is left out, 3 in all (LICENSE, README.md, notes.txt.gz); index it by itself" in caplog.text
        assert [p.text for p in passages] == ["first", "second"]
        assert len(list(read_corpus(str(tmp_path), "text"))) == 5

    def test_hidden_and_unfinished_files_are_not_there(self, tmp_path):
        (tmp_path / ".cache").mkdir()
        for name in ("a.txt", ".a.txt.swp", ".cache/b.txt", "c.txt.part"):
            write(tmp_path / name, name)
        assert [p.text for p in read_corpus(str(tmp_path))] == ["a.txt"]

    def test_files_are_listed_before_passages_are_read(self, tmp_path):
        write(tmp_path / "a.jsonl", rows({"_id": "1", "text": "a"}))
        passages = read_corpus(str(tmp_path))
        write(tmp_path / "b.jsonl", rows({"_id": "2", "text": "b"}))
        assert [p.text for p in passages] == ["a"]

    def test_names_of_files_keep_their_dots(self, tmp_path):
        (tmp_path / "v1.0").mkdir()
        for name in ("a.txt", "b.v2.md.gz", "U.S. history"):
            write(tmp_path / "v1.0" / name, "words")
        found = [(p.id, p.title) for p in read_corpus(str(tmp_path))]
        assert found == [(f"v1.0/{n}-0", f"v1.0/{n}") for n in ("U.S. history", "a", "b.v2")]

    def test_of_a_beir_data_set_only_the_corpus(self, tmp_path):
        (tmp_path / "qrels").mkdir()
        write(tmp_path / "corpus.jsonl", rows({"_id": "1", "text": "a"}))
        write(tmp_path / "queries.jsonl", rows({"_id": "q", "text": "b"}))
        write(tmp_path / "qrels" / "test.tsv", "query-id\tcorpus-id\tscore\n")
        assert [p.text for p in read_corpus(str(tmp_path))] == ["a"]

    def test_rows_are_whole_unless_split(self, tmp_path):
        path = write(tmp_path / "c.jsonl", rows({"_id": "a", "title": "T", "text": "one two three"}))
        assert [p.text for p in read_corpus(path, passage_words=2)] == ["one two three"]
        assert list(read_corpus(path, passage_words=2, split_rows=True)) == [
            Passage("a-0", "T", "one two"), Passage("a-1", "T", "three"),
        ]  # fmt: skip

    def test_a_format_can_be_named(self, tmp_path):
        path = write(tmp_path / "psgs_w100", DPR)
        assert len(list(read_corpus(path, "dpr"))) == 2

    @pytest.mark.parametrize("name", ["c.jsonl", "c.jsonl.gz", "c.jsonl.zst"])
    def test_bytes_that_need_care(self, tmp_path, name):
        """A byte-order mark, CRLF, U+2028 and a NUL are handled; only "\\n" ends a line."""
        content = (
            "\ufeff" + rows({"_id": "1", "text": "a\u2028b"}).replace("\n", "\r\n") + rows({"_id": "2", "text": "c\0d"})
        )
        found = list(read_corpus(write(tmp_path / name, content)))
        assert [p.text for p in found] == ["a\u2028b", "c d"]

    def test_quotes_in_titles(self, tmp_path):
        path = write(tmp_path / "c.jsonl", rows({"id": "1", "contents": '"Weird Al"\ntext'}))
        passages = Passages.of(list(read_corpus(path)))
        assert passages.titled(frozenset(["Weird Al"])).tolist() == [True]
        assert passages.titled(frozenset(["Weird"])).tolist() == [False]


LONGBENCH = {
    "input": "who?", "context": "one two\n\nthree\nfour five", "answers": ["a"], "length": 5, "dataset": "qasper",
    "language": "en", "all_classes": None, "_id": "b7",
}  # fmt: skip
SCROLLS = {"id": "q1", "pid": "q1_0", "input": "who is\nit?\n\none two\n\nthree", "output": "a"}


def zero_scrolls(question, document="one two three", **changes):
    """A row as ZeroSCROLLS has it: an instruction, the document, the question, and where they stand."""
    start = len("Read it.\n\nArticle:\n")
    content = f"Read it.\n\nArticle:\n{document}\n\n{question}\n\nAnswer:\n"
    ends = start + len(document), start + len(document) + 2 + len(question)
    row = {"id": "z", "pid": "z", "input": content, "output": None, "truncation_seperator": "... [omitted]\n\n"}
    row |= {"document_start_index": start, "document_end_index": ends[0]}
    return row | {"query_start_index": ends[0] + 2, "query_end_index": ends[1]} | changes


class TestDocuments:
    """LongBench and SCROLLS: what a question is about is running text, cut into passages."""

    def cut(self, tmp_path, *objects, format="auto"):
        path = write(tmp_path / "c.jsonl", rows(*objects))
        return [tuple(p) for p in read_corpus(path, format, passage_words=2)]

    def test_longbench(self, tmp_path):
        expected = [("b7-0", "", "one two"), ("b7-1", "", "three four"), ("b7-2", "", "five")]
        assert self.cut(tmp_path, LONGBENCH) == self.cut(tmp_path, LONGBENCH, format="longbench") == expected
        assert self.cut(tmp_path, LONGBENCH | {"context": "", "title": "T"}) == [("b7-0", "T", "")]

    def test_scrolls(self, tmp_path):
        expected = [("q1-0", "", "one two"), ("q1-1", "", "three")]
        assert self.cut(tmp_path, SCROLLS) == self.cut(tmp_path, SCROLLS, format="scrolls") == expected

    def test_a_row_for_each_reference_is_one_document(self, tmp_path):
        other = SCROLLS | {"id": "q2", "input": "and?\n\none"}
        found = self.cut(tmp_path, SCROLLS, other, SCROLLS | {"pid": "q1_1", "output": "b"})
        assert [id for id, _, _ in found] == ["q1-0", "q1-1", "q2-0"]
        with pytest.raises(RalmError, match=r"c\.jsonl:2: the id q1 is that of another document above"):
            self.cut(tmp_path, SCROLLS, other | {"id": "q1"})

    def test_options_are_not_of_the_document(self, tmp_path):
        content = "who?\n\n (A) one\n (B) two\n (C) (A)\n (D) four\n\n\nthe story\n\n(D) of it"
        found = self.cut(tmp_path, SCROLLS | {"input": content})
        assert [text for _, _, text in found] == ["the story", "(D) of", "it"]
        found = self.cut(tmp_path, SCROLLS | {"input": "who?\n\n(A) one\n\n(D) two"})
        assert [text for _, _, text in found] == ["(A) one", "(D) two"]

    def test_zero_scrolls_goes_by_its_indexes(self, tmp_path):
        row = zero_scrolls("Question:\nwho?", "é😀 two\n\nthree")
        assert self.cut(tmp_path, row) == [("z-0", "", "é😀 two"), ("z-1", "", "three")]
        as_in_scrolls = SCROLLS | {"document_start_index": None, "document_end_index": None}
        assert self.cut(tmp_path, as_in_scrolls) == self.cut(tmp_path, SCROLLS)

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            (SCROLLS | {"input": "no question"}, "expected a question, a blank line and a document"),
            (SCROLLS | {"input": None}, "field 'input' is missing"),
            (zero_scrolls("q", document_end_index=10**4), r"document from 19 to 10000: not a part of the input, of 4"),
            (zero_scrolls("q", document_end_index="30"), "document from 19 to 30: not a part of the input"),
            (zero_scrolls("q", document_start_index=-1), "document from -1 to 32: not a part of the input"),
            (zero_scrolls("q", query_end_index=None), "query from 34 to None: not a part of the input"),
            (LONGBENCH | {"context": ["a"]}, "field 'context' is list, expected a string"),
        ],
    )
    def test_refusals(self, tmp_path, row, message):
        with pytest.raises(RalmError, match=rf"c\.jsonl:1: .*{message}"):
            self.cut(tmp_path, row)
        count = RowCount(skip_bad=True)
        path = write(tmp_path / "c.jsonl", rows(row, SCROLLS if "pid" in row else LONGBENCH))
        assert list(read_corpus(path, count=count))
        assert (count.rows, count.bad) == (2, 1)


@pytest.mark.parametrize("name", ["hotpotqa", "multifieldqa_en", "narrativeqa", "qmsum", "samsum", "trec"])
def test_real_documents(shared, name):
    path = shared / f"data/longbench/{name}.jsonl.gz"
    made = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    passages = list(read_corpus(str(path), passage_words=300))
    for row in made:
        texts = [p.text for p in passages if p.id.rpartition("-")[0] == row["_id"]]
        assert " ".join(texts).split() == row["context"].split()
        assert {len(text.split()) for text in texts[:-1]} <= {300}


COLUMNS = {"id": ["a", "b"], "title": ["T", None], "text": ["one", "two\nlines"]}


def save_dataset(folder, tables):
    """A folder as `datasets.Dataset.save_to_disk` leaves it: Arrow streams and two files about them."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{len(tables):05}.arrow" for i in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


class TestColumns:
    EXPECTED = [Passage("a", "T", "one"), Passage("b", "", "two\nlines")]

    def test_parquet(self, tmp_path):
        pq.write_table(pa.table(COLUMNS | {"embedding": [[1.0], [2.0]]}), tmp_path / "c.parquet")
        assert list(read_corpus(str(tmp_path / "c.parquet"))) == self.EXPECTED
        assert list(read_corpus(str(tmp_path))) == self.EXPECTED

    def test_large_strings_dictionaries_and_numbers(self, tmp_path):
        table = pa.table({
            "_id": pa.array([1, 2]), "text": pa.array(["x", "y"], pa.large_string()),
            "title": pa.array(["T", "T"]).dictionary_encode(),
        })  # fmt: skip
        pq.write_table(table, tmp_path / "c.parquet")
        assert list(read_corpus(str(tmp_path / "c.parquet"))) == [Passage("1", "T", "x"), Passage("2", "T", "y")]

    def test_a_datasets_folder(self, tmp_path):
        table = pa.table(COLUMNS)
        save_dataset(tmp_path / "one", [table, table.slice(1)])
        write(tmp_path / "one" / "data-00000-of-00009.arrow", "left by an earlier save")
        assert list(read_corpus(str(tmp_path / "one"))) == [*self.EXPECTED, self.EXPECTED[1]]

    def test_a_datasets_folder_with_splits(self, tmp_path):
        save_dataset(tmp_path / "all" / "test", [pa.table(COLUMNS).slice(0, 1)])
        save_dataset(tmp_path / "all" / "train", [pa.table(COLUMNS).slice(1)])
        write(tmp_path / "all" / "dataset_dict.json", '{"splits": ["train", "test"]}')
        assert list(read_corpus(str(tmp_path / "all"))) == self.EXPECTED
        assert list(read_corpus(str(tmp_path / "all" / "train"))) == self.EXPECTED[1:]

    def test_the_passages_of_an_index_are_a_corpus(self, tmp_path):
        list(write_passages(self.EXPECTED, tmp_path / "passages.arrow"))
        assert list(read_corpus(str(tmp_path / "passages.arrow"))) == self.EXPECTED

    @pytest.mark.parametrize(
        ("columns", "message"),
        [
            ({"id": ["a"], "body": ["x"]}, r"c\.parquet: row 1: field 'text' is missing"),
            ({"body": ["x"]}, r"c\.parquet: row 1: field '_id' or 'id' is missing"),
            ({"id": ["a", "b"], "text": ["x", None]}, r"c\.parquet: row 2: field 'text' is missing"),
            ({"id": ["a"], "text": [1.5]}, r"c\.parquet: row 1: field 'text' is float"),
        ],
    )
    def test_refusals(self, tmp_path, columns, message):
        pq.write_table(pa.table(columns), tmp_path / "c.parquet")
        with pytest.raises(RalmError, match=message):
            list(read_corpus(str(tmp_path / "c.parquet")))

    @pytest.mark.parametrize("suffix", ["parquet", "arrow"])
    def test_damaged_and_missing_files(self, tmp_path, suffix):
        path = tmp_path / f"c.{suffix}"
        with pytest.raises(UsageError, match="no such file"):
            list(read_corpus(str(path)))
        pq.write_table(pa.table({"id": ["a"] * 999, "text": ["x"] * 999}), path)
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(RalmError, match=rf"c\.{suffix}: row 1: cannot be read"):
            list(read_corpus(str(path)))

    def test_text_that_is_not_utf_8(self, tmp_path):
        data = pa.array([b"x", b"\xff"]).view(pa.string())
        pq.write_table(pa.table({"id": ["a", "b"], "text": data}), tmp_path / "c.parquet")
        with pytest.raises(RalmError, match=r"c\.parquet: row 2: not UTF-8"):
            list(read_corpus(str(tmp_path / "c.parquet")))
        count = RowCount(skip_bad=True)
        assert list(read_corpus(str(tmp_path / "c.parquet"), count=count)) == [Passage("a", "", "x")]
        assert (count.rows, count.bad) == (2, 1)

    def test_a_state_of_something_else(self, tmp_path):
        write(tmp_path / "state.json", "{}")
        with pytest.raises(RalmError, match=r"state\.json: lists no _data_files"):
            list(read_corpus(str(tmp_path)))


ODDITIES = {
    "newlines": "two\nlines\n\nand an end\n",
    "tabs": "a\tb\t",
    "an unbalanced quote": 'a 5" disk',
    "a quote in front": '"a disk',
    "quotes": '""a"" \'b\'',
    "carriage returns": "\r a\rb\r\nc\r",
    "what Unicode calls line ends": "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg",
    "a byte-order mark": "\ufeffa\ufeff",
    "backslashes": "a\\nb\\",
    "nothing": "",
    "spaces": "  a  ",
    "other planes": "日本語 😀",
}


class TestRoundTrips:
    @pytest.mark.parametrize("name", ["out", "out.gz", "out.zst"])
    @pytest.mark.parametrize("format", ["dpr", "beir", "pyserini"])
    @pytest.mark.parametrize("oddity", ODDITIES)
    def test_every_oddity(self, tmp_path, format, oddity, name):
        odd = ODDITIES[oddity]
        titles = ["", "T", odd.replace("\n", " ") if format == "pyserini" else odd]
        made = [
            Passage(str(i), title, text) for i, (title, text) in enumerate((t, x) for t in titles for x in (odd, "x"))
        ]
        path = str(tmp_path / name)
        assert write_corpus(iter(made), path, format) == len(made)
        assert list(read_corpus(path, format)) == made
        write_corpus(read_corpus(path, format), path + ".again" + name[3:], format)
        assert (tmp_path / name).read_bytes() == (tmp_path / f"{name}.again{name[3:]}").read_bytes()

    def test_parquet(self, tmp_path, monkeypatch):
        monkeypatch.setattr(corpus, "BATCH_ROWS", 5)
        made = [Passage(str(i), title, text) for i, (title, text) in enumerate(product(ODDITIES.values(), repeat=2))]
        path = str(tmp_path / "out.parquet")
        assert write_corpus(iter(made), path, "parquet") == len(made)
        assert list(read_corpus(path)) == made
        written = pq.ParquetFile(path)
        assert written.schema_arrow.names == ["id", "title", "text"]
        assert written.num_row_groups == -(-len(made) // 5)

    def test_parquet_is_whole_or_not_there(self, tmp_path, monkeypatch):
        monkeypatch.setattr(corpus, "BATCH_ROWS", 1)
        write_corpus([Passage("1", "", "a")], str(tmp_path / "out"), "parquet")
        with pytest.raises(RalmError, match=r"out: passage '2': a lone surrogate"):
            write_corpus([Passage("1", "", "b"), Passage("2", "\ud800", "")], str(tmp_path / "out"), "parquet")
        with pytest.raises(RalmError, match=r"/dev/full: cannot be written"):
            write_corpus([Passage("1", "", tiny.text(9999))] * 9, "/dev/full", "parquet")
        assert list(read_corpus(str(tmp_path / "out"), "parquet")) == [Passage("1", "", "a")]
        assert [file.name for file in tmp_path.iterdir()] == ["out"]

    @pytest.mark.parametrize("format", ["beir", "pyserini"])
    def test_a_line_is_one_line_to_every_program(self, tmp_path, format):
        write_corpus([Passage("1", "T", text) for text in ODDITIES.values()], str(tmp_path / "c"), format)
        assert len((tmp_path / "c").read_text().splitlines()) == len(ODDITIES)

    def test_as_dpr_has_it(self, tmp_path):
        path = str(tmp_path / "p.tsv")
        write_corpus([Passage("1", "T one", 'a "quoted" text'), Passage("2", 'T "two"', "plain text")], path, "dpr")
        assert (tmp_path / "p.tsv").read_text() == DPR

    @pytest.mark.parametrize("format", ["dpr", "beir", "pyserini"])
    def test_refusals_leave_nothing(self, tmp_path, format):
        with pytest.raises(RalmError, match=r"out:\d: a lone surrogate"):
            write_corpus([Passage("1", "", "\udc80")], str(tmp_path / "out"), format)
        if format == "pyserini":
            with pytest.raises(RalmError, match="passage '1': its title has more than one line"):
                write_corpus([Passage("1", "a\nb", "")], str(tmp_path / "out"), format)
        assert not list(tmp_path.iterdir())


class TestSkipping:
    """Bad rows are skipped and counted; what is around them is read."""

    def read(self, path, **options):
        count = RowCount(skip_bad=True)
        return [p.text for p in read_corpus(path, count=count, **options)], count

    def test_jsonl(self, tmp_path):
        content = b'[1]\n{\n{"_id": "1", "text": "a"}\n{"_id": "2"}\n\n{"_id": "3", "text": "\\ud800"}\n\xff\n' + (
            b'{"_id": "4", "text": "b"}\n{"_id": "5", "text": '
        )
        texts, count = self.read(write(tmp_path / "c.jsonl", content))
        assert texts == ["a", "b"]
        assert (count.rows, count.bad) == (8, 6)
        first = f"{tmp_path}/c.jsonl:1: expected a JSON object, found list"
        assert str(count) == f"8 rows read, 6 of them bad and skipped (the first: {first})"

    def test_dpr(self, tmp_path):
        content = (
            b'id\ttext\ttitle\n1\t"never closed\tT\n2\tb\tT\n3\t"c\nc"\tT\n4\t"closed" early\tT\n5\te\n'
            b'6\t"f\n\xff\nf"\tT\n7\tg\tT\n8\t"never closed'
        )
        texts, count = self.read(write(tmp_path / "p.tsv", content))
        assert texts == ["b", "c\nc", "g"]
        assert (count.rows, count.bad) == (8, 5)
        assert "p.tsv:2: " in count.first_bad

    def test_lines_of_text(self, tmp_path):
        texts, count = self.read(write(tmp_path / "t.txt", b"a\n\xff\nb"))
        assert (texts, count.rows, count.bad) == (["a b"], 3, 1)

    def test_rows_are_counted_as_they_stand_in_the_file(self, tmp_path):
        path = write(tmp_path / "c.jsonl", rows({"_id": "a", "text": "one two three"}))
        texts, count = self.read(path, split_rows=True, passage_words=1)
        assert (len(texts), str(count)) == (3, "1 row read")

    def test_nothing_but_bad_rows(self, tmp_path):
        with pytest.raises(RalmError, match=r"c\.jsonl: no passages in it: 1 row read, 1 of them bad"):
            self.read(write(tmp_path / "c.jsonl", "{}\n"))

    @pytest.mark.parametrize("content", ["1\ttext\ttitle\n2\ta\tb\n"])
    def test_a_wrong_header_is_no_bad_row(self, tmp_path, content):
        with pytest.raises(RalmError, match="expected the header id, text, title"):
            self.read(write(tmp_path / "p.tsv", content))


class TestRefusals:
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ('{"_id": "1", "text": "a"}\n{', r"c\.jsonl:2: not JSON"),
            ("[1]\n", r"c\.jsonl:1: expected a JSON object, found list"),
            ('{"_id": "1"}\n', r"c\.jsonl:1: field 'text' is missing"),
            ('{"text": "a"}\n', r"c\.jsonl:1: field '_id' or 'id' is missing"),
            ('{"_id": "1", "text": 5.5}\n', r"c\.jsonl:1: field 'text' is float, expected a string"),
            ('{"_id": "1", "text": "\\ud800"}\n', r"c\.jsonl:1: a lone surrogate"),
            (b'{"_id": "1", "text": "\xff"}\n', r"c\.jsonl:1: not UTF-8"),
            ('{"id": "1", "contents": "a"}\n{"id": "2"}\n', r"c\.jsonl:2: field 'contents' is missing"),
        ],
    )
    def test_jsonl(self, tmp_path, content, message):
        with pytest.raises(RalmError, match=message):
            list(read_corpus(write(tmp_path / "c.jsonl", content)))

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("1\ttext\ttitle\n", r"p\.tsv:1: expected the header id, text, title"),
            ("id\ttext\ttitle\n1\tonly two\n", r"p\.tsv:2: 2 fields, expected 3"),
            ('id\ttext\ttitle\n1\t"never closed\tT\n2\tb\tT\n', r"p\.tsv:\d: .*the quoting of this row is broken"),
            ('id\ttext\ttitle\n1\t"closed" early\tT\n', r"p\.tsv:2: .*the quoting of this row is broken"),
        ],
    )
    def test_dpr(self, tmp_path, content, message):
        with pytest.raises(RalmError, match=message):
            list(read_corpus(write(tmp_path / "p.tsv", content)))

    @pytest.mark.parametrize(
        "damage", [lambda b: b[:-20], lambda b: b[:20] + b"\xff" * 30 + b[50:], lambda b: b"x" + b]
    )
    def test_a_damaged_gzip_file(self, tmp_path, damage):
        path = tmp_path / "c.jsonl.gz"
        content = "".join(rows({"_id": str(i), "text": tiny.text(50, i)}) for i in range(50))
        path.write_bytes(damage(gzip.compress(content.encode())))
        with pytest.raises(RalmError, match=r"c\.jsonl\.gz:\d+: (cannot be read|not UTF-8|not JSON)"):
            list(read_corpus(str(path)))

    @pytest.mark.parametrize(
        "damage",
        [lambda b: b[:-20], lambda b: b[:20] + b"\xff" * 30 + b[50:], lambda b: b"x" + b, lambda b: b + b"rest"],
    )
    def test_a_damaged_zstd_file(self, tmp_path, damage):
        path = tmp_path / "c.jsonl.zst"
        content = "".join(rows({"_id": str(i), "text": tiny.text(50, i)}) for i in range(50))
        path.write_bytes(damage(zstd(content.encode())))
        with pytest.raises(RalmError, match=r"c\.jsonl\.zst:\d+: cannot be read \([^\n]+\)$"):
            list(read_corpus(str(path), "beir"))

    @pytest.mark.parametrize("name", ["c.json", "c.csv", "c.csv.gz", "c.csv.zst"])
    def test_formats_that_are_not_known(self, tmp_path, name):
        with pytest.raises(RalmError, match="is not one of the formats"):
            list(read_corpus(write(tmp_path / name, "[1]")))
        assert len(list(read_corpus(write(tmp_path / name, "words"), "text"))) == 1

    def test_nothing_there(self, tmp_path):
        with pytest.raises(UsageError, match="no such file"):
            list(read_corpus(str(tmp_path / "none.jsonl")))
        with pytest.raises(UsageError, match="the folder has no files"):
            list(read_corpus(str(tmp_path)))
        with pytest.raises(UsageError, match="passage words must be at least 1"):
            list(read_corpus(str(tmp_path), passage_words=0))
        with pytest.raises(RalmError, match=r"c\.jsonl: no passages in it"):
            list(read_corpus(write(tmp_path / "c.jsonl", "\n\n")))


def test_the_commands_know_every_format():
    assert get_args(get_type_hints(CorpusOptions)["corpus_format"]) == get_args(corpus.Format)
    assert get_args(get_type_hints(ConvertCorpus)["to"]) == get_args(corpus.WrittenFormat)
    assert {"auto", "text", *corpus.ROWS} == set(get_args(corpus.Format))


def test_what_passages_depend_on(tmp_path):
    path = write(tmp_path / "c.jsonl", rows({"_id": "1", "text": "a"}))
    options = {"passage_words": 100, "split_rows": False}
    first = describe_corpus(path, "auto", **options)
    assert first == describe_corpus(path, "auto", **options)
    assert first != describe_corpus(path, "auto", **options | {"passage_words": 50})
    write(tmp_path / "c.jsonl", rows({"_id": "1", "text": "ab"}))
    assert first != describe_corpus(path, "auto", **options)


class TestPassages:
    def test_written_and_mapped(self, tmp_path):
        made = [Passage(str(i), f"t{i % 3}", "x" * i) for i in range(20_000)]
        assert list(write_passages(iter(made), tmp_path / "p.arrow")) == made
        passages = Passages.open(tmp_path / "p.arrow")
        assert len(passages) == 20_000
        assert passages.rows([19_999, 0, 16_384]) == [made[19_999], made[0], made[16_384]]
        assert passages.contents(np.array([3])) == ["t0\nxxx"]
        assert passages.titled(frozenset(["t1"])).sum() == 6667

    def test_damaged(self, tmp_path):
        (tmp_path / "p.arrow").write_bytes(b"ARROW1")
        with pytest.raises(RalmError, match=r"p\.arrow: the index's passages cannot be read"):
            Passages.open(tmp_path / "p.arrow")


def test_queries(tmp_path):
    assert read_field(write(tmp_path / "q.jsonl", rows({"query": "a"}, {"query": ""})), "query") == ["a", ""]
    with pytest.raises(RalmError, match=r"q\.jsonl:1: field 'query' is missing"):
        read_field(write(tmp_path / "q.jsonl", rows({"text": "a"})), "query")


class TestText:
    def test_rows_are_joined_by_the_data_set_rule(self, tmp_path):
        content = (
            json.dumps("")
            + "\n"
            + json.dumps(" = A = \n")
            + "\n"
            + json.dumps({"text": ""})
            + "\n"
            + json.dumps({"text": " b \n"})
            + "\n"
        )
        assert read_text(write(tmp_path / "t.jsonl.gz", content)).content == " \n = A = \n \n b \n"

    @pytest.mark.parametrize("content", ["one line", "two\nlines\n", "\nblank first", "a\u2028b\n\n"])
    def test_plain_text_comes_as_it_is(self, tmp_path, content):
        assert read_text(write(tmp_path / "t.txt", content)).content == content

    @pytest.mark.parametrize(("compress", "suffix"), [(gzip.compress, "gz"), (zstd, "zst")])
    def test_parts_compressed_one_by_one_are_one_text(self, tmp_path, compress, suffix):
        path = tmp_path / f"t.txt.{suffix}"
        path.write_bytes(b"".join(compress(part.encode()) for part in ("one\ntw", "", "o\n", "three" * 99_999)))
        assert read_text(str(path)).content == "one\ntwo\n" + "three" * 99_999

    def test_zstd_as_the_pile_has_it(self, tmp_path):
        skippable = b"\x50\x2a\x4d\x18\x05\0\0\0notes"
        path = tmp_path / "00.jsonl.zst"
        path.write_bytes(
            skippable + zstd(rows({"text": "a", "meta": {}}).encode()) + zstd(rows({"text": "b"}).encode())
        )
        assert read_text(str(path)).content == "ab"

    def test_crlf_and_byte_order_mark(self, tmp_path):
        assert read_text(write(tmp_path / "t.txt", "\ufeffa\r\nb\r\n")).content == "a\nb\n"

    def test_words_are_spaces(self, tmp_path):
        text = read_text(write(tmp_path / "t.txt", "one two  three\nfour "))
        assert text.words(0, len(text.content)) == 4
        assert text.words(0, 8) == 2

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("t.txt", "", r"t\.txt: the text is empty"),
            ("t.jsonl", "", r"t\.jsonl: the text is empty"),
            ("t.jsonl", "5\n", r"t\.jsonl:1: expected a string or an object"),
            ("t.jsonl", '"a"\n{"txt": 1}\n', r"t\.jsonl:2: expected a string or an object"),
            ("t.jsonl", '"a\n', r"t\.jsonl:1: not JSON"),
            ("t.jsonl", '"\\udc00"\n', r"t\.jsonl:1: a lone surrogate"),
            ("t.txt", b"a\n\xff", r"t\.txt:2: not UTF-8"),
        ],
    )
    def test_refusals(self, tmp_path, name, content, message):
        with pytest.raises(RalmError, match=message):
            read_text(write(tmp_path / name, content))

    def test_a_folder_is_no_text(self, tmp_path):
        with pytest.raises(UsageError, match="is a folder, not a file"):
            read_text(str(tmp_path))
