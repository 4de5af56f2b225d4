"""From tokens that come one by one to text that can be shown at once, and to the place where it ends."""

from collections.abc import Callable, Sequence

import numpy as np
from tokenizers.decoders import DecodeStream

from ralm_jax.generate.generator import Finish, Generation
from ralm_jax.generate.stopping import Stopping
from ralm_jax.tokenizer import Tokenizer

CONTEXT = 8  # tokens of the prompt, from which a decoder knows whether a space belongs before the text


class Writer:
    """The text of one prompt.

    Attributes:
        tokens, log_probs: that came out, those of a stop string or an end among them.
        finish: why the text ended; None as long as it goes on.
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
        self.tokens, self.log_probs = list[int](), list[float]()
        self.finish: Finish | None = None
        self._count, self._ends, self._stopping = count, frozenset(ends), Stopping(stop, tell)
        self._backend, self._decoder = tokenizer.backend, DecodeStream(skip_special_tokens=False)
        for token in prompt[-CONTEXT:]:
            self._decoder.step(self._backend, int(token))

    @property
    def text(self) -> str:
        """What is known for sure: no half character, and nothing that may turn out to begin a stop string."""
        return self._stopping.text

    def add(self, token: int, log_prob: float) -> None:
        """Takes the next token, unless the text has ended."""
        if self.finish:
            return
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        if token not in self._ends:
            self._stopping.add(self._decoder.step(self._backend, token) or "")
        if self._stopping.stopped:
            self.finish = "stop"
        elif token in self._ends:
            self.finish = "end"
        elif len(self.tokens) == self._count:
            self.finish = "length"
        if self.finish:
            self._stopping.end()

    def generation(self, prompt_tokens: int, cut: int = 0) -> Generation:
        """What was written, once it has ended."""
        assert self.finish is not None
        return Generation(self.text, self.finish, prompt_tokens, len(self.tokens), cut)
