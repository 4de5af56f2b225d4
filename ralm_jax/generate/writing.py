"""From tokens that come one by one to text that can be shown at once, and to the place where it ends."""

from collections.abc import Callable, Sequence

import numpy as np
from tokenizers.decoders import DecodeStream

from ralm_jax.generate.generator import Finish, Generation
from ralm_jax.tokenizer import Tokenizer

CONTEXT = 8  # tokens of the prompt, from which a decoder knows whether a space belongs before the text


class Writer:
    """The text of one prompt.

    Attributes:
        text: what is known for sure: no half character, and nothing that may turn out to begin a stop string.
        tokens, log_probs: that came out, the last one perhaps not part of the text.
        finish: why it ended; None as long as it goes on.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: np.ndarray,
        count: int,
        *,
        stop: Sequence[str] = (),
        ends: Sequence[int] = (),
        tell: Callable[[str], None] | None = None,
    ):
        """
        Args:
            prompt: its tokens.
            count: tokens that come at most.
            stop: strings that end the text.
            ends: tokens that end it.
            tell: is told what `text` grows by.
        """
        self.text, self.tokens, self.log_probs = "", list[int](), list[float]()
        self.finish: Finish | None = None
        self._count, self._stop, self._ends, self._tell = count, stop, frozenset(ends), tell
        self._backend, self._decoder, self._known = tokenizer.backend, DecodeStream(skip_special_tokens=False), ""
        for token in prompt[-CONTEXT:]:
            self._decoder.step(self._backend, int(token))

    def add(self, token: int, log_prob: float) -> None:
        """Takes the next token, unless the text has ended."""
        if self.finish:
            return
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        if token in self._ends:
            self._end("end")
            return
        piece = self._decoder.step(self._backend, token) or ""
        searched = max(0, len(self._known) - max(map(len, self._stop), default=0))
        self._known += piece
        found = [at for at in (self._known.find(stop, searched) for stop in self._stop) if at >= 0]
        if found:
            self._known = self._known[: min(found)]
            self._end("stop")
        elif len(self.tokens) == self._count:
            self._end("length")
        else:
            self._show(len(self._known) - self._held())

    def generation(self, prompt_tokens: int, cut: int = 0) -> Generation:
        """What was written, once it has ended."""
        assert self.finish is not None
        return Generation(self.text, self.finish, prompt_tokens, len(self.tokens), cut)

    def _end(self, finish: Finish) -> None:
        self.finish = finish
        self._show(len(self._known))

    def _held(self) -> int:
        """Characters at the end that a stop string may begin with."""
        longest = min(max(map(len, self._stop), default=0) - 1, len(self._known))
        ends = (self._known[-n:] for n in range(longest, 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._stop)), 0)

    def _show(self, length: int) -> None:
        new, self.text = self._known[len(self.text) : length], self._known[:length]
        if new and self._tell:
            self._tell(new)
