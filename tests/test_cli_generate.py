"""`ralm generate`: from a prompt to a text and where it came from; and what it refuses."""

import json
import math
import shutil

import pytest

from tests import tiny
from tests.test_cli import ralm, refused

PROMPT = tiny.text(12, 3)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, a file of prompts, and an index."""
    folder = tmp_path_factory.mktemp("generate")
    tiny.save_model(folder / "model", tiny.LLAMA)
    tiny.write_corpus(folder / "corpus.jsonl", 40)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": tiny.text(n, n)}) + "\n" for n in (9, 30, 4)))
    ralm("index", "--corpus", folder / "corpus.jsonl", "--out", folder / "index")
    return folder


def rows(place, *args):
    """What a command writes to a file."""
    ralm("generate", "--model", place / "model", "--max-new-tokens", 20, "--json", place / "out.jsonl", *args)
    return [json.loads(line) for line in (place / "out.jsonl").read_text(encoding="utf-8").splitlines()]


class TestText:
    def test_one_prompt_is_shown(self, place, capsys):
        ralm("generate", "--model", place / "model", "--prompt", PROMPT, "--max-new-tokens", 20)
        (row,) = rows(place, "--prompt", PROMPT)
        assert capsys.readouterr().out.startswith(row["text"] + "\n")
        assert row["prompt"] == PROMPT
        assert (row["finish"], row["new_tokens"], row["cut"]) == ("length", 20, 0)

    def test_prompts_keep_their_order(self, place):
        found = rows(place, "--prompts", place / "prompts.jsonl", "--batch-size", 2)
        assert [row["prompt"] for row in found] == [tiny.text(n, n) for n in (9, 30, 4)]
        assert found[1] == rows(place, "--prompt", tiny.text(30, 30))[0]

    def test_a_seed_is_a_text(self, place):
        drawn = ["--prompt", PROMPT, "--temperature", 1.0, "--top-p", 0.95]
        first, again, other = (rows(place, *drawn, "--seed", seed)[0]["text"] for seed in (0, 0, 1))
        assert first == again != other

    def test_a_chat(self, place):
        """The prompt is a message in the template of the tokenizer."""
        talker = place / "talker"
        if not talker.exists():
            shutil.copytree(place / "model", talker)
            (talker / "chat_template.jinja").write_text(
                "la {{ messages[0].content }}{% if add_generation_prompt %} so{% endif %}"
            )
        (row,) = rows(place, "--prompt", PROMPT, "--model", talker, "--chat")
        (whole,) = rows(place, "--prompt", f"la {PROMPT} so")
        assert row == whole | {"prompt": PROMPT}

    def test_a_prompt_that_is_too_long_is_cut_and_told(self, place, caplog):
        (row,) = rows(place, "--prompt", tiny.text(100), "--window", 60)
        assert row["prompt_tokens"] == 40
        assert row["cut"] > 0
        assert "1 prompts were too long" in caplog.text


class TestRetrieval:
    def test_rows_say_where_each_token_came_from(self, place):
        (row,) = rows(place, "--prompt", PROMPT, "--index", place / "index", "--stride", 6, "--compare")
        segments = row["segments"]
        assert "".join(segment["text"] for segment in segments) == row["text"]
        assert [segment["begin"] for segment in segments] == [0, 6, 12, 18]
        assert sum(len(segment["tokens"]) for segment in segments) == 20
        for segment in segments:
            assert segment["passage"].keys() == {"id", "title", "text", "score"}
            assert len(segment["log_probs"]) == len(segment["log_probs_without_passage"]) == len(segment["tokens"])
            assert all(math.isfinite(x) and x < 0 for x in segment["log_probs"])

    def test_in_words(self, place, capsys):
        command = ["generate", "--model", place / "model", "--prompt", PROMPT, "--index", place / "index"]
        ralm(*command, "--max-new-tokens", 20, "--attribution", "text", "--compare")
        printed = capsys.readouterr().out
        assert "tokens 1-" in printed
        assert "nats a token)" in printed

    @pytest.mark.parametrize("strategy", ["zero-shot", "predictive"])
    def test_another_chooses(self, place, strategy):
        options = []
        if strategy == "predictive":
            options = ["--reranker", tiny.save_cross_encoder(place / "reranker"), "--prefix-tokens", 16]
        chosen = ["--prompt", PROMPT, "--index", place / "index", "--strategy", strategy, "--k", 5]
        first, other = (rows(place, *some)[0]["segments"] for some in (chosen[:4], chosen + options))
        assert [s["passage"]["id"] for s in first] != [s["passage"]["id"] for s in other]

    def test_titles_can_be_left_out(self, place):
        (row,) = rows(place, "--prompt", PROMPT, "--index", place / "index")
        title = row["segments"][0]["passage"]["title"]
        (place / "titles.txt").write_text(title + "\n", encoding="utf-8")
        (row,) = rows(place, "--prompt", PROMPT, "--index", place / "index", "--exclude-titles", place / "titles.txt")
        assert title not in [segment["passage"]["title"] for segment in row["segments"]]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--attribution", "text"], "--attribution and --compare are for --index"),
        (["--stride", "2"], "are for --index"),
        (["--index", "nowhere"], "nowhere"),
        (["--index", "INDEX", "--strategy", "predictive"], "--strategy predictive needs --reranker"),
        (["--index", "INDEX", "--reranker", "x"], "--strategy predictive needs --reranker"),
        (["--index", "INDEX", "--prefix-tokens", "16"], "--prefix-tokens and --pair-tokens are for --strategy"),
        (["--index", "INDEX", "--stride", "0"], "stride must be at least 1"),
        (["--index", "INDEX", "--query-tokens", "retriever"], "this retriever has no tokenizer"),
        (["--index", "INDEX", "--window", "20"], "a window of 20 tokens has no room"),
        (["--window", "999"], "a window of 999 tokens is more than the 256 positions"),
        (["--max-new-tokens", "300"], "has no room for a text beside 300 new ones"),
        (["--top-k", "5"], "set a temperature above 0"),
        (["--stop", ""], "what follows is empty"),
        (["--json", "nowhere/out.jsonl"], "the folder nowhere does not exist"),
        (["--concurrency", "3"], "for a server's model"),
        (["--chat"], "has no chat template"),
        (["--chat", "--model", "openai:x"], "name a server's as openai-chat:NAME"),
        (["--chat", "--index", "INDEX"], "--chat: is not for --index"),
    ],
)
def test_refused(place, capsys, args, message):
    names = {"INDEX": place / "index"}
    code, line = refused(
        capsys, "generate", "--model", place / "model", "--prompt", PROMPT, *(names.get(arg, arg) for arg in args)
    )
    assert code == 2
    assert message in line


def test_a_file_of_prompts_without_any(place, capsys):
    (place / "empty.jsonl").write_text("")
    code, line = refused(capsys, "generate", "--model", place / "model", "--prompts", place / "empty.jsonl")
    assert (code, "no rows in it" in line) == (1, True)
