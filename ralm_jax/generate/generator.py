"""What writes text after a prompt: a reader on this machine, or one behind a server's API."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from ralm_jax.openai_client import CONCURRENCY, is_api
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


def open_generator(
    model: str,
    *,
    tokenizer: str | None = None,
    dtype: str = "float32",
    batch_size: int | None = None,
    window: int | None = None,
    concurrency: int = CONCURRENCY,
) -> Generator:
    """The generator of a reader.

    Args:
        model: as `load_reader` takes it, or openai:NAME or openai-chat:NAME for a server's; the arguments that follow
            are for a reader on this machine, `concurrency` is for a server.
        tokenizer: where the tokenizer is, if not with the model.
        dtype: as `load_reader` takes it.
        batch_size: prompts at a time; None chooses.
        window: tokens that prompt and text may have together; None for the reader's positions.
        concurrency: requests at the same time.

    Raises:
        UsageError: no such model or tokenizer, or a window that the reader does not have.
        RalmError: the model cannot be loaded exactly.
    """
    if is_api(model):
        from ralm_jax.generate.api import APIGenerator

        return APIGenerator(model, concurrency=concurrency)
    from ralm_jax.generate.local import LocalGenerator
    from ralm_jax.reader import load_reader
    from ralm_jax.tokenizer import load_tokenizer

    own = load_tokenizer(tokenizer or model)
    return LocalGenerator(load_reader(model, dtype=dtype), own, window=window, batch_size=batch_size)
