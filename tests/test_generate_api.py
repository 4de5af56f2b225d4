"""Text over HTTP, from a server in the test: at the same time, retried, cached, streamed, counted, interrupted."""

import signal
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ralm_jax import openai_client
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.generate.api import APIGenerator
from ralm_jax.generate.generator import Generation
from ralm_jax.generate.stopping import Stopping
from ralm_jax.openai_client import cache_file, concurrently, is_api
from ralm_jax.settings import GenerateSettings
from tests.api import KEY, assert_secret, serving

pytest.importorskip("openai", reason="needs the package openai (make test installs it)")

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
PROMPTS = [f"prompt {i}" for i in range(12)]


def completion(text, finish="stop", **more):
    return {"object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": finish, **more}],
            "usage": USAGE}  # fmt: skip


def message(text, finish="stop"):
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
    return {"object": "chat.completion", "choices": [choice], "usage": USAGE}


def pieces(texts, finish="stop"):
    """What a completion is as events; the usage comes last, by itself."""
    for i, text in enumerate(texts):
        reason = finish if i == len(texts) - 1 else None
        yield {"object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": reason}]}
    yield {"object": "text_completion", "choices": [], "usage": USAGE}


def reply(path, asked):
    if path.endswith("/chat/completions"):
        return message(f"to {asked['messages'][0]['content']}")
    return completion(f" after {asked['prompt']}")


@pytest.fixture
def server(tmp_path, monkeypatch):
    with serving(reply, tmp_path, monkeypatch) as made:
        yield made


def write(prompts, model="openai:small", *, concurrency=4, tell=None, **settings):
    """The generations by place, and the generator."""
    generator = APIGenerator(model, concurrency=concurrency)
    return dict(generator.generate(prompts, GenerateSettings(**settings), tell=tell)), generator


def text_of(prompt, model="openai:small", **options):
    return write([prompt], model, **options)[0][0].text


class TestRequests:
    def test_completions(self, server, caplog):
        made, generator = write(PROMPTS)
        assert made == {i: Generation(f" after prompt {i}", "end", 7, 3) for i in range(12)}
        assert {asked["path"] for asked in server.asked} == {"/v1/completions"}
        assert server.keys == {f"Bearer {KEY}"}
        assert generator.identity == {"openai": "small", "endpoint": "text"}
        assert KEY not in f"{vars(generator)}{caplog.text}"

    def test_chat(self, server):
        made, generator = write(["hello"], "openai-chat:large/one:8b")
        assert made == {0: Generation("to hello", "end", 7, 3)}
        (asked,) = server.asked
        assert (asked["path"], asked["model"]) == ("/v1/chat/completions", "large/one:8b")
        assert asked["messages"] == [{"role": "user", "content": "hello"}]
        assert generator.identity == {"openai": "large/one:8b", "endpoint": "chat"}

    def test_only_what_is_asked_for(self, server):
        write(["a"], max_new_tokens=5)
        assert server.asked == [
            {"path": "/v1/completions", "prompt": "a", "model": "small", "max_tokens": 5, "temperature": 0.0}
        ]

    def test_all_settings(self, server):
        write(["a"], temperature=0.7, top_p=0.9, top_k=40, repetition_penalty=1.2, stop=("x", "y"), seed=3)
        (asked,) = server.asked
        asked.pop("path")
        assert asked == {"prompt": "a", "model": "small", "max_tokens": 128, "temperature": 0.7, "seed": 3,
                         "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.2, "stop": ["x", "y"]}  # fmt: skip

    @pytest.mark.parametrize(
        ("answer", "stop", "finish"),
        [
            (completion("a", "length"), ("x",), "length"),
            (completion("a", "stop"), (), "end"),
            (completion("a", "stop"), ("x",), "stop"),
            (completion("a", "stop", stop_reason="x"), ("x",), "stop"),
            (completion("a", "stop", stop_reason=None), ("x",), "end"),
            (completion("a", "stop", stop_reason=2), ("x",), "end"),
            (completion("a", None), (), "end"),
        ],
    )
    def test_why_it_ends(self, server, answer, stop, finish):
        server.reply = lambda path, asked: answer
        assert write(["a"], stop=stop)[0][0].finish == finish

    def test_a_content_filter_is_told(self, server, caplog):
        server.reply = lambda path, asked: completion("a", "content_filter")
        assert text_of("a") == "a"
        assert "openai:small: the server's content filter ended an answer" in caplog.text

    def test_a_server_that_does_not_count(self, server):
        server.reply = lambda path, asked: {"choices": completion("a")["choices"]}
        made, generator = write(["a"])
        assert made[0] == Generation("a", "end", 0, 0)
        assert generator.usage.told() == "1 requests (0 tokens read, 0 written), 0 answers from the cache"

    def test_a_chat_model_that_says_nothing(self, server):
        server.reply = lambda path, asked: message(None, "length")
        assert write(["a"], "openai-chat:small")[0][0] == Generation("", "length", 7, 3)


class TestConcurrency:
    def test_so_many_at_the_same_time_and_no_more(self, server):
        barrier, lock, now, most = threading.Barrier(4), threading.Lock(), [0], [0]

        def together(path, asked):
            with lock:
                now[0] += 1
                most[0] = max(most[0], now[0])
            barrier.wait(10)  # nobody is answered before four have asked
            with lock:
                now[0] -= 1
            return reply(path, asked)

        server.reply = together
        assert len(write(PROMPTS, concurrency=4)[0]) == 12
        assert most == [4]

    def test_in_the_order_in_which_they_are_finished(self, server):
        first = threading.Event()

        def reply_to_the_first_last(path, asked):
            if asked["prompt"] == "prompt 0":
                assert first.wait(10)
            return reply(path, asked)

        server.reply = reply_to_the_first_last
        places = []
        for place, _ in APIGenerator("openai:small", concurrency=2).generate(PROMPTS[:4], GenerateSettings()):
            places.append(place)
            if len(places) == 3:
                first.set()
        assert places == [1, 2, 3, 0]

    def test_who_stops_asking_starts_no_other(self):
        started, release = [], threading.Event()

        def work(item):
            started.append(item)
            return item == 0 or release.wait(60)

        made = concurrently(work, range(100), 3)
        next(made)
        made.close()
        release.set()
        time.sleep(0.3)
        assert len(started) <= 4  # three, and one in place of the finished

    def test_an_error_keeps_what_is_finished(self, server):
        server.reply = lambda path, asked: b"{" if asked["prompt"] == "prompt 3" else reply(path, asked)
        found = {}
        with pytest.raises(RalmError, match="did not answer with a text"):
            found.update(APIGenerator("openai:small", concurrency=1).generate(PROMPTS, GenerateSettings()))
        assert set(found) == {0, 1, 2}
        server.asked.clear()
        server.reply = reply
        assert len(write(PROMPTS)[0]) == 12
        assert not {asked["prompt"] for asked in server.asked} & set(PROMPTS[:3])

    def test_ctrl_c_waits_for_nobody_and_loses_nothing(self, server):
        release, held = threading.Event(), threading.Event()

        def reply_to_five(path, asked):
            if asked["prompt"] not in PROMPTS[:5]:
                held.set()
                release.wait(60)
            return reply(path, asked)

        def interrupt():
            held.wait(60)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        server.reply = reply_to_five
        found = {}
        try:
            threading.Thread(target=interrupt).start()
            started = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                found.update(APIGenerator("openai:small", concurrency=1).generate(PROMPTS, GenerateSettings()))
            assert time.monotonic() - started < 20
        finally:
            release.set()
        assert set(found) <= set(range(5))
        server.asked.clear()
        server.reply = reply
        assert len(write(PROMPTS)[0]) == 12
        assert not {asked["prompt"] for asked in server.asked} & set(PROMPTS[:5])


class TestCache:
    def test_nothing_is_asked_twice(self, server, tmp_path):
        first, _ = write(PROMPTS)
        again, generator = write(PROMPTS[::-1])
        assert [again[11 - i] for i in range(12)] == [first[i] for i in range(12)]
        assert len(server.asked) == 12
        assert generator.usage.told(1, 1) == (
            "0 requests (0 tokens read, 0 written), 12 answers from the cache; cost 0.0000"
        )
        assert_secret(tmp_path, server)

    def test_by_everything_that_changes_an_answer(self, server, tmp_path, monkeypatch):
        asked = [("openai:small", {}), ("openai:large", {}), ("openai-chat:small", {}), ("openai:small", {"seed": 1}),
                 ("openai:small", {"max_new_tokens": 2}), ("openai:small", {"temperature": 1.0}),
                 ("openai:small", {"temperature": 1.0, "seed": 1}), ("openai:small", {"stop": ("x",)}),
                 ("openai:small", {"stop": ("x", *"1234")}), ("openai:small", {"stop": ("x", *"1235")})]  # fmt: skip
        for model, settings in asked * 2:
            write(["a"], model, **settings)
        assert len(server.asked) == len(asked) - 1  # greedy decoding draws nothing, whatever the seed
        with serving(reply, tmp_path, monkeypatch) as other:
            write(["a"])
            assert len(other.asked) == 1

    def test_damaged(self, server):
        cache_file("answers").write_bytes(b"not a database" * 100)
        with pytest.raises(RalmError, match=r"answers\.sqlite: the cache of answers cannot be used"):
            write(["a"])
        assert server.asked == []


def test_cost(server):
    _, generator = write(PROMPTS)
    assert generator.usage.told() == "12 requests (84 tokens read, 36 written), 0 answers from the cache"
    assert generator.usage.told(1000, 500).endswith("; cost 0.1020")


class TestStreaming:
    def test_told_while_it_is_written(self, server):
        told, heard = [], threading.Event()

        def slowly(path, asked):
            first, *rest = pieces([" one", " two", " three"])
            yield first
            assert heard.wait(10)  # the rest is written only after the first piece has been told
            yield from rest

        def tell(place, text):
            told.append((place, text))
            heard.set()

        server.reply = slowly
        made, generator = write(["a"], tell=tell)
        assert told == [(0, " one"), (0, " two"), (0, " three")]
        assert made[0] == Generation(" one two three", "end", 7, 3)
        assert generator.usage.requests == 1
        assert (server.asked[0]["stream"], server.asked[0]["stream_options"]) == (True, {"include_usage": True})

    def test_chat(self, server):
        def events(path, asked):
            for text, reason in [("", None), ("to ", None), ("you", None), (None, "length")]:
                delta = {"role": "assistant", "content": text}
                yield {"object": "chat.completion.chunk",
                       "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}  # fmt: skip

        server.reply = events
        told = []
        made, _ = write(["a"], "openai-chat:small", tell=lambda place, text: told.append(text))
        assert told == ["to ", "you"]
        assert made[0] == Generation("to you", "length", 0, 0)

    def test_from_the_cache(self, server):
        server.reply = lambda path, asked: pieces(["a", "b"])
        told = []
        for _ in range(2):
            write(["a"], tell=lambda place, text: told.append(text))
        assert told == ["a", "b", "ab"]
        assert len(server.asked) == 1

    def test_several_prompts_are_told_as_they_finish(self, server):
        told = {}
        made, _ = write(PROMPTS, tell=told.__setitem__)
        assert told == {i: made[i].text for i in range(12)}
        assert "stream" not in server.asked[0]

    @pytest.mark.parametrize("events", [[], [next(pieces(["a", "b"]))], [{"choices": [{"text": 3}]}], [{"a": 1}]])
    def test_broken_off(self, server, events):
        server.reply = lambda path, asked: events
        for _ in range(2):  # half an answer is not kept
            with pytest.raises(RalmError, match="openai:small: the server did not answer with a text"):
                write(["a"], tell=lambda place, text: None)
        assert len(server.asked) == 2


class TestStops:
    STOP = ("1", "2", "3", "4", "\n\n", "END")

    def test_more_than_the_api_takes(self, server):
        server.reply = lambda path, asked: completion("an answer\n\nand more", "length")
        made, _ = write(["a"], stop=self.STOP)
        assert server.asked[0]["stop"] == ["1", "2", "3", "4"]
        assert made[0] == Generation("an answer", "stop", 7, 3)

    def test_streamed(self, server):
        written = []

        def events(path, asked):
            for event in pieces(["an", " EN", "TRY\n", "E", "ND", *" and much more" * 10000]):
                yield event
                written.append(event)

        server.reply = events
        told = []
        made, _ = write(["a"], stop=self.STOP, tell=lambda place, text: told.append(text))
        assert told == ["an", " ", "ENTRY", "\n"]
        assert (made[0].text, made[0].finish) == ("an ENTRY\n", "stop")
        assert len(written) < 140_000  # nobody listens any more

    @given(st.text("abc", max_size=20), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
    def test_any_pieces(self, text, stop, data):
        """As one character after the other: the text before the string that is complete first."""
        ends = [(n, n - len(s)) for n in range(len(text) + 1) for s in stop if text[:n].endswith(s)]
        expected = text[: min(ends)[1]] if ends else text
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
        told = []
        stopping = Stopping(stop, told.append)
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            stopping.add(text[start:end])
            assert expected.startswith(stopping.text)
        stopping.end()
        assert (stopping.text, stopping.stopped, "".join(told)) == (expected, bool(ends), expected)
        assert "" not in told


class TestErrors:
    def test_retried(self, server):
        server.failures = [(429, {"error": {"message": "slow down"}}), (500, {"error": {"message": "oops"}})]
        assert text_of("a") == " after a"
        assert len(server.asked) == 3

    @pytest.mark.parametrize(
        ("answer", "message"),
        [
            ((401, {"error": {"message": f"Incorrect key {KEY}"}}), r"Error code: 401.*\*\*\*.*; check OPENAI_API_KEY"),
            ((404, {"error": {"message": "no small"}}), "404.*no small.*no such model or endpoint; a model that only "
                                                        "chats is openai-chat:small"),
            ((404, b"<html>\nNot Found\n</html>"), "openai:small: Error code: 404; the server at OPENAI_BASE_URL has"),
            ((400, {"error": {"message": "too long"}}), "openai:small: Error code: 400 .*too long"),
            ((200, b"{"), "the server did not answer with a text"),
            ((200, {"nothing": 1}), "the server did not answer with a text"),
            ((200, {"choices": []}), "the server did not answer with a text"),
            ((200, {"choices": None}), "the server did not answer with a text"),
            ((200, completion(None)), "the server did not answer with a text"),
            ((200, completion(3)), "the server did not answer with a text"),
        ],
    )  # fmt: skip
    def test_one_line(self, server, answer, message, caplog):
        server.failures = [answer]
        with pytest.raises(RalmError, match=message) as caught:
            write(["a"])
        assert "\n" not in str(caught.value)
        assert KEY not in f"{caught.value}{caplog.text}"
        assert str(server.server_port) not in str(caught.value)

    def test_still_too_many_requests(self, server, monkeypatch):
        monkeypatch.setattr(openai_client, "RETRIES", 2)
        server.failures = [(429, {"error": {"message": "slow down"}})] * 3
        with pytest.raises(RalmError, match=r"429.*slow down.*; ask again later, or fewer at once"):
            write(["a"])
        assert len(server.asked) == 3

    def test_no_answer_in_time(self, server, monkeypatch):
        monkeypatch.setattr(openai_client, "RETRIES", 1)
        monkeypatch.setattr(openai_client, "TIMEOUT", 0.2)
        release = threading.Event()
        server.reply = lambda path, asked: release.wait(60) and reply(path, asked)
        try:
            with pytest.raises(RalmError, match="openai:small: Request timed out; is the server"):
                write(["a"])
        finally:
            release.set()
        assert len(server.asked) == 2

    def test_no_server(self, server, monkeypatch):
        monkeypatch.setattr(openai_client, "RETRIES", 0)
        monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
        with pytest.raises(RalmError, match="openai:small: Connection error; is the server at OPENAI_BASE_URL running"):
            write(["a"])

    def test_requests_that_cannot_be_met(self, server, monkeypatch):
        with pytest.raises(UsageError, match="prompt 2 is empty"):
            write(["a", ""])
        with pytest.raises(UsageError, match="concurrency must be at least 1, not 0"):
            write(["a"], concurrency=0)
        with pytest.raises(UsageError, match="openai-chat:: name a model"):
            write(["a"], "openai-chat:")
        monkeypatch.delenv("OPENAI_API_KEY")
        with pytest.raises(UsageError, match="OPENAI_API_KEY is not set"):
            write(["a"])
        monkeypatch.setitem(sys.modules, "openai", None)
        with pytest.raises(UsageError, match=r"not installed: pip install 'ralm-jax\[openai\]'"):
            write(["a"])
        assert server.asked == []


def test_which_models_are_a_servers():
    assert is_api("openai:small")
    assert is_api("openai-chat:small")
    assert not is_api("openai-community/gpt2")
    assert not is_api("./openai")
