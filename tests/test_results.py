"""Files of questions and of retrieval results, every dialect both ways, and every way in which they can be broken."""

import gzip
import json
from typing import get_args

import pytest

from ralm_jax import cli_retrieval
from ralm_jax.errors import RalmError, UsageError
from retrieval.corpus import Passage
from retrieval.qa import Found, Question, answer_matcher, mark_answers, read_qrels
from retrieval.results import DIALECTS, join_passages, join_questions, read_questions, write_questions
from tests.test_corpus import rows, write

TEXT = 'a "quoted"\ttab\nand line\u2028, 日本語'
FOUND = (Found("7", 12.25, "T one", TEXT, True), Found("wiki:9", 1 / 3, "", "two\nlines", False))
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
    @pytest.mark.parametrize("suffix", ["", ".gz"])
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

    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            ({"question": "q", "answer": ["a", "b"]}, Question("0", "q", ("a", "b"))),
            ({"question": "q", "answers": "a"}, Question("0", "q", ("a",))),
            ({"id": "test_0", "question": "q", "golden_answers": ["a"]}, Question("test_0", "q", ("a",))),
            ({"id": 9, "question": "q", "answer_regex": "a|b"}, Question("9", "q", ("a|b",), regex=True)),
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
            (GOOD + '{"answers": ["a"]}', r"file:2: field 'question' or 'text' is missing"),
            (GOOD + '{"question": "q", "answers": [1]}', r"file:2: answers: expected a list of strings"),
            (GOOD + '{"question": "\\ud800"}', r"file:2: a lone surrogate"),
            (GOOD + '{"question": "q", "ctxs": {}}', r"file:2: ctxs: expected a list"),
            ('[\n{"question": "q"},\n\n {"question": 1.5}]', r"file:4: field 'question' is float"),
            ('[\n{"question": "q"},\n3]', r"file:3: expected a JSON object, found int"),
            ('[\n{"question": "q"}', r"file:2: not JSON"),
            ('{"1": {"question": "q"},\n"2": {"answers": []}}', r"file:2: field 'question' or 'text' is missing"),
            ('{"1": {"question": "q"},\n"1": {"question": "q"}}', "stands in the object twice"),
            ('[{"question": "q", "ctxs": [{"score": "high"}]}]', r"file:1: passage 1: score 'high' is not a finite"),
            ('[{"question": "q", "ctxs": [{"score": NaN}]}]', r"passage 1: score nan is not a finite number"),
            ('[{"question": "q", "ctxs": [{"has_answer": "no"}]}]', r"passage 1: has_answer is str"),
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
            ("trec", [Question("1", "q")], "the questions have no passages"),
            ("trec", [Question("a b", "q", found=(Found("d", 1),))], "id 'a b' cannot stand in a run"),
            ("msmarco", [Question("1", "q", found=(Found("", 1),))], "id '' cannot stand in a run"),
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
    unmarked = [q._replace(found=tuple(p._replace(has_answer=None) for p in q.found)) for q in QUESTIONS]
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
