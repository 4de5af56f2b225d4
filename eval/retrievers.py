"""A retriever judged before a reader runs: does it find the gold passages, and the answers?"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from eval.retrieval_metrics import answer_recall, gold_recall
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.settings import at_least
from retrieval.qa import Found, Question, mark_answers
from retrieval.retriever import Retriever

BATCH = 256


@dataclass(frozen=True)
class Recall:
    """Recall of one kind.

    Attributes:
        kind: "gold" passages or "answers".
        questions: how many it is averaged over.
        at: recall by k, from 0 to 1.
        notes: what it leaves out.
    """

    kind: str
    questions: int
    at: dict[int, float]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"questions": self.questions, "recall": {str(k): value for k, value in self.at.items()}}


def search_questions(
    retriever: Retriever, questions: Sequence[Question], k: int, *, progress: bool | None = None
) -> list[Question]:
    """`questions` with the best `k` passages of each."""
    found: list[Question] = []
    with tqdm(total=len(questions), unit="query", disable=None if progress is None else not progress) as bar:
        for start in range(0, len(questions), BATCH):
            batch = questions[start : start + BATCH]
            hits = retriever.search([question.text for question in batch], k)
            for question, rows, scores in zip(batch, hits.rows, hits.scores.tolist(), strict=True):
                passages = retriever.passages.rows(rows[rows >= 0])
                listed = (Found(p.id, score, p.title, p.text) for p, score in zip(passages, scores, strict=False))
                found.append(question._replace(found=tuple(listed)))
            bar.update(len(batch))
    return found


def evaluate(
    questions: Sequence[Question], ks: Sequence[int], gold: dict[str, frozenset[str]] | None = None
) -> list[Recall]:
    """Recall of `gold` passages, where they are given, and of answers, where questions have some.

    Args:
        gold: ids of the relevant passages by question id. A question of these that was not searched for is a miss.

    Raises:
        UsageError: a k below 1, or there is nothing to judge by.
        RalmError: none of the questions is in `gold`, or answers are to be looked for in passages without text.
    """
    for k in ks:
        at_least(1, k=k)
    recalls = [] if gold is None else [recall_of_gold(questions, ks, gold)]
    if any(question.answers for question in questions):
        recalls.append(recall_of_answers(questions, ks))
    if not recalls:
        raise UsageError("nothing to judge by: the questions have no answers, and there are no --qrels")
    return recalls


def recall_of_gold(questions: Sequence[Question], ks: Sequence[int], gold: dict[str, frozenset[str]]) -> Recall:
    found = {question.id: [passage.id in gold[question.id] for passage in question.found]
             for question in questions if question.id in gold}  # fmt: skip
    if not found:
        raise RalmError(f"none of the {len(questions):,} questions is among the {len(gold):,} with gold passages")
    hits = padded([found.get(id, []) for id in gold], max(ks))
    counts = np.array([len(passages) for passages in gold.values()])
    notes = shallow(questions, ks) + note("left out, without gold passages", len(questions) - len(found))
    notes += note("misses, not searched for", len(gold) - len(found))
    return Recall("gold", len(gold), {k: gold_recall(hits, counts, k) for k in ks}, notes)


def recall_of_answers(questions: Sequence[Question], ks: Sequence[int]) -> Recall:
    asked = [question._replace(found=question.found[: max(ks)]) for question in questions if question.answers]
    for question in asked:
        for passage in question.found:
            if passage.text is None:
                raise RalmError(
                    f"passage {passage.id} of question {question.id} has no text to look for answers in; "
                    "`ralm convert-retrieval --to dpr --corpus` adds it"
                )
    marked = (mark_answers(question, anew=True) for question in asked)
    hits = padded([[bool(passage.has_answer) for passage in question.found] for question in marked], max(ks))
    notes = shallow(questions, ks) + note("left out, without answers", len(questions) - len(asked))
    return Recall("answers", len(asked), {k: answer_recall(hits, k) for k in ks}, notes)


def padded(hits: Sequence[Sequence[bool]], width: int) -> np.ndarray:
    """(Q, `width`) bool, false after the end of each."""
    table = np.zeros((len(hits), width), bool)
    for row, found in zip(table, hits, strict=True):
        row[: len(found)] = found[:width]
    return table


def shallow(questions: Sequence[Question], ks: Sequence[int]) -> tuple[str, ...]:
    most = max(len(question.found) for question in questions)
    return (f"no question has more than {most:,} passages",) if most < max(ks) else ()


def note(what: str, count: int) -> tuple[str, ...]:
    return (f"{what}: {count:,}",) if count else ()


def format_recalls(recalls: Sequence[Recall]) -> str:
    """A table, one line a kind, and below it what was left out."""
    lines = [f"{'recall':10}{'questions':>11}" + "".join(f"{f'@{k}':>9}" for k in recalls[0].at)]
    lines += [f"{r.kind:10}{r.questions:>11,}" + "".join(f"{v:>9.1%}" for v in r.at.values()) for r in recalls]
    return "\n".join([*lines, *dict.fromkeys(note for recall in recalls for note in recall.notes)])
