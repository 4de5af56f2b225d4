"""Predictive reranking (section 6.2): a cross-encoder scores every retrieved passage for the prefix of its stride."""

import logging
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from ralm_jax import processes
from ralm_jax.cross_encoder import BUCKET, CrossEncoder, PairFormat, cut_pairs, join_pairs, pair_format
from ralm_jax.errors import RalmError
from ralm_jax.scoring import PassageTokens
from ralm_jax.settings import PREFIX_TOKENS, IfExists, RerankSettings
from ralm_jax.sharding import batch_multiple, shard_batch
from ralm_jax.storage import Folder
from ralm_jax.text import Text
from ralm_jax.tokenizer import Tokenizer
from ralm_jax.windows import first_characters
from retrieval.corpus import PassageRows
from retrieval.embedder import BATCH_TOKENS
from retrieval.ranking_table import KIND, RankingTable, RankingWriter, open_ranking
from retrieval.table import RetrievalTable

log = logging.getLogger("ralm")

PREFIX_CHARACTERS = 16  # of the text before a target, for each token of it that a reranker may see


def prefix_text(text: str, begin: int, prefix_tokens: int) -> str:
    """The characters before `begin` whose last `prefix_tokens` tokens (`cut_pairs`) are a prefix, in training and
    afterwards."""
    return text[max(0, begin - PREFIX_CHARACTERS * prefix_tokens) : begin]


def rerank(
    cross_encoder: CrossEncoder,
    own: Tokenizer,
    table: RetrievalTable,
    passages: PassageRows,
    text: Text,
    tokenizer: Tokenizer,
    location: str,
    *,
    settings: RerankSettings | None = None,
    batch_size: int | None = None,
    if_exists: IfExists = "refuse",
    progress: bool | None = None,
) -> RankingTable:
    """Scores every passage of `table` for the text before its stride's target; writes a RankingTable, by chunks.

    Of several processes, each ranks chunks of its own on its own devices.

    Args:
        own: the reranker's tokenizer, by which prefixes are measured.
        passages: what the table's rows are.
        text: what the table was retrieved for, with the reader's `tokenizer`.
        location: folder or bucket of the RankingTable.
        batch_size: pairs a forward; None chooses.
        progress: show a progress bar; None for "if there is a terminal".

    Raises:
        UsageError: lengths that do not fit, or `location` is taken and `if_exists` refuses.
        RalmError: the table is of another text or tokenizer, the reranker does not know its tokenizer's tokens or gives
            NaN, or the table cannot be written.
    """
    settings = settings or RerankSettings()
    tokens, offsets = tokenizer.encode_with_offsets(text.content)
    if table.ends[-1] > len(tokens):
        raise RalmError(f"{table.origin}: is of a longer text than {text.origin}, or of another tokenizer")
    table.check_text(text, tokens, tokenizer)
    warn_of_other_sizes(cross_encoder, settings)
    _, prefix_tokens, longest = checked_format(cross_encoder, own, settings)
    made_with = {
        "text_sha256": text.fingerprint,
        "tokenizer_sha256": tokenizer.fingerprint,
        "retrieval": table.settings,
        "rows_sha256": sha256(np.ascontiguousarray(table.rows).tobytes()).hexdigest(),
        **rerank_settings(cross_encoder, own, settings),
    }
    begins = first_characters(offsets, table.begins).tolist()
    encode = PassageTokens(passages.contents, own, longest, specials=False)
    folder = Folder.create(location, KIND, made_with, if_exists)
    writer = RankingWriter(folder, table.rows)
    missing = processes.own_share(processes.once(writer.missing))
    total = sum(int((table.rows[chunk.start : chunk.stop] >= 0).sum()) for chunk in missing)
    with tqdm(total=total, unit="pair", disable=processes.bar_hidden(progress)) as bar:
        for chunk in missing:
            rows = table.rows[chunk.start : chunk.stop]
            before = [prefix_text(text.content, at, prefix_tokens) for at in begins[chunk.start : chunk.stop]]
            writer.write(chunk, score_rows(cross_encoder, own, settings, before, rows, encode, batch_size))
            bar.update(int((rows >= 0).sum()))
    folder.about.update(reranker=cross_encoder.name, retrieved=table.origin, text=text.origin)
    processes.once(folder.write_manifest)  # when all have written their chunks
    return open_ranking(location)


def reading_sizes(cross_encoder: CrossEncoder, settings: RerankSettings) -> tuple[int, int]:
    """Tokens of a prefix and of a pair: as `settings` ask, else as in training, else 128 and the model's positions."""
    trained, positions = cross_encoder.trained_with, cross_encoder.config.max_positions
    prefix_tokens = settings.prefix_tokens or trained.get("prefix_tokens", PREFIX_TOKENS)
    return prefix_tokens, min(settings.pair_tokens or trained.get("pair_tokens", positions), positions)


def warn_of_other_sizes(cross_encoder: CrossEncoder, settings: RerankSettings) -> None:
    for name, value in cross_encoder.trained_with.items():
        asked = getattr(settings, name)
        if asked not in (None, value):
            option = name.replace("_", "-")
            log.warning("%s was trained with --%s %d, not %d", cross_encoder.name, option, value, asked)


def checked_format(
    cross_encoder: CrossEncoder, own: Tokenizer, settings: RerankSettings
) -> tuple[PairFormat, int, int]:
    """How pairs are joined, and the most tokens that a prefix and a pair may have.

    Raises:
        UsageError: lengths that do not fit.
    """
    prefix_tokens, longest = reading_sizes(cross_encoder, settings)
    form = pair_format(own)
    cut_pairs(form, [], [], longest, prefix_tokens)
    return form, prefix_tokens, longest


def rerank_settings(cross_encoder: CrossEncoder, own: Tokenizer, settings: RerankSettings) -> dict[str, Any]:
    """What a RankingTable is a function of, beside what is ranked."""
    prefix_tokens, longest = reading_sizes(cross_encoder, settings)
    return {
        "reranker_sha256": cross_encoder.fingerprint,
        "reranker_tokenizer_sha256": own.fingerprint,
        "dtype": cross_encoder.dtype,
        "prefix_tokens": prefix_tokens,
        "pair_tokens": longest,
    }


def score_rows(
    cross_encoder: CrossEncoder,
    own: Tokenizer,
    settings: RerankSettings,
    prefixes: Sequence[str],
    rows: np.ndarray,
    encode: PassageTokens,
    batch_size: int | None = None,
) -> np.ndarray:
    """(n, k) float32 scores of passages `rows` for what comes after each of n `prefixes`; -inf where the row is -1.

    Raises:
        UsageError: lengths that do not fit.
        RalmError: as `score_pairs`.
    """
    form, prefix_tokens, longest = checked_format(cross_encoder, own, settings)
    strides, ranks = np.nonzero(rows >= 0)
    before = own.encode_batch(list(prefixes))
    pairs = cut_pairs(form, [before[j] for j in strides], encode(rows[strides, ranks]), longest, prefix_tokens)
    scores = np.full(rows.shape, -np.inf, np.float32)
    scores[strides, ranks] = score_pairs(cross_encoder, form, *pairs, longest, batch_size)
    return scores


def score_pairs(
    cross_encoder: CrossEncoder,
    form: PairFormat,
    prefixes: Sequence[np.ndarray],
    passages: Sequence[np.ndarray],
    max_tokens: int,
    batch_size: int | None = None,
) -> np.ndarray:
    """(n,) float32 scores of pairs as `cut_pairs` gives them, on all devices of the cross-encoder's mesh.

    A pair is padded to a length that it alone decides, and a batch of a length has one shape: that makes one
    compilation a length, and the same numbers whatever else is in the batch.

    Raises:
        RalmError: the cross-encoder gives NaN, or does not know a token.
    """
    needed = np.array([form.specials + len(a) + len(b) for a, b in zip(prefixes, passages, strict=True)], np.int64)
    lengths, mesh, waiting = np.minimum(-(-needed // BUCKET) * BUCKET, max_tokens), cross_encoder.mesh, []
    devices = batch_multiple(mesh)
    for length in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == length)
        batch = max(1, BATCH_TOKENS[jax.default_backend()] // length) * devices
        if batch_size is not None:
            batch = -(-batch_size // devices) * devices
        for start in range(0, len(rows), batch):
            chosen = rows[start : start + batch]
            filled = np.pad(chosen, (0, batch - len(chosen)), mode="edge")
            arrays = join_pairs(form, [prefixes[i] for i in filled], [passages[i] for i in filled], max_tokens)
            cross_encoder.check_tokens(arrays[0])
            waiting.append((chosen, cross_encoder.scores(*(shard_batch(mesh, array) for array in arrays))))
    scores = np.zeros(len(needed), np.float32)
    for chosen, found in waiting:  # the devices compute while the host prepares
        scores[chosen] = np.asarray(found)[: len(chosen)]
    if not np.isfinite(scores).all():
        advice = "; try --dtype float32" if cross_encoder.dtype != "float32" else ""
        raise RalmError(f"{cross_encoder.name}: the reranker gives NaN in {cross_encoder.dtype}{advice}")
    return scores
