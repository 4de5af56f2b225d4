"""Prompts of question answering, as data: what passages and a question become, and what of the text is the answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ralm_jax.settings import GenerateSettings
from retrieval.qa import Found


@dataclass(frozen=True)
class PromptPreset:
    """How questions are asked.

    Attributes:
        closed: the prompt without passages, with {question}.
        several: with {passages} before it.
        one: with a single one.
        settings: how the answer is written; a stop string ends it.
        passage: what becomes of a passage, with {number} from 1, {title} and {text}.
        untitled: of one without a title.
        between: passages.
        question: what becomes of a question.
    """

    closed: str
    several: str
    one: str
    settings: GenerateSettings
    passage: str
    untitled: str = "{text}"
    between: str = "\n\n"
    question: Callable[[str], str] = str

    def prompt(self, question: str, passages: Sequence[Found]) -> str:
        """The prompt for `question` with `passages`, the best first."""
        listed = self.between.join(
            (self.passage if passage.title else self.untitled).format(
                number=number, title=passage.title, text=passage.text
            )
            for number, passage in enumerate(passages, start=1)
        )
        template = self.closed if not passages else self.one if len(passages) == 1 else self.several
        return template.format(question=self.question(question), passages=listed)

    def answer(self, text: str) -> str:
        """The answer in what was written after a prompt: all before the first stop string, whether or not whoever wrote
        it stopped there, without spaces around it."""
        for stop in self.settings.stop:
            text = text.split(stop, 1)[0]
        return text.strip()


def asked(question: str) -> str:
    """First letter lowered, "?" added if missing, as in the paper's code."""
    question = question.strip()
    return question[:1].lower() + question[1:] + ("" if question.endswith("?") else "?")


SEARCH_RESULTS = (
    "Write a high-quality answer for the given question using only the provided search results (some of which might be "
    "irrelevant).\n\n{passages}\n\nQuestion: {question}\nAnswer:"
)

PRESETS = {  # the names are those of `ralm_jax.settings.Prompts`
    # In-Context RALM, appendix C, and where that is open its code (eval_qa.py)
    "ram2023": PromptPreset(
        closed="Answer these questions:\nQ: {question}\nA:",
        several="{passages}\n\nBased on these texts, answer these questions:\nQ: {question}\nA:",
        one="{passages}\n\nBased on this text, answer these questions:\nQ: {question}\nA:",
        settings=GenerateSettings(max_new_tokens=10, stop=("\n",)),
        passage="{title}\n\n{text}",
        question=asked,
    ),
    # Lost in the Middle (Liu et al., 2023), for readers that follow instructions; it is judged by containment there
    "liu2023": PromptPreset(
        closed="Question: {question}\nAnswer:",
        several=SEARCH_RESULTS,
        one=SEARCH_RESULTS,
        settings=GenerateSettings(max_new_tokens=100, stop=("\n",)),
        passage="Document [{number}](Title: {title}) {text}",
        untitled="Document [{number}] {text}",
        between="\n",
    ),
    # ram2023 with an instruction in place of a list to go on with, after which readers that were tuned to follow
    # instructions often say nothing
    "instruct": PromptPreset(
        closed="Answer the question in a few words.\n\nQuestion: {question}\nAnswer:",
        several="{passages}\n\nBased on these texts, answer the question in a few words.\n\n"
        "Question: {question}\nAnswer:",
        one="{passages}\n\nBased on this text, answer the question in a few words.\n\nQuestion: {question}\nAnswer:",
        settings=GenerateSettings(max_new_tokens=32, stop=("\n",)),
        passage="{title}\n\n{text}",
        question=asked,
    ),
}
