"""How good a ranking of passages is (NumPy only)."""

import numpy as np


def gold_recall(hits: np.ndarray, gold: np.ndarray, k: int) -> float:
    """Recall@k as BEIR has it: the share of a question's gold passages that are among its first k, averaged over the
    questions.

    Args:
        hits: (Q, K) bool, the passages found, best first, that are gold; false after the last one.
        gold: (Q,) the number of gold passages of each question, 1 or more.
    """
    return float((hits[:, :k].sum(axis=1) / gold).mean())


def answer_recall(hits: np.ndarray, k: int) -> float:
    """The share of questions with an answer in one of the first k passages (DPR's top-k accuracy).

    Args:
        hits: (Q, K) bool, the passages found, best first, with an answer in them; false after the last one.
    """
    return float(hits[:, :k].any(axis=1).mean())
