"""Text from a server that speaks OpenAI's API: vLLM's, llama.cpp's, Ollama's, OpenAI's own."""

import functools
import json
import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import Any

from ralm_jax.errors import UsageError
from ralm_jax.generate.generator import Finish, Generation
from ralm_jax.generate.stopping import Stopping
from ralm_jax.openai_client import CHAT_PREFIX, CONCURRENCY, Cache, Server, Usage, cache_key, concurrently
from ralm_jax.settings import GenerateSettings, at_least

log = logging.getLogger("ralm")

STOPS = 4  # strings that the API takes


class APIGenerator:
    """A `Generator` behind OPENAI_BASE_URL (default: OpenAI's own) and OPENAI_API_KEY.

    `openai:MODEL` completes the prompt as it is; `openai-chat:MODEL` answers it as a user's message. What was answered
    once is in the cache, answers.sqlite, and is not asked for again: nothing is asked without either temperature 0 or a
    seed. Tokens are 0 where the server does not count them.

    Attributes:
        usage: what was asked of the server.
    """

    def __init__(self, model: str, *, concurrency: int = CONCURRENCY):
        """
        Args:
            concurrency: requests at the same time.

        Raises:
            UsageError: the package `openai` is not installed, no key in the environment, or no model.
        """
        at_least(1, concurrency=concurrency)
        self.server, self.concurrency, self.usage = Server(model), concurrency, Usage()
        self.chat = model.startswith(CHAT_PREFIX)
        self.name = model
        self.identity: dict[str, Any] = {"openai": self.server.model, "endpoint": "chat" if self.chat else "text"}

    def generate(
        self,
        prompts: Sequence[str],
        settings: GenerateSettings,
        *,
        tell: Callable[[int, str], None] | None = None,
    ) -> Iterator[tuple[int, Generation]]:
        """As `Generator.generate`; a single prompt's text is told while it is written.

        Raises:
            UsageError: an empty prompt.
            RalmError: the server refuses, does not answer after several tries, or answers with something else than
                text; or the cache cannot be used. What was answered before is in the cache.
        """
        if "" in prompts:
            raise UsageError(f"prompt {prompts.index('') + 1} is empty")
        advice = {} if self.chat else {404: f"a model that only chats is {CHAT_PREFIX}{self.server.model}"}
        with self.server.client(advice) as client, Cache("answers") as cache:
            answer = functools.partial(self._answer, settings=settings, client=client, cache=cache)
            if tell and len(prompts) == 1:
                yield 0, answer(prompts[0], tell=functools.partial(tell, 0))
                return
            with closing(concurrently(answer, prompts, self.concurrency)) as answers:
                for place, generation in answers:
                    if tell:
                        tell(place, generation.text)
                    yield place, generation

    def _answer(
        self,
        prompt: str,
        settings: GenerateSettings,
        client: Any,
        cache: Cache,
        tell: Callable[[str], None] | None = None,
    ) -> Generation:
        """What follows `prompt`, from the cache or else from the server; streamed if there is someone to tell."""
        request = self.request(prompt, settings)
        key = cache_key(str(client.base_url), self.chat, request, settings.stop)
        known = cache.get([key])
        if known:
            self.usage.add(cached=True)
            made = Generation(*json.loads(known[key]))
            if tell and made.text:
                tell(made.text)
            return made
        made = self._write(client, request, settings.stop, tell)
        cache.put({key: json.dumps(made).encode()})
        return made

    def request(self, prompt: str, settings: GenerateSettings) -> dict[str, Any]:
        """The arguments of the client's call; only what is asked for, since servers refuse what they do not know."""
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        asked |= {"model": self.server.model, "max_tokens": settings.max_new_tokens}
        asked["temperature"] = settings.temperature
        if settings.temperature:
            asked["seed"] = settings.seed
        if settings.top_p != 1:
            asked["top_p"] = settings.top_p
        if settings.stop:
            asked["stop"] = list(settings.stop[:STOPS])  # the others end the text here
        beyond: dict[str, float] = {}  # OpenAI's own API; as vLLM names it
        if settings.top_k is not None:
            beyond["top_k"] = settings.top_k
        if settings.repetition_penalty != 1:
            beyond["repetition_penalty"] = settings.repetition_penalty
        return asked | ({"extra_body": beyond} if beyond else {})

    def _write(
        self, client: Any, request: dict[str, Any], stop: Sequence[str], tell: Callable[[str], None] | None
    ) -> Generation:
        writing = Stopping(stop, tell)
        choice = usage = None
        with closing(self._pieces(client, request, streamed=tell is not None)) as pieces:
            for piece, last, counted in pieces:
                writing.add(piece)
                choice, usage = last or choice, counted or usage
                if writing.stopped:
                    break
        writing.end()
        self.usage.add(usage)
        reason = "stop" if writing.stopped else finish(choice, stop)
        if getattr(choice, "finish_reason", None) == "content_filter":
            log.warning("%s: the server's content filter ended an answer", self.name)
        tokens = (getattr(usage, name, None) or 0 for name in ("prompt_tokens", "completion_tokens"))
        return Generation(writing.text, reason, *tokens)

    def _pieces(
        self, client: Any, request: dict[str, Any], *, streamed: bool
    ) -> Generator[tuple[str, Any, Any], None, None]:
        """Pieces of text as they come; the last one's choice says how the text ended, and one of them has the usage.

        Raises:
            RalmError: the answer is none, or breaks off.
        """
        create = (client.chat.completions if self.chat else client.completions).create
        with self.server.answering("a text"):
            if not streamed:
                response = create(**request)
                choice = response.choices[0]
                text = (choice.message.content or "") if self.chat else choice.text
                yield checked(text), choice, response.usage
                return
            ended = False
            with create(**request, stream=True, stream_options={"include_usage": True}) as events:
                for event in events:
                    choice = event.choices[0] if event.choices else None  # none beside the usage
                    delta = (choice.delta.content if self.chat else choice.text) if choice else None
                    ended |= bool(choice and choice.finish_reason)
                    yield checked(delta or ""), choice if choice and choice.finish_reason else None, event.usage
            if not ended:
                raise ValueError


def checked(text: Any) -> str:
    """
    Raises:
        TypeError: not a text.
    """
    if not isinstance(text, str):
        raise TypeError
    return text


def finish(choice: Any, stop: Sequence[str]) -> Finish:
    """Why a text ended. The API says "stop" of a stop string and of the end of text; vLLM adds which string it was, and
    of the others we take it that there was one, if there are any."""
    if choice.finish_reason == "length":
        return "length"
    at_string = choice.finish_reason == "stop" and isinstance(getattr(choice, "stop_reason", ""), str)
    return "stop" if stop and at_string else "end"
