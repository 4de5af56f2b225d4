"""Text from a reader: decoding with a cache of keys and values, with retrieval in between, or by a server."""

from typing import TYPE_CHECKING

from ralm_jax.generate.generator import Generator
from ralm_jax.openai_client import CONCURRENCY, is_api
from ralm_jax.settings import AttentionName

if TYPE_CHECKING:
    from jax.sharding import Mesh


def open_generator(
    model: str,
    *,
    tokenizer: str | None = None,
    dtype: str = "float32",
    attention: AttentionName = "auto",
    batch_size: int | None = None,
    window: int | None = None,
    concurrency: int = CONCURRENCY,
    mesh: "Mesh | None" = None,
) -> Generator:
    """The generator of a reader.

    Args:
        model: as `load_reader` takes it, or openai:NAME or openai-chat:NAME for a server's; the arguments that follow
            are for a reader on this machine, `concurrency` is for a server.
        tokenizer: where the tokenizer is, if not with the model.
        dtype, attention: as `load_reader` takes them.
        batch_size: prompts at a time; None chooses.
        window: tokens that prompt and text may have together; None for the reader's positions.
        mesh: as `load_reader` takes it.
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
    reader = load_reader(model, dtype=dtype, mesh=mesh, attention=attention)
    return LocalGenerator(reader, own, window=window, batch_size=batch_size)
