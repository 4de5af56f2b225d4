"""Prompts of the long-context tasks, and how one that does not fit is cut: a prompt never loses its question or the
words that ask for the answer, and what it loses is recorded."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eval.tasks import TASKS
from ralm_jax.errors import UsageError
from ralm_jax.settings import LongPrompts, LongTask, Truncation
from ralm_jax.tokenizer import Tokenizer

OMITTED = "... [The rest of the text is omitted]"  # where ZeroSCROLLS' own rows do not say what to write

PASSAGES = "Answer the question based on the given passages. Only give me the answer and do not output any other words."
QASPER = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered based "
    'on the information in the article, write "unanswerable". If the question is a yes/no question, answer "yes", '
    '"no", or "unanswerable". Do not provide any explanation.\n\n'
)
STORY = "asconcisely as you can, using a single phrase if possible. Do not provide any explanation.\n\n"  # its spelling
PASSAGES_TEMPLATE = (
    f"{PASSAGES}\n\nThe following are given passages.\n{{context}}\n\n{PASSAGES}\n\nQuestion: {{input}}\nAnswer:"
)

LONGBENCH: dict[LongTask, str] = {
    "narrativeqa": "You are given a story, which can be either a novel or a movie script, and a question. Answer the "
    f"question {STORY}Story: {{context}}\n\nNow, answer the question based on the story {STORY}"
    "Question: {input}\n\nAnswer:",
    "qasper": f"You are given a scientific article and a question. Answer the question {QASPER}Article: {{context}}"
    f"\n\n Answer the question based on the above article {QASPER}Question: {{input}}\n\nAnswer:",
    "multifieldqa_en": "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question "
    "based on the above text, only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:",
    "hotpotqa": PASSAGES_TEMPLATE,
    "musique": PASSAGES_TEMPLATE,
    "qmsum": "You are given a meeting transcript and a query containing a question or instruction. Answer the query in "
    "one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the above meeting transcript "
    "in one or more sentences.\n\nQuery: {input}\nAnswer:",
    "trec": "Please determine the type of the question below. Here are some examples of questions.\n\n"
    "{context}\n{input}",
    "samsum": "Summarize the dialogue into a few short sentences. The following are some examples.\n\n"
    "{context}\n\n{input}",
}
NEXT_TURN, ANSWER_TURN = "\n\nUser:", "\n\nAssistant:"
TURNS = f"{{context}}{NEXT_TURN} INSTRUCTION {{input}}{ANSWER_TURN}"
SHORT = TURNS.replace("INSTRUCTION", "Answer the following question with a short span.")
FULL = TURNS.replace("INSTRUCTION", "Please give a full and complete answer for the question.")


class LongPreset(NamedTuple):
    """How the tasks are asked.

    Attributes:
        templates: with {context} and {input}.
        passage: what becomes of each context, with {text}; few-shot examples stay as they are.
        truncation: how prompts are cut unless another way is named.
        stop: strings that end an answer.
    """

    templates: dict[LongTask, str]
    passage: str
    truncation: Truncation
    stop: tuple[str, ...] = ()


LONG_PRESETS: dict[LongPrompts, LongPreset] = {
    "longbench": LongPreset(LONGBENCH, "{text}", "middle"),
    # Retrieval meets Long Context, appendix A; few-shot tasks are asked as in LongBench, where turns of a chat between
    # the examples and what goes on with them would be in the way
    "xu2023": LongPreset(
        {name: FULL if task.kind == "summary" else SHORT for name, task in TASKS.items()}
        | {name: LONGBENCH[name] for name in ("trec", "samsum")},
        "title: , source: {text}",
        "context-tail",
        stop=(NEXT_TURN,),
    ),
}


class Prompt(NamedTuple):
    """A prompt in three parts: the middle one may be cut, the last one asks."""

    head: str
    context: str
    tail: str

    @property
    def whole(self) -> str:
        return self.head + self.context + self.tail


def find_template(preset: LongPrompts, task: LongTask) -> str:
    """
    Raises:
        UsageError: the preset does not have the task.
    """
    templates = LONG_PRESETS[preset].templates
    if task not in templates:
        others = " or ".join(name for name, other in LONG_PRESETS.items() if task in other.templates)
        raise UsageError(f"--prompt-preset {preset} has no prompt for {task}; name {others}")
    return templates[task]


def make_prompt(
    preset: LongPrompts, task: LongTask, question: str, contexts: Sequence[str], chat: tuple[str, str] | None = None
) -> Prompt:
    """
    Args:
        contexts: the document; or what was retrieved from it, most relevant first, which stays the order.
        chat: what a chat template writes around a user's message, in place of a preset's own turns; None for no chat.
            Few-shot tasks, whose examples a reader goes on with, have none in any case, as in LongBench.

    Raises:
        UsageError: as `find_template`.
    """
    template = find_template(preset, task)
    if TASKS[task].kind in ("class", "dialogue"):
        context, chat = "\n".join(contexts), None
    else:
        context = "\n\n".join(LONG_PRESETS[preset].passage.replace("{text}", text) for text in contexts)
    if chat is not None:
        template = template.replace(f"{NEXT_TURN} ", "\n\n").removesuffix(ANSWER_TURN)
    before, behind = chat or ("", "")
    head, tail = template.split("{context}")
    return Prompt(before + head, context, tail.replace("{input}", question) + behind)


class Fitted(NamedTuple):
    """A prompt that fits.

    Attributes:
        text: the prompt.
        tokens: that it has, without BOS.
        cut_tokens: that it lost, without what is written in their place.
        cut: the characters of the whole prompt that it lost: first, one past the last; both 0 where it is whole.
    """

    text: str
    tokens: int
    cut_tokens: int = 0
    cut: tuple[int, int] = (0, 0)


def fit(prompt: Prompt, policy: Truncation, tokenizer: Tokenizer, room: int, separator: str = "") -> Fitted:
    """`prompt` in at most `room` tokens. Text is cut between tokens of the whole prompt and tokenised again.

    Args:
        policy: middle keeps the first and the last half of the tokens, as LongBench does, except that the last part
            is longer where the question is. context-tail cuts the end of the context. document-tail does so too and
            writes a separator there, as ZeroSCROLLS does.
        separator: of document-tail; `OMITTED` if empty.

    Raises:
        UsageError: there is no room for what must not be cut.
    """
    ids, offsets = tokenizer.encode_with_offsets(prompt.whole)
    if len(ids) <= room:
        return Fitted(prompt.whole, len(ids))
    between = f"{separator.strip() or OMITTED}\n\n" if policy == "document-tail" else ""
    allowed = room - (len(tokenizer.encode(between)) if between else 0)
    while True:
        span = (middle if policy == "middle" else context_tail)(prompt, offsets, allowed)
        if span is None:
            raise UsageError(f"{room:,} tokens have no room for instruction and question")
        start, end = span
        tail = prompt.whole[end:].lstrip("\n") if between else prompt.whole[end:]
        text = prompt.whole[:start] + between + tail
        count = len(tokenizer.encode(text))
        if count <= room:
            lost = int(np.count_nonzero((offsets[:, 0] >= start) & (offsets[:, 0] < end)))
            return Fitted(text, count, lost, (start, end))
        allowed -= count - room  # where the two sides of a cut meet, there may be other tokens


def middle(prompt: Prompt, offsets: np.ndarray, allowed: int) -> tuple[int, int] | None:
    """The characters to cut so that the first half of `allowed` tokens stays and the last; None if no cut will do."""
    asking = int(np.count_nonzero(offsets[:, 1] > len(prompt.head) + len(prompt.context)))
    last = max(allowed // 2, asking)
    first = min(allowed // 2, allowed - last)
    if first < 0 or last < 1:
        return None
    return int(offsets[first, 0]), int(offsets[len(offsets) - last, 0])


def context_tail(prompt: Prompt, offsets: np.ndarray, allowed: int) -> tuple[int, int] | None:
    """The characters to cut at the context's end; None if no cut will do."""
    start, end = len(prompt.head), len(prompt.head) + len(prompt.context)
    inside = np.flatnonzero((offsets[:, 0] >= start) & (offsets[:, 1] <= end) & (offsets[:, 0] < end))
    excess = len(offsets) - allowed
    return (int(offsets[inside[-excess], 0]), end) if 0 < excess <= len(inside) else None
