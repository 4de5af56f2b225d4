"""Passages for a text that is being written: found for its last tokens, and perhaps chosen by a ranker."""

from collections.abc import Callable, Sequence

import numpy as np

from ralm_jax.cross_encoder import CrossEncoder
from ralm_jax.generate.local import LocalGenerator
from ralm_jax.scoring import PassageTokens, Scorer
from ralm_jax.settings import QuerySettings, RerankSettings
from ralm_jax.tokenizer import Tokenizer
from ralm_jax.windows import bucket_length, build_windows
from retrieval.corpus import Passage
from retrieval.query import query_tokenizer, stride_queries
from retrieval.reranker import checked_format, prefix_text, score_rows
from retrieval.retriever import Retriever, search

Ranker = Callable[[Sequence[np.ndarray], np.ndarray], np.ndarray]
"""Scores (n, k) of passages `rows` (n, k) for what comes after n prefixes (int32 tokens); -inf where the row is -1."""


class PassageFinder:
    """A `ralm_jax.generate.ralm.PassageSource`: an index, and perhaps a ranker of what it finds."""

    def __init__(
        self,
        retriever: Retriever,
        tokenizer: Tokenizer,
        *,
        queries: QuerySettings,
        passage_tokens: int,
        excluded: frozenset[str] = frozenset(),
    ):
        """
        Args:
            tokenizer: the reader's.
            queries: `k` is how many passages a ranker chooses from.
            passage_tokens: that a passage may have.
            excluded: titles that are left out.

        Raises:
            UsageError: queries in the retriever's tokens, and it has none.
        """
        self.rank: Ranker | None = None  # None takes the retriever's best
        self.tokens = PassageTokens(retriever.passages.contents, tokenizer, passage_tokens, specials=False)
        self._retriever, self._tokenizer, self._queries, self._excluded = retriever, tokenizer, queries, excluded
        self._own = query_tokenizer(queries, retriever.tokenizer)

    def find(self, prefixes: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """(n,) rows of the passages for what comes after `prefixes`, -1 for none, and their scores."""
        k = min(1 if self.rank is None else self._queries.k, len(self._retriever.passages))
        exclusion = self._queries.exclusion_of("default")
        hits = search(self._retriever, [self._query(tokens) for tokens in prefixes], k, self._excluded, exclusion)
        if self.rank is None:
            return hits.rows[:, 0], hits.scores[:, 0]
        scores = self.rank(prefixes, hits.rows)
        best, each = scores.argmax(axis=1), np.arange(len(prefixes))
        return hits.rows[each, best], scores[each, best]

    def passage(self, row: int) -> Passage:
        return self._retriever.passages.rows([row])[0]

    def contents(self, rows: Sequence[int]) -> list[str]:
        """What passages `rows` say, titles included."""
        return self._retriever.passages.contents(rows)

    def text(self, tokens: np.ndarray, length: int) -> str:
        """Of a text's `tokens`, enough for the last `length` tokens of any tokenizer."""
        text = self._tokenizer.decode(tokens)
        return prefix_text(text, len(text), length)

    def _query(self, tokens: np.ndarray) -> str:
        """The last tokens of a text, the reader's or the retriever's own."""
        length = self._queries.query_length
        if self._own is None:
            return stride_queries(tokens, np.array([len(tokens)]), length, self._tokenizer)[0]
        text = self.text(tokens, length)
        _, offsets = self._own.encode_with_offsets(text)
        return text[int(offsets[-length:][0, 0]) :] if len(offsets) else text


def predictive_ranker(
    cross_encoder: CrossEncoder, own: Tokenizer, finder: PassageFinder, settings: RerankSettings
) -> Ranker:
    """By a trained reranker (section 6.2).

    Args:
        own: the reranker's tokenizer.

    Raises:
        UsageError: lengths that do not fit.
    """
    _, prefix_tokens, longest = checked_format(cross_encoder, own, settings)
    encode = PassageTokens(finder.contents, own, longest, specials=False)

    def rank(prefixes: Sequence[np.ndarray], rows: np.ndarray) -> np.ndarray:
        texts = [finder.text(tokens, prefix_tokens) for tokens in prefixes]
        return score_rows(cross_encoder, own, settings, texts, rows, encode)

    return rank


def zero_shot_ranker(local: LocalGenerator, finder: PassageFinder, *, stride: int, past: int) -> Ranker:
    """By the reader: how well it predicts the text's last `past` tokens with a passage in front (section 6.1), in the
    window that the next stride has."""
    bos = local.tokenizer.bos

    def rank(prefixes: Sequence[np.ndarray], rows: np.ndarray) -> np.ndarray:
        texts, ranks = np.nonzero(rows >= 0)
        scores = np.full(rows.shape, -np.inf, np.float32)
        passages = finder.tokens(rows[texts, ranks])
        for text, tokens in enumerate(prefixes):
            mine = np.flatnonzero(texts == text)
            if not len(mine):
                continue
            each, end = np.ones(len(mine), np.int64), len(tokens)
            needed = max(len(passages[i]) for i in mine) + end + stride + len(local.specials)
            windows = build_windows(
                tokens,
                starts=each * (end + stride - local.window),
                first_labels=each * max(0, end - past),
                ends=each * end,
                passages=[passages[i] for i in mine],
                num_labels=past,
                length=bucket_length(needed, local.window),
                bos=bos,
            )
            found = Scorer(local.reader, windows.tokens.shape[1], past).score(windows)
            scores[text, ranks[mine]] = np.nansum(found, axis=1)
        return scores

    return rank
