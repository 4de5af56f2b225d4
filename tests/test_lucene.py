"""Lucene through Pyserini: agrees with the embedded engine, whose promises it keeps; without Java it says so."""

import gzip
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from eval.lm import open_retrieved
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.settings import QuerySettings, StrideSettings
from ralm_jax.text import Text
from retrieval import bm25, lucene
from retrieval.bm25 import BM25Index
from retrieval.corpus import Passage, read_corpus
from retrieval.lucene import LuceneIndex, build_index, find_java
from retrieval.query import retrieve
from retrieval.retriever import look_up, open_index, search
from tests import tiny
from tests.test_cli import ralm, refused

ODD = [
    Passage("empty", "", ""),
    Passage("no title", "", "a red fish"),
    Passage("stop words", "", "the of and"),
    Passage("lines", "Fish", "\nThe first line.\n\nA red fish\tin the third.\r\n"),
    Passage("lines without title", "", "Red\nfish\nswim"),
    Passage("quotes", '"Blue" fish', 'He said "fish", \\"fish\\" and \'fish\'.'),
    Passage("quoted title", '"Kept"', "fish and chips"),
    Passage("blank", " ", " \n "),
    Passage("same id", "Café", "Où est le poisson ? Der Fisch heißt Ωmega; e\u0301 \u2028 \u0085 \u00a0."),
    Passage("same id", "日本語", "魚は fish です 🐟🐟 👩‍👩‍👧 𝔉ish"),
    Passage("", "", "an empty id, fish"),
    Passage("long", "Long", "fish " * 500 + "x" * 600),
]  # fmt: skip
QUERIES = ["fish", "red fish", "the first line", "blue quotes said", "poisson", "Ωmega café", "魚", "🐟", "日本語 fish",
           "𝔉ish", "fish fish red", "chips kept", "x" * 255, "of the", "", "?!", " \n "]  # fmt: skip


@pytest.fixture(scope="session")
def pyserini():
    """Nothing, where Lucene can run."""
    if importlib.util.find_spec("pyserini") is None:
        pytest.skip("needs Pyserini (pip install 'ralm-jax[lucene]')")
    try:
        find_java()
    except RalmError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def odd(pyserini, tmp_path_factory):
    """The same odd passages and many plain ones in Lucene and in the embedded engine."""
    folder = tmp_path_factory.mktemp("odd")
    plain = [Passage(row["id"], row["title"], row["text"]) for row in tiny.passages(300)]
    passages = ODD + plain + [plain[0]._replace(id=f"copy {99 - i}") for i in range(40)]
    ours = bm25.build_index(passages, str(folder / "bm25"), progress=False)
    return passages, build_index(passages, str(folder / "lucene"), progress=False), ours


def index(tmp_path, *texts, name="index", **options):
    passages = [
        Passage(str(i), *text) if isinstance(text, tuple) else Passage(str(i), "", text) for i, text in enumerate(texts)
    ]
    return build_index(passages, str(tmp_path / name), progress=False, **options)


def raw_index(folder, *documents, raw=True):
    """An index that Pyserini's command makes of `documents`, in a folder of Lucene's own."""
    rows = folder / "rows"
    rows.mkdir()
    (rows / "rows.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    command = [sys.executable, "-m", "pyserini.index.lucene", "--collection", "JsonCollection", "--input", str(rows),
               "--index", str(folder / "raw"), "--generator", "DefaultLuceneDocumentGenerator"]  # fmt: skip
    environment = os.environ | lucene.java_environment()
    subprocess.run([*command, *["--storeRaw"] * raw], env=environment, check=True, capture_output=True)
    return str(folder / "raw")


class TestAgreement:
    def test_a_corpus_of_every_oddity(self, odd):
        passages, theirs, ours = odd
        assert isinstance(theirs, LuceneIndex)
        assert len(theirs.passages) == len(passages)
        assert theirs.passages.rows(range(len(passages))) == passages
        assert theirs.passages.contents([3, 0]) == ours.passages.contents([3, 0])

    @pytest.mark.parametrize("k", [1, 16, 1000])
    def test_the_same_hits_ties_included(self, odd, k):
        _, theirs, ours = odd
        queries = QUERIES + [tiny.text(12, seed) for seed in range(60)]
        lucenes, embedded = theirs.search(queries, k), ours.search(queries, k)
        np.testing.assert_allclose(lucenes.scores, embedded.scores, atol=1e-5)
        np.testing.assert_array_equal(lucenes.rows >= 0, embedded.rows >= 0)
        for j in range(len(queries)):  # sums of many terms may differ in the last bit, which can swap neighbours
            for i in np.flatnonzero(lucenes.rows[j] != embedded.rows[j]):
                near = np.abs(embedded.scores[j] - embedded.scores[j, i]) < 1e-5
                assert lucenes.rows[j, i] in embedded.rows[j][near] or near[-1], queries[j]
        np.testing.assert_array_equal(lucenes.rows[:13], embedded.rows[:13])

    def test_equals_go_to_the_lower_row(self, odd):
        passages, theirs, _ = odd
        query = " ".join(passages[len(ODD)].text.split()[:9])
        best = theirs.search([query], 41).rows[0]
        equal = [len(ODD), *range(len(passages) - 40, len(passages))]
        np.testing.assert_array_equal(best, equal)
        np.testing.assert_array_equal(theirs.search([query], 7).rows[0], equal[:7])

    @pytest.mark.parametrize("titles", [{"Kept"}, {"Fish", "Long", "日本語"}, {"nothing"}])
    def test_exclusion(self, odd, titles):
        passages, theirs, ours = odd
        hits, expected = (engine.search(["fish", "red", "of"], 5, frozenset(titles)) for engine in (theirs, ours))
        np.testing.assert_array_equal(hits.rows, expected.rows)
        np.testing.assert_allclose(hits.scores, expected.scores, atol=1e-5)
        assert (hits.rows[0] >= 0).all()
        assert not {passages[row].title.strip('"') for row in hits.rows[0]} & titles

    def test_golden(self, pyserini, shared, tmp_path):
        """3,000 real queries over 36,474 real passages: against Lucene's recorded top 20, and the embedded engine."""
        corpus = str(shared / "data/corpus/wiki_passages_100w.jsonl.gz")
        theirs = build_index(read_corpus(corpus), str(tmp_path / "lucene"), progress=False)
        ours = bm25.build_index(read_corpus(corpus), str(tmp_path / "bm25"), progress=False)
        with gzip.open(shared / "golden/bm25/wikitext_queries_lucene_top20.jsonl.gz", "rt") as file:
            golden = [json.loads(line) for line in file]
        queries = [entry["query"] for entry in golden]
        found = theirs.search(queries, 20)
        for expected in (recorded(golden), ours.search(queries, 20)):
            np.testing.assert_array_equal(found.rows >= 0, expected.rows >= 0)
            np.testing.assert_allclose(found.scores, expected.scores, atol=1e-3)
            assert agreement(found, expected) == (3000, 3000)
        assert [p.id for p in theirs.passages.rows(found.rows[0])] == [p.id for p in ours.passages.rows(found.rows[0])]


def recorded(golden):
    rows, scores = np.full((len(golden), 20), -1, np.int64), np.zeros((len(golden), 20), np.float32)
    for j, entry in enumerate(golden):
        for i, hit in enumerate(entry["hits"]):
            rows[j, i], scores[j, i] = hit
    return lucene.Hits(rows, scores)


def agreement(found, expected):
    """Queries with the same top 1, and with the same top 16, ties apart."""
    tops = sets = 0
    for rows, scores, theirs, their_scores in zip(*found, *expected, strict=True):
        tops += rows[0] in theirs[their_scores == their_scores[0]]
        score_of = dict(zip(theirs, their_scores, strict=True)) | dict(zip(rows, scores, strict=True))
        last = their_scores[:16][theirs[:16] >= 0][-1:]
        sets += all(abs(score_of[row] - last) < 1e-4 for row in set(rows[:16]) ^ set(theirs[:16]))
    return tops, sets


class TestEdges:
    def test_k_larger_than_the_corpus(self, pyserini, tmp_path):
        found = index(tmp_path, "red fish", "blue fish").search(["fish"], 16)
        assert found.rows.tolist() == [[0, 1] + [-1] * 14]
        assert (found.scores[0][2:] == 0).all()

    def test_queries_that_analyse_to_nothing(self, odd):
        found = odd[1].search(["", "the of and", "?!", "unseen"], 4)
        assert (found.rows == -1).all()
        assert not found.scores.any()

    def test_no_queries(self, odd):
        assert odd[1].search([], 4).rows.shape == (0, 4)

    @pytest.mark.parametrize("k", [0, -3])
    def test_k_below_one(self, odd, k):
        with pytest.raises(UsageError, match="k must be at least 1"):
            odd[1].search(["fish"], k)

    def test_more_terms_than_lucene_allows_by_default(self, odd):
        query = " ".join(f"word{i}" for i in range(3000))
        assert odd[1].search([f"{query} poisson"], 2).rows.tolist() == [[8, -1]]

    def test_threads_and_batches_change_nothing(self, odd):
        queries = [tiny.text(12, seed) for seed in range(40)]
        together, long = odd[1].search(queries, 8), odd[1].search(queries, 16)
        for i, query in enumerate(queries):
            np.testing.assert_array_equal(together.rows[i], odd[1].search([query], 8).rows[0])
        np.testing.assert_array_equal(together.rows, long.rows[:, :8])

    def test_exclusion_leaves_k_however_deep_they_are(self, pyserini, tmp_path):
        built = index(tmp_path, *[("Out", "fish fish fish")] * 400, *[("Kept", f"fish {'x ' * i}") for i in range(9)])
        excluded = frozenset(["Out"])
        assert built.search(["fish", "nothing"], 3, excluded).rows.tolist() == [[400, 401, 402], [-1] * 3]
        assert built.search(["fish"], 12, excluded).rows.tolist() == [[*range(400, 409), -1, -1, -1]]
        assert (built.search(["fish"], 3, frozenset(["Out", "Kept"])).rows == -1).all()
        assert (search(built, ["fish"], 3, excluded, "after").rows == -1).all()


class TestFolder:
    def test_reopened_by_what_is_there(self, pyserini, tmp_path):
        built = index(tmp_path, "red fish", ("Bird", "blue\nbird"))
        for location in (built.location, f"{built.location}/lucene"):
            again = open_index(location)
            assert isinstance(again, LuceneIndex)
            assert again.fingerprint == built.fingerprint
            hit = {"id": "1", "score": pytest.approx(0.4, abs=0.1), "title": "Bird", "text": "blue\nbird"}
            assert look_up(again, ["bird"], 2) == [{"query": "bird", "hits": [hit]}]

    def test_fingerprints_tell_corpora_apart(self, pyserini, tmp_path):
        assert index(tmp_path, "red", name="a").fingerprint != index(tmp_path, "blue", name="b").fingerprint

    def test_an_index_of_pyserinis_own(self, pyserini, tmp_path):
        documents = [
            {"id": "0", "contents": '"Fish"\nFirst line\nsecond'},
            {"id": "1", "contents": "fish without title"},
            {"id": "2", "contents": "Bird\nfish", "title": "Bird", "text": "fish"},
        ]
        opened = open_index(raw_index(tmp_path, *documents))
        assert opened.passages.rows([0, 1, 2]) == [
            Passage("0", '"Fish"', "First line\nsecond"),
            Passage("1", "", "fish without title"),
            Passage("2", "Bird", "fish"),
        ]
        assert set(opened.search(["fish"], 3, frozenset(["Fish"])).rows[0]) == {1, 2, -1}

    def test_an_index_without_its_texts(self, pyserini, tmp_path):
        opened = open_index(raw_index(tmp_path, {"id": "0", "contents": "fish"}, raw=False))
        with pytest.raises(RalmError, match="document 0: its text is not stored; the index must be built with --store"):
            look_up(opened, ["fish"], 1)

    def test_damage(self, pyserini, tmp_path):
        index(tmp_path, "red fish")
        next((tmp_path / "index/lucene").glob("segments_*")).write_bytes(b"x")
        with pytest.raises(RalmError, match="index: Lucene cannot open the index"):
            open_index(str(tmp_path / "index"))

    def test_a_taken_folder(self, pyserini, tmp_path):
        first = index(tmp_path, "red fish")
        with pytest.raises(UsageError, match=r"holds an earlier run's index; add --overwrite$"):
            index(tmp_path, "blue bird")
        second = index(tmp_path, "blue bird", if_exists="overwrite")
        assert second.passages.rows([0])[0].text == "blue bird"
        assert second.fingerprint != first.fingerprint
        assert isinstance(open_index(bm25.build_index(ODD, second.location, if_exists="overwrite").location), BM25Index)

    def test_a_corpus_that_breaks_half_way_is_not_taken_for_whole(self, pyserini, tmp_path):
        (tmp_path / "c.jsonl").write_text('{"_id": "1", "text": "a fish"}\n{')
        with pytest.raises(RalmError, match=r"c\.jsonl:2"):
            build_index(read_corpus(str(tmp_path / "c.jsonl")), str(tmp_path / "index"), progress=False)
        with pytest.raises(RalmError, match="the index was not finished; build it again with --overwrite"):
            open_index(str(tmp_path / "index"))
        assert [path.name for path in (tmp_path / "index").iterdir()] == ["manifest.json"]

    def test_an_order_that_may_not_be_the_corpus_is_told(self, pyserini, tmp_path, monkeypatch, caplog):
        """A small buffer gives a small corpus the many parts that Lucene merges."""
        texts = [" ".join(map(str, range(200 * i, 200 * i + 200))) for i in range(4000)]
        monkeypatch.setattr(lucene, "INDEXER", (*lucene.INDEXER, "--memoryBuffer", "1"))
        built = index(tmp_path, *texts)
        assert "its rows may not be in the order of the corpus" in caplog.text
        rows = built.search(["7", "799999"], 1).rows[:, 0]
        assert [passage.id for passage in built.passages.rows(rows)] == ["0", "3999"]

    def test_no_order_but_the_corpus_with_few_parts(self, pyserini, tmp_path, monkeypatch, caplog):
        texts = [" ".join(map(str, range(200 * i, 200 * i + 200))) for i in range(800)]
        monkeypatch.setattr(lucene, "INDEXER", (*lucene.INDEXER, "--memoryBuffer", "1"))
        built = index(tmp_path, *texts)
        assert len(list((tmp_path / "index/lucene").glob("*.si"))) > 1
        assert built.passages.rows(range(800)) == [Passage(str(i), "", text) for i, text in enumerate(texts)]
        assert not caplog.text

    def test_an_indexer_that_fails_leaves_no_index_of_before(self, pyserini, tmp_path, monkeypatch):
        index(tmp_path, "red fish")
        monkeypatch.setattr(lucene, "INDEXER", (*lucene.INDEXER, "--nonsense"))
        with pytest.raises(RalmError, match=r"Pyserini's indexer failed with code \d \(.*nonsense"):
            index(tmp_path, "green tree", if_exists="overwrite")
        with pytest.raises(RalmError, match="the index was not finished"):
            open_index(str(tmp_path / "index"))

    def test_an_indexer_that_drops_a_passage(self, pyserini, tmp_path, monkeypatch):
        write = lucene.write_rows
        monkeypatch.setattr(lucene, "write_rows", lambda *arguments: (write(*arguments)[0] + 1, ""))
        with pytest.raises(RalmError, match="index: Lucene indexed 1 of 2 passages"):
            index(tmp_path, "red fish", if_exists="overwrite")

    def test_no_passages(self, pyserini, tmp_path):
        with pytest.raises(RalmError, match="the corpus has no passages"):
            index(tmp_path)
        assert not (tmp_path / "index").exists()

    def test_prebuilt(self, pyserini, tmp_path, monkeypatch):
        """A name of Pyserini's is its folder in Pyserini's cache, which is downloaded only where it is not there."""
        from pyserini.prebuilt_index_info import TF_INDEX_INFO

        stored = raw_index(tmp_path, {"id": "7", "contents": '"Fish"\nred'})
        info = TF_INDEX_INFO["wikipedia-dpr-100w"]
        name = info.get("filename") or info["urls"][0].split("/")[-1]
        (tmp_path / "indexes").mkdir()
        folder = Path(stored).rename(tmp_path / "indexes" / f"{name.removesuffix('.tar.gz')}.{info['md5']}")
        monkeypatch.setenv("PYSERINI_CACHE", str(tmp_path))
        opened = open_index("lucene:wikipedia-dpr-100w")
        assert opened.location == str(folder)
        assert opened.passages.rows([0]) == [Passage("7", '"Fish"', "red")]
        with pytest.raises(UsageError, match="lucene:nonesuch: not one of Pyserini's prebuilt BM25 indexes"):
            open_index("lucene:nonesuch")


class TestUse:
    def test_neither_pytorch_nor_a_key_is_needed(self, odd):
        code = (
            "import sys; from retrieval.retriever import open_index;"
            f"assert open_index({odd[1].location!r}).search(['poisson'], 1).rows.tolist() == [[8]];"
            "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'openai')))"
        )
        environment = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
        assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0

    def test_retrieve_and_score_as_with_the_embedded_engine(self, odd, tmp_path):
        _, theirs, ours = odd
        text, tokenizer = Text(tiny.text(300), "text.txt"), tiny.tokenizer()
        options = {"strides": StrideSettings(64, 4), "queries": QuerySettings(k=5, query_length=10), "progress": False}
        table = retrieve(theirs, text, tokenizer, str(tmp_path / "lucene"), **options)
        expected = retrieve(ours, text, tokenizer, str(tmp_path / "bm25"), **options)
        np.testing.assert_allclose(table.scores, expected.scores, atol=1e-5)
        again, passages = open_retrieved(str(tmp_path / "lucene"))
        np.testing.assert_array_equal(again.rows, table.rows)
        row = table.rows[1, 0]
        assert passages.contents([row]) == ours.passages.contents([row])

    def test_commands(self, pyserini, tmp_path, monkeypatch, tiny_model, text_file, corpus_file, capsys):
        monkeypatch.chdir(tmp_path)
        sizes = ["--window", "64", "--stride", "16", "--k", "3"]
        ralm("index", "--engine", "lucene", "--corpus", corpus_file, "--out", "index")
        ralm("search", "--index", "index/lucene", "--query", tiny.text(5, 1), "--k", "2")
        assert "index: 40 passages\n" in capsys.readouterr().out
        titles = [row["title"] for row in tiny.passages(40)]
        Path("titles").write_text("\n".join(titles[:35]))
        ralm("retrieve", "--index", "index/lucene", "--text", text_file, "--tokenizer", tiny_model,
             "--out", "retrieval", "--exclude-titles", "titles", "--export-json", "r.json", *sizes)  # fmt: skip
        ralm("score", "--model", tiny_model, "--text", text_file, "--retrieval", "retrieval", "--out", "scores", *sizes)
        ralm("report", "--scores", "scores", "--json", "report.json")
        assert "first" in json.loads(Path("report.json").read_text())["strategies"]
        table, passages = open_retrieved("retrieval")
        found = table.rows[1:][table.rows[1:] >= 0]
        assert len(found)
        assert {passage.title for passage in passages.rows(found)} <= set(titles[35:])


class TestJava:
    @pytest.fixture(autouse=True)
    def no_java(self, monkeypatch, tmp_path):
        for name in ("JAVA_HOME", "JVM_PATH"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        monkeypatch.setattr(lucene, "USUAL_FOLDERS", (str(tmp_path / "jvm/*"),))
        lucene.java.cache_clear()
        yield
        lucene.java.cache_clear()

    def home(self, folder, version, library="lib/server/libjvm.so"):
        (folder / library).parent.mkdir(parents=True)
        (folder / library).touch()
        (folder / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')
        return folder

    def test_the_first_that_is_new_enough(self, tmp_path, monkeypatch):
        self.home(tmp_path / "jvm/a", "17.0.15")
        usual = self.home(tmp_path / "jvm/b", "21")
        self.home(tmp_path / "jvm/c", "25.0.3")
        assert find_java() == (usual, 21)
        (tmp_path / "bin").mkdir()
        command = self.home(tmp_path / "command", "22.0.1", "bin/server/jvm.dll") / "bin/java"
        command.touch(mode=0o755)
        (tmp_path / "bin/java").symlink_to(command)
        assert find_java() == (tmp_path / "command", 22)
        library = self.home(tmp_path / "library", "23-ea") / "lib/server/libjvm.so"
        monkeypatch.setenv("JVM_PATH", str(library))
        assert find_java() == (tmp_path / "library", 23)
        monkeypatch.setenv("JAVA_HOME", str(self.home(tmp_path / "home", "24", "lib/server/libjvm.dylib")))
        assert find_java() == (tmp_path / "home", 24)
        monkeypatch.setenv("JAVA_HOME", str(self.home(tmp_path / "old", "1.8.0_402")))
        assert find_java() == (tmp_path / "library", 23)
        assert lucene.java_environment() == {"JAVA_HOME": str(tmp_path / "library"), "JVM_PATH": str(library)}

    def test_none(self):
        with pytest.raises(
            RalmError, match=r"^Lucene needs Java 21 or newer \(none found\): install a JDK and name it"
        ):
            find_java()

    def test_too_old(self, tmp_path, monkeypatch):
        old = self.home(tmp_path / "jvm/a", "17.0.15")
        older = self.home(tmp_path / "older", "1.8.0_402")
        monkeypatch.setenv("JAVA_HOME", str(older))
        with pytest.raises(RalmError) as caught:
            find_java()
        assert f"(found only 8 in {older}, 17 in {old}): install a JDK" in str(caught.value)

    @pytest.mark.parametrize("broken", ["", "JAVA_VERSION=25", b"\xff"])
    def test_what_is_not_a_java_is_passed_over(self, tmp_path, monkeypatch, broken):
        home = self.home(tmp_path / "jvm/a", "25")
        (home / "release").write_bytes(broken if isinstance(broken, bytes) else broken.encode())
        self.home(tmp_path / "jvm/b", "25", "lib/no-libjvm.so")
        monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
        with pytest.raises(RalmError, match="none found"):
            find_java()

    def test_the_environment_is_put_back(self, monkeypatch):
        monkeypatch.setenv("JAVA_HOME", "mine")
        with lucene.environment(JAVA_HOME="theirs", JVM_PATH="x"):
            assert (os.environ["JAVA_HOME"], os.environ["JVM_PATH"]) == ("theirs", "x")
        assert os.environ["JAVA_HOME"] == "mine"
        assert "JVM_PATH" not in os.environ

    def test_one_line_without_java(self, tmp_path, corpus_file, capsys):
        if importlib.util.find_spec("pyserini") is None:
            pytest.skip("needs Pyserini (pip install 'ralm-jax[lucene]')")
        out = tmp_path / "index"
        code, line = refused(capsys, "index", "--engine", "lucene", "--corpus", corpus_file, "--out", out)
        assert (code, out.exists()) == (1, False)
        assert "Lucene needs Java 21 or newer (none found): install a JDK and name it with JAVA_HOME" in line

    def test_one_line_without_pyserini(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "jnius_config", None)
        (tmp_path / "segments_1").touch()
        for location in (tmp_path, "lucene:wikipedia-dpr-100w"):
            code, line = refused(capsys, "search", "--index", location, "--query", "fish")
            assert code == 1
            assert "Lucene needs Pyserini: pip install 'ralm-jax[lucene]'" in line

    def test_an_engine_that_is_not_here(self, tmp_path):
        built = bm25.build_index([Passage("0", "", "fish")], str(tmp_path / "index"), progress=False)
        manifest = tmp_path / "index/manifest.json"
        manifest.write_text(manifest.read_text().replace('"engine": "bm25"', '"engine": "magic"'))
        with pytest.raises(RalmError, match="an index of the engine 'magic', which is not here"):
            open_index(built.location)
