"""Language modelling with and without retrieval: from a text to its ScoreTable (In-Context RALM, section 5)."""

import logging
from collections.abc import Iterable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from ralm_jax import processes
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.reader import Reader
from ralm_jax.reader_api import APIReader
from ralm_jax.score_table import KIND, Scores, ScoreTable, open_scores
from ralm_jax.scoring import Job, JoinedPassages, PassageTokens, Scorer, chunk_strides, score_job
from ralm_jax.settings import IfExists, QuerySettings, StrideSettings, WindowSettings, at_least
from ralm_jax.storage import Folder, differences, refuse_mismatch
from ralm_jax.text import Text
from ralm_jax.tokenizer import Tokenizer
from ralm_jax.windows import Schedule, aligned_schedule, make_schedule, stride_characters
from retrieval.bm25 import build_index
from retrieval.corpus import Passage, PassageRows, Passages
from retrieval.interchange import import_json
from retrieval.overlap import OVERLAP_WORDS, PASSAGES_AT_ONCE, overlap
from retrieval.query import retrieve
from retrieval.retriever import Retriever, open_index
from retrieval.table import RetrievalTable, open_retrieval

log = logging.getLogger("ralm")
OF_PASSAGES = {
    "passage_tokens",
    "passages_in_window",
    "k",
    "rows_sha256",
    "retrieval",
}  # settings on which "no passage" does not depend


def open_retrieved(location: str, index: str | None = None) -> tuple[RetrievalTable, PassageRows]:
    """A RetrievalTable, or the paper's JSON, and the passages that its rows are.

    Args:
        index: where the index is, if not where it was when the table was made.

    Raises:
        UsageError: there is no table, or its index has gone.
        RalmError: the index there is another one.
    """
    if Path(location).expanduser().is_file():
        return import_json(location)
    table = open_retrieval(location)
    where = index or table.about["index"]
    try:
        opened = open_index(where)
    except UsageError:
        raise UsageError(f"{where}: the index of {location} is not there; say where it is with --index") from None
    if opened.fingerprint != table.settings["retriever_sha256"]:
        raise RalmError(f"{where}: not the index that {location} was retrieved from; name that one with --index")
    return table, opened.passages


def score(
    text: Text,
    reader: Reader | APIReader,
    tokenizer: Tokenizer,
    location: str,
    *,
    strides: StrideSettings,
    windows: WindowSettings,
    retrieved: tuple[RetrievalTable, PassageRows] | None = None,
    k: int = 16,
    strides_of_retrieval: bool = False,
    schedule: Schedule | None = None,
    plain: Scores | None = None,
    batch_size: int | None = None,
    if_exists: IfExists = "refuse",
    progress: bool | None = None,
) -> Scores:
    """Scores every stride of `text` without passage and with each of its first `k` retrieved ones.

    Args:
        location: folder or bucket of the ScoreTable; written chunk by chunk.
        retrieved: a RetrievalTable and its passages; None to score without passages only.
        strides_of_retrieval: score the strides that `retrieved` was made for, wherever they begin, though the tokenizer
            is another one; for reranking by another reader.
        schedule: only these of the text's strides.
        plain: finished scores of the same text and reader, whose "no passage" is copied instead of computed.
        batch_size: windows a forward; None chooses. A server is asked for single windows.
        progress: show a progress bar; None for "if there is a terminal".

    Raises:
        UsageError: sizes that do not fit together, or `location` is taken and `if_exists` refuses.
        RalmError: text, tokenizer, reader, retrieval and `plain` do not belong together, or the table cannot be
            written.
    """
    at_least(0, k=k)
    tokens, offsets = tokenizer.encode_with_offsets(text.content)
    check_reader(text, reader, tokenizer, tokens, strides.window)
    sample = {} if schedule is None else {"sample_sha256": schedule.fingerprint}
    if (sample or strides_of_retrieval) and windows.block_strides(strides) > 1:
        which = "a sample of strides" if sample else "strides of another tokenizer"
        raise UsageError(f"{which} cannot share windows; leave --block out")
    if strides_of_retrieval:
        schedule, strides, characters = retrieved_schedule(retrieved, text, offsets[:, 1], strides, windows.past)
    else:
        schedule = schedule or make_schedule(len(tokens), strides)
        characters = stride_characters(schedule, offsets)
        check_retrieved(retrieved, text, tokens, tokenizer, schedule, strides)
    everywhere = windows.bos_of(strides.preset) == "every-window"
    rows, found, passages = candidate_rows(retrieved, len(schedule), k)
    encode = PassageTokens(passages.contents, tokenizer, windows.passage_limit(strides), specials=not everywhere)
    together = windows.passages_in_window
    ids, groups = grouped(rows, together)
    passage_tokens = JoinedPassages(encode, groups)

    block = windows.block_strides(strides)
    margin = shared_margin(reader, strides, block)
    settings = score_settings(text, reader, tokenizer, strides, windows, rows, len(schedule))
    settings |= {"retrieval": retrieved[0].settings if retrieved else None} | sample
    settings |= {"strides_of_retrieval": True} if strides_of_retrieval else {}
    settings |= {"block_margin": margin} if block > 1 else {}
    folder = Folder.create(location, KIND, settings, if_exists)
    if plain is not None:
        check_plain(location, plain, folder.settings)
    labels = windows.past + block * strides.stride
    scorer = Scorer(reader, strides.window + margin, labels, batch_size) if isinstance(reader, Reader) else reader
    bos = tokenizer.bos if everywhere else None
    job = Job(tokens, schedule, strides.window, strides.stride, block, windows.past, ids, passage_tokens, bos, margin)
    count = len(job.shared(range(len(rows)), plain=plain is None)[0])
    table = ScoreTable(
        folder,
        passages=rows[:, : ids.shape[1] * together : together],
        retrieval_scores=found[:, : ids.shape[1] * together : together],
        token_ends=offsets[: schedule.ends[-1], 1],
        begins=characters[1:, 0],
        past=windows.past,
        stride=strides.stride,
        first=int(schedule.ends[0] - schedule.starts[0]) - 1,
        chunk=chunk_strides(count, len(rows), scorer.batch_size, block),
    )
    score_job(scorer, job, table, plain=plain, progress=progress)

    def finish() -> None:
        folder.about.update(describe(text, offsets, schedule, rows, passages, encode), reader=reader.name)
        if retrieved is not None:
            folder.about["retrieved"] = retrieved[0].origin
        folder.write_manifest()

    processes.once(finish)  # when all have written their chunks
    return open_scores(location)


def shared_margin(reader: Reader | APIReader, strides: StrideSettings, block: int) -> int:
    """Tokens that the windows of a block of so many strides are longer than others: those with which its strides have
    as much prefix on average as by themselves, as far as the reader has positions; how many a server's has, is not
    known."""
    margin = (block - 1) * strides.stride // 2
    return max(0, min(margin, reader.config.max_positions - strides.window)) if isinstance(reader, Reader) else margin


def check_plain(location: str, plain: Scores, settings: dict[str, Any]) -> None:
    """Refuses scores without passage that are not those of the table to be made with `settings`.

    Raises:
        RalmError: naming what differs.
    """
    there, here = ({k: v for k, v in made.items() if k not in OF_PASSAGES} for made in (plain.settings, settings))
    listed = differences(there, here)
    if listed:
        raise RalmError(f"{location}: the scores without passage are not of this reader and these windows: {listed}")


def check_reader(text: Text, reader: Reader | APIReader, tokenizer: Tokenizer, tokens: np.ndarray, window: int) -> None:
    """Refuses a text or a window that the reader cannot take.

    Raises:
        UsageError: a window longer than the reader's learned positions.
        RalmError: nothing to score, or a token that the reader does not have.
    """
    if len(tokens) < 2:
        raise RalmError(f"{text.origin}: {len(tokens)} token; scoring needs two at least, the first has no prefix")
    if not isinstance(reader, Reader):  # the server says what its model cannot take
        return
    config = reader.config
    highest = max(int(tokens.max()), *tokenizer.prefix, 0)
    if highest >= config.vocab_size:
        raise RalmError(
            f"{tokenizer.origin}: gives token {highest}, the reader {reader.name} knows {config.vocab_size}; name the "
            "reader's own tokenizer with --tokenizer"
        )
    if window > config.max_positions:
        message = f"a window of {window} is longer than the {config.max_positions} positions of {reader.name}"
        if config.learned_positions:
            raise UsageError(f"{message}; use --window {config.max_positions}")
        log.warning("%s: expect worse predictions", message)


def check_retrieved(
    retrieved: tuple[RetrievalTable, PassageRows] | None,
    text: Text,
    tokens: np.ndarray,
    tokenizer: Tokenizer,
    schedule: Schedule,
    strides: StrideSettings,
) -> None:
    """
    Raises:
        RalmError: the table was made for another text, tokenizer or schedule.
    """
    if retrieved is not None:
        table, _ = retrieved
        table.check_schedule(schedule, f"window {strides.window} and stride {strides.stride}")
        table.check_text(
            text, tokens, tokenizer, advice="; add --strides-of-retrieval to score its strides nevertheless"
        )


def retrieved_schedule(
    retrieved: tuple[RetrievalTable, PassageRows] | None,
    text: Text,
    token_ends: np.ndarray,
    strides: StrideSettings,
    past: int,
) -> tuple[Schedule, StrideSettings, np.ndarray]:
    """The strides of a RetrievalTable in tokens that end at `token_ends`, `strides` with the length of the longest, and
    the characters (J, 2) of each.

    Raises:
        UsageError: there is no table, a stride does not fit into a window, or has fewer than `past` tokens before it.
        RalmError: the table was made for another text, or does not say at which characters its strides begin.
    """
    if retrieved is None:
        raise UsageError("strides of the retrieval: name it with --retrieval")
    table, _ = retrieved
    table.check_fingerprint("text", text)
    characters = table.stride_characters()[: strides.limit_strides]
    schedule = aligned_schedule(characters, token_ends, strides.window)
    if (schedule.targets[1:] <= past).any():
        raise UsageError(
            f"{table.origin}: its second stride begins at token {schedule.targets[1]}; use a smaller --past"
        )
    longest = int((schedule.ends - schedule.targets)[1:].max(initial=1))
    return schedule, replace(strides, stride=max(1, longest)), characters


def candidate_rows(
    retrieved: tuple[RetrievalTable, PassageRows] | None, count: int, k: int
) -> tuple[np.ndarray, np.ndarray, PassageRows]:
    """The first `k` passages of each of `count` strides but the first: rows and scores (J, k), and what rows are."""
    if retrieved is None:
        return np.zeros((count - 1, 0), np.int64), np.zeros((count - 1, 0), np.float32), Passages.of([])
    table, passages = retrieved
    if k > table.k:
        log.warning("%s has %d passages a stride; scoring these, not %d", table.origin, table.k, k)
    return table.rows[1:count, :k], table.scores[1:count, :k].astype(np.float32), passages


def grouped(rows: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Candidates (J, k // size) of `size` passages each, as numbers of groups (G, size) of rows; -1 for none.

    Raises:
        UsageError: there are fewer passages a stride.
    """
    count = rows.shape[1] // size
    if rows.shape[1] and not count:
        raise UsageError(f"{size} passages in a window need --k {size} at least, not {rows.shape[1]}")
    listed = rows[:, : count * size].reshape(-1, size)
    groups, ids = np.unique(listed, axis=0, return_inverse=True)
    return np.where(listed[:, 0] >= 0, ids.reshape(-1), -1).reshape(len(rows), count), groups


def score_settings(
    text: Text,
    reader: Reader | APIReader,
    tokenizer: Tokenizer,
    strides: StrideSettings,
    windows: WindowSettings,
    rows: np.ndarray,
    count: int,
) -> dict[str, Any]:
    """What a ScoreTable is a function of, beside the passages; a table is resumed only where all of it agrees."""
    return {
        "text_sha256": text.fingerprint,
        "tokenizer_sha256": tokenizer.fingerprint,
        **reader.identity,
        "window": strides.window,
        "stride": strides.stride,
        "past": windows.past,
        "passage_tokens": windows.passage_tokens,
        "bos": windows.bos_of(strides.preset),
        "strides": count,
        "k": rows.shape[1],
        "rows_sha256": sha256(np.ascontiguousarray(rows).tobytes()).hexdigest(),
        **({"block": windows.block} if windows.block_strides(strides) > 1 else {}),
        **({"passages_in_window": windows.passages_in_window} if windows.passages_in_window > 1 else {}),
    }


def describe(
    text: Text, offsets: np.ndarray, schedule: Schedule, rows: np.ndarray, passages: PassageRows, encode: PassageTokens
) -> dict[str, Any]:
    """What a finished table tells of its text: the denominators of its perplexities, and overlap with the passages."""
    begins = np.append(schedule.starts[0], schedule.targets[1:])
    ends = np.append(0, offsets[:, 1])
    ends[-1] = len(text.content)
    spans = np.stack([ends[begins], ends[schedule.ends]], axis=1)
    words = sum(text.words(start, end) for start, end in spans.tolist())
    end, tokens = int(ends[schedule.ends[-1]]), int((schedule.ends - begins).sum())
    about: dict[str, Any] = {"text": text.origin, "tokens": tokens, "words": words}
    used = np.unique(rows[rows >= 0])
    if len(used):
        slices = [used[start : start + PASSAGES_AT_ONCE] for start in range(0, len(used), PASSAGES_AT_ONCE)]
        for some in slices:
            encode(some)  # a resumed run has not seen them all
        contents = (content for some in slices for content in passages.contents(some))
        shared = overlap(text.content[:end], contents, spans)
        about |= {"passages": len(used), "passages_truncated": len(encode.truncated)}
        about |= {"overlap": shared, "overlap_words": OVERLAP_WORDS}
    if encode.truncated:
        log.warning("%d of %d passages were cut to %d tokens", len(encode.truncated), len(used), encode.limit)
    return about


def language_model(
    text: Text,
    reader: Reader | APIReader,
    tokenizer: Tokenizer,
    passages: Iterable[Passage],
    out: str,
    *,
    strides: StrideSettings,
    queries: QuerySettings,
    windows: WindowSettings,
    source: dict[str, Any],
    excluded: frozenset[str] = frozenset(),
    batch_size: int | None = None,
    if_exists: IfExists = "refuse",
    progress: bool | None = None,
) -> Scores:
    """Index, retrieval and scores of a text and a corpus, in the folders index, retrieval and scores of `out`.

    Args:
        source: what `passages` come from (`corpus.describe_corpus`); a finished index of the same source is resumed.

    Raises:
        UsageError: `out` holds an earlier run and `if_exists` refuses; or as `build_index`, `retrieve`, `score` do.
        RalmError: as these do.
    """
    root = Path(out).expanduser()
    names = ("index", "retrieval", "scores", "report.json")
    taken = processes.once(lambda: [name for name in names if (root / name).exists()])
    if "://" in out:
        raise UsageError(f"{out}: the index needs a local disk; use the steps one by one to write to a bucket")
    if taken and if_exists == "refuse":
        raise UsageError(f"{out}: has {', '.join(taken)} already; add --resume to go on, or --overwrite")

    def make_index() -> None:
        if if_exists != "resume" or resumed_index(str(root / "index"), source) is None:
            build_index(
                passages,
                str(root / "index"),
                source=source,
                if_exists="resume" if if_exists == "resume" else "overwrite",
                progress=progress,
            )

    processes.once(make_index)
    index = open_index(str(root / "index"))
    table = retrieve(
        index,
        text,
        tokenizer,
        str(root / "retrieval"),
        strides=strides,
        queries=queries,
        excluded=excluded,
        if_exists=if_exists,
        progress=progress,
    )
    return score(
        text,
        reader,
        tokenizer,
        str(root / "scores"),
        strides=strides,
        windows=windows,
        retrieved=(table, index.passages),
        k=queries.k,
        batch_size=batch_size,
        if_exists=if_exists,
        progress=progress,
    )


def resumed_index(location: str, source: dict[str, Any]) -> Retriever | None:
    """The finished index at `location`, or None if there is none.

    Raises:
        RalmError: it was made from something else than `source`.
    """
    try:
        index = open_index(location)
    except RalmError:
        return None
    refuse_mismatch(location, index.about["source"], source)
    return index
