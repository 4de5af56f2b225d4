"""`ralm eval long` from files to scores, with a reader that looks answers up."""

import copy
import csv
import dataclasses
import json
from hashlib import sha256

import pytest

from eval import long, long_report
from eval.long_metrics import find_metric
from eval.tasks import read_examples
from ralm_jax import generate
from ralm_jax.errors import RalmError
from ralm_jax.generate.generator import Generation
from tests import api, tiny
from tests.test_cli import ralm, refused
from tests.test_tasks import longbench, write

CODES = dict(zip(tiny.WORDS[9:15], tiny.WORDS[18:24], strict=True))  # what is asked, and the answer


class Lookup:
    """Answers with the word that follows "ASKED is" in its prompt, or nothing; a window of 8,000 tokens."""

    name = "lookup"

    def __init__(self, stop_after=None):
        self.identity, self.tokenizer, self.window = {"kind": "lookup"}, tiny.tokenizer(), 8000
        self.asked, self.settings, self.stop_after = [], None, stop_after

    def with_window(self, window):
        made = copy.copy(self)
        made.window = window
        return made

    def generate(self, prompts, settings, *, tell=None):
        self.settings = settings
        for place in reversed(range(len(prompts))):
            if self.stop_after is not None and len(self.asked) == self.stop_after:
                raise KeyboardInterrupt
            self.asked.append(prompts[place])
            question = prompts[place].split("Question: ")[-1].split("short span. ")[-1].split("?")[0]
            after = prompts[place].split(f"{question} is ")
            text = f" {after[1].split()[0]}\n\nUser: more" if len(after) > 1 else ""
            yield place, Generation(text, "stop", len(prompts[place].split()), 2)


USED = {*CODES, *CODES.values()}  # nor has the filler a plural of these, which BM25 would find for them
FILLER = [word for word in tiny.text(3000, 1).split() if word.removesuffix("s") not in USED]


def document(asked):
    """1,000 words with the answer among the last 100."""
    return " ".join([*FILLER[:960], asked, "is", CODES[asked], *FILLER[960:997]])


@pytest.fixture
def data(tmp_path):
    rows = [longbench(asked, input=f"{asked}?", context=document(asked), answers=[CODES[asked]]) for asked in CODES]
    write(tmp_path / "data/hotpotqa.jsonl", *rows)
    return tmp_path / "data"


@pytest.fixture
def evaluate(tmp_path, data, monkeypatch, capsys):
    """Runs the command; the reader, what was printed, and the result."""

    def run(*options, reader=None, family="longbench"):
        reader = reader or Lookup()
        reader.window = int(options[options.index("--window") + 1]) if "--window" in options else reader.window
        monkeypatch.setattr(generate, "open_generator", lambda *arguments, **more: reader)
        capsys.readouterr()
        task = () if "--task" in options else ("--task", "hotpotqa")
        ralm("eval", "long", *task, "--model", "m", "--data", data, "--out", tmp_path / "out", *options)
        result = json.loads(written(tmp_path, f"result-{family}.json").read_text())
        return reader, capsys.readouterr().out, result

    return run


def written(tmp_path, name):
    """The file of this name that was written last."""
    return max((tmp_path / "out").glob(f"*/{name}"), key=lambda file: file.stat().st_mtime_ns)


def lines(tmp_path):
    return [json.loads(line) for line in written(tmp_path, "predictions.jsonl").read_text().splitlines()]


CELL = "hotpotqa-8000-none"


class TestRun:
    def test_whole_documents(self, evaluate, tmp_path):
        reader, printed, result = evaluate()
        assert result["score"] == 100
        assert (result["task"], result["prompt_preset"], result["metric_family"]) == ("hotpotqa", "xu2023", "longbench")
        assert (result["metric"], result["metric_package"], result["parts"]) == ("F1", None, {"f1": 100})
        assert (result["examples"], result["paper_examples"], result["cut_prompts"]) == (6, 200, 0)
        assert result["scores"] == {asked: [1.0] for asked in CODES}
        assert (reader.settings.max_new_tokens, reader.settings.temperature) == (32, 0)
        assert result["config"]["limit_examples"] is None
        assert "hotpotqa, whole documents: F1 100.00\n  metric family longbench; prompt preset xu2023\n" in printed
        assert "6 examples; the paper has 200" in printed
        rows = lines(tmp_path)
        assert {row["prompt_preset"] for row in rows} == {"xu2023"}
        by_id = {row["example"]: row for row in rows}
        assert set(by_id) == set(CODES)
        for prompt in reader.asked:
            asked = prompt.split("short span. ")[1].split("?")[0]
            assert by_id[asked]["prompt_sha256"] == sha256(prompt.encode()).hexdigest()
            assert by_id[asked]["text"] == f" {CODES[asked]}"  # without the turn of a chat behind it
        assert result["seconds"] == pytest.approx(sum(row["seconds"] for row in rows))

    def test_cut(self, evaluate, tmp_path, caplog):
        reader, printed, result = evaluate("--window", 500)
        assert result["score"] == 0  # the answer is at the document's end
        assert (result["cut_prompts"], result["empty_answers"], result["truncation"]) == (6, 6, "context-tail")
        assert "window 500: 6 prompts cut (context-tail)" in printed
        assert f"6 of 6 prompts did not fit into 500 tokens and lost {result['cut_tokens']:,} tokens" in caplog.text
        for row in lines(tmp_path):
            start, end = row["cut"]
            whole = f"title: , source: {document(row['example'])}"
            assert f"{row['example']} is" in whole[start:end]
            assert row["cut_tokens"] == pytest.approx(len(reader.tokenizer.encode(whole[start:end])), abs=2)
        assert all(len(reader.tokenizer.encode(prompt)) <= 500 - 32 for prompt in reader.asked)
        assert all(prompt.endswith("?\n\nAssistant:") for prompt in reader.asked)
        _, _, result = evaluate("--window", 500, "--truncation", "middle", "--overwrite")
        assert (result["truncation"], result["score"]) == ("middle", 100)  # which is within the last half

    def test_retrieval(self, evaluate, tmp_path):
        reader, _, result = evaluate("--window", 900, "--retriever", "bm25", "--top", 1)
        assert (result["score"], result["cut_prompts"]) == (100, 0)
        assert all(row["given"] == [3] and row["chunks"] == 4 for row in lines(tmp_path))
        assert all("title: , source: " in prompt and len(prompt.split()) < 330 for prompt in reader.asked)
        reader, _, _ = evaluate("--retriever", "bm25", "--top", 2, "--overwrite")
        for row, prompt in zip(lines(tmp_path), reader.asked, strict=True):
            words = document(row["example"]).split()
            first, second = (" ".join(words[300 * i : 300 * i + 300]) for i in row["given"])
            assert f"title: , source: {first}\n\ntitle: , source: {second}\n\nUser: " in prompt

    def test_few_shot_retrieval(self, evaluate, data, tmp_path):
        shots = [f"Question: {asked}?\nType: {asked} is {code}" for asked, code in CODES.items()]
        rows = [
            longbench(asked, input=f"Question: {asked}?\nType:", context="\n".join(shots), answers=[code],
                      all_classes=list(CODES.values()))
            for asked, code in CODES.items()
        ]  # fmt: skip
        write(data / "trec.jsonl", *rows)
        reader, _, result = evaluate("--task", "trec", "--retriever", "bm25", "--top", 1)
        assert (result["score"], result["metric"]) == (100, "classification accuracy")
        for row, prompt in zip(lines(tmp_path), reader.asked, strict=True):
            (given,) = row["given"]
            assert prompt.endswith(f"questions.\n\n{shots[given]}\nQuestion: {row['example']}?\nType:")
            assert list(CODES)[given] == row["example"]

    @pytest.mark.slow
    def test_dense(self, evaluate, tmp_path):
        encoder = tiny.save_encoder(tmp_path / "encoder")
        _, _, result = evaluate("--retriever", encoder, "--top", 2, "--limit-examples", 2)
        assert result["examples"] == 2
        assert all(len(set(row["given"])) == 2 and row["chunks"] == 4 for row in lines(tmp_path))
        manifest = json.loads(written(tmp_path, "manifest.json").read_text())
        assert manifest["settings"]["retriever"]["engine"] == "dense"
        assert manifest["settings"]["retriever"]["encoder"]["sha256"]

    @pytest.mark.slow
    def test_real_reader(self, data, tmp_path, tiny_model):
        ralm("eval", "long", "--task", "hotpotqa", "--model", tiny_model, "--data", data, "--out", tmp_path / "out",
             "--prompt-preset", "longbench", "--limit-examples", 2, "--max-new-tokens", 4,
             "--mesh", "data=1")  # fmt: skip
        result = json.loads(written(tmp_path, "result-longbench.json").read_text())
        assert (result["window"], result["truncation"], result["cut_prompts"]) == (256, "middle", 2)
        for row in lines(tmp_path):
            assert 248 <= row["prompt_tokens"] <= 252
            assert row["new_tokens"] <= 4

    def test_server(self, data, tmp_path, monkeypatch, capsys):
        def reply(path, body):
            asked = body["prompt"].split("short span. ")[1].split("?")[0]
            usage = {"prompt_tokens": 70, "completion_tokens": 2}
            return {"choices": [{"text": f" {CODES[asked]}", "finish_reason": "stop"}], "usage": usage}

        (tmp_path / "tokenizer").mkdir()
        tiny.tokenizer().save(tmp_path / "tokenizer")
        with api.serving(reply, tmp_path, monkeypatch) as server:
            ralm("eval", "long", "--task", "hotpotqa", "--data", data, "--out", tmp_path / "out", "--model", "openai:x",
                 "--tokenizer", tmp_path / "tokenizer", "--window", 300)  # fmt: skip
        result = json.loads(written(tmp_path, "result-longbench.json").read_text())
        assert (result["score"], result["cut_prompts"], result["prompt_tokens"]) == (100, 6, 70)
        api.assert_secret(tmp_path / "out", server)
        assert "openai:x: 6 requests (420 tokens read, 12 written)" in capsys.readouterr().out


class TestGrid:
    """Several tasks, windows, retrievers and numbers of chunks in one command."""

    GRID = ("--window", 500, 900, "--retriever", "none", "bm25", "--top", 1, 2)

    def test_every_combination_has_a_folder(self, evaluate, tmp_path):
        _, printed, _ = evaluate(*self.GRID)
        names = [f"hotpotqa-{w}-{given}" for w in (500, 900) for given in ("none", "bm25-1", "bm25-2")]
        assert {path.parent.name for path in (tmp_path / "out").glob("*/predictions.jsonl")} == set(names)
        with (tmp_path / "out/long.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["folder"] for row in rows] == names
        assert [float(row["score"]) for row in rows] == [0, 100, 100, 0, 100, 100]
        assert [int(row["cut_prompts"]) for row in rows] == [6, 0, 6, 6, 0, 0]
        table = printed.split("\n\n")[-2].splitlines()
        assert (len(table), table[2].split()[:5]) == (7, ["hotpotqa", "500", "bm25", "top", "1"])

    def test_a_retriever_ranks_a_document_once(self, evaluate, monkeypatch):
        from eval import long_chunks

        read = []
        monkeypatch.setattr(long_chunks.analyzer, "analyze", lambda text: read.append(text) or text.split())
        long_chunks.term_counts.cache_clear()
        evaluate(*self.GRID)
        chunks = [text for text in read if not text.endswith("?")]
        assert len(chunks) == 6 * 4

    def test_more_cells_in_one_folder(self, evaluate, tmp_path):
        evaluate("--window", 500)
        reader, _, _ = evaluate("--window", 900)
        assert len(reader.asked) == 6
        assert len((tmp_path / "out/long.csv").read_text().splitlines()) == 3

    def test_what_is_there_is_found_before_anything_is_asked(self, evaluate, tmp_path, capsys):
        evaluate("--window", 900)
        reader = Lookup()
        with pytest.raises(SystemExit):
            evaluate("--window", 500, 900, reader=reader)
        assert "hotpotqa-900-none: is there already; add --resume to go on" in capsys.readouterr().err
        assert not (tmp_path / "out/hotpotqa-500-none").exists()

    def test_tasks_that_the_preset_lacks_are_refused_first(self, capsys, data, tmp_path):
        code, line = refused(capsys, "eval", "long", "--task", "hotpotqa", "quality", "--data", data, "--model", "m",
                             "--prompt-preset", "longbench", "--out", tmp_path / "new")  # fmt: skip
        assert (code, "has no prompt for quality" in line) == (2, True)


class TestChat:
    TEMPLATE = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<me>{% endif %}"
    )

    def reader(self, template=TEMPLATE):
        reader = Lookup()
        reader.tokenizer = dataclasses.replace(reader.tokenizer, chat_template=template)
        return reader

    def test_turns_are_those_of_the_template(self, evaluate):
        reader, printed, result = evaluate("--chat", reader=self.reader())
        assert all(prompt.startswith("<user>title: , source: ") for prompt in reader.asked)
        assert all(prompt.endswith("?<me>") and "User:" not in prompt for prompt in reader.asked)
        assert "prompt preset xu2023 in the reader's chat template" in printed
        assert (result["chat"], result["score"]) == (True, 100)

    def test_they_are_never_cut(self, evaluate):
        reader, _, _ = evaluate("--chat", "--window", 500, reader=self.reader())
        assert all(prompt.startswith("<user>title: ") and prompt.endswith("?<me>") for prompt in reader.asked)
        assert all(len(reader.tokenizer.encode(prompt)) <= 500 - 32 for prompt in reader.asked)

    def test_not_for_few_shot_tasks(self, evaluate, data):
        write(data / "samsum.jsonl", longbench("a", input="Dialogue: a", context="Dialogue: b\nSummary: b"))
        reader, _, _ = evaluate("--task", "samsum", "--chat", reader=self.reader())
        assert reader.asked == ["Summarize the dialogue into a few short sentences. The following are some examples."
                                "\n\nDialogue: b\nSummary: b\n\nDialogue: a"]  # fmt: skip

    def test_never_mixed_with_others(self, evaluate, capsys):
        evaluate()
        with pytest.raises(SystemExit):
            evaluate("--resume", "--chat", reader=self.reader())
        assert "cannot be resumed" in capsys.readouterr().err

    def test_without_a_template(self, evaluate, capsys):
        with pytest.raises(SystemExit):
            evaluate("--chat")
        assert "has no chat template" in capsys.readouterr().err


class TestAgain:
    def test_after_a_kill(self, evaluate, tmp_path):
        with pytest.raises(SystemExit):
            evaluate(reader=Lookup(stop_after=2))
        with written(tmp_path, "predictions.jsonl").open("a") as file:
            file.write('{"half')
        reader, _, result = evaluate("--resume")
        assert (len(reader.asked), result["score"]) == (4, 100)
        rows = lines(tmp_path)
        assert len(rows) == len({row["example"] for row in rows}) == 6

    def test_more_examples(self, evaluate, tmp_path):
        reader, _, first = evaluate("--limit-examples", 2)
        assert (len(reader.asked), first["examples"]) == (2, 2)
        reader, _, all_ = evaluate("--resume")
        assert (len(reader.asked), all_["examples"]) == (4, 6)

    def test_another_family_asks_nothing(self, evaluate, tmp_path):
        evaluate()
        before = written(tmp_path, "predictions.jsonl").read_bytes()
        reader, printed, result = evaluate("--resume", "--metric-family", "nvidia", family="nvidia")
        assert (reader.asked, result["metric_family"]) == ([], "nvidia")
        assert "metric family nvidia" in printed
        assert written(tmp_path, "predictions.jsonl").read_bytes() == before
        assert json.loads(written(tmp_path, "result-longbench.json").read_text())["metric_family"] == "longbench"

    @pytest.mark.parametrize(
        "option",
        [("--prompt-preset", "longbench"), ("--truncation", "middle"), ("--max-new-tokens", 5)],
    )  # fmt: skip
    def test_never_mixed(self, evaluate, option, capsys, data, tmp_path):
        evaluate()
        before = written(tmp_path, "predictions.jsonl").read_bytes()
        with pytest.raises(SystemExit):
            evaluate("--resume", *option)
        assert "cannot be resumed" in capsys.readouterr().err
        assert written(tmp_path, "predictions.jsonl").read_bytes() == before

    def test_presets_in_one_file(self, evaluate, data, tmp_path):
        evaluate()
        examples = read_examples("hotpotqa", str(data))
        settings = long.LongSettings("hotpotqa", "longbench", False, "middle", 800, 0, Lookup().settings)
        rows = [long.LongPrediction(**row) for row in lines(tmp_path)]
        metric = find_metric("longbench", "span", "hotpotqa")
        with pytest.raises(RalmError, match="answers to prompts of xu2023 are among those to prompts of longbench"):
            long_report.report(examples, rows, settings, "none", "longbench", metric, {})

    def test_overwrite_leaves_what_is_not_ours(self, evaluate, tmp_path):
        evaluate()
        (tmp_path / "out" / CELL / "notes.txt").write_text("mine")
        reader, _, _ = evaluate("--overwrite", "--metric-family", "nvidia", family="nvidia")
        assert len(reader.asked) == 6
        assert (tmp_path / "out" / CELL / "notes.txt").read_text() == "mine"
        assert not (tmp_path / "out" / CELL / "result-longbench.json").exists()

    @pytest.mark.parametrize(
        ("edit", "message"),
        [
            (lambda rows: [*rows, rows[0]], "stands twice"),
            (lambda rows: [rows[0].replace('"seconds"', '"second"')], "predictions.jsonl:1: not a prediction"),
        ],
    )
    def test_damaged(self, evaluate, tmp_path, capsys, edit, message):
        evaluate()
        path = written(tmp_path, "predictions.jsonl")
        path.write_text("\n".join(edit(path.read_text().splitlines())) + "\n")
        with pytest.raises(SystemExit):
            evaluate("--resume")
        assert message in capsys.readouterr().err


class TestScores:
    @pytest.mark.parametrize(
        ("options", "family"),
        [((), "scrolls"), (("--prompt-preset", "longbench"), "longbench"),
         (("--prompt-preset", "longbench", "--metric-family", "nvidia"), "nvidia")],
    )  # fmt: skip
    def test_family_unless_named(self, evaluate, data, options, family):
        write(data / "qasper.jsonl", longbench(context=document("da")))
        _, _, result = evaluate("--task", "qasper", *options, family=family)
        assert (result["metric_family"], result["metric"]) == (family, "F1")

    def test_rouge_package_is_named(self, evaluate, data, tmp_path):
        rows = [longbench("a", input="who?", context="Dialogue: a\nSummary: b", answers=["A b."])]
        write(data / "samsum.jsonl", *rows)
        _, printed, usual = evaluate("--task", "samsum")
        assert (usual["metric"], usual["metric_package"]) == ("ROUGE-L", "rouge")
        assert "metric family longbench, package rouge; prompt preset xu2023" in printed
        _, _, other = evaluate("--task", "samsum", "--resume", "--rouge", "rouge-score", family="longbench-rouge-score")
        assert (other["metric"], other["metric_package"]) == ("ROUGE-L", "rouge-score")


class TestRefused:
    def refused(self, capsys, data, tmp_path, *options):
        code, line = refused(capsys, "eval", "long", "--model", "m", "--out", tmp_path / "new", *options)
        assert not (tmp_path / "new").exists()
        return code, line

    def test_options(self, capsys, data, tmp_path):
        code, line = self.refused(capsys, data, tmp_path, "--task", "samsum", "--data", data)
        assert code == 2
        assert "no file of samsum; download https://huggingface.co/datasets/zai-org/LongBench: data.zip" in line
        hotpotqa = ("--task", "hotpotqa", "--data", data)
        for options, message in (
            (("--task", "quality", "--data", data, "--prompt-preset", "longbench"), "has no prompt for quality"),
            ((*hotpotqa, "--metric-family", "scrolls", "--rouge", "rouge"), "hotpotqa is not scored by ROUGE"),
            ((*hotpotqa, "--top", 3), "--top is for a --retriever"),
            (
                (*hotpotqa, "--retriever", "bm25", "--pooling", "mean"),
                "--query-encoder and --pooling are for an encoder as --retriever",
            ),
            ((*hotpotqa, "--retriever", "bm25", "--top", 0), "top must be at least 1"),
            ((*hotpotqa, "--limit-examples", 0), "limit examples must be at least 1"),
        ):
            code, line = self.refused(capsys, data, tmp_path, *options)
            assert (code, message in line) == (2, True), line

    def test_server_without_tokenizer(self, capsys, data, tmp_path):
        code, line = refused(capsys, "eval", "long", "--task", "hotpotqa", "--data", data, "--model", "openai:x",
                             "--out", tmp_path / "new")  # fmt: skip
        assert (code, "openai:x: name --window, and the folder of its tokenizer" in line) == (2, True)

    def test_a_server_has_turns_of_its_own(self, capsys, data, tmp_path):
        code, line = refused(capsys, "eval", "long", "--task", "hotpotqa", "--data", data, "--model", "openai:x",
                             "--tokenizer", "t", "--window", 300, "--chat", "--out", tmp_path / "new")  # fmt: skip
        assert (code, "--chat is for a reader on this machine; openai:x has turns of its own" in line) == (2, True)

    def test_no_room(self, evaluate, capsys, tmp_path):
        with pytest.raises(SystemExit):
            evaluate("--window", 40)
        printed = capsys.readouterr().err
        assert "a window of 40 leaves, beside 32 new tokens, 8: 8 tokens have no room for instruction and" in printed
        assert written(tmp_path, "predictions.jsonl").read_bytes() == b""
