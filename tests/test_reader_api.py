"""Scoring over HTTP, by a server in the test that answers from a tiny reader: the tables of both are the same."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ralm_jax.errors import RalmError, UsageError
from ralm_jax.reader_api import APIReader
from ralm_jax.score_table import open_scores
from ralm_jax.settings import StrideSettings, WindowSettings
from tests import tiny
from tests.api import assert_secret, serving
from tests.test_cli import SIZES, place, ralm, refused  # noqa: F401
from tests.test_scoring import run

pytest.importorskip("openai", reason="needs the package openai (make test installs it)")

ROOT = Path(__file__).parents[1]
API = ["--model", "openai:tiny", "--tokenizer", "model"]
STRIDES = StrideSettings(window=64, stride=4)
LENGTH = 72  # of what the reader is given: no prompt is longer, and what follows changes nothing before it


def echo(path, asked):
    """As vLLM answers: the prompt's log-probabilities, without the first token's, and that of a token that it wrote."""
    prompt, reader = asked["prompt"], tiny.reader(tiny.GPT2)
    assert (path, asked["echo"], asked["max_tokens"], asked["logprobs"]) == ("/v1/completions", True, 1, 1)
    logits = np.asarray(reader.logits(np.array([prompt + [0] * (LENGTH - len(prompt))], np.int32)))[0].astype(float)
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    given = [log_probs[i, token] for i, token in enumerate(prompt[1:])]
    return answer([None, *given, log_probs[len(prompt) - 1].max()], len(prompt))


def answer(log_probs, read):
    choice = {"index": 0, "text": "", "finish_reason": "length", "logprobs": {"token_logprobs": log_probs}}
    return {"choices": [choice], "usage": {"prompt_tokens": read, "completion_tokens": 1}}


@pytest.fixture
def server(tmp_path, monkeypatch):
    with serving(echo, tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def local():
    return tiny.reader(tiny.GPT2)


def assert_close(ours, theirs):
    for name in ("first_window", "past", "target"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), atol=1e-5, err_msg=name)
    for name in ("passages", "token_ends", "begins"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))


@pytest.mark.parametrize(
    ("bos", "adds_bos", "block", "past"),
    [("every-window", False, None, 8), ("every-window", True, None, 0), ("passage", True, None, 8),
     ("every-window", True, 16, 8)],
)  # fmt: skip
def test_as_a_reader_on_this_machine(tmp_path, server, local, bos, adds_bos, block, past):
    tokenizer = tiny.tokenizer(bos=adds_bos)
    windows = WindowSettings(past=past, passage_tokens=20, bos=bos, block=block)
    theirs = run(tmp_path, local, tokenizer, strides=STRIDES, windows=windows)
    ours = run(tmp_path, APIReader("openai:tiny"), tokenizer, strides=STRIDES, windows=windows, name="api")
    assert_close(ours, theirs)
    margin = (16 - 4) // 2 if block else 0
    longest = 64 + margin + (adds_bos and bos == "every-window")
    assert max(len(asked["prompt"]) for asked in server.asked) == longest


@pytest.mark.parametrize("tokens", [2, 63, 64, 65])
def test_short_texts(tmp_path, server, local, tokens):
    theirs = run(tmp_path, local, tiny.tokenizer(), tokens=tokens)
    assert_close(run(tmp_path, APIReader("openai:tiny"), tiny.tokenizer(), tokens=tokens, name="api"), theirs)


def test_whatever_is_asked_at_the_same_time(tmp_path, server):
    one = run(tmp_path, APIReader("openai:tiny", concurrency=1), tiny.tokenizer(), name="one")
    (tmp_path / "cache/ralm/answers.sqlite").unlink()
    assert_close(run(tmp_path, APIReader("openai:tiny", concurrency=7), tiny.tokenizer(), name="seven"), one)


def test_the_manifest_names_the_model(tmp_path, server):
    made = run(tmp_path, APIReader("openai:tiny"), tiny.tokenizer())
    assert made.settings["openai"] == "tiny"
    assert not {"weights_sha256", "config", "dtype"} & set(made.settings)
    assert made.about["reader"] == "openai:tiny"
    assert_secret(tmp_path, server)
    with pytest.raises(RalmError, match="openai"):
        run(tmp_path, APIReader("openai:other"), tiny.tokenizer(), if_exists="resume")


def test_an_interrupted_table_goes_on_and_asks_nothing_twice(tmp_path, server):
    asked_before = []

    def fail_late(path, asked):
        if len(server.asked) > 40:
            return answer([], 0)
        asked_before.append(json.dumps(asked["prompt"]))
        return echo(path, asked)

    server.reply = fail_late
    with pytest.raises(RalmError, match="log-probabilities of 0 came back"):
        run(tmp_path, APIReader("openai:tiny", concurrency=1), tiny.tokenizer())
    server.reply = echo
    server.asked.clear()
    reader = APIReader("openai:tiny")
    made = run(tmp_path, reader, tiny.tokenizer(), if_exists="resume")
    assert not set(asked_before) & {json.dumps(asked["prompt"]) for asked in server.asked}
    count = len(server.asked)
    assert reader.usage.requests == count
    again = APIReader("openai:tiny")
    assert_close(run(tmp_path, again, tiny.tokenizer(), name="again"), made)
    assert (len(server.asked), again.usage.requests, again.usage.cached) == (count, 0, count + 40)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda prompt: answer([-1.0], len(prompt)), "64 tokens went out, and log-probabilities of 1 came back; the "
                                                     "server does not echo"),
        (lambda prompt: answer([None] + [-1.0] * (len(prompt) + 1), len(prompt) + 1), "makes other tokens of them"),
        (lambda prompt: answer([None] + [-1.0] * len(prompt), len(prompt) + 1), "makes other tokens of them"),
        (lambda prompt: {"choices": [{"index": 0, "text": "", "logprobs": None}]}, "of 0 came back"),
        (lambda prompt: answer([None] * len(prompt), len(prompt)), "log-probabilities that are no numbers"),
        (lambda prompt: answer(["x"] * len(prompt), len(prompt)), "did not answer with a text and its log-prob"),
        (lambda prompt: {"choices": []}, "did not answer with a text and its log-prob"),
        (lambda prompt: b"{", "did not answer with a text and its log-prob"),
    ],
)  # fmt: skip
def test_servers_that_do_not_score(tmp_path, server, change, message):
    server.reply = lambda path, asked: change(asked["prompt"])
    with pytest.raises(RalmError, match=f"openai:tiny: .*{message}"):
        run(tmp_path, APIReader("openai:tiny"), tiny.tokenizer())


def test_a_window_that_is_too_long(tmp_path, server):
    server.failures = [(400, {"error": {"message": "maximum context length is 16"}})]
    with pytest.raises(RalmError, match=r"maximum context length is 16.*gets shorter with --window"):
        run(tmp_path, APIReader("openai:tiny"), tiny.tokenizer())


def test_requests_that_cannot_be_met(server):
    with pytest.raises(UsageError, match="no log-probabilities of a text; name it openai:tiny"):
        APIReader("openai-chat:tiny")
    with pytest.raises(UsageError, match="concurrency must be at least 1"):
        APIReader("openai:tiny", concurrency=0)


def test_commands(place, server, capsys):  # noqa: F811
    command = ["lm", "--text", "text.txt", "--corpus", "corpus.jsonl", *SIZES]
    ralm(*command, "--model", "model", "--out", "local")
    ralm(*command, *API, "--concurrency", "3", "--out", "api")
    printed = capsys.readouterr().out
    count = len(server.asked)
    assert f"openai:tiny: {count} requests (" in printed
    assert "cost" not in printed
    assert "3 passages a stride, scored by a server" in printed
    assert_close(open_scores("api/scores"), open_scores("local/scores"))
    ralm("score", "--text", "text.txt", "--retrieval", "api/retrieval", *SIZES, *API, "--out", "scores",
         "--price-in", "2")  # fmt: skip
    assert f"openai:tiny: 0 requests (0 tokens read, 0 written), {count} answers from the cache; cost 0.0000" in (
        capsys.readouterr().out
    )
    assert_close(open_scores("scores"), open_scores("local/scores"))
    assert json.loads(Path("api/report.json").read_text())["strategies"]["first"]["strides"] == 35
    assert_secret(place, server)


def test_what_a_reranker_learns_from(place, server):  # noqa: F811
    ralm("index", "--corpus", "corpus.jsonl", "--out", "index")
    command = ["train", "reranker-data", "--index", "index", "--text", "text.txt", "--examples", "9", *SIZES]
    ralm(*command, "--model", "model", "--out", "local")
    ralm(*command, *API, "--out", "api")
    assert_close(open_scores("api/scores"), open_scores("local/scores"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (API[:2], "openai:tiny: name the folder or Hugging Face id of its tokenizer with --tokenizer"),
        ([*API[:2], "--tokenizer", "openai:tiny"], "openai:tiny: is a server's; this needs the model's files"),
        (["--model", "openai-chat:tiny", "--tokenizer", "model"], "name it openai:tiny"),
        ([*API, "--dtype", "bfloat16"], "--dtype, --attention and --batch-size are for a reader on this machine"),
        ([*API, "--price-out", "-1"], "--price-out -1.0: must be 0 or more"),
        (["--model", "model", "--concurrency", "3"], "--price-out are for a server's model, openai:NAME"),
    ],
)  # fmt: skip
def test_commands_that_cannot_be_met(place, server, capsys, options, message):  # noqa: F811
    code, line = refused(capsys, "score", "--text", "text.txt", "--out", "scores", *SIZES, *options)
    assert (code, message in line) == (2, True), line
    assert server.asked == []


def test_ctrl_c(place, server):  # noqa: F811
    """Quick though a request is under way, with what was used; what was answered is not asked for again."""
    release, held = threading.Event(), threading.Event()

    def hold_late(path, asked):
        if len(server.asked) > 10:
            held.set()
            release.wait(60)
        return echo(path, asked)

    server.reply = hold_late
    command = [sys.executable, "-m", "ralm_jax", "score", "--text", "text.txt", "--out", "scores", *SIZES, *API]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as started:
        try:
            assert held.wait(120)
            time.sleep(0.5)  # the others are answered
            started.send_signal(signal.SIGINT)
            out, err = started.communicate(timeout=20)
        finally:
            release.set()
            started.kill()
    assert (started.returncode, err.strip().splitlines()[-1]) == (
        130, "ralm: error: interrupted; what is finished is kept, and --resume goes on from there"
    )  # fmt: skip
    assert "openai:tiny: 10 requests (" in out
    count = len(server.asked)
    server.reply = echo
    ralm(*command[3:], "--resume")
    assert len(server.asked) - count == 35 - 10
