"""From strides to retrieval: the query of a stride is the text of the last tokens before its target (section 3.2)."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ralm_jax import processes
from ralm_jax.errors import UsageError
from ralm_jax.settings import IfExists, QuerySettings, StrideSettings
from ralm_jax.storage import Folder
from ralm_jax.text import Text
from ralm_jax.tokenizer import Tokenizer
from ralm_jax.windows import Schedule, first_characters, make_schedule, stride_characters
from retrieval.retriever import Retriever, search
from retrieval.table import KIND, RetrievalTable, RetrievalWriter, open_retrieval


def stride_queries(tokens: np.ndarray, begins: np.ndarray, query_length: int, tokenizer: Tokenizer) -> list[str]:
    """The query of every stride: the text of at most `query_length` tokens strictly before its target; empty for the
    first stride."""
    return [tokenizer.decode(tokens[max(0, begin - query_length) : begin]) for begin in begins]


def own_queries(
    text: str, begins: np.ndarray, query_length: int, tokenizer: Tokenizer, retriever_tokenizer: Tokenizer
) -> list[str]:
    """`stride_queries` with `query_length` counted in the tokens of the retriever's tokenizer."""
    _, offsets = tokenizer.encode_with_offsets(text)
    _, own = retriever_tokenizer.encode_with_offsets(text)
    targets = first_characters(offsets, begins)
    last = np.searchsorted(own[:, 1], targets, side="right")  # tokens that end before the target
    starts = np.append(own[:, 0], len(text))[np.maximum(0, last - query_length)]
    return [text[start:target] for start, target in zip(starts.tolist(), targets.tolist(), strict=True)]


def make_queries(
    text: Text,
    tokens: np.ndarray,
    begins: np.ndarray,
    queries: QuerySettings,
    tokenizer: Tokenizer,
    retriever_tokenizer: Tokenizer | None,
) -> list[str]:
    """The query of every stride, of the length that `queries` say.

    Raises:
        UsageError: in the retriever's tokens, and it has none.
    """
    own = query_tokenizer(queries, retriever_tokenizer)
    if own is None:
        return stride_queries(tokens, begins, queries.query_length, tokenizer)
    return own_queries(text.content, begins, queries.query_length, tokenizer, own)


def query_tokenizer(queries: QuerySettings, retriever_tokenizer: Tokenizer | None) -> Tokenizer | None:
    """The retriever's tokenizer if it is to measure queries, None for the reader's.

    Raises:
        UsageError: it is, and there is none.
    """
    if queries.query_tokens == "reader":
        return None
    if retriever_tokenizer is None:
        raise UsageError("--query-tokens retriever: this retriever has no tokenizer; only dense ones have their own")
    return retriever_tokenizer


def retrieval_settings(
    retriever: Retriever,
    text: Text,
    tokenizer: Tokenizer,
    strides: StrideSettings,
    queries: QuerySettings,
    excluded: frozenset[str],
    count: int,
) -> dict[str, Any]:
    """What a RetrievalTable of `count` strides is a function of; it is resumed only where all of it agrees."""
    return {
        "text_sha256": text.fingerprint,
        "tokenizer_sha256": tokenizer.fingerprint,
        "strides": count,
        "window": strides.window,
        "stride": strides.stride,
        "query_length": queries.query_length,
        "query_tokens": queries.query_tokens,
        "k": queries.k,
        "retriever": retriever.settings,
        "retriever_sha256": retriever.fingerprint,
        "exclusion": queries.exclusion_of(strides.preset),
        "excluded_titles": len(excluded),
        "excluded_sha256": sha256("\n".join(sorted(excluded)).encode()).hexdigest(),
    }


def retrieve(
    retriever: Retriever,
    text: Text,
    tokenizer: Tokenizer,
    location: str,
    *,
    strides: StrideSettings,
    queries: QuerySettings,
    schedule: Schedule | None = None,
    excluded: frozenset[str] = frozenset(),
    if_exists: IfExists = "refuse",
    progress: bool | None = None,
) -> RetrievalTable:
    """Retrieves for every stride of `text` and writes a RetrievalTable to `location`, chunk by chunk.

    Of several processes all search, as they may share the vectors of an index, and the first writes.

    Args:
        schedule: only these of the text's strides.
        excluded: titles that are left out.
        progress: show a progress bar; None for "if there is a terminal".

    Raises:
        UsageError: `location` is taken, and `if_exists` refuses; or the retriever has no tokens to measure queries by.
        RalmError: what is there was made with other settings, or cannot be written.
    """
    tokens, offsets = tokenizer.encode_with_offsets(text.content)
    sample = {} if schedule is None else {"sample_sha256": schedule.fingerprint}
    schedule = schedule or make_schedule(len(tokens), strides)
    exclusion = queries.exclusion_of(strides.preset)
    settings = retrieval_settings(retriever, text, tokenizer, strides, queries, excluded, len(schedule)) | sample
    own = retriever.tokenizer if queries.query_tokens == "retriever" else None
    wanted = make_queries(text, tokens, schedule.targets, queries, tokenizer, own)
    folder = Folder.create(location, KIND, settings, if_exists)
    writer = RetrievalWriter(folder, stride_characters(schedule, offsets), queries.k)
    missing = processes.once(writer.missing)
    with tqdm(total=sum(map(len, missing)), unit="query", disable=processes.bar_hidden(progress)) as bar:
        for chunk in missing:
            rows = slice(chunk.start, chunk.stop)
            hits = search(retriever, wanted[rows], queries.k, excluded, exclusion)
            if processes.first():
                writer.write(chunk, schedule.targets[rows], schedule.ends[rows], hits)
            bar.update(len(chunk))
    index = str(Path(retriever.location).expanduser().absolute())
    folder.about.update(index=index, text=text.origin, tokenizer=tokenizer.origin)
    folder.write_manifest()
    processes.wait()
    return open_retrieval(location)
