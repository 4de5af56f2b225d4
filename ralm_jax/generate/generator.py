"""What writes text after a prompt: a reader on this machine, or one behind a server's API."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from ralm_jax.settings import GenerateSettings

Finish = Literal["end", "stop", "length"]


class Generation(NamedTuple):
    """What was written after a prompt.

    Attributes:
        text: up to, and without, a stop string or the end of text.
        finish: why it ends: the reader ended it, a stop string came, or it has all the tokens that were asked for.
        prompt_tokens: that went in, BOS among them.
        new_tokens: that came out, those of a stop string among them.
        cut: tokens that the prompt lost at its start, since it did not fit.
    """

    text: str
    finish: Finish
    prompt_tokens: int
    new_tokens: int
    cut: int = 0


class Generator(Protocol):
    """
    Attributes:
        name: of the reader, for people.
        identity: what the text depends on beside prompt and settings, for manifests.
    """

    name: str
    identity: dict[str, Any]

    def generate(
        self,
        prompts: Sequence[str],
        settings: GenerateSettings,
        *,
        tell: Callable[[int, str], None] | None = None,
    ) -> Iterator[tuple[int, Generation]]:
        """What follows each of `prompts`, with its place among them, in the order in which they are finished.

        Args:
            tell: is told a prompt's place and a piece of text as soon as it is known.

        Raises:
            UsageError: a prompt without tokens, or settings that this one does not have.
            RalmError: the reader gives NaN, or the server does not answer.
        """
        ...
