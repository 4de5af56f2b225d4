"""Long-context tasks answered with and without retrieval (Retrieval meets Long Context, section 4): from examples to a
file of predictions, and from it to scores.

A prediction is one line, written as soon as it is there, so that a run goes on after a kill. Predictions do not depend
on how they are scored: scores by another metric family go into another file, and ask nothing again.
"""

import logging
import re
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tqdm import tqdm

from eval.long_chunks import Ranker, chosen, pieces_of
from eval.long_prompts import Fitted, fit, make_prompt
from eval.qa import appending
from eval.tasks import TASKS, Example
from ralm_jax import processes
from ralm_jax.chat import around
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.generate.generator import Generation, Generator
from ralm_jax.settings import GenerateSettings, IfExists, LongPrompts, LongTask, Truncation
from ralm_jax.stopwatch import Stopwatch
from ralm_jax.storage import Folder
from ralm_jax.text import json_line, read_rows, writing
from ralm_jax.tokenizer import Tokenizer

log = logging.getLogger("ralm")

KIND = "long-context answers"
PREDICTIONS = "predictions.jsonl"  # in the folder
FIGURES = "long.csv"  # in the folder above


@dataclass(frozen=True)
class LongSettings:
    """What a prompt depends on beside the example.

    Attributes:
        chat: prompts are messages in the chat template of the reader's tokenizer.
        window: tokens that prompt and answer may have together.
        top: chunks, or few-shot examples, in the prompt; 0 for the whole document.
    """

    task: LongTask
    prompt_preset: LongPrompts
    chat: bool
    truncation: Truncation
    window: int
    top: int
    generate: GenerateSettings


def cell_name(settings: LongSettings, retriever: str) -> str:
    """The folder of a task's answers with one window and one retriever, among those of others."""
    given = f"{re.sub('[^A-Za-z0-9._]+', '-', Path(retriever).name)}-{settings.top}" if settings.top else retriever
    return f"{settings.task}-{settings.window}-{given}"


@dataclass(frozen=True)
class LongPrediction:
    """What was answered to an example.

    Attributes:
        example: its id.
        prompt_preset: how it was asked.
        prompt_sha256: of the prompt.
        prompt_tokens, new_tokens, finish, text: as in `Generation`.
        document_words: of the whole document.
        chunks: that the document was searched in; 0 without retrieval.
        given: which of them the prompt was made from, counted from 0, most relevant first.
        cut_tokens: that the prompt lost to fit.
        cut: the characters of the uncut prompt that these are: first, one past the last.
        retrieval_seconds: that ranking the document's chunks took.
        seconds: since the answer before it was there, or since the first prompt was read; their sum is the time that
            answering took. Neither counts compilation.
    """

    example: str
    prompt_preset: str
    prompt_sha256: str
    prompt_tokens: int
    new_tokens: int
    finish: str
    text: str
    document_words: int
    chunks: int
    given: list
    cut_tokens: int
    cut: list
    retrieval_seconds: float
    seconds: float


class Asked(NamedTuple):
    """An example's prompt and what went into it; as in `LongPrediction`."""

    example: Example
    prompt: Fitted
    chunks: int
    given: list[int]
    retrieval_seconds: float


def ask(example: Example, settings: LongSettings, tokenizer: Tokenizer, ranker: Ranker | None = None) -> Asked:
    """The prompt of an example.

    Raises:
        UsageError: the window has no room for its question, the preset has no prompt for the task, or the tokenizer no
            chat template.
    """
    contexts, given, pieces, clock = [example.document], list[int](), tuple[str, ...](), Stopwatch()
    if ranker is not None:
        pieces = pieces_of(TASKS[settings.task].kind, example.document)
        given = chosen(ranker, example.question, pieces, settings.top)
        contexts = [pieces[i] for i in given]
    seconds = clock.lap() if ranker else 0.0
    chat = around(tokenizer) if settings.chat else None
    prompt = make_prompt(settings.prompt_preset, settings.task, example.question, contexts, chat)
    room = settings.window - settings.generate.max_new_tokens
    try:
        fitted = fit(prompt, settings.truncation, tokenizer, room, example.separator)
    except UsageError as error:
        raise UsageError(
            f"example {example.id}: a window of {settings.window:,} leaves, beside {settings.generate.max_new_tokens} "
            f"new tokens, {room:,}: {error}; use a larger --window or fewer --max-new-tokens"
        ) from None
    return Asked(example, fitted, len(pieces), given, seconds)


def examples_sha256(examples: Iterable[Example]) -> str:
    """A hash of all that is read of the examples, but for what they are judged by."""
    digest = sha256()
    for example in examples:
        digest.update(json_line([example.id, example.question, example.document, example.separator]).encode() + b"\n")
    return digest.hexdigest()


# --- answers ---


def answer_examples(
    examples: Sequence[Example],
    settings: LongSettings,
    generator: Generator,
    tokenizer: Tokenizer,
    location: str,
    *,
    ranker: Ranker | None = None,
    about: dict[str, Any],
    data_sha256: str,
    if_exists: IfExists = "refuse",
    progress: bool | None = None,
) -> list[LongPrediction]:
    """Asks every example and writes the answers down.

    Args:
        tokenizer: that prompts are cut by.
        location: a local folder; predictions are appended to a file in it.
        ranker: of a document's chunks, of which the prompt has `settings.top`; None for the document itself.
        about: is written into the folder's manifest when all answers are there.
        data_sha256: `examples_sha256` of all examples of the file, of which `examples` may be the first few: a run
            that resumes may ask more of them.
        progress: show a progress bar; None for "if there is a terminal".

    Returns:
        The predictions in the order of the examples.

    Raises:
        UsageError: `location` is taken and `if_exists` refuses, or it is not a local folder; or as `ask`.
        RalmError: what is there was made in another way, is damaged, or is being written by another run; or the reader
            fails, or the disk is full.
    """
    if "://" in location:
        raise UsageError(f"{location}: answers need a local disk")
    root = Path(location).expanduser()
    if if_exists == "overwrite":
        processes.once(lambda: remove_earlier(location))
    depends = {
        "reader": generator.identity, **asdict(settings), "retriever": ranker.identity if ranker else None,
        "examples_sha256": data_sha256, "tokenizer_sha256": tokenizer.fingerprint,
        "chat_template": tokenizer.chat_template if settings.chat else None,
    }  # fmt: skip
    folder = Folder.create(location, KIND, depends, if_exists)
    with appending(root / PREDICTIONS) if processes.first() else nullcontext() as file:
        done = processes.once(lambda: recovered(root / PREDICTIONS, file) if file else {})
        todo = [example for example in examples if example.id not in done]
        asked = [
            ask(example, settings, tokenizer, ranker)
            for example in tqdm(todo, unit="prompt", disable=processes.bar_hidden(progress))
        ]
        if ranker is not None and ranker.cut:
            log.warning("%s questions or chunks were too long for the encoder, which ranked their beginnings",
                        f"{ranker.cut:,}")  # fmt: skip
        made = generator.generate([one.prompt.text for one in asked], settings.generate) if asked else ()
        clock = Stopwatch()
        with tqdm(total=len(asked), unit="answer", disable=processes.bar_hidden(progress)) as bar:
            for place, generation in made:
                prediction = predicted(asked[place], generation, settings, clock.lap())
                if file is not None:  # process 0 writes
                    with writing(root / PREDICTIONS):
                        file.write(json_line(asdict(prediction)).encode() + b"\n")
                        file.flush()
                done[prediction.example] = prediction
                bar.update()
    folder.manifest["about"] = about
    folder.write_manifest()
    found = [done[example.id] for example in examples]
    cut = [one.cut_tokens for one in found if one.cut_tokens]
    if cut:
        log.warning(
            "%s of %s prompts did not fit into %s tokens and lost %s tokens (%s); see cut in %s",
            f"{len(cut):,}", f"{len(found):,}", f"{settings.window:,}", f"{sum(cut):,}", settings.truncation,
            root / PREDICTIONS,
        )  # fmt: skip
    return found


def predicted(asked: Asked, made: Generation, settings: LongSettings, seconds: float) -> LongPrediction:
    """
    Raises:
        RalmError: the reader lost tokens of a prompt that should have fitted.
    """
    example, prompt = asked.example, asked.prompt
    if made.cut:
        raise RalmError(
            f"example {example.id}: the reader lost {made.cut} tokens of the prompt; use a smaller --window"
        )
    text = made.text.encode("utf-8", "replace").decode()  # a server can send lone surrogates, which no file takes
    for stop in settings.generate.stop:
        text = text.split(stop, 1)[0]
    return LongPrediction(
        example.id, settings.prompt_preset, sha256(prompt.text.encode()).hexdigest(),
        made.prompt_tokens or prompt.tokens, made.new_tokens, made.finish, text, len(example.document.split()),
        asked.chunks, asked.given, prompt.cut_tokens, list(prompt.cut) if prompt.cut_tokens else [],
        round(asked.retrieval_seconds, 3), round(seconds, 3),
    )  # fmt: skip


# --- the file of predictions ---


def remove_earlier(location: str) -> None:
    """Removes what an earlier run wrote into its folder; others' folders are left as they are."""
    try:
        Folder.open(location, KIND)
    except UsageError:
        return
    root = Path(location).expanduser()
    for file in (root / PREDICTIONS, *root.glob("result-*.json")):
        file.unlink(missing_ok=True)


def recovered(path: Path, file: BinaryIO) -> dict[str, LongPrediction]:
    """The predictions in the file by example; what follows the last line end, which a killed run left half-written, is
    cut off.

    Raises:
        RalmError: another line is broken, or an example stands twice; file and line are named.
    """
    content = path.read_bytes()
    with writing(path):
        file.truncate(content.rfind(b"\n") + 1)
    found: dict[str, LongPrediction] = {}
    kinds = {field.name: field.type for field in fields(LongPrediction)}
    for where, row in read_rows(path):
        if not isinstance(row, dict) or row.keys() != kinds.keys() or not all(
            isinstance(row[name], kind) for name, kind in kinds.items()  # type: ignore[arg-type]
        ):  # fmt: skip
            raise RalmError(
                f"{where}: not a prediction; delete the line to have its example asked again, or add --overwrite"
            )
        if row["example"] in found:
            raise RalmError(f"{where}: example {row['example']} stands twice")
        found[row["example"]] = LongPrediction(**row)
    return found
