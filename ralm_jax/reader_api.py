"""A reader behind a server's API, where that gives the log-probabilities of a prompt: vLLM's does, and its like."""

import functools
import math
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np

from ralm_jax.errors import RalmError, UsageError
from ralm_jax.openai_client import CHAT_PREFIX, CONCURRENCY, PREFIX, Cache, Server, Usage, cache_key, concurrently
from ralm_jax.scoring import WindowScorer
from ralm_jax.settings import at_least
from ralm_jax.windows import Windows


class APIReader(WindowScorer):
    """A model behind OPENAI_BASE_URL and OPENAI_API_KEY that scores windows.

    Windows go out as tokens, one a request, and come back as an echo with log-probabilities. What was scored once is in
    the cache, answers.sqlite, and is not asked for again.

    Attributes:
        name: openai:MODEL.
        identity: what the log-probabilities depend on, as far as it is known, for manifests.
        usage: what was asked of the server.
    """

    multiple = 1

    def __init__(self, model: str, *, concurrency: int = CONCURRENCY):
        """
        Args:
            concurrency: requests at the same time.

        Raises:
            UsageError: the package `openai` is not installed, no key in the environment, or no model that can score.
        """
        at_least(1, concurrency=concurrency)
        if model.startswith(CHAT_PREFIX):
            named = PREFIX + model.removeprefix(CHAT_PREFIX)
            raise UsageError(f"{model}: a chat endpoint gives no log-probabilities of a text; name it {named}")
        self.server, self.usage = Server(model), Usage()
        self.name, self.batch_size = model, concurrency
        self.identity: dict[str, Any] = {"openai": self.server.model}

    def batches(self, windows: Windows, batch_size: int, count: int | None = None) -> Iterator[np.ndarray]:
        """
        Raises:
            RalmError: the server refuses, does not answer after several tries, or does not score; or the cache cannot
                be used. What was scored before is in the cache.
        """
        advice = {400: "a window that is too long for it gets shorter with --window"}
        values = np.full(windows.labels.shape, np.nan, np.float32)
        missing, start = np.ones(len(windows), bool), 0
        with self.server.client(advice) as client, Cache("answers") as cache:
            score = functools.partial(self._score, windows, client=client, cache=cache)
            with closing(concurrently(score, range(len(windows)), self.batch_size)) as scored:
                for row, log_probs in scored:
                    values[row, windows.scored[row]] = log_probs
                    missing[row] = False
                    while start < len(windows) and not missing[start : start + batch_size].any():
                        yield values[start : start + batch_size]
                        start += batch_size

    def _score(self, windows: Windows, row: int, client: Any, cache: Cache) -> np.ndarray:
        """Log-probabilities (n,) float32 of the scored labels of a window, from the cache or else from the server."""
        scored = windows.scored[row]
        if not scored.any():
            return np.zeros(0, np.float32)
        at = windows.positions[row, scored] + 1  # of the labels themselves
        tokens = np.append(windows.tokens[row], 0)[: at.max() + 1]
        tokens[at] = windows.labels[row, scored]  # the last one need not be in the window
        key = cache_key(str(client.base_url), self.server.model, tokens.tolist(), at.tolist())
        known = cache.get([key])
        if known:
            self.usage.add(cached=True)
            return np.frombuffer(known[key], np.float32)
        log_probs = self._ask(tokens, client)[at]
        if not np.isfinite(log_probs).all():
            raise RalmError(f"{self.name}: the server gives log-probabilities that are no numbers")
        cache.put({key: log_probs.tobytes()})
        return log_probs

    def _ask(self, tokens: np.ndarray, client: Any) -> np.ndarray:
        """Log-probabilities (T,) float32 of all `tokens`; NaN where the server gives none, as for the first.

        Raises:
            RalmError: what comes back is not one for each token.
        """
        with self.server.answering("a text and its log-probabilities"):
            # not every server scores without a token written, or takes 0 for `logprobs`
            response = client.completions.create(
                model=self.server.model, prompt=tokens.tolist(), echo=True, logprobs=1, max_tokens=1, temperature=0
            )
            self.usage.add(response.usage)
            (choice,) = response.choices
            given = choice.logprobs.token_logprobs if choice.logprobs else []
            log_probs = [math.nan if value is None else float(value) for value in given]
        read = getattr(response.usage, "prompt_tokens", None)
        if len(log_probs) - len(tokens) not in (0, 1) or read not in (None, len(tokens)):
            raise RalmError(
                f"{self.name}: {len(tokens)} tokens went out, and log-probabilities of {len(log_probs)} came back; the "
                "server does not echo prompts with log-probabilities (vLLM does), or makes other tokens of them"
            )
        return np.array(log_probs[: len(tokens)], np.float32)
