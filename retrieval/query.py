"""From strides to retrieval: the query of a stride is the text of the last tokens before its target (section 3.2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from tqdm import tqdm

from ralm_jax.errors import UsageError
from ralm_jax.storage import Folder
from ralm_jax.text import Text
from ralm_jax.tokenizer import Tokenizer
from ralm_jax.windows import make_schedule
from retrieval.bm25 import Hits
from retrieval.corpus import Passages
from retrieval.table import KIND, RetrievalTable, RetrievalWriter, open_retrieval, stride_queries

Exclusion = Literal["inside", "after"]


class Retriever(Protocol):
    """What finds passages. `BM25Index` is one."""

    @property
    def location(self) -> str:
        """Where it lies."""

    @property
    def passages(self) -> Passages:
        """What the rows of its hits are."""

    @property
    def settings(self) -> dict[str, Any]:
        """How it works; `engine` names it."""

    @property
    def fingerprint(self) -> str:
        """Changes when corpus, engine or its settings do."""

    def search(self, queries: Sequence[str], k: int, excluded: frozenset[str]) -> Hits:
        """The best k passages of each query, titles in `excluded` left out."""


@dataclass(frozen=True)
class Retrieval:
    """How a text is retrieved for.

    Attributes:
        stride, window: of the schedule, as in `ralm_jax.windows`.
        query_length: tokens before the target that make the query.
        k: passages a stride.
        excluded: titles that are left out.
        exclusion: "inside": the search itself leaves them out, and k hits remain where there are k. "after": as the
            paper's code, they are dropped from the first max(100, 4 k) hits, and fewer than k may remain.
    """

    stride: int = 4
    window: int = 1024
    query_length: int = 32
    k: int = 16
    excluded: frozenset[str] = frozenset()
    exclusion: Exclusion = "inside"

    def __post_init__(self) -> None:
        for name in ("stride", "window", "query_length", "k"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name.replace('_', ' ')} must be at least 1, not {getattr(self, name)}")
        if self.stride >= self.window:
            raise UsageError(f"stride {self.stride} must be smaller than the window, {self.window}")

    def search(self, retriever: Retriever, queries: Sequence[str]) -> Hits:
        """The hits of every query; an empty query has none."""
        if not self.excluded or self.exclusion == "inside":
            return retriever.search(queries, self.k, self.excluded)
        deep = retriever.search(queries, max(100, 4 * self.k), frozenset())
        found = deep.rows >= 0
        titled = retriever.passages.titled(self.excluded)
        keep = found & ~titled[np.where(found, deep.rows, 0)]
        order = np.argsort(~keep, axis=1, kind="stable")[:, : self.k]
        kept = np.take_along_axis(keep, order, axis=1)
        rows = np.where(kept, np.take_along_axis(deep.rows, order, axis=1), -1)
        return Hits(rows, np.where(kept, np.take_along_axis(deep.scores, order, axis=1), 0).astype(np.float32))


def retrieve(
    retriever: Retriever,
    text: Text,
    tokenizer: Tokenizer,
    retrieval: Retrieval,
    location: str,
    *,
    limit_strides: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool | None = None,
) -> RetrievalTable:
    """Retrieves for every stride of `text` and writes a RetrievalTable to `location`, chunk by chunk.

    Raises:
        UsageError: `location` is taken, and neither `resume` nor `overwrite` is set.
        RalmError: what is there was made with other settings, or cannot be written.
    """
    tokens = tokenizer.encode(text.content)
    schedule = make_schedule(len(tokens), retrieval.window, retrieval.stride, limit_strides)
    settings = {
        "tokenizer": tokenizer.fingerprint, "text": text.fingerprint, "strides": len(schedule),
        "window": retrieval.window, "stride": retrieval.stride, "query_length": retrieval.query_length,
        "k": retrieval.k, "retriever": retriever.fingerprint, "retriever_settings": retriever.settings,
        "exclusion": retrieval.exclusion,
        "excluded_titles": len(retrieval.excluded),
        "excluded": sha256("\n".join(sorted(retrieval.excluded)).encode()).hexdigest(),
    }  # fmt: skip
    folder = Folder.create(location, KIND, settings, resume=resume, overwrite=overwrite)
    writer = RetrievalWriter(folder, len(schedule), retrieval.k)
    queries = stride_queries(tokens, schedule.targets, retrieval.query_length, tokenizer)
    disable = None if progress is None else not progress
    for chunk in tqdm(writer.missing(), unit_scale=writer.chunk, unit=" queries", disable=disable):
        rows = slice(chunk.start, chunk.stop)
        hits = retrieval.search(retriever, queries[rows])
        writer.write(chunk, schedule.targets[rows], schedule.ends[rows], hits)
    folder.about.update(
        index=str(Path(retriever.location).expanduser().absolute()),
        text=text.origin,
        tokenizer=tokenizer.origin,
        engine=retriever.settings["engine"],
    )
    folder.write_manifest()
    return open_retrieval(location)
