"""Question answering from a file of questions to predictions and figures, with a reader that looks answers up."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from matplotlib.image import imread

from eval import gold, plots, qa
from eval.answers import judge
from eval.prompts import PRESETS
from eval.qa_report import QARow, format_csv, format_rows, qa_rows, read_csv
from eval.retrievers import evaluate
from ralm_jax import generate
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.generate.generator import Generation
from ralm_jax.settings import GenerateSettings
from retrieval.bm25 import build_index
from retrieval.corpus import Passage
from retrieval.qa import Found, Question
from retrieval.results import read_questions
from tests import api, tiny
from tests.test_cli import ralm, refused

ROOT = Path(__file__).parents[1]
CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Peru": "Lima"}
KNOWN = "France"  # what the reader knows without passages


class Lookup:
    """Answers with the last "COUNTRY: CAPITAL" of its prompt for the country that is asked about, in any order."""

    name = "lookup"

    def __init__(self, stop_after=None, room=10**6):
        self.identity = {"kind": "lookup", "room": room}
        self.asked, self.stop_after, self.room = [], stop_after, room

    def generate(self, prompts, settings, *, tell=None):
        assert (settings.stop, settings.temperature) == (("\n",), 0)
        for place in reversed(range(len(prompts))):
            if self.stop_after is not None and len(self.asked) == self.stop_after:
                raise KeyboardInterrupt
            self.asked.append(prompts[place])
            words = prompts[place].split()
            country = next(country for country in CAPITALS if f"of {country}?" in prompts[place])
            stated = f"{country}: {CAPITALS[country]}" in prompts[place]
            text = f" {CAPITALS[country]}" if stated or country == KNOWN else " I do not know"
            yield place, Generation(text, "stop", min(len(words), self.room), 2, max(0, len(words) - self.room))


def found(*countries):
    return tuple(Found(country, 1.0, country, f"{country}: {CAPITALS[country]}") for country in countries)


def questions(passages=("Peru", "Italy")):
    return [
        Question(str(i), f"what is the capital of {country}", (f"the {capital}", capital.upper()), found(*passages))
        for i, (country, capital) in enumerate(CAPITALS.items())
    ]


def run(out, counts=(0, 1, 2), reader=None, **options):
    asked = options.pop("asked", questions())
    reader = reader or Lookup()
    options = {"made_with": {"data": 1}, "about": {"data": "here"}, "progress": False} | options
    made = qa.answer_questions(
        qa.with_passages(qa.with_answers(asked), max(counts)), counts, reader, PRESETS["ram2023"], str(out),
        settings=PRESETS["ram2023"].settings, **options,
    )  # fmt: skip
    return made, reader


def lines(out):
    return [json.loads(line) for line in (Path(out) / "predictions.jsonl").read_text().splitlines()]


class TestRun:
    def test_figures(self, tmp_path):
        made, reader = run(tmp_path / "out")
        assert len(reader.asked) == 12
        closed, one, two = qa_rows(made)
        assert [(row.passages, row.questions, row.em, row.contains, row.has_answer) for row in (closed, one, two)] == [
            (0, 4, 1 / 4, 1 / 4, None), (1, 4, 2 / 4, 2 / 4, 1 / 4), (2, 4, 3 / 4, 3 / 4, 2 / 4),
        ]  # fmt: skip
        assert (closed.f1, closed.rouge_l) == (1 / 4, 1 / 4)
        assert two.prompt_tokens > one.prompt_tokens > closed.prompt_tokens
        assert [(row.short, row.cut_prompts, row.cut_tokens) for row in (closed, one, two)] == [(0, 0, 0)] * 3

    def test_a_line_each(self, tmp_path):
        made, _ = run(tmp_path / "out")
        rows = lines(tmp_path / "out")
        assert len(rows) == len({(row["question"], row["passages"]) for row in rows}) == 12
        assert [one.key for one in made] == [(str(i), count, None) for count in (0, 1, 2) for i in range(4)]
        row = next(row for row in rows if (row["question"], row["passages"]) == ("1", 2))
        assert row == {
            "question": "1", "passages": 2, "gold_at": None, "given": 2, "prompt_sha256": row["prompt_sha256"],
            "prompt_tokens": row["prompt_tokens"], "cut": 0, "new_tokens": 2, "finish": "stop", "text": " Rome",
            "answer": "Rome", "em": True, "f1": 1.0, "rouge_l": 1.0, "contains": True, "has_answer": True,
        }  # fmt: skip
        import hashlib

        prompt = PRESETS["ram2023"].prompt(questions()[1].text, found("Peru", "Italy"))
        assert row["prompt_sha256"] == hashlib.sha256(prompt.encode()).hexdigest()

    def test_again(self, tmp_path):
        first, _ = run(tmp_path / "out")
        before = (tmp_path / "out/predictions.jsonl").read_bytes()
        with pytest.raises(UsageError, match="holds an earlier run's answers; add --resume to go on, or --overwrite"):
            run(tmp_path / "out")
        second, reader = run(tmp_path / "out", if_exists="resume")
        assert (second, reader.asked) == (first, [])
        assert (tmp_path / "out/predictions.jsonl").read_bytes() == before
        third, reader = run(tmp_path / "out", if_exists="overwrite")
        assert (third, len(reader.asked)) == (first, 12)
        assert (tmp_path / "out/predictions.jsonl").read_bytes() == before

    def test_another_number_of_passages_costs_its_own(self, tmp_path):
        run(tmp_path / "out", (0,))
        made, reader = run(tmp_path / "out", (0, 2), if_exists="resume")
        assert len(reader.asked) == 4
        assert [row.passages for row in qa_rows(made)] == [0, 2]
        fewer, reader = run(tmp_path / "out", (2,), if_exists="resume")
        assert (reader.asked, [row.passages for row in qa_rows(fewer)]) == ([], [2])
        assert len(lines(tmp_path / "out")) == 8

    @pytest.mark.parametrize("tail", [b"", b'{"question": "0", "pass', b"\xff", '{"é'.encode()[:-1]])
    def test_interrupted(self, tmp_path, tail):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "out", reader=Lookup(stop_after=5))
        with (tmp_path / "out/predictions.jsonl").open("ab") as file:
            file.write(tail)
        resumed, reader = run(tmp_path / "out", if_exists="resume")
        assert len(reader.asked) == 7
        whole, _ = run(tmp_path / "whole")
        assert resumed == whole
        assert sorted(map(str, lines(tmp_path / "out"))) == sorted(map(str, lines(tmp_path / "whole")))

    def test_a_whole_last_line_without_its_end_is_asked_again(self, tmp_path):
        run(tmp_path / "out")
        file = tmp_path / "out/predictions.jsonl"
        file.write_bytes(file.read_bytes().removesuffix(b"\n"))
        _, reader = run(tmp_path / "out", if_exists="resume")
        assert len(reader.asked) == 1
        assert len(lines(tmp_path / "out")) == 12

    def test_fewer_passages_than_asked_for(self, tmp_path):
        asked = [*questions(), Question("4", "what is the capital of Peru", ("Lima",), found("Peru"))]
        made, reader = run(tmp_path / "out", (2,), asked=asked)
        (row,) = qa_rows(made)
        assert (row.short, row.em) == (1, 4 / 5)
        assert made[-1].given == 1
        assert sum("Based on this text," in prompt for prompt in reader.asked) == 1
        assert "1 of 5 questions have fewer than 2 passages in the prompt." in format_rows([row])

    def test_what_was_cut_is_said_once(self, tmp_path, caplog):
        made, _ = run(tmp_path / "out", reader=Lookup(room=20))
        cut = [one.cut for one in made if one.cut]
        (record,) = caplog.records
        assert record.getMessage() == (
            f"{len(cut)} of 12 prompts did not fit and lost {sum(cut)} tokens at their start; ask for fewer "
            "--passages, or shorter ones"
        )
        assert sum(row.cut_prompts for row in qa_rows(made)) == len(cut) > 0

    def test_regular_expressions(self, tmp_path):
        asked = [Question("0", "what is the capital of France", ("Par.s|Lyon",), regex=True)]
        made, _ = run(tmp_path / "out", (0,), asked=asked)
        (row,) = qa_rows(made)
        assert (row.em, row.f1, row.rouge_l, row.contains) == (1, None, None, 1)
        assert format_rows([row]).splitlines()[1].split()[:7] == ["0", "1", "100.0%", "-", "-", "100.0%", "-"]

    def test_text_that_no_file_takes(self, tmp_path):
        class Odd(Lookup):
            def generate(self, prompts, settings, *, tell=None):
                yield 0, Generation(" Par\ud800is\u2028!\0\nmore", "length", 3, 10)

        made, _ = run(tmp_path / "out", (0,), Odd(), asked=questions()[:1])
        assert made[0].answer == "Par?is\u2028!\0"
        assert run(tmp_path / "out", (0,), Odd(), asked=questions()[:1], if_exists="resume")[0] == made


class TestRefusals:
    def damaged(self, tmp_path, change):
        run(tmp_path / "out")
        file = tmp_path / "out/predictions.jsonl"
        rows = file.read_text().splitlines()
        change(rows)
        file.write_text("\n".join(rows) + "\n")
        return run(tmp_path / "out", if_exists="resume")

    def test_a_broken_line(self, tmp_path):
        with pytest.raises(RalmError, match=r"predictions\.jsonl:3: not JSON"):
            self.damaged(tmp_path, lambda rows: rows.__setitem__(2, rows[2][:20]))

    @pytest.mark.parametrize("name", ["em", "question", "prompt_sha256"])
    def test_another_kind_of_line(self, tmp_path, name):
        def change(rows):
            row = json.loads(rows[1])
            rows[1] = json.dumps(row | {name: 3.5})

        with pytest.raises(RalmError, match=r"predictions\.jsonl:2: not a prediction; delete the line"):
            self.damaged(tmp_path, change)

    def test_a_line_that_lacks_a_field(self, tmp_path):
        with pytest.raises(RalmError, match=r"predictions\.jsonl:1: not a prediction"):
            self.damaged(tmp_path, lambda rows: rows.__setitem__(0, '{"question": "0"}'))

    def test_a_line_twice(self, tmp_path):
        with pytest.raises(RalmError, match=r"predictions\.jsonl:13: question 3 stands twice with 2 passages"):
            self.damaged(tmp_path, lambda rows: rows.append(rows[0]))

    def test_a_line_that_is_gone_is_asked_again(self, tmp_path):
        _, reader = self.damaged(tmp_path, lambda rows: rows.pop(4))
        assert len(reader.asked) == 1

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"reader": Lookup(room=9)}, r"reader\.room: 1000000 there, 9 now"),
            ({"made_with": {"data": 2}}, "data: 1 there, 2 now"),
        ],
    )
    def test_other_settings(self, tmp_path, options, message):
        run(tmp_path / "out")
        with pytest.raises(RalmError, match="was made with other settings and cannot be resumed: " + message):
            run(tmp_path / "out", if_exists="resume", **options)

    def test_other_passages(self, tmp_path):
        run(tmp_path / "out")
        with pytest.raises(RalmError, match="question 0 was asked with 1 other passages, or in other words"):
            run(tmp_path / "out", asked=questions(("Italy", "Peru")), if_exists="resume")

    def test_two_runs_at_once(self, tmp_path):
        run(tmp_path / "out")
        with (
            qa.appending(tmp_path / "out/predictions.jsonl"),
            pytest.raises(RalmError, match="another run is writing it; wait for its end"),
        ):
            run(tmp_path / "out", if_exists="resume")

    def test_a_folder_of_somebody_elses(self, tmp_path):
        (tmp_path / "out").mkdir()
        (tmp_path / "out/predictions.jsonl").write_text("mine")
        for if_exists in ("refuse", "resume", "overwrite"):
            with pytest.raises(UsageError, match="exists and does not hold answers of ours"):
                run(tmp_path / "out", if_exists=if_exists)
        assert (tmp_path / "out/predictions.jsonl").read_text() == "mine"

    def test_a_bucket(self):
        with pytest.raises(UsageError, match="gs://bucket/x: answers need a local disk"):
            run("gs://bucket/x")

    @pytest.mark.parametrize(
        ("asked", "error", "message"),
        [
            ([Question("0", "who")], UsageError, "the questions have no answers to judge by"),
            ([Question("0", " ", ("x",))], RalmError, "question 0 has no text"),
            ([Question("0", "who", ("x",)), Question("0", "who", ("y",))], RalmError, "question 0 stands in it twice"),
            (
                [Question("7", "who", ("(",), regex=True)],
                RalmError,
                "question 7: an answer is not a regular expression",
            ),
        ],
    )
    def test_questions(self, asked, error, message):
        with pytest.raises(error, match=message):
            qa.with_answers(asked)

    def test_a_limit_of_none(self):
        with pytest.raises(UsageError, match="limit questions must be at least 1, not 0"):
            qa.with_answers(questions(), 0)

    @pytest.mark.parametrize(
        ("asked", "most", "message"),
        [
            (questions(()), 1, "--passages 1: the questions have none; name an index to search with --index"),
            (questions(), 3, "--passages 3: no question has more than 2"),
            ([Question("0", "who", ("x",), (Found("d1", 1.0),))], 1, "passage d1 of question 0 has no text"),
        ],
    )
    def test_passages(self, asked, most, message):
        with pytest.raises(RalmError, match=message):
            qa.with_passages(asked, most)


class TestPassages:
    @pytest.fixture
    def index(self, tmp_path):
        made = [Passage(name, name, f"{name}: {capital}") for name, capital in CAPITALS.items()]
        return build_index(iter(made), str(tmp_path / "index"), progress=False)

    def test_are_searched_for(self, index):
        found = qa.with_passages(questions(()), 1, index, progress=False)
        assert [[passage.title for passage in question.found] for question in found] == [[name] for name in CAPITALS]
        assert all(question.found[0].has_answer for question in found)

    def test_an_index_goes_before_those_that_are_there(self, index):
        (question, *_) = qa.with_passages(questions(("Peru",)), 1, index, progress=False)
        assert question.found[0].title == "France"

    def test_closed_book_needs_none(self, index):
        for retriever in (None, index):
            assert all(not question.found for question in qa.with_passages(questions(()), 0, retriever))

    def test_more_than_the_index_has(self, index):
        with pytest.raises(UsageError, match=r"--passages 5: .*index has 4 passages"):
            qa.with_passages(questions(()), 5, index)

    def test_labels_in_the_file_do_not_count(self):
        wrong = Question("0", "who", ("x",), (Found("1", 1.0, "", "y", True), Found("2", 1.0, "", "x", False)))
        (question,) = qa.with_passages([wrong], 2)
        assert [passage.has_answer for passage in question.found] == [False, True]

    def test_questions_without_answers_are_left_out(self, caplog):
        kept = qa.with_answers([Question("x", "who"), *questions()], 2)
        assert [question.id for question in kept] == ["0", "1"]
        assert caplog.messages == ["1 of 5 questions have no answers and are left out"]


def marked(*others, country="Peru"):
    """A question about `country`, with its gold passage after `others`."""
    (question,) = (one for one in questions(()) if country in one.text)
    return question._replace(found=(*found(*others), found(country)[0]._replace(gold=True)))


def at_places(out, asked, passages=4, places=(1, 2, 4), **options):
    reader = options.pop("reader", None) or Lookup()
    made = qa.answer_questions(
        gold.with_gold(asked, passages), [passages], reader, PRESETS["ram2023"], str(out), gold_at=places,
        **{"settings": PRESETS["ram2023"].settings, "made_with": {}, "about": {}, "progress": False} | options,
    )  # fmt: skip
    return made, reader


class TestGold:
    OTHERS = ("Spain", "France", "Italy")

    @pytest.mark.parametrize(
        ("gold_at", "order"),
        [
            (1, ("Peru", "Spain", "France", "Italy")),
            (2, ("Spain", "Peru", "France", "Italy")),
            (3, ("Spain", "France", "Peru", "Italy")),
            (4, ("Spain", "France", "Italy", "Peru")),
        ],
    )
    def test_order(self, tmp_path, gold_at, order):
        (made,), reader = at_places(tmp_path / "out", [marked(*self.OTHERS)], places=(gold_at,))
        assert reader.asked == [PRESETS["ram2023"].prompt(marked().text, found(*order))]
        assert (made.key, made.given, made.has_answer, made.em) == (("3", 4, gold_at), 4, True, True)

    def test_the_best_distractors_without_an_answer(self):
        """No second gold passage, none of the gold one's text or id, none with an answer."""
        (first,), (spain, france, italy) = marked().found, found(*self.OTHERS)
        answer, second = Found("1", 9.0, "", "Quinoa"), Found("2", 1.0, "", "as well", gold=True)
        same = first._replace(id="3", gold=False), first._replace(text="something else", gold=False)
        listed = (answer, spain, *same, first, second, france, italy)
        (question,) = gold.with_gold([marked()._replace(answers=("quinoa",), found=listed)], 4)
        assert question.found == tuple(one._replace(has_answer=False) for one in (first, spain, france, italy))

    def test_passages_without_ids_are_not_the_same(self):
        asked = [q._replace(found=tuple(one._replace(id="") for one in q.found)) for q in [marked(*self.OTHERS)]]
        assert len(gold.with_gold(asked, 4)[0].found) == 4

    def test_a_resumed_run_adds_places(self, tmp_path):
        asked = [marked(*self.OTHERS), marked(*self.OTHERS[:2], country="Italy")]
        first, reader = at_places(tmp_path / "out", asked, 3, (1, 3))
        assert len(reader.asked) == 4
        made, reader = at_places(tmp_path / "out", asked, 3, (1, 2, 3), if_exists="resume")
        assert len(reader.asked) == 2
        assert [one.key for one in made] == [(id, 3, at) for at in (1, 2, 3) for id in ("3", "1")]
        assert [one for one in made if one.gold_at != 2] == first
        assert at_places(tmp_path / "out", asked, 3, (1, 2, 3), if_exists="resume")[1].asked == []
        assert len(lines(tmp_path / "out")) == 6

    def test_few_distractors(self, tmp_path):
        asked = [marked(*self.OTHERS), marked("Spain", country="Italy")]
        made, reader = at_places(tmp_path / "out", asked)
        assert PRESETS["ram2023"].prompt(asked[1].text, found("Spain", "Italy")) in reader.asked
        rows = qa_rows(made)
        assert [(row.gold_at, row.passages, row.short) for row in rows] == [(1, 4, 1), (2, 4, 1), (4, 4, 1)]
        assert format_rows(rows).splitlines()[4:] == ["1 of 2 questions have fewer than 4 passages in the prompt."]

    def test_questions_without_one_are_left_out(self, caplog):
        (question,) = gold.with_gold([*questions(), marked("Spain")._replace(id="x")], 2)
        assert question.id == "x"
        assert caplog.messages == ["4 of 5 questions have no gold passage and are left out"]

    @pytest.mark.parametrize(
        ("asked", "error", "message"),
        [
            (questions(), UsageError, "--gold-at: no question has a gold passage; mark one of its ctxs in --data"),
            ([marked("Spain")], UsageError, "--passages 3: no question has more than 1 distractors; ask for fewer"),
            (
                [marked("Spain")._replace(found=(Found("d1", 1.0, gold=True),))],
                RalmError,
                "passage d1 of question 3 has no text",
            ),
        ],
    )
    def test_refusals(self, asked, error, message):
        with pytest.raises(error, match=message):
            gold.with_gold(asked, 3)

    def test_csv(self, tmp_path):
        rows = [QARow(4, place, 2, 0.5, None, None, 0.5, None, 9.5, 0, 0, 1) for place in (1, None)]
        (tmp_path / "qa.csv").write_text(format_csv(rows))
        assert read_csv(tmp_path / "qa.csv") == rows

    @pytest.fixture
    def index(self, tmp_path):
        """Passages about a country, the first ones with the answer."""
        texts = [f"Peru Lima {'Peru ' * (20 - n)}{n}" for n in range(10)] + [
            f"Peru {'and so on ' * n}" for n in range(10, 19)
        ]
        made = [Passage(str(i), "", text) for i, text in enumerate(texts)]
        return build_index(iter(made), str(tmp_path / "index"), progress=False)

    def test_hits_are_distractors(self, index, monkeypatch):
        """The question's own first passage is gold; answers push the hits down, so that the search goes deeper."""
        searches, search = [], gold.search_questions
        monkeypatch.setattr(
            gold, "search_questions",
            lambda index, asked, k, **kept: searches.append((len(asked), k)) or search(index, asked, k, **kept),
        )  # fmt: skip
        deep = Question("deep", "Peru", ("Lima",), found("Peru", "Italy"))
        shallow = Question("shallow", "Peru", ("nobody",), (Found("0", 1.0, "", "mine"), *found("Italy")))
        made = gold.with_gold([deep, shallow], 2, index, progress=False)
        assert searches == [(2, 8), (1, 19)]
        assert [one.id for one in made[0].found] == ["Peru", "10"]
        assert [one.id for one in made[1].found] == ["0", "1"]
        everything = gold.with_gold([deep], 10, index, progress=False)[0]
        assert [one.has_answer for one in everything.found] == [True] + [False] * 9
        with pytest.raises(UsageError, match="no question has more than 9 distractors; ask for fewer, or name another"):
            gold.with_gold([deep], 11, index, progress=False)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with questions, an index, and a reader for whatever model is named; the current one."""
    monkeypatch.chdir(tmp_path)
    rows = [{"question": q.text, "answers": q.answers} for q in questions()]
    Path("qa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with_ctxs = [row | {"ctxs": [{"title": "Italy", "text": "Italy: Rome"}]} for row in rows]
    Path("dpr.json").write_text(json.dumps(with_ctxs))
    Path("corpus.jsonl").write_text(
        "".join(json.dumps({"_id": k, "title": k, "text": f"{k}: {v}"}) + "\n" for k, v in CAPITALS.items())
    )
    Path("long.jsonl").write_text(Path("corpus.jsonl").read_text().replace('"text": "', '"text": "the capital of '))
    ralm("index", "--corpus", "corpus.jsonl", "--out", "words")
    readers = []

    def open_generator(model, **options):
        readers.append((model, options, Lookup()))
        return readers[-1][-1]

    monkeypatch.setattr(generate, "open_generator", open_generator)
    return readers


QA = ["eval", "qa", "--model", "m", "--out", "out"]


class TestCommand:
    def test_from_questions_to_figures(self, place, capsys):
        capsys.readouterr()
        ralm(*QA, "--data", "qa.jsonl", "--index", "words", "--passages", "0,1", "--json", "r.json")
        assert capsys.readouterr().out == (
            "passages  questions      EM      F1  ROUGE-L  contains  has answer  prompt tokens  cut\n"
            "       0          4   25.0%   25.0%    25.0%     25.0%           -           11.0    0\n"
            "       1          4  100.0%  100.0%   100.0%    100.0%      100.0%           18.0    0\n"
            "\nPredictions and figures are in out.\n"
        )
        ((model, options, reader),) = place
        assert (model, options) == (
            "m",
            {
                "tokenizer": None, "dtype": "float32", "attention": "auto", "batch_size": None, "window": None,
                "concurrency": 8, "mesh": None,
            },
        )  # fmt: skip
        assert len(reader.asked) == 8
        report = json.loads(Path("r.json").read_text())
        assert [row["em"] for row in report["rows"]] == [0.25, 1.0]
        assert (report["config"]["model"], report["config"]["passages"]) == ("m", [0, 1])
        with open("out/qa.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert [(row["passages"], row["em"], row["has_answer"]) for row in rows] == [
            ("0", "0.25", ""),
            ("1", "1.0", "1.0"),
        ]
        assert [row.em for row in read_csv(Path("out/qa.csv"))] == [0.25, 1.0]
        assert imread("out/qa.png").shape[:2] == (600, 900)

    def test_again_and_resumed(self, place, capsys):
        command = [*QA, "--data", "qa.jsonl", "--index", "words", "--passages", "0,1"]
        ralm(*command)
        printed = capsys.readouterr().out
        code, line = refused(capsys, *command)
        assert (code, "out: holds an earlier run's answers; add --resume to go on, or --overwrite" in line) == (2, True)
        for option in ("--resume", "--overwrite"):
            ralm(*command, option)
            assert capsys.readouterr().out in printed
        assert [len(reader.asked) for _, _, reader in place] == [8, 0, 0, 8]
        ralm(*QA, "--data", "qa.jsonl", "--index", "words", "--passages", "2,0", "--limit-questions", "3", "--resume")
        assert len(place[-1][-1].asked) == 3
        assert [row.passages for row in read_csv(Path("out/qa.csv"))] == [0, 2]

    @pytest.mark.parametrize(
        ("options", "differs"),
        [
            (["--data", "dpr.json"], "retriever_sha256: "),
            (["--data", "qa.jsonl", "--index", "words", "--prompt-preset", "instruct"],
             "generate.max_new_tokens: 10 there, 32 now; prompt_preset: 'ram2023' there, 'instruct' now"),
            (["--data", "qa.jsonl", "--index", "words", "--max-new-tokens", "5"],
             "generate.max_new_tokens: 10 there, 5 now"),
            (["--data", "qa.jsonl", "--index", "words", "--regex"], "questions_sha256: "),
        ],
    )  # fmt: skip
    def test_other_settings(self, place, capsys, options, differs):
        ralm(*QA, "--data", "qa.jsonl", "--index", "words", "--passages", "0,1")
        code, line = refused(capsys, *QA, *options, "--passages", "0,1", "--resume")
        assert (code, f"out: was made with other settings and cannot be resumed: {differs}" in line) == (1, True)

    def test_passages_of_the_file(self, place, capsys):
        ralm(*QA, "--data", "dpr.json", "--passages", "1")
        assert [row.em for row in read_csv(Path("out/qa.csv"))] == [2 / 4]
        assert not Path("out/qa.png").exists()

    def test_places_of_the_gold_passage(self, place, capsys):
        ralm("index", "--corpus", "long.jsonl", "--out", "long")
        command = [*QA, "--data", "dpr.json", "--index", "long", "--passages", "3", "--gold-at"]
        capsys.readouterr()
        ralm(*command, "3,1", "--limit-questions", "2")
        assert capsys.readouterr().out == (
            "passages  gold at  questions      EM      F1  ROUGE-L  contains  has answer  prompt tokens  cut\n"
            "       3        1          2  100.0%  100.0%   100.0%    100.0%       50.0%           30.0    0\n"
            "       3        3          2  100.0%  100.0%   100.0%    100.0%       50.0%           30.0    0\n"
            "\nPredictions and figures are in out.\n"
        )
        assert imread("out/qa.png").shape[:2] == (600, 900)
        ralm(*command, "1,2,3", "--limit-questions", "2", "--resume")
        assert [len(reader.asked) for _, _, reader in place] == [4, 2]
        rows = read_csv(Path("out/qa.csv"))
        assert [(row.passages, row.gold_at, row.contains) for row in rows] == [(3, at, 1) for at in (1, 2, 3)]

    def test_what_is_drawn_over_places(self, place, monkeypatch):
        drawn = []
        monkeypatch.setattr(plots, "draw_curves", lambda *args, **options: drawn.append((*args, options)))
        ralm("index", "--corpus", "long.jsonl", "--out", "long")
        ralm(*QA, "--data", "dpr.json", "--index", "long", "--passages", "2", "--gold-at", "1,2")
        _, curves, *labels, options = drawn[0]
        assert curves == {"ram2023": [(1, 50), (2, 50)]}
        assert labels == ["place of the gold passage", "answers that contain the gold answer (%)", "m on dpr.json"]
        assert options == {"whole": True}

    def test_a_data_set_by_name(self, place):
        Path("nq").mkdir()
        Path("nq/NQ-open.dev.jsonl").write_text(Path("qa.jsonl").read_text())
        ralm(*QA, "--dataset", "nq", "--data-path", "nq", "--passages", "0", "--limit-questions", "2")
        assert [(row.questions, row.em) for row in read_csv(Path("out/qa.csv"))] == [(2, 1 / 2)]

    @pytest.mark.parametrize(
        ("options", "code", "message"),
        [
            ([], 2, "--data: name a file of questions, or --dataset"),
            (["--data", "none.jsonl"], 2, "none.jsonl: no such file"),
            (["--data", "empty.jsonl"], 1, "empty.jsonl"),
            (["--data", "corpus.jsonl"], 2, "the questions have no answers to judge by"),
            (["--data", "broken.jsonl"], 1, "broken.jsonl:2: not JSON"),
            (["--data", "qa.jsonl"], 2, "--passages 2: the questions have none; name an index to search with --index"),
            (["--data", "dpr.json"], 2, "--passages 2: no question has more than 1"),
            (["--data", "qa.jsonl", "--index", "nowhere"], 2, "nowhere: no index there"),
            (["--data", "qa.jsonl", "--index", "words", "--passages", "1,9"], 2, "--passages 9: words has 4 passages"),
            (["--data", "qa.jsonl", "--passages", "-1"], 2, "--passages -1: expected numbers from 0"),
            (["--data", "qa.jsonl", "--passages", "0,,1"], 2, "--passages 0,,1: expected numbers from 0"),
            (
                ["--data", "dpr.json", "--gold-at", "1"],
                2,
                "--gold-at: needs a single number of --passages, from 1, not 0,1,2",
            ),
            (["--data", "dpr.json", "--gold-at", "1", "--passages", "0"], 2, "--gold-at: needs a single number of"),
            (
                ["--data", "dpr.json", "--gold-at", "1,4", "--passages", "3"],
                2,
                "--gold-at 4: there are --passages 3; name places from 1 to these",
            ),
            (["--data", "dpr.json", "--gold-at", "0", "--passages", "3"], 2, "--gold-at 0: expected numbers from 1"),
            (
                ["--data", "dpr.json", "--gold-at", "1", "--passages", "1"],
                2,
                "--gold-at: no question has a gold passage",
            ),
            (
                ["--data", "qa.jsonl", "--passages", "0", "--split", "train"],
                2,
                "--split and --data-path are for --dataset",
            ),
            (
                ["--data", "qa.jsonl", "--passages", "0", "--limit-questions", "0"],
                2,
                "limit questions must be at least 1",
            ),
            (
                ["--data", "qa.jsonl", "--passages", "0", "--max-new-tokens", "0"],
                2,
                "max new tokens must be at least 1",
            ),
            (["--data", "qa.jsonl", "--passages", "0", "--window", "0"], 2, "window must be at least 1"),
            (["--data", "qa.jsonl", "--passages", "0", "--batch-size", "0"], 2, "batch size must be at least 1"),
            (["--data", "qa.jsonl", "--passages", "0", "--json", "no/r.json"], 2, "the folder no does not exist"),
            (["--data", "qa.jsonl", "--passages", "0", "--out", "words"], 2, "words: exists and does not hold answers"),
        ],
    )
    def test_refusals(self, place, capsys, options, code, message):
        Path("empty.jsonl").write_text("")
        Path("broken.jsonl").write_text(Path("qa.jsonl").read_text().replace("Italy", '"'))
        found, line = refused(capsys, *QA, *options)
        assert message in line
        assert found == code
        assert not Path("out").exists()

    def test_ctrl_c_says_that_it_goes_on(self, place, capsys, monkeypatch):
        monkeypatch.setattr(generate, "open_generator", lambda *args, **options: Lookup(stop_after=3))
        code, line = refused(capsys, *QA, "--data", "qa.jsonl", "--passages", "0")
        assert (code, "--resume goes on from there" in line) == (130, True)
        assert len(lines("out")) == 3


class TestRealQuestions:
    FILES = {
        "curatedtrec_test": 430, "nq_gold_ctx_dpr_format": 2655, "nq_open_test3610": 3610, "triviaqa_200": 200,
        "webquestions_test": 2032,
    }  # fmt: skip

    @pytest.mark.parametrize(("name", "count"), FILES.items())
    def test_every_answer_is_right(self, shared, name, count):
        asked = qa.with_answers(read_questions(str(shared / f"data/qa/{name}.jsonl.gz")))
        assert len(asked) == count
        assert all(question.regex == (name == "curatedtrec_test") for question in asked)
        for question in asked:
            for answer in question.answers:
                quality = judge(answer, question.answers, regex=question.regex)
                assert question.regex or (quality.em and quality.f1 == 1 and quality.contains)

    def test_passages_have_the_answers_that_dpr_finds(self, shared, tmp_path):
        """Natural Questions by BM25 over their gold passages: the column and `ralm eval retrieval` agree."""
        asked = qa.with_answers(read_questions(str(shared / "data/qa/nq_gold_ctx_dpr_format.jsonl.gz")))
        contents = dict.fromkeys((q.found[0].title, q.found[0].text or "") for q in asked)
        index = build_index(
            (Passage(str(i), *one) for i, one in enumerate(contents)), str(tmp_path / "index"), progress=False
        )

        class Silent(Lookup):
            def generate(self, prompts, settings, *, tell=None):
                for place in range(len(prompts)):
                    yield place, Generation("", "end", 1, 0)

        found = qa.with_passages(asked[:300], 2, index, progress=False)
        made = qa.answer_questions(
            found, (1, 2), Silent(), PRESETS["instruct"], str(tmp_path / "out"), settings=PRESETS["instruct"].settings,
            made_with={}, about={}, progress=False,
        )  # fmt: skip
        (recall,) = evaluate(found, [1, 2])
        assert {row.passages: row.has_answer for row in qa_rows(made)} == pytest.approx(recall.at)
        assert recall.at[2] > recall.at[1] > 0.7
        assert all((row.em, row.f1) == (0, 0) for row in qa_rows(made))


KILLED = """
import time
from ralm_jax import generate
from tests.test_eval_qa import Lookup
from ralm_jax import cli

class Slow(Lookup):
    def generate(self, prompts, settings, *, tell=None):
        for made in super().generate(prompts, settings):
            time.sleep(0.05)
            yield made

generate.open_generator = lambda model, **options: Slow()
cli.main("eval qa --model m --out out --data qa.jsonl --index words --passages 0,1,2".split())
"""


def test_killed_and_resumed(place):
    """kill -9 in the middle of a run of the real command."""
    file = Path("out/predictions.jsonl")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    deadline = time.monotonic() + 60
    with subprocess.Popen([sys.executable, "-c", KILLED], env=environment) as started:
        try:
            while not file.exists() or file.read_bytes().count(b"\n") < 3:
                assert started.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.005)
        finally:
            started.send_signal(signal.SIGKILL)
    written = file.read_bytes().count(b"\n")
    assert 3 <= written < 12
    command = ["eval", "qa", "--model", "m", "--data", "qa.jsonl", "--index", "words", "--passages", "0,1,2", "--out"]
    ralm(*command, "out", "--resume")
    assert len(place[-1][-1].asked) == 12 - written
    ralm(*command, "whole")
    assert sorted(map(str, lines("out"))) == sorted(map(str, lines("whole")))
    assert Path("out/qa.csv").read_bytes() == Path("whole/qa.csv").read_bytes()


def test_a_reader_of_this_machine(tmp_path, tiny_model, monkeypatch):
    """The same answers again, in other batches, and after half of them were lost."""
    monkeypatch.chdir(tmp_path)
    asked = [
        {"question": tiny.text(n, n), "answers": ["ba"], "ctxs": [{"text": tiny.text(20, n)}]} for n in range(3, 9)
    ]
    Path("qa.json").write_text(json.dumps(asked))
    command = ["eval", "qa", "--model", tiny_model, "--data", "qa.json", "--passages", "0,1", "--out"]
    ralm(*command, "first")
    ralm(*command, "second", "--batch-size", "3")
    assert sorted(map(str, lines("first"))) == sorted(map(str, lines("second")))
    assert {row["new_tokens"] for row in lines("first")} != {0}
    whole = Path("first/predictions.jsonl").read_bytes()
    Path("first/predictions.jsonl").write_bytes(whole[: len(whole) // 2])
    ralm(*command, "first", "--resume")
    assert sorted(map(str, lines("first"))) == sorted(map(str, lines("second")))
    assert Path("first/qa.csv").read_bytes() == Path("second/qa.csv").read_bytes()


def test_a_server(tmp_path, monkeypatch, capsys):
    def reply(path, request):
        return {"choices": [{"text": " Rome\n", "finish_reason": "stop"}], "usage": {"prompt_tokens": 7}}

    monkeypatch.chdir(tmp_path)
    Path("qa.json").write_text(json.dumps([{"question": f"Q{n}", "answers": ["Rome"]} for n in range(5)]))
    with api.serving(reply, tmp_path, monkeypatch):
        ralm(
            "eval", "qa", "--model", "openai:m", "--data", "qa.json", "--passages", "0", "--out", "out", "--price-in", 2
        )
    printed = capsys.readouterr().out
    assert "openai:m: 5 requests (35 tokens read, 0 written), 0 answers from the cache; cost 0.0001" in printed
    assert [row["em"] for row in lines("out")] == [True] * 5


def test_settings_of_generation_are_those_of_the_preset():
    assert PRESETS["ram2023"].settings == GenerateSettings(max_new_tokens=10, stop=("\n",))
