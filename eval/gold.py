"""Lost in the Middle (Liu et al., 2023): the gold passage, and distractors among which it is moved.

Distractors are as there: the best passages that are not the gold one and in which no answer stands.
"""

import logging
from collections.abc import Iterable, Sequence

from eval.qa import marked
from eval.retrievers import search_questions
from ralm_jax.errors import UsageError
from retrieval.qa import Found, Question
from retrieval.retriever import Retriever

log = logging.getLogger("ralm")

DEEPER = 4  # as many times as many hits as passages are searched for, and then as many times as before


def with_gold(
    questions: Sequence[Question], passages: int, retriever: Retriever | None = None, *, progress: bool | None = None
) -> list[Question]:
    """`questions` with up to `passages` passages each: the gold one, and then distractors, best first.

    The gold one is the one that the data mark, or if they mark none and there is a retriever, the question's first.
    Distractors are hits of the retriever, or where there is none, the question's other passages. Questions without a
    gold passage are left out, and said.

    Raises:
        UsageError: no question has a gold passage, or none has so many distractors.
        RalmError: a passage has no text.
    """
    kept = [gold_first(question, marked_only=retriever is None) for question in questions]
    kept = [question for question in kept if question.found]
    if not kept:
        raise UsageError(
            '--gold-at: no question has a gold passage; mark one of its ctxs in --data with "isgold": true, or add '
            "--index, with which the first passage in --data is the gold one"
        )
    if len(kept) < len(questions):
        without = len(questions) - len(kept)
        log.warning("%s of %s questions have no gold passage and are left out", f"{without:,}", f"{len(questions):,}")
    if retriever is None:
        made = [with_distractors(question, question.found[1:], passages) for question in kept]
    else:
        made = search_distractors(retriever, kept, passages, progress=progress)
    most = max(len(question.found) for question in made)
    if most < passages:
        raise UsageError(
            f"--passages {passages}: no question has more than {most - 1:,} distractors; ask for fewer, or name "
            f"{'an' if retriever is None else 'another'} index with --index"
        )
    return made


def gold_first(question: Question, *, marked_only: bool) -> Question:
    """`question` with its gold passage before the others; with none, where it has no gold one."""
    gold = next((one for one in question.found if one.gold), None)
    if gold is None and not marked_only:
        gold = next(iter(question.found), None)
    others = (one for one in question.found if one is not gold)
    return question._replace(found=() if gold is None else (gold, *others))


def search_distractors(
    retriever: Retriever, questions: Sequence[Question], passages: int, *, progress: bool | None = None
) -> list[Question]:
    """`questions` with their first passage and distractors; those that lack some are searched for deeper, until there
    are no more hits."""
    made: dict[str, Question] = {}
    todo, depth = list(questions), DEEPER * passages
    while todo:
        depth = min(depth, len(retriever.passages))
        found = search_questions(retriever, todo, depth, progress=progress)
        made |= {
            question.id: with_distractors(question, hits.found, passages)
            for question, hits in zip(todo, found, strict=True)
        }
        ended = {hits.id for hits in found if len(hits.found) < depth or depth == len(retriever.passages)}
        todo = [one for one in todo if len(made[one.id].found) < passages and one.id not in ended]
        depth *= DEEPER
    return [made[question.id] for question in questions]


def with_distractors(question: Question, candidates: Iterable[Found], passages: int) -> Question:
    """`question` with its first passage, the gold one, and the distractors among `candidates`, `passages` at most.

    Raises:
        RalmError: a passage has no text.
    """
    gold, *others = marked(question._replace(found=(question.found[0], *candidates))).found
    distractors = (one for one in others if not (one.gold or one.has_answer or same(one, gold)))
    return question._replace(found=(gold, *distractors)[:passages])


def same(passage: Found, other: Found) -> bool:
    return passage.text == other.text or passage.id == other.id != ""
