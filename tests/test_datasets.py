"""The paper's data sets by name, in the forms in which people have them."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eval.lm import open_retrieved
from ralm_jax import cli
from ralm_jax.errors import RalmError, UsageError
from retrieval.corpus import Passage
from retrieval.datasets import dataset_corpus, dataset_questions, dataset_text, dataset_titles, describe_dataset
from retrieval.rows import RowCount
from tests import tiny

WIKITEXT = ["", " = One = \n", "", " a @-@ b . \n"]
JOINED = " \n = One = \n \n a @-@ b . \n"


def ralm(*args):
    cli.main([str(arg) for arg in args])


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def jsonl(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def parquet(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Folders that `datasets` takes for repositories of the hub, since they have their names."""
    datasets = pytest.importorskip("datasets", reason="without the extra `data`")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def add(repository, configuration, **splits):
        root = tmp_path / repository
        named = []
        for split, columns in splits.items():
            parquet(root / configuration / f"{split}-0.parquet", **columns)
            named.append(f"  - split: {split}\n    path: {configuration}/{split}-*\n")
        old = (root / "README.md").read_text().split("\n---")[0] if (root / "README.md").exists() else "---\nconfigs:"
        write(root / "README.md", f"{old}\n- config_name: {configuration}\n  data_files:\n{''.join(named)}---\n")

    return add


class TestText:
    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("test.jsonl", jsonl(*WIKITEXT)),
            ("test.jsonl", jsonl(*({"text": row} for row in WIKITEXT))),
            ("wikitext-103/wiki.test.tokens", JOINED),
        ],
    )
    def test_wikitext_in_every_form_is_the_same_text(self, tmp_path, name, content):
        write(tmp_path / name, content)
        write(tmp_path / "wiki.valid.tokens", "other")
        text = dataset_text("wikitext-103", "test", str(tmp_path))
        assert (text.content, text.origin) == (JOINED, "wikitext-103 test")

    def test_a_copy_of_the_repository(self, tmp_path):
        for configuration in ("wikitext-103-raw-v1", "wikitext-103-v1", "wikitext-2-v1"):
            parquet(tmp_path / configuration / "test-00000-of-00001.parquet", text=[configuration])
        assert dataset_text("wikitext-103", "test", str(tmp_path)).content == "wikitext-103-v1"

    def test_the_hub(self, hub):
        hub("Salesforce/wikitext", "wikitext-103-v1", test={"text": WIKITEXT}, train={"text": ["no"]})
        assert dataset_text("wikitext-103").content == JOINED

    def test_rows_of_the_pile_are_told_apart(self, tmp_path):
        rows = [
            {"text": "paper", "meta": {"pile_set_name": "ArXiv"}},
            {"text": "law", "meta": {"pile_set_name": "FreeLaw"}},
            {"text": "paper two", "meta": {"pile_set_name": "ArXiv"}},
        ]
        path = write(tmp_path / "val.jsonl", jsonl(*rows))
        assert dataset_text("arxiv", "validation", str(tmp_path)).content == "paperpaper two"
        assert dataset_text("arxiv", "validation", path, limit_rows=1).content == "paper"
        with pytest.raises(UsageError, match=r"val\.jsonl: has validation in its name, and the split is test"):
            dataset_text("freelaw", "test", path)
        path = write(tmp_path / "pile.jsonl", jsonl(*rows))
        assert dataset_text("freelaw", "test", path).content == "law"  # a file whose name says nothing is the split
        with pytest.raises(RalmError, match=r"no rows of stackexchange, split test; its rows are of ArXiv, FreeLaw"):
            dataset_text("stackexchange", "test", path)

    @pytest.mark.parametrize("content", ['[{"text": "a"},\n{"text": "b"}]', '{"text": "a"}\n{"text": "b"}\n'])
    def test_json_has_rows_too(self, tmp_path, content):
        write(tmp_path / "test.json", content)
        assert dataset_text("arxiv", "test", str(tmp_path)).content == "ab"

    @pytest.mark.parametrize("suffix", [".csv", ".tsv.gz"])
    def test_tables_are_no_texts(self, tmp_path, suffix):
        write(tmp_path / f"test{suffix}", "text\na\n")
        with pytest.raises(UsageError, match=r"test\.[^:]*: texts are not read from \.[ct]sv; make it jsonl rows"):
            dataset_text("arxiv", "test", str(tmp_path))

    def test_both_editions_of_wikitext_are_not_added(self, tmp_path):
        write(tmp_path / "wikitext-103" / "wiki.test.tokens", "one")
        write(tmp_path / "wikitext-103-raw" / "wiki.test.raw", "raw")
        assert dataset_text("wikitext-103", "test", str(tmp_path)).content == "one"
        assert dataset_text("wikitext-103", "test", str(tmp_path / "wikitext-103-raw")).content == "raw"
        write(tmp_path / "wikitext-103" / "wiki.test.raw", "raw")
        with pytest.raises(UsageError, match=r"test of wikitext-103 is in it more than once \(wikitext-103/wiki.*raw"):
            dataset_text("wikitext-103", "test", str(tmp_path))

    def test_shards_are_one_form(self, tmp_path):
        for i, hashed in enumerate(("ab1", "c2d")):
            parquet(tmp_path / f"test-0000{i}-of-00002-{hashed}.parquet", text=[str(i)])
        assert dataset_text("wikitext-103", "test", str(tmp_path)).content == "01"

    def test_the_pile_on_the_hub(self, hub):
        meta = [{"pile_set_name": "FreeLaw"}, {"pile_set_name": "ArXiv"}]
        hub("monology/pile-uncopyrighted", "default", test={"text": ["law", "paper"], "meta": meta})
        assert dataset_text("arxiv").content == "paper"

    def test_splits_of_realnews_stand_in_its_rows(self, tmp_path):
        rows = [{"text": "a", "title": "A", "split": "train"}, {"text": "b", "title": "B", "split": "val"}]
        path = write(tmp_path / "realnews.jsonl", jsonl(*rows))
        assert dataset_text("realnews", "validation", path).content == "b"
        assert list(dataset_corpus("realnews", path)) == [Passage("0-0", "A", "a")]
        with pytest.raises(RalmError, match="no rows of realnews, split test; its rows are of train, val"):
            dataset_text("realnews", "test", path)

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            (("arxiv", "test", "nowhere"), UsageError, "nowhere: no such file or folder; The Pile .* should be there"),
            (("wikitext-103", "train", "."), UsageError, r"\.: no file in it has train in its name; WikiText-103 "),
            (("realnews",), UsageError, "realnews is not on the Hugging Face hub: get RealNews .* with --data-path"),
            (("arxiv", "test", "test.jsonl"), RalmError, r"test\.jsonl:1: expected a string or an object with"),
            (("arxiv", "test", "test.jsonl", 0), UsageError, "limit rows must be at least 1"),
            (("arxiv", "test", "empty.jsonl"), RalmError, r"empty\.jsonl: no rows of arxiv, split test"),
        ],
    )
    def test_what_is_missing_is_named(self, tmp_path, monkeypatch, arguments, error, message):
        monkeypatch.chdir(tmp_path)
        write(tmp_path / "test.jsonl", jsonl({"body": "x"}))
        write(tmp_path / "empty.jsonl", "")
        with pytest.raises(error, match=message):
            dataset_text(*arguments)

    def test_a_hub_that_does_not_answer(self, hub):
        hub("Salesforce/wikitext", "another", test={"text": ["a"]})
        with pytest.raises(RalmError, match=r"wikitext-103: Salesforce/wikitext cannot be read .* with --data-path"):
            dataset_text("wikitext-103")

    def test_without_the_extra(self, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "datasets", None)
        with pytest.raises(UsageError, match=r"wikitext-103: .* needs pip install 'ralm-jax\[data\]'; or get WikiText"):
            dataset_text("wikitext-103")


class TestCorpus:
    def test_the_training_split_is_cut_into_passages(self, tmp_path):
        write(tmp_path / "train" / "00.jsonl", jsonl({"text": "a b c d e"}, {"text": "f\n\ng"}))
        write(tmp_path / "test.jsonl", jsonl({"text": "z"}))
        count = RowCount()
        assert list(dataset_corpus("arxiv", str(tmp_path), passage_words=2, count=count)) == [
            Passage("0-0", "", "a b"), Passage("0-1", "", "c d"), Passage("0-2", "", "e"), Passage("1-0", "", "f g"),
        ]  # fmt: skip
        assert count.rows == 2

    @pytest.mark.parametrize("bad", ['{"text": 1}', '{"text": ', '{"text": "\\ud800"}', "5"])
    @pytest.mark.parametrize("name", ["train.jsonl", "train.json"])
    def test_broken_rows_are_refused_or_counted(self, tmp_path, name, bad):
        path = write(tmp_path / name, jsonl({"text": "a"}) + bad + "\n" + jsonl({"text": "b"}))
        with pytest.raises(RalmError, match=rf"{name}:2: "):
            list(dataset_corpus("arxiv", path))
        count = RowCount(skip_bad=True)
        assert [passage.text for passage in dataset_corpus("arxiv", path, count=count)] == ["a", "b"]
        assert (count.rows, count.bad) == (3, 1)

    def test_the_evaluated_text_is_not_its_own_corpus(self, tmp_path):
        path = write(tmp_path / "test.jsonl", jsonl({"text": "a"}))
        with pytest.raises(UsageError, match=r"test\.jsonl: nothing says .* training split.*; name the folder, or --c"):
            list(dataset_corpus("arxiv", path))
        path = write(tmp_path / "train" / "00.jsonl", jsonl({"text": "a"}))
        assert len(list(dataset_corpus("arxiv", path))) == 1

    @pytest.mark.parametrize("name", ["wikitext-103", "nq", "triviaqa"])
    def test_wikipedia_is_named_with_where_to_get_it(self, name):
        with pytest.raises(
            UsageError, match=f"{name} has no corpus of its own; .*psgs_w100.*lucene:wikipedia-dpr-100w"
        ):
            list(dataset_corpus(name))

    def test_another_file_is_another_source(self, tmp_path):
        path = write(tmp_path / "train.jsonl", jsonl({"text": "a"}))
        first = describe_dataset("arxiv", path, passage_words=100)
        assert first == describe_dataset("arxiv", path, passage_words=100)
        assert first != describe_dataset("arxiv", path, passage_words=50)
        write(tmp_path / "train.jsonl", jsonl({"text": "abc"}))
        assert first != describe_dataset("arxiv", path, passage_words=100)


class TestTitles:
    def test_both_held_out_sets_and_the_raw_ones_if_they_are_there(self, tmp_path):
        write(tmp_path / "wikitext-103" / "wiki.test.tokens", " = One = \n")
        write(tmp_path / "wikitext-103-raw" / "wiki.test.raw", " = Raw One = \n")
        write(tmp_path / "wikitext-103" / "wiki.valid.tokens", " = Two = \n")
        write(tmp_path / "wikitext-103" / "wiki.train.tokens", " = Three = \n")
        found = list(dataset_titles("wikitext-103", "test", str(tmp_path)))
        assert found == [" = Two = \n", " = One = \n", " = Raw One = \n"]

    def test_the_hub_has_them_without_unk(self, hub):
        hub("Salesforce/wikitext", "wikitext-103-v1", test={"text": [" = <unk> = \n"]}, validation={"text": ["no"]})
        hub("Salesforce/wikitext", "wikitext-103-raw-v1", test={"text": [" = One = \n"]}, validation={"text": ["x"]})
        assert list(dataset_titles("wikitext-103")) == ["x", " = One = \n"]

    def test_other_data_sets_have_none(self):
        assert list(dataset_titles("realnews")) == []


class TestQuestions:
    def test_the_hub_calls_the_test_set_validation(self, hub):
        columns = {"question": ["who"], "answer": [["a", "b"]]}
        hub("google-research-datasets/nq_open", "nq_open", validation=columns, train=columns)
        (question,) = dataset_questions("nq")
        assert (question.text, question.answers) == ("who", ("a", "b"))

    def test_files_by_their_split(self, tmp_path):
        write(tmp_path / "nq-test.qa.csv", "who\t['a']\n")
        write(tmp_path / "nq-dev.qa.csv", "where\t['b']\n")
        assert [q.text for q in dataset_questions("nq", "test", str(tmp_path))] == ["who"]
        assert [q.text for q in dataset_questions("nq", "validation", str(tmp_path))] == ["where"]

    def test_a_test_set_without_answers_is_not_the_one(self, tmp_path):
        write(tmp_path / "unfiltered-web-dev.jsonl", jsonl({"question": "who", "answer": ["a"]}))
        write(tmp_path / "unfiltered-web-test-without-answers.jsonl", jsonl({"question": "where"}))
        assert [q.text for q in dataset_questions("triviaqa", "test", str(tmp_path))] == ["who"]

    def test_parquet(self, tmp_path):
        parquet(tmp_path / "train-0.parquet", question=["who"], answer=[["a"]])
        assert dataset_questions("nq", "train", str(tmp_path))[0].answers == ("a",)


class TestCommands:
    @pytest.fixture(autouse=True)
    def place(self, tmp_path, monkeypatch, tiny_model, corpus_file):
        """A folder with a model, a corpus, WikiText of one article that the corpus has, and a part of The Pile."""
        monkeypatch.chdir(tmp_path)
        self.title = tiny.passages(40)[0]["title"]
        write(
            tmp_path / "wiki" / "test.jsonl", jsonl(f" = {self.title} = \n", "", tiny.text(600) + "\n", " = <unk> = \n")
        )
        write(tmp_path / "pile" / "test.jsonl", jsonl({"text": tiny.text(600)}))
        write(tmp_path / "pile" / "train" / "00.jsonl", jsonl(*({"text": tiny.text(900, seed=i)} for i in range(3))))
        self.sizes = [
            "--model",
            str(tiny_model),
            "--window",
            "64",
            "--stride",
            "16",
            "--k",
            "2",
            "--limit-strides",
            "6",
        ]

    def test_the_articles_of_wikitext_are_left_out(self, capsys, caplog):
        ralm("lm", "--dataset", "wikitext-103", "--data-path", "wiki", "--corpus", "corpus.jsonl", "--out", "all",
             *self.sizes)  # fmt: skip
        assert "wikitext-103 test" in capsys.readouterr().out
        assert "1 headings have <unk> and name no article (<unk>)" in caplog.text
        table, passages = open_retrieved("all/retrieval")
        assert table.settings["excluded_titles"] >= 1
        found = table.rows[table.rows >= 0]
        assert len(found)
        assert not passages.titled(frozenset([self.title]), found).any()

    def test_the_articles_of_any_text_are_left_out(self):
        ralm("index", "--corpus", "corpus.jsonl", "--out", "index")
        write(Path("articles.md"), f"# {self.title}\n\ntext\n")
        query = ["search", "--index", "index", "--query", self.title, "--k", "40"]
        for options, expected in (([], True), (["--exclude-titles-from", "articles.md"], False)):
            ralm(*query, "--json", "hits.json", *options)
            hits = json.loads(Path("hits.json").read_text())["hits"]
            assert (self.title in {hit["title"] for hit in hits}) is expected

    def test_a_data_set_with_its_own_corpus_needs_no_other(self, capsys):
        ralm("lm", "--dataset", "arxiv", "--data-path", "pile", "--out", "all", *self.sizes)
        assert "arxiv test" in capsys.readouterr().out
        ralm("lm", "--dataset", "arxiv", "--data-path", "pile", "--out", "all", *self.sizes, "--resume")
        ralm("index", "--dataset", "arxiv", "--data-path", "pile", "--out", "index")
        assert "arxiv: 3 rows read\nindex: 15 passages" in capsys.readouterr().out

    def test_questions(self, capsys):
        ralm("index", "--corpus", "corpus.jsonl", "--out", "index")
        write(Path("qa/nq-test.qa.csv"), f"{tiny.text(5)}\t['{tiny.text(2)}']\n")
        ralm("eval", "retrieval", "--index", "index", "--dataset", "nq", "--data-path", "qa", "--k", "1")
        assert "answers" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("args", "code", "message"),
        [
            ("index --out i --corpus corpus.jsonl --data-path pile", 2, "--data-path is for --dataset"),
            (
                "lm --out o --model m --dataset arxiv --data-path pile/test.jsonl",
                2,
                "nothing says that it is the training split",
            ),
            ("index --out i --dataset wikitext-103", 2, "wikitext-103 has no corpus of its own"),
            ("index --out i --dataset arxiv --data-path pile --split-rows", 2, "--split-rows are for --corpus"),
            (
                "score --out s --model m --text t --split validation",
                2,
                "--data-path and --limit-rows are for --dataset",
            ),
            ("score --out s --model m --dataset freelaw --data-path nowhere", 2, "nowhere: no such file or folder"),
            ("lm --out o --model m --text corpus.jsonl", 2, "name the corpus with --corpus"),
            ("search --index i --query q --exclude-titles-from none.txt", 2, "none.txt: no such file"),
            ("search --index i --query q --exclude-titles-from corpus.jsonl", 1, "corpus.jsonl"),
            ("eval retrieval --index i --dataset triviaqa --data-path wiki", 1, "wiki/test.jsonl"),
        ],
    )
    def test_refusals(self, capsys, args, code, message):
        with pytest.raises(SystemExit) as caught:
            ralm(*args.split())
        assert caught.value.code == code
        error = capsys.readouterr().err
        assert message in error
        assert error.startswith("ralm: error: ")
        assert error.count("\n") == 1
