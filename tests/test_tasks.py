"""The long-context tasks: their files, what is retrieved from a document, prompts, and what of them is cut."""

import json

import numpy as np
import pytest

from eval.long_chunks import BM25Ranker, DenseRanker, best_first, chosen, pieces_of
from eval.long_prompts import LONG_PRESETS, OMITTED, Prompt, fit, make_prompt
from eval.tasks import TASKS, read_examples
from ralm_jax.errors import RalmError, UsageError
from retrieval.bm25 import build_index
from retrieval.corpus import Passage
from tests import tiny

POLICIES = ("middle", "document-tail", "context-tail")


def write(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def longbench(id="a", **fields):
    row = {
        "input": "who?",
        "context": "it was me",
        "answers": ["me", "I"],
        "length": 3,
        "dataset": "",
        "language": "en",
    }
    return row | {"all_classes": None, "_id": id} | fields


def scrolls(id="a", pid="a_0", output="me", input="who?\n\nIt was me.\n\nYes."):
    return {"id": id, "pid": pid, "input": input, "output": output}


class TestFiles:
    def test_longbench(self, tmp_path):
        write(tmp_path / "data/trec.jsonl", longbench(all_classes=["me", "you"]), longbench("b", all_classes=["me"]))
        one, two = read_examples("trec", str(tmp_path))
        assert one == ("a", "who?", "it was me", ("me", "I"), ("me", "you"), "")
        assert two.id == "b"

    def test_scrolls_references_by_id(self, tmp_path):
        rows = scrolls(), scrolls("b", "b_0"), scrolls("a", "a_1", "I"), scrolls("a", "a_2", "me")
        write(tmp_path / "narrative_qa/validation.jsonl", *rows)
        write(tmp_path / "narrative_qa/test.jsonl", scrolls(output=None))
        one, two = read_examples("narrativeqa", str(tmp_path))
        assert one == ("a", "who?", "It was me.\n\nYes.", ("me", "I"), (), "")
        assert (two.id, two.answers) == ("b", ("me",))

    def test_scrolls_options_stay(self, tmp_path):
        options = "(A) me\n(B) you\n(C) she\n(D) they"
        write(tmp_path / "quality.jsonl", scrolls(input=f"who?\n\n{options}\n\nIt was me.\n\nYes."))
        (example,) = read_examples("quality", str(tmp_path))
        assert (example.question, example.document) == (f"who?\n\n{options}", "It was me.\n\nYes.")

    def test_zeroscrolls(self, tmp_path):
        whole = "Read.\n\nReport:\nIt was me.\n\nQuery:\nwho?\n\nAnswer:"
        places = {"document_start_index": 15, "document_end_index": 25, "query_start_index": 27, "query_end_index": 38}
        row = scrolls(input=whole) | places | {"truncation_seperator": "... [cut]\n\n"}
        write(tmp_path / "qmsum.jsonl", row)
        (example,) = read_examples("qmsum", str(tmp_path))
        assert (example.question, example.document, example.separator) == ("who?", "It was me.", "... [cut]\n\n")

    def test_quality_release(self, tmp_path):
        asked = {"question": "who? ", "options": ["me", "you ", "she", "they"], "gold_label": 2}
        row = {"article_id": "1", "article": "It was you."}
        write(tmp_path / "quality_dev.jsonl", row | asked, row | {"questions": [asked | {"question_unique_id": "q"}]})
        flat, nested = read_examples("quality", str(tmp_path))
        assert (flat.id, nested.id) == ("0", "q")
        assert flat[1:4] == nested[1:4] == ("who?\n\n(A) me\n(B) you\n(C) she\n(D) they", "It was you.", ("you",))

    def test_qasper_release(self, tmp_path):
        def given(**fields):
            return {"answer": {"unanswerable": False, "extractive_spans": [], "yes_no": None, "free_form_answer": ""}
                    | fields}  # fmt: skip

        answers = [given(unanswerable=True), given(yes_no=False), given(yes_no=True)]
        answers += [given(extractive_spans=["a", "b"]), given(free_form_answer="free"), given(free_form_answer="free")]
        paper = {"title": "T", "abstract": "A", "full_text": [{"section_name": "S", "paragraphs": ["p", "q"]}],
                 "qas": [{"question": "who?", "question_id": "1", "answers": answers}]}  # fmt: skip
        (tmp_path / "qasper-dev.json").write_text(json.dumps({"1909.1": paper}))
        (example,) = read_examples("qasper", str(tmp_path / "qasper-dev.json"))
        answers = ("Unanswerable", "No", "Yes", "a, b", "free")
        assert example == ("1909.1-0", "who?", "T\n\nA\n\nS\np\nq", answers, (), "")

    def test_hotpotqa_and_qmsum_releases(self, tmp_path):
        write(tmp_path / "hotpotqa_dev.jsonl", {"_id": "a", "question": "who?", "answer": "me", "supporting_facts": [],
              "context": [["One", ["It ", "was."]], ["Two", ["Me."]]]})  # fmt: skip
        (example,) = read_examples("hotpotqa", str(tmp_path))
        assert example[:4] == ("a", "who?", "Passage 1:\nOne\nIt was.\n\nPassage 2:\nTwo\nMe.", ("me",))
        write(tmp_path / "qmsum_test.jsonl", {"meeting_transcripts": [{"speaker": "A", "content": "Hello."}] * 2,
              "general_query_list": [{"query": "all?", "answer": "x"}],
              "specific_query_list": [{"query": "one?", "answer": "y"}]})  # fmt: skip
        general, specific = read_examples("qmsum", str(tmp_path))
        assert general == ("0", "all?", "A: Hello.\nA: Hello.", ("x",), (), "")
        assert specific == ("1", "one?", "A: Hello.\nA: Hello.", ("y",), (), "")

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            ([longbench(), longbench()], r"musique.jsonl: example a stands in it twice"),
            ([{"foo": 1}], "musique.jsonl:1: not a row of LongBench, .*; its fields are foo"),
            ([scrolls(), scrolls(input="what?\n\nIt was me.")], "musique.jsonl:2: the id a is that of another example"),
            ([longbench(answers=[])], "musique.jsonl:1: no answer to judge by"),
            ([longbench(answers=3)], "musique.jsonl:1: answers: expected a list of strings"),
            ([longbench(context=None)], "musique.jsonl:1: field 'context' is missing"),
            (
                [{"article_id": 1, "article": "x", "question": "y"}],
                "not as in the original release .KeyError: 'options'",
            ),
            ([], "no examples"),
        ],
    )
    def test_broken(self, tmp_path, rows, message):
        write(tmp_path / "musique.jsonl", *rows)
        with pytest.raises(RalmError, match=message):
            read_examples("musique", str(tmp_path))

    def test_classes_missing(self, tmp_path):
        write(tmp_path / "trec.jsonl", longbench())
        with pytest.raises(RalmError, match="field 'all_classes' is missing"):
            read_examples("trec", str(tmp_path))

    def test_missing_files(self, tmp_path):
        with pytest.raises(UsageError, match=r"no file of narrativeqa; download .*: narrative_qa.zip or .*data.zip"):
            read_examples("narrativeqa", str(tmp_path))
        with pytest.raises(UsageError, match=r"no such file or folder; download .*LongBench: data.zip, and name"):
            read_examples("samsum", str(tmp_path / "absent"))

    def test_the_exact_name_first(self, tmp_path):
        write(tmp_path / "hotpotqa_e.jsonl", longbench("e"))
        write(tmp_path / "hotpotqa.jsonl", longbench("a"))
        assert [example.id for example in read_examples("hotpotqa", str(tmp_path))] == ["a"]
        write(tmp_path / "other/hotpotqa.jsonl", longbench("a"))
        with pytest.raises(UsageError, match=r"more than once \(hotpotqa.jsonl, other/hotpotqa.jsonl\)"):
            read_examples("hotpotqa", str(tmp_path))

    @pytest.mark.parametrize("task", TASKS)
    def test_real_rows(self, shared, task):
        folder = shared / "data" / ("longctx" if task == "quality" else "longbench")
        if not folder.is_dir():
            pytest.skip(f"needs {folder.name}/ in the reference data")
        for example in read_examples(task, str(folder)):
            pieces = pieces_of(TASKS[task].kind, example.document)
            assert " ".join(example.document.split()) == " ".join(" ".join(pieces).split())  # nothing is lost
            if task == "trec":
                assert set(example.answers) <= set(example.classes)
                assert all(piece.startswith("Question: ") and "\nType: " in piece for piece in pieces)
            if task == "samsum":
                assert all(piece.startswith("Dialogue: ") and "\nSummary: " in piece for piece in pieces)
            if task == "quality":
                assert all(answer in example.question for answer in example.answers)


class TestRetrieval:
    def test_chunks_of_300_words(self):
        document = " ".join(f"w{i}" for i in range(650))
        assert [len(piece.split()) for piece in pieces_of("span", document)] == [300, 300, 50]

    def test_few_shot_examples(self):
        document = "Question: one ?\nType: A\nQuestion: two ?\nType: B\n"
        assert pieces_of("class", document) == ("Question: one ?\nType: A", "Question: two ?\nType: B")
        document = "Dialogue: A: hi\r\nB: no\nSummary: one. \nDialogue: A: x\nSummary: two."
        assert pieces_of("dialogue", document) == (
            "Dialogue: A: hi\r\nB: no\nSummary: one. ", "Dialogue: A: x\nSummary: two.",
        )  # fmt: skip

    def test_most_relevant_first(self):
        assert best_first(np.array([1.0, 3, 3, 2]), 3) == [1, 2, 3]
        assert best_first(np.array([1.0, 3]), 5) == [1, 0]

    def test_bm25_is_the_index(self, tmp_path):
        texts = [tiny.text(words, seed) for seed, words in enumerate((40, 90, 60, 300))] + ["", "!"]
        index = build_index([Passage(str(i), "", text) for i, text in enumerate(texts)], str(tmp_path / "index"))
        for query in (texts[0][:60], " ".join(texts[2].split()[5:9]) * 2, "nothing of this"):
            scores = BM25Ranker().scores(query, tuple(texts))
            hits = index.search([query], len(texts))
            found = hits.rows[0][hits.rows[0] >= 0]
            np.testing.assert_allclose(scores[found], hits.scores[0][: len(found)], rtol=1e-5)
            assert np.count_nonzero(scores) == len(found)

    def test_dense(self):
        class Counting:
            """Vectors count two letters."""

            location, settings, dimension, tokenizer, cut = "counting", {"kind": "counting"}, 2, None, 0

            def __init__(self):
                self.asked = []

            def embed(self, texts):
                self.asked += texts
                return np.array([[text.count("a"), text.count("b")] for text in texts], np.float32)

        passages, queries = Counting(), Counting()
        ranker = DenseRanker(passages, queries)
        assert chosen(ranker, "b", ("ab", "bbb", "a", "bb"), 3) == [1, 3, 0]
        assert chosen(ranker, "a", ("ab", "bbb", "a", "bb"), 1) == [0]
        assert (len(passages.asked), queries.asked) == (4, ["b", "a"])  # a document's chunks are embedded once
        queries.dimension = 3
        with pytest.raises(UsageError, match="they are no pair of encoders"):
            DenseRanker(passages, queries)


class TestPrompts:
    def test_xu2023(self):
        prompt = make_prompt("xu2023", "hotpotqa", "who {input}?", ["one {context}", "two"])
        assert prompt.whole == (
            "title: , source: one {context}\n\ntitle: , source: two\n\n"
            "User: Answer the following question with a short span. who {input}?\n\nAssistant:"
        )
        prompt = make_prompt("xu2023", "qmsum", "why?", ["text"])
        assert prompt.tail == "\n\nUser: Please give a full and complete answer for the question. why?\n\nAssistant:"

    def test_longbench(self):
        twice = "Answer the question based on the given passages. Only give me the answer and do not output any other"
        for task in ("hotpotqa", "musique"):
            assert make_prompt("longbench", task, "who?", ["one", "two"]).whole == (
                f"{twice} words.\n\nThe following are given passages.\none\n\ntwo\n\n{twice} words.\n\n"
                "Question: who?\nAnswer:"
            )
        assert make_prompt("longbench", "multifieldqa_en", "who?", ["one"]).whole == (
            "Read the following text and answer briefly.\n\none\n\nNow, answer the following question based on the "
            "above text, only give me the answer and do not output any other words.\n\nQuestion: who?\nAnswer:"
        )

    @pytest.mark.parametrize("preset", LONG_PRESETS)
    def test_few_shot_without_turns(self, preset):
        assert make_prompt(
            preset, "trec", "Question: d\nType:", ["Question: a\nType: b", "Question: c\nType: e"]
        ).whole == (
            "Please determine the type of the question below. Here are some examples of questions.\n\n"
            "Question: a\nType: b\nQuestion: c\nType: e\nQuestion: d\nType:"
        )
        assert make_prompt(preset, "samsum", "Dialogue: d\nSummary:", ["one", "two"]).whole == (
            "Summarize the dialogue into a few short sentences. The following are some examples.\n\n"
            "one\ntwo\n\nDialogue: d\nSummary:"
        )

    def test_every_task_has_one(self):
        for name, preset in LONG_PRESETS.items():
            for task in preset.templates:
                template = preset.templates[task]
                assert template.count("{context}") == template.count("{input}") == 1, (name, task)
        assert (
            LONG_PRESETS["xu2023"].templates.keys()
            == TASKS.keys()
            == LONG_PRESETS["longbench"].templates.keys() | {"quality"}
        )
        with pytest.raises(UsageError, match="--prompt-preset longbench has no prompt for quality; name xu2023"):
            make_prompt("longbench", "quality", "who?", ["one"])


class TestCut:
    @pytest.fixture(params=[tiny.tokenizer, tiny.trimming_tokenizer])
    def tokenizer(self, request):
        return request.param()

    @pytest.fixture
    def prompt(self):
        return Prompt("Read this.\n\n", tiny.text(300, 1), "\n\nNow, who is it?\nAnswer:")

    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize("share", [0.95, 0.5, 0.2])
    def test_question_stays(self, tokenizer, prompt, policy, share):
        tokens = tokenizer.encode(prompt.whole)
        room = int(share * len(tokens))
        fitted = fit(prompt, policy, tokenizer, room)
        assert fitted.text.endswith(prompt.tail)
        assert fitted.text.startswith(prompt.head)
        assert room - 4 <= fitted.tokens <= room
        assert fitted.tokens == len(tokenizer.encode(fitted.text))
        start, end = fitted.cut
        separator = f"{OMITTED}\n\n" if policy == "document-tail" else ""
        rest = prompt.whole[end:].lstrip("\n") if separator else prompt.whole[end:]
        assert fitted.text == prompt.whole[:start] + separator + rest
        assert abs(fitted.cut_tokens - len(tokenizer.encode(prompt.whole[start:end]))) <= 2
        if policy == "middle":
            halves = len(tokenizer.encode(prompt.whole[:start])), len(tokenizer.encode(prompt.whole[end:]))
            assert abs(halves[0] - room // 2) <= 2
            assert abs(halves[1] - room // 2) <= 2
        else:
            assert end == len(prompt.head) + len(prompt.context)

    @pytest.mark.parametrize("policy", POLICIES)
    def test_whole_where_it_fits(self, tokenizer, prompt, policy):
        length = len(tokenizer.encode(prompt.whole))
        assert fit(prompt, policy, tokenizer, length) == (prompt.whole, length, 0, (0, 0))

    @pytest.mark.parametrize("policy", POLICIES)
    def test_long_question(self, tokenizer, policy):
        prompt = Prompt("", tiny.text(100, 1), tiny.text(60, 2))
        asking = len(tokenizer.encode(prompt.tail))
        fitted = fit(prompt, policy, tokenizer, asking + 40)  # more than a half is the question
        assert fitted.text.endswith(prompt.tail)
        assert fitted.tokens <= asking + 40
        with pytest.raises(UsageError, match="have no room for instruction and question"):
            fit(prompt, policy, tokenizer, asking - 5)

    def test_own_separator(self, tokenizer, prompt):
        fitted = fit(prompt, "document-tail", tokenizer, 200, "... [cut]\n\n")
        assert "... [cut]\n\nNow, who is it?" in fitted.text
