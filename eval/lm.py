"""Language modelling with and without retrieval: from a text to its ScoreTable (In-Context RALM, section 5)."""

import logging
import re
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from ralm_jax.errors import RalmError, UsageError
from ralm_jax.reader import Reader
from ralm_jax.score_table import KIND, Scores, ScoreTable, open_scores
from ralm_jax.scoring import Job, PassageTokens, Scorer, chunk_strides, score_job
from ralm_jax.storage import Folder
from ralm_jax.text import Text
from ralm_jax.tokenizer import Tokenizer
from ralm_jax.windows import Protocol, make_schedule
from retrieval.bm25 import BM25Index, build_index
from retrieval.corpus import Passage, Passages
from retrieval.query import Retrieval, retrieve
from retrieval.table import RetrievalTable, open_retrieval, read_json

log = logging.getLogger("ralm")

OVERLAP_WORDS = 13  # the run length of GPT-3's and The Pile's contamination checks


def open_retrieved(location: str, index: str | None = None) -> tuple[RetrievalTable, Passages]:
    """A RetrievalTable, or the paper's JSON, and the passages that its rows are.

    Args:
        index: where the index lies, if not where it was when the table was made.

    Raises:
        UsageError: there is no table, or its index has gone.
        RalmError: the index there is another one.
    """
    if Path(location).expanduser().is_file():
        return read_json(location)
    table = open_retrieval(location)
    where = index or table.about["index"]
    try:
        opened = BM25Index.open(where)
    except UsageError:
        raise UsageError(f"{where}: the index of {location} is not there; say where it is with --index") from None
    if opened.fingerprint != table.settings["retriever"]:
        raise RalmError(f"{where}: not the index that {location} was retrieved from; name that one with --index")
    return table, opened.passages


def check_reader(reader: Reader, tokenizer: Tokenizer, tokens: np.ndarray, protocol: Protocol) -> None:
    """
    Raises:
        UsageError: a window longer than the reader's positions.
        RalmError: a tokenizer whose tokens the reader does not have.
    """
    config = reader.config
    if tokens.max(initial=0) >= config.vocab_size or max(tokenizer.prefix, default=0) >= config.vocab_size:
        raise RalmError(
            f"{tokenizer.origin}: the text has token {tokens.max()}, the reader {reader.name} knows "
            f"{config.vocab_size}; name the reader's own tokenizer with --tokenizer"
        )
    if protocol.window > config.max_positions:
        message = f"a window of {protocol.window} is longer than the {config.max_positions} positions of {reader.name}"
        if config.learned_positions:
            raise UsageError(f"{message}; use --window {config.max_positions}")
        log.warning("%s: expect worse predictions", message)


def score(
    text: Text,
    reader: Reader,
    tokenizer: Tokenizer,
    protocol: Protocol,
    location: str,
    *,
    retrieved: tuple[RetrievalTable, Passages] | None = None,
    k: int = 16,
    batch_size: int | None = None,
    limit_strides: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool | None = None,
) -> Scores:
    """Scores every stride of `text` without passage and with each of its first `k` retrieved ones.

    Args:
        location: folder or bucket of the ScoreTable; written chunk by chunk.
        retrieved: a RetrievalTable and its passages; None to score without passages only.
        batch_size: windows a forward; None chooses.
        limit_strides: only the first so many strides, the first window included.

    Raises:
        UsageError: sizes that do not fit together, or `location` is taken.
        RalmError: text, tokenizer, reader and retrieval do not belong together, or the table cannot be written.
    """
    if k < 0:
        raise UsageError(f"k must be at least 0, not {k}")
    tokens, offsets = tokenizer.encode_with_offsets(text.content)
    if len(tokens) < 2:
        raise RalmError(f"{text.origin}: {len(tokens)} token; scoring needs two at least, the first has no prefix")
    check_reader(reader, tokenizer, tokens, protocol)
    schedule = make_schedule(len(tokens), protocol.window, protocol.stride, limit_strides)
    rows = np.zeros((len(schedule) - 1, 0), np.int64)
    about: dict[str, Any] = {"text": text.origin, "reader": reader.name}
    if retrieved is not None:
        table, passages = retrieved
        check_retrieved(table, tokenizer, text)
        table.check_schedule(schedule, f"window {protocol.window} and stride {protocol.stride}")
        rows = table.rows[1 : len(schedule), : min(k, table.k)]
        encode = PassageTokens(passages.contents, tokenizer, protocol)
        about["retrieval"] = table.origin
    else:
        encode = PassageTokens(lambda _: [], tokenizer, protocol)
    bos = tokenizer.prefix[0] if protocol.bos == "every-window" and tokenizer.prefix else None

    settings = score_settings(text, reader, tokenizer, protocol, rows, retrieved, limit_strides, len(schedule) - 1)
    folder = Folder.create(location, KIND, settings, resume=resume, overwrite=overwrite)
    scorer = Scorer(reader, protocol.window, batch_size)
    score_table = ScoreTable(
        folder,
        strides=len(schedule) - 1,
        passages=rows.shape[1],
        past=protocol.past,
        stride=protocol.stride,
        first=int(schedule.ends[0]) - 1,
        chunk=chunk_strides(1 + rows.shape[1], scorer.batch_size),
    )
    score_job(scorer, Job(tokens, schedule, protocol, rows, encode, bos), score_table, progress=progress)

    if retrieved is not None:
        used = np.unique(rows[rows >= 0])
        encode(used)  # a resumed run has not seen them all
        about |= {"passages": len(used), "passages_truncated": len(encode.truncated), "overlap_words": OVERLAP_WORDS}
        scored_text = text.content[: offsets[schedule.ends[-1] - 1, 1]]
        about["overlap"] = overlap(scored_text, passages.contents(used), OVERLAP_WORDS)
        if encode.truncated:
            limit = min(protocol.passage_tokens, protocol.passage_room)
            log.warning("%d of %d passages were cut to %d tokens", len(encode.truncated), len(used), limit)
    whole = schedule.ends[-1] == len(tokens)
    about["tokens"] = int(schedule.ends[-1])
    about["words"] = text.words_up_to(len(text.content) if whole else int(offsets[schedule.ends[-1] - 1, 1]))
    folder.about.update(about)
    folder.write_manifest()
    return open_scores(location)


def language_model(
    text: Text,
    reader: Reader,
    tokenizer: Tokenizer,
    passages: Iterable[Passage],
    retrieval: Retrieval,
    protocol: Protocol,
    out: str,
    *,
    source: str = "",
    batch_size: int | None = None,
    limit_strides: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool | None = None,
) -> Scores:
    """Index, retrieval and scores of a text and a corpus, in the folders index, retrieval and scores of `out`.

    Args:
        source: where `passages` come from; with `resume`, a finished index of the same source is used as it is.

    Raises:
        UsageError, RalmError: as `build_index`, `retrieve` and `score` do.
    """
    root = Path(out).expanduser()
    where = str(root / "index")
    finished = finished_index(where) if resume else None
    if finished is not None and finished.about["source"] != source:
        raise RalmError(f"{where}: was built from {finished.about['source']}, not from {source}; choose another folder")
    index = finished or build_index(passages, where, source=source, overwrite=overwrite or resume, progress=progress)
    again: dict[str, Any] = {"resume": resume, "overwrite": overwrite, "progress": progress}
    again["limit_strides"] = limit_strides
    table = retrieve(index, text, tokenizer, retrieval, str(root / "retrieval"), **again)
    return score(
        text,
        reader,
        tokenizer,
        protocol,
        str(root / "scores"),
        retrieved=(table, index.passages),
        k=retrieval.k,
        batch_size=batch_size,
        **again,
    )


def finished_index(location: str) -> BM25Index | None:
    """The index at `location`, if there is a finished one."""
    try:
        return BM25Index.open(location)
    except RalmError:
        return None


def score_settings(
    text: Text,
    reader: Reader,
    tokenizer: Tokenizer,
    protocol: Protocol,
    rows: np.ndarray,
    retrieved: tuple[RetrievalTable, Passages] | None,
    limit_strides: int | None,
    strides: int,
) -> dict[str, Any]:
    """What a ScoreTable is a function of; a table is resumed only where all of it agrees."""
    return {
        "family": reader.config.model_type,
        "config": reader.config.to_hf(),
        "weights": reader.fingerprint,
        "dtype": reader.dtype,
        "tokenizer": tokenizer.fingerprint,
        "text": text.fingerprint,
        "window": protocol.window,
        "stride": protocol.stride,
        "past": protocol.past,
        "passage_tokens": protocol.passage_tokens,
        "bos": protocol.bos,
        "k": rows.shape[1],
        "strides": strides,
        "limit_strides": limit_strides,
        "rows": sha256(np.ascontiguousarray(rows).tobytes()).hexdigest(),
        "retrieval": retrieved[0].settings if retrieved else None,
    }


def check_retrieved(table: RetrievalTable, tokenizer: Tokenizer, text: Text) -> None:
    """
    Raises:
        RalmError: the table was made for another text, or with another tokenizer.
    """
    for name, ours in (("text", text), ("tokenizer", tokenizer)):
        theirs = table.settings.get(name, ours.fingerprint)
        if theirs != ours.fingerprint:
            made = table.about.get(name, "another one")
            raise RalmError(f"{table.origin}: was retrieved with the {name} of {made}, not of {ours.origin}")


def overlap(text: str, passages: Iterable[str], run: int) -> float:
    """The share of the text's words that stand in a run of `run` words which a passage has too: retrieval that finds
    the evaluated text itself measures memory, not help. Case and punctuation do not count."""

    def words(string: str) -> list[str]:
        return re.findall(r"\w+", string.lower())

    own = words(text)
    runs: dict[tuple[str, ...], list[int]] = {}
    for i in range(len(own) - run + 1):
        runs.setdefault(tuple(own[i : i + run]), []).append(i)
    covered = np.zeros(len(own), bool)
    for passage in passages:
        found = words(passage)
        for i in range(len(found) - run + 1):
            for start in runs.get(tuple(found[i : i + run]), ()):
                covered[start : start + run] = True
    return float(covered.mean()) if own else 0.0
