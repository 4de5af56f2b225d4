"""Files of questions and of retrieval results, every dialect both ways, and every way in which they can be broken."""

import gzip
import json
from pathlib import Path
from typing import get_args

import pytest

from ralm_jax import cli_retrieval
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.text import read_rows
from retrieval.corpus import Passage, read_corpus
from retrieval.qa import Found, Question, answer_matcher, mark_answers, read_qrels
from retrieval.results import DIALECTS, join_passages, join_questions, read_questions, write_questions
from tests.test_corpus import LONGBENCH, SCROLLS, rows, write, zero_scrolls

TEXT = 'a "quoted"\ttab\nand line\u2028, 日本語'
FOUND = (Found("7", 12.25, "T one", TEXT, True, gold=True), Found("wiki:9", 1 / 3, "", "two\nlines", False))
QUESTIONS = [
    Question("0", "who\u2028asks?", ("Röntgen", 'Cassini\'s "gap"'), FOUND),
    Question("q2", 'is "it"?', ("yes",), (Found("7", -1.0, "T one", TEXT, False),)),
    Question("2", "nobody knows", (), ()),
]


def runs():
    return [Question(q.id, "", found=tuple(Found(p.id, p.score) for p in q.found)) for q in QUESTIONS if q.found]


def bare(**changes):
    return [q._replace(found=(), **changes) for q in QUESTIONS]


class TestRoundTrips:
    @pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
    @pytest.mark.parametrize("dialect", ["dpr", "contriever", "pyserini"])
    def test_with_texts(self, tmp_path, dialect, suffix):
        path = str(tmp_path / f"file{suffix}")
        write_questions(path, QUESTIONS, dialect)
        assert read_questions(path) == QUESTIONS
        assert read_questions(path, dialect) == QUESTIONS

    def test_runs(self, tmp_path):
        path = str(tmp_path / "run")
        write_questions(path, QUESTIONS, "trec")
        assert read_questions(path) == runs()
        write_questions(path, QUESTIONS, "msmarco")
        assert [[p.id for p in q.found] for q in read_questions(path)] == [["7", "wiki:9"], ["7"]]
        assert [p.score for p in read_questions(path)[0].found] == [1, 0.5]

    @pytest.mark.parametrize("dialect", ["nq-open", "flashrag"])
    def test_questions(self, tmp_path, dialect):
        path = str(tmp_path / "file.jsonl")
        write_questions(path, QUESTIONS, dialect)
        assert read_questions(path) == bare()

    def test_csv(self, tmp_path):
        path = str(tmp_path / "file.csv")
        write_questions(path, QUESTIONS, "csv")
        assert [q[1:] for q in read_questions(path)] == [q[1:] for q in bare()]
        assert [q.id for q in read_questions(path)] == ["0", "1", "2"]

    def test_beir_queries(self, tmp_path):
        path = str(tmp_path / "queries.jsonl")
        write_questions(path, QUESTIONS, "beir-queries")
        assert read_questions(path) == bare(answers=())

    def test_longbench(self, tmp_path):
        path = str(tmp_path / "file.jsonl")
        write_questions(path, QUESTIONS, "longbench")
        kept = (("dataset", ""), ("language", "en"), ("all_classes", None))
        assert read_questions(path) == bare(kept=kept)
        assert read_questions(path, "longbench") == read_questions(path)

    def test_the_command_knows_every_dialect(self):
        assert get_args(cli_retrieval.Dialect) == tuple(DIALECTS)


class TestAsOthersWriteThem:
    """Files as the other programs write them, down to the names of the fields and the kinds of the values."""

    def found(self, tmp_path, content, name="file.json"):
        return read_questions(write(tmp_path / name, content))

    def test_dpr(self, tmp_path):
        context = {"id": "wiki:1", "title": "T", "text": "x", "score": "80.5", "has_answer": True}
        content = json.dumps([{"question": "q", "answers": ["a"], "ctxs": [context]}], indent=4)
        assert self.found(tmp_path, content) == [Question("0", "q", ("a",), (Found("wiki:1", 80.5, "T", "x", True),))]

    def test_contriever(self, tmp_path):
        context = {"id": "1", "title": "T", "text": "x", "score": "1.5", "hasanswer": False}
        content = rows(*[{"question": "q", "answers": ["a"], "ctxs": [context]}] * 2)
        assert [q.id for q in self.found(tmp_path, content)] == ["0", "1"]
        assert self.found(tmp_path, content)[1].found == (Found("1", 1.5, "T", "x", False),)

    @pytest.mark.parametrize("indent", [None, 4])
    def test_pyserini(self, tmp_path, indent):
        contexts = [{"docid": "1", "score": "9", "text": "T\nx\ny", "has_answer": True}, {"docid": "2", "score": 8.5}]
        entry = {"question": "q", "answers": ["a"], "contexts": contexts}
        content = json.dumps({"11": entry, "5": entry}, indent=indent)
        expected = (Found("1", 9, "T", "x\ny", True), Found("2", 8.5))
        assert self.found(tmp_path, content) == [Question(id, "q", ("a",), expected) for id in ("11", "5")]

    def test_trec(self, tmp_path):
        content = "q2 Q0 d1 1 3.5 tag\r\nq1\tQ0\td2 2 1e-3 tag\n\nq1 Q0 d1 1 7 tag\n"
        assert self.found(tmp_path, content) == [
            Question("q2", "", found=(Found("d1", 3.5),)),
            Question("q1", "", found=(Found("d1", 7), Found("d2", 0.001))),
        ]

    def test_msmarco(self, tmp_path):
        found = self.found(tmp_path, "1\t10\t2\n1\t11\t1\n2\t10\t1\n")
        assert [[p.id for p in q.found] for q in found] == [["11", "10"], ["10"]]

    def test_gold_contexts_without_ids_and_scores(self, tmp_path):
        content = rows({"question": "q", "answers": ["a"], "ctxs": [{"title": "T", "text": "x", "hasanswer": True}]})
        assert self.found(tmp_path, content)[0].found == (Found("", 1, "T", "x", True),)

    def test_dpr_for_training(self, tmp_path):
        """The first positive passage is gold, and the hard negatives follow; ids are NQ's or TriviaQA's."""
        gold, other = {"title": "T", "text": "x", "score": 1000, "passage_id": "1"}, {"text": "y", "psg_id": "2"}
        entry = {"dataset": "nq", "question": "q", "answers": ["a"], "negative_ctxs": [{"text": "far"}]}
        full = entry | {"positive_ctxs": [gold, other], "hard_negative_ctxs": [other | {"psg_id": 3}]}
        found = self.found(tmp_path, json.dumps([full, entry | {"positive_ctxs": []}], indent=4))
        assert [q.found for q in found] == [(Found("1", 1000, "T", "x", gold=True), Found("3", 1, "", "y")), ()]

    def test_gold_as_in_lost_in_the_middle(self, tmp_path):
        contexts = [{"id": "1", "text": "x", "hasanswer": False, "isgold": False, "original_retrieval_index": 0},
                    {"id": "2", "text": "y", "hasanswer": True, "isgold": True}]  # fmt: skip
        (question,) = self.found(tmp_path, rows({"question": "q", "answers": ["a"], "ctxs": contexts}))
        assert [one.gold for one in question.found] == [False, True]

    def test_longbench(self, tmp_path):
        question = Question(
            "b7", "who?", ("a",), kept=(("dataset", "qasper"), ("language", "en"), ("all_classes", None))
        )
        assert self.found(tmp_path, rows(LONGBENCH)) == [question]
        of_classes = LONGBENCH | {"all_classes": ["X", "Y"], "dataset": "trec"}
        again = str(tmp_path / "again.jsonl")
        found = (Found("1", 2, "T", "one\ntwo"), Found("2", 1, "", "three four"))
        write_questions(again, [q._replace(found=found) for q in self.found(tmp_path, rows(of_classes))], "longbench")
        with open(again, encoding="utf-8") as file:
            assert json.loads(file.read()) == of_classes | {"context": "T\none\ntwo\n\nthree four", "length": 5}

    def test_references_of_scrolls_are_grouped_by_id(self, tmp_path):
        other = SCROLLS | {"id": "q2", "pid": "q2_0", "input": "who is\nit?\n\nelse", "output": "c"}
        references = [SCROLLS | {"pid": f"q1_{i}", "output": output} for i, output in enumerate("bab", start=1)]
        found = self.found(tmp_path, rows(SCROLLS, other, *references))
        assert found == [Question("q1", "who is\nit?", ("a", "b")), Question("q2", "who is\nit?", ("c",))]
        with pytest.raises(RalmError, match=r"file\.json:2: the id q1 is that of another question above"):
            self.found(tmp_path, rows(SCROLLS, SCROLLS | {"input": "and?\n\none"}))

    def test_options_are_not_of_the_question(self, tmp_path):
        row = SCROLLS | {"input": "who?\n\n (A) 1\n (B) 2\n (C) 3\n (D) 4\n\n\nthe story"}
        assert self.found(tmp_path, rows(row)) == [Question("q1", "who?", ("a",))]

    @pytest.mark.parametrize(
        ("query", "text"),
        [
            ("Question:\nwho?\n", "who?"),
            ("Query:\nQuestion: who?", "Question: who?"),
            ("Question and Possible Answers:\nwho?\n\n (A) 1", "who?\n\n (A) 1"),
            ("", ""),
        ],
    )
    def test_zero_scrolls(self, tmp_path, query, text):
        assert self.found(tmp_path, rows(zero_scrolls(query))) == [Question("z", text)]

    def test_scrolls_without_question_or_with_indexes_of_something_else(self, tmp_path):
        without = {"query_start_index": None, "query_end_index": None}
        assert self.found(tmp_path, rows(zero_scrolls("", **without))) == [Question("z", "")]
        with pytest.raises(RalmError, match=r"file\.json:1: query from 5 to 1: not a part of the input"):
            self.found(tmp_path, rows(zero_scrolls("q", query_start_index=5, query_end_index=1)))

    TRIVIA = {
        "Value": "Sunset Blvd",
        "Aliases": ["Sunset Boulevard", "Sunset Blvd", "Sunset"],
        "NormalizedAliases": ["x"],
    }

    @pytest.mark.parametrize("indent", [None, 4])
    @pytest.mark.parametrize("before", [{}, {"Domain": 'a "Data": [', "Also": {"Data": [{}]}, "Version": 1.0}])
    def test_trivia_qa(self, tmp_path, indent, before):
        entries = [
            {"Answer": self.TRIVIA, "Question": "which?", "QuestionId": "tc_3", "EntityPages": [{"Title": "T"}]},
            {"Question": "of the test set?", "QuestionId": "tc_4", "SearchResults": []},
        ]
        content = json.dumps(before | {"Data": entries, "VerifiedEval": False}, indent=indent)
        assert self.found(tmp_path, content) == [
            Question("tc_3", "which?", ("Sunset Blvd", "Sunset Boulevard", "Sunset")),
            Question("tc_4", "of the test set?"),
        ]

    def test_trivia_qa_of_hugging_face(self, tmp_path):
        answer = {"aliases": ["Sunset"], "normalized_aliases": ["x"], "normalized_value": "x", "value": "Sunset Blvd"}
        unknown = {"aliases": [], "normalized_aliases": [], "value": "<unk>"}
        made = [{"question": "which?", "question_id": f"tc_{i}", "answer": a} for i, a in enumerate([answer, unknown])]
        for content in (rows(*made), json.dumps(made)):
            assert self.found(tmp_path, content) == [
                Question("tc_0", "which?", ("Sunset Blvd", "Sunset")), Question("tc_1", "which?"),
            ]  # fmt: skip

    def test_the_papers(self, tmp_path):
        """A stride is a question; passages have numbers for ids, by title and text."""
        one, two = {"text": "T one\nx\ny", "score": 2.5}, {"title": "T", "text": "x\ny", "score": 1}
        strides = [
            {"query": "", "retrieved_docs": []},
            {"query": " a\nquery", "retrieved_docs": [one, two, one]},
            {"query": "b", "retrieved_docs": [two, {"text": "bare", "score": 1}, one]},
            {"query": "c", "retrieved_docs": []},
        ]
        place = {"begin_location": 4, "end_location": 8, "future": "f"}
        content = json.dumps([place | stride for stride in strides], indent=4)
        first, second = Found("0", 2.5, "T one", "x\ny"), Found("1", 1, "T", "x\ny")
        expected = [
            Question("1", " a\nquery", (), (first, second, first._replace(id="2"))),
            Question("2", "b", (), (second, Found("3", 1, "", "bare"), first)),
            Question("3", "c"),
        ]
        assert self.found(tmp_path, content) == expected
        assert read_questions(str(tmp_path / "file.json"), "ralm") == expected
        for dialect in ("dpr", "contriever", "pyserini"):
            write_questions(str(tmp_path / dialect), expected, dialect)
            assert read_questions(str(tmp_path / dialect)) == expected
        write_questions(str(tmp_path / "trec"), expected, "trec")
        assert [[p.id for p in q.found] for q in read_questions(str(tmp_path / "trec"))] == [
            ["0", "1", "2"],
            ["1", "3", "0"],
        ]
        with pytest.raises(UsageError, match=r"--to ralm: .* ralm retrieve --export-json writes it"):
            write_questions(str(tmp_path / "out"), expected, "ralm")
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            ({"question": "q", "answer": ["a", "b"]}, Question("0", "q", ("a", "b"))),
            ({"question": "q", "answers": "a"}, Question("0", "q", ("a",))),
            ({"id": "test_0", "question": "q", "golden_answers": ["a"]}, Question("test_0", "q", ("a",))),
            ({"id": 9, "question": "q", "answer_regex": "a|b"}, Question("9", "q", ("a|b",), regex=True)),
            ({"index": 3, "input": "q", "outputs": ["a", "b"]}, Question("0", "q", ("a", "b"))),
            ({"_id": "PLAIN-2", "text": "q", "metadata": {}}, Question("PLAIN-2", "q")),
        ],
    )
    @pytest.mark.parametrize("count", [1, 2])
    def test_questions(self, tmp_path, content, expected, count):
        second = content | {"id": "x"} if "_id" not in content else content | {"_id": "x"}
        found = self.found(tmp_path, "\ufeff" + rows(*[content, second][:count]).replace("\n", "\r\n"))
        assert found[0] == expected
        assert len(found) == count

    def test_csv(self, tmp_path):
        content = 'who?\t[\'a\', "b\'s"]\n"he said ""x"""\t"[""Cassini\'s gap""]"\r\nhow\t(\'\\d+ ft\',)\n'
        assert [(q.text, q.answers) for q in self.found(tmp_path, content, "q.csv")] == [
            ("who?", ("a", "b's")), ('he said "x"', ("Cassini's gap",)), ("how", ("\\d+ ft",)),
        ]  # fmt: skip

    @pytest.mark.parametrize(
        "content",
        ["query-id\tcorpus-id\tscore\nq1\td1\t1\nq1\td2\t2\nq2\td1\t0\n", "q1 0 d1 1\nq1 0 d2 2\r\n\nq2 0 d1 0\n"],
    )
    def test_qrels(self, tmp_path, content):
        assert read_qrels(write(tmp_path / "qrels", content)) == {"q1": {"d1", "d2"}}


GOOD = '{"question": "q", "answers": ["a"]}\n'


class TestRefusals:
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("", "no questions in it"),
            ("[]", "no questions in it"),
            ("just words\n", r"file:1: none of the dialects dpr, contriever"),
            (GOOD + "{\n", r"file:2: not JSON"),
            (GOOD + "[1]\n", r"file:2: expected a JSON object, found list"),
            (GOOD + '{"answers": ["a"]}', r"file:2: field 'question' or 'text' or .* is missing"),
            (GOOD + '{"question": "q", "answers": [1]}', r"file:2: answers: expected a list of strings"),
            (GOOD + '{"question": "\\ud800"}', r"file:2: a lone surrogate"),
            (GOOD + '{"question": "q", "ctxs": {}}', r"file:2: ctxs: expected a list"),
            ('[\n{"question": "q"},\n\n {"question": 1.5}]', r"file:4: field 'question' is float"),
            ('[\n{"question": "q"},\n3]', r"file:3: expected a JSON object, found int"),
            ('[\n{"question": "q"}', r"file:2: not JSON"),
            ('{"1": {"question": "q"},\n"2": {"answers": []}}', r"file:2: field 'question' or 'text' or .* is missing"),
            ('{"1": {"question": "q"},\n"1": {"question": "q"}}', "stands in the object twice"),
            ('[{"question": "q", "ctxs": [{"score": "high"}]}]', r"file:1: passage 1: score 'high' is not a finite"),
            ('[{"question": "q", "ctxs": [{"score": NaN}]}]', r"passage 1: score nan is not a finite number"),
            ('[{"question": "q", "ctxs": [{"has_answer": "no"}]}]', r"passage 1: has_answer is str"),
            ('[{"question": "q", "ctxs": [{"isgold": 1}]}]', r"passage 1: isgold is int, expected true or false"),
            ('[{"question": "q", "positive_ctxs": {}}]', r"file:1: positive_ctxs: expected a list"),
            ('{"Data": [\n{"Question": "q"},\n{"Answer": {}}]}', r"file:3: field 'question' or"),
            ('{"Data": {"Question": "q"}, "Version": 1}', "field 'question' or 'text' or"),
            ('{"Data": []}', "no questions in it"),
            (GOOD + '{"question": "q", "answer": {"aliases": ["a"]}}', r"file:2: field 'value' or 'Value' is missing"),
            (GOOD + '{"question": "q", "answer": {"value": "a", "aliases": 1}}', r"file:2: aliases: expected a list"),
            (GOOD + '{"pid": "1", "input": "q", "id": "1"}', r"file:2: input: expected a question, a blank line"),
            (GOOD + '{"query": "q", "retrieved_docs": {}}', r"file:2: retrieved_docs: expected a list"),
            ('[{"question": "q", "ctxs": ["x"]}]', r"file:1: passage 1: expected an object, found str"),
            ('[{"question": "q", "id": 1}, {"question": "r", "id": 1}]', "question 1 stands in it twice"),
            ('[{"question": "q", "ctxs": [{"id": 1}, {"id": 1}]}]', "question 0: passage 1 stands in it twice"),
            ("q Q0 d 1 1.0 t\nq Q0 d 2 0.5 t\n", r"file:2: passage d stands twice under question q"),
            ("q Q0 d 1 1.0 t\nq Q0 e x 0.5 t\n", r"file:2: expected qid Q0 docid rank score tag"),
            ("q Q0 d 1 inf t\n", r"file:1: score 'inf' is not a finite number"),
            ("q Q0 d 1 1.0 t\nq d 2\n", r"file:2: expected qid Q0 docid rank score tag"),
            ("q\td\t1\nq\te\n", r"file:2: expected qid docid rank"),
            ("q\t['a']\nr\n", r"file:2: 1 fields, expected 2"),
            ("q\t['a']\nr\t__import__('os').getcwd()\n", r"file:2: answers: expected a list as \['a', 'b'\]"),
            ("q\t['a']\nr\t{'a': 1}\n", r"file:2: answers: expected a list of strings"),
            ("q\t['\\ud800']\n", r"file:1: a lone surrogate"),
            ('q\t["a"]\n"r\t[]\n', r"file:2: .*the quoting of this row is broken"),
        ],
    )
    def test_reading(self, tmp_path, content, message):
        with pytest.raises(RalmError, match=message):
            read_questions(write(tmp_path / "file", content))

    @pytest.mark.parametrize(
        ("content", "message"),
        [("a\tb\tc\nq\td\tx\n", r"qrels:2: expected query-id"), ("q 0 d\n\nq d 1 1 1\n", r"qrels:3: expected query-id"),
         ("q 0 d 0\n", "no relevant passages in it")],
    )  # fmt: skip
    def test_qrels(self, tmp_path, content, message):
        with pytest.raises(RalmError, match=message):
            read_qrels(write(tmp_path / "qrels", content))

    def test_nothing_there(self, tmp_path):
        for read in (read_questions, read_qrels):
            with pytest.raises(UsageError, match="none: no such file"):
                read(str(tmp_path / "none"))

    @pytest.mark.parametrize(
        ("dialect", "questions", "message"),
        [
            ("dpr", [Question("1", "q", found=(Found("d", 1),))], "passage d of question 1 has no text; --corpus"),
            ("contriever", [Question("1", "")], "question 1 has no text; --questions FILE adds it"),
            ("pyserini", [Question("1", "")], "question 1 has no text; --questions FILE adds it"),
            ("pyserini", [Question("1", "q", found=(Found("d", 1, "a\nb", "x"),))], "title has more than one line"),
            (
                "longbench",
                [Question("1", "q", found=(Found("d", 1),))],
                "passage d of question 1 has no text; --corpus",
            ),
            ("longbench", [Question("1", "", found=(Found("d", 1, "", "x"),))], "question 1 has no text; --questions"),
            ("longbench", [Question("1", "q")], "the questions have no passages"),
            ("trec", [Question("1", "q")], "the questions have no passages"),
            ("trec", [Question("a b", "q", found=(Found("d", 1),))], "id 'a b' cannot stand in a run"),
            ("msmarco", [Question("1", "q", found=(Found("", 1),))], "id '' cannot stand in a run"),
            *(
                (name, [Question("1", "", found=(Found("d", 1),))], "question 1 has no text; --questions FILE adds it")
                for name in ("nq-open", "csv", "flashrag", "beir-queries")
            ),
            ("nq-open", [Question("1", "\ud800")], r"out:1: a lone surrogate"),
        ],
    )
    def test_writing(self, tmp_path, dialect, questions, message):
        with pytest.raises(RalmError, match=message):
            write_questions(str(tmp_path / "out"), questions, dialect)
        assert not list(tmp_path.iterdir())


def test_texts_join_a_run():
    texts = [Passage("7", "T one", TEXT), Passage("wiki:9", "", "two\nlines"), Passage("8", "", "")]
    full = join_passages(join_questions(runs(), QUESTIONS), texts)
    unmarked = [q._replace(found=tuple(p._replace(has_answer=None, gold=False) for p in q.found)) for q in QUESTIONS]
    assert full == unmarked[:2]
    with pytest.raises(RalmError, match="1 questions are not in the file of questions, q2 the first"):
        join_questions(runs(), QUESTIONS[:1])
    with pytest.raises(RalmError, match="question 2 is 'nobody knows', but 'x' in the file of questions"):
        join_questions(QUESTIONS, [*QUESTIONS[:2], Question("2", "x")])
    with pytest.raises(RalmError, match="1 passages are not in the corpus, 'wiki:9' the first"):
        join_passages(runs(), texts[:1])


class TestAnswers:
    """Worked out by hand after DPR's qa_validation.py."""

    @pytest.mark.parametrize(
        ("answer", "text", "expected"),
        [
            ("Röntgen", "by Wilhelm RO\u0308NTGEN.", True),  # case, and composed against decomposed
            ("new york", "In New\n York, 1900", True),
            ("new york", "New (York)", False),  # punctuation is a token
            ("art", "party", False),  # whole tokens only
            ("art", "state-of-the-art", True),
            ("14,000", "some 14,000 men", True),
            ("14,000", "some 14000 men", False),
            ("the", "the", True),  # articles are no exception
            ("", "anything", False),
            (" \u200b ", "anything", False),
            ("東京", "東京都", False),  # a run of letters is one token
            ("C++", "in C++ and C", True),
        ],
    )
    def test_tokens(self, answer, text, expected):
        assert answer_matcher(Question("0", "q", ("nothing of it", answer)))(text) is expected

    @pytest.mark.parametrize(
        ("pattern", "text", "expected"),
        [
            (r"20,?237\s*f(oo|ee)?t", "it is 20237 FEET high", True),
            (r"^high$", "so\nhigh\nup", True),
            (r"Röntgen", "Ro\u0308ntgen", True),
            (r"Sně[zž]ka|Sn\ě\žka", "the Sne\u030cz\u030cka, 1603 m", True),
            (r"\d{3}", "12", False),
        ],
    )
    def test_regular_expressions(self, pattern, text, expected):
        assert answer_matcher(Question("0", "q", (pattern,), regex=True))(text) is expected

    def test_what_is_no_regular_expression(self):
        with pytest.raises(RalmError, match=r"question 5: an answer is not a regular expression \("):
            answer_matcher(Question("5", "q", ("(",), regex=True))

    def test_marks(self):
        passages = (Found("1", 1, "a", "b", True), Found("2", 1, "a", "b"), Found("3", 1, "b", "A"), Found("4", 1))
        question = Question("0", "q", ("a",), passages)  # titles do not count
        assert [p.has_answer for p in mark_answers(question).found] == [True, False, True, None]
        assert [p.has_answer for p in mark_answers(question, anew=True).found] == [False, False, True, None]
        assert mark_answers(question._replace(answers=())) == question._replace(answers=())


@pytest.mark.parametrize(
    ("name", "count", "first"),
    [
        ("nq_open_test3610", 3610, ("14 December 1972 UTC", "December 1972")),
        ("triviaqa_200", 200, ("Cassini's Division", "Cassini's division")),
        ("webquestions_test", 2032, ("Jamaican Creole English Language", "Jamaican English")),
        ("nq_gold_ctx_dpr_format", 2655, ("Wilhelm Conrad Röntgen",)),
    ],
)
def test_real_files(shared, tmp_path, name, count, first):
    questions = read_questions(str(shared / f"data/qa/{name}.jsonl.gz"))
    assert (len(questions), questions[0].answers) == (count, first)
    for dialect in ("dpr", "contriever", "pyserini", "nq-open", "csv", "flashrag"):
        path = str(tmp_path / dialect)
        write_questions(path, questions, dialect)
        again = read_questions(path)
        assert [q[:3] for q in again] == [q[:3] for q in questions]
        assert not again[0].found or [q.found for q in again] == [q.found for q in questions]


@pytest.mark.parametrize(
    ("name", "count", "answers"),
    [("hotpotqa", 13, ("Bob Dylan",)), ("musique", 7, ("University of Toronto", "UT")), ("trec", 8, ("Individual",))],
)
def test_real_longbench(shared, tmp_path, name, count, answers):
    """Questions about documents, and the passages found in them as a shorter context."""
    path = str(shared / f"data/longbench/{name}.jsonl.gz")
    questions = read_questions(path)
    assert (len(questions), questions[0].answers, questions[0].kept[0]) == (count, answers, ("dataset", name))
    passages: dict[str, list[Passage]] = {}
    for passage in read_corpus(path, passage_words=300):
        passages.setdefault(passage.id.rpartition("-")[0], []).append(passage)
    found = [q._replace(found=tuple(Found(p.id, 1.0, p.title, p.text) for p in passages[q.id][:5])) for q in questions]
    out = str(tmp_path / "top5.jsonl.zst")
    write_questions(out, found, "longbench")
    again = [row for _, row in read_rows(tmp_path / "top5.jsonl.zst")]
    for row, made in zip(again, [row for _, row in read_rows(Path(path))], strict=True):
        same = ("_id", "input", "answers", "dataset", "all_classes")
        assert [row[name] for name in same] == [made[name] for name in same]
        assert row["context"].split() == made["context"].split()[: row["length"]]
        assert row["length"] == min(1500, made["length"])


def test_real_strides(shared):
    """What the paper's own code wrote: 137 strides, the first one without a query."""
    questions = read_questions(str(shared / "golden/luke/retrieved.json"))
    assert [question.id for question in questions] == [str(i) for i in range(1, 137)]
    assert {len(question.found) for question in questions} == {16}
    assert questions[0].found[0][:3] == ("0", 7.114999771118164, "Matthew 20")


def test_real_questions_about_documents(shared):
    hotpotqa = read_questions(str(shared / "data/longctx/hotpotqa_200.jsonl.gz"))
    assert (len(hotpotqa), hotpotqa[0].id, hotpotqa[0].answers) == (200, "5a7f6fd75542992e7d278cfa", ("Rush",))


def test_real_regular_expressions(shared):
    questions = read_questions(str(shared / "data/qa/curatedtrec_test.jsonl.gz"))
    assert len(questions) == 430
    assert all(question.regex for question in questions)
    assert answer_matcher(questions[0])("McKinley, at 20,320 feet,")
    assert not any(answer_matcher(question)("") for question in questions)


def test_gzip_gives_the_same_bytes(tmp_path):
    for name in ("a.gz", "b.gz"):
        write_questions(str(tmp_path / name), QUESTIONS, "dpr")
    one, two = ((tmp_path / name).read_bytes() for name in ("a.gz", "b.gz"))
    assert one == two
    assert json.loads(gzip.decompress(one))[1]["id"] == "q2"
