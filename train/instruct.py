"""Instruction tuning (Retrieval meets long context, section 3): conversations from several sources, of which a reader
learns the answers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from ralm_jax.chat import Message, render
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.reader import Reader, load_reader
from ralm_jax.settings import AttentionName, IfExists, InstructSettings, ReaderTrainSettings
from ralm_jax.text import encodable, read_rows
from ralm_jax.tokenizer import Tokenizer, load_tokenizer
from train.causal import Batch, causal_loss
from train.context import MODEL, Evaluation, check_attention, check_tokens, save
from train.data import ahead, stack
from train.loop import Task, train
from train.windows import Piece, Windows, make_windows


@dataclass(frozen=True)
class Conversation:
    """Questions and answers about a context.

    Attributes:
        system: what the reader is told to be, or nothing.
        context: what is asked about, or nothing.
        turns: each question with its answer.
    """

    system: str
    context: str
    turns: tuple[tuple[str, str], ...]

    def texts(self) -> Iterator[tuple[str, str]]:
        """What stands in front of each answer, and the answer: "System: …, context, User: …, Assistant:" with blank
        lines between, the last two again for every turn."""
        head = [f"System: {self.system}"] if self.system else []
        head += [self.context] if self.context else []
        for question, answer in self.turns:
            yield "\n\n".join([*head, f"User: {question}", "Assistant:"]), f" {answer}"
            head = [""]

    def messages(self) -> list[Message]:
        """For a chat template: the context stands in front of the first question."""
        made = [{"role": "system", "content": self.system}] if self.system else []
        head = [self.context] if self.context else []
        for question, answer in self.turns:
            made.append({"role": "user", "content": "\n\n".join([*head, question])})
            made.append({"role": "assistant", "content": answer})
            head = []
        return made


def read_conversation(row: Any, where: str) -> Conversation:
    """A row's conversation: "question" and "answer", or "messages" of {"role", "content"}, where user and assistant
    take turns; with "system" and "context", or a first message of the role system.

    Raises:
        RalmError: it is none.
    """

    def text(values: Any, key: str, default: str | None = None) -> str:
        value = values.get(key, default) if isinstance(values, dict) else None
        if not isinstance(value, str):
            raise RalmError(f"{where}: expected an object with a text {key!r}")
        return encodable(value, where)

    system, context = text(row, "system", ""), text(row, "context", "")
    if "messages" not in row:
        return Conversation(system, context, ((text(row, "question"), text(row, "answer")),))
    if not isinstance(row["messages"], list):
        raise RalmError(f"{where}: 'messages' is no list")
    said = [(text(message, "role"), text(message, "content")) for message in row["messages"]]
    if said and said[0][0] == "system":
        system, said = said[0][1], said[1:]
    if not said or [role for role, _ in said] != ["user", "assistant"] * (len(said) // 2):
        raise RalmError(f"{where}: 'messages' must be of user and assistant in turn, the last one of assistant")
    contents = [content for _, content in said]
    return Conversation(system, context, tuple(zip(contents[::2], contents[1::2], strict=True)))


def encode(conversation: Conversation, tokenizer: Tokenizer, end: int) -> Piece:
    """The tokens of a conversation, of which are learned: what an answer has of its text, and the token `end` behind
    every answer. A BOS stands in front, if the tokenizer adds one."""
    tokens, learned = [np.array(tokenizer.prefix, np.int32)], [np.zeros(len(tokenizer.prefix), bool)]
    for prompt, answer in conversation.texts():
        found, offsets = tokenizer.encode_with_offsets(prompt + answer)
        tokens += [found, np.array([end], np.int32)]
        learned += [offsets[:, 1] > len(prompt), np.ones(1, bool)]
    return Piece(np.concatenate(tokens), np.concatenate(learned)[1:])


def encode_chat(conversation: Conversation, tokenizer: Tokenizer) -> Piece:
    """As `encode`, in the tokenizer's chat template: what that adds for an answer is learned, its end included, but for
    white space behind it.

    Raises:
        UsageError: the tokenizer has none.
        RalmError: it does not take such messages, or writes earlier ones in another way when later ones are there.
    """
    messages, text, spans = conversation.messages(), "", []
    for number in (number for number, message in enumerate(messages) if message["role"] == "assistant"):
        asked = render(tokenizer, messages[:number], ask=True)
        answered = render(tokenizer, messages[: number + 1], ask=False)
        if not (asked.startswith(text) and answered.startswith(asked)):
            raise RalmError(f"{tokenizer.origin}: the chat template rewrites earlier turns and cannot be learned from")
        spans.append((len(asked), len(answered.rstrip())))
        text = answered
    tokens, offsets = tokenizer.encode_with_offsets(text)
    learned = np.zeros(len(tokens), bool)
    for begin, end in spans:
        learned |= (offsets[:, 1] > begin) & (offsets[:, 0] < end)
    prefix = np.array(tokenizer.prefix, np.int32)
    return Piece(np.concatenate([prefix, tokens]), np.concatenate([np.zeros(len(prefix), bool), learned])[1:])


def read_source(path: str, encode: Callable[[Conversation], Piece], length: int) -> tuple[list[Piece], int]:
    """The conversations of a jsonl file that have room in a window of `length` tokens, and how many have not.

    Raises:
        UsageError: no such file.
        RalmError: a row that is none, or none that has room.
    """
    rows = read_rows(Path(path).expanduser())
    encoded = [encode(read_conversation(row, where)) for where, row in rows]
    fitting = [piece for piece in encoded if len(piece.learned) <= length]
    if not fitting:
        raise RalmError(f"{path}: none of its {len(encoded)} conversations has room in {length:,} tokens")
    return fitting, len(encoded) - len(fitting)


def blend(
    sources: Sequence[Windows], shares: Sequence[float], batch_size: int, seed: int, start: int, stop: int
) -> Iterator[Batch]:
    """Batches `start` to `stop`, each of which follows from `seed` alone: of each source its share of the windows,
    shuffled, and again from its beginning when it ends."""
    from grain import MapDataset

    def shuffled(source: Windows) -> Any:
        rows = MapDataset.source(range(len(source))).seed(seed).shuffle()
        return rows.repeat(-(-stop * batch_size // len(source))).map(source)

    mixed = MapDataset.mix([shuffled(source) for source in sources], weights=list(shares))
    return ahead(mixed.batch(batch_size, batch_fn=stack).slice(slice(start, stop)))


def divide(source: Sequence[Piece], held_out: float) -> tuple[Sequence[Piece], Sequence[Piece]]:
    """Those to train on, and the share `held_out` that comes last, at least one of it."""
    held = min(len(source) - 1, max(1, round(held_out * len(source)))) if held_out else 0
    return source[: len(source) - held], source[len(source) - held :]


def train_instruct(
    model: str,
    data: Sequence[str],
    out: str,
    *,
    settings: ReaderTrainSettings,
    instruct: InstructSettings,
    weights: Sequence[float] = (),
    tokenizer: str | None = None,
    attention: AttentionName = "auto",
    mesh: Mesh | None = None,
    if_exists: IfExists = "refuse",
    announce: Callable[[str], None] = print,
) -> Reader:
    """Tunes `model` on the conversations in `data`, and writes it to the folder `model` of `out`.

    Args:
        weights: of the files' windows in the blend; none for as many as each has.
        tokenizer: where it is, if not with the model.
        mesh: None for all devices, as `load_reader` has it.
        announce: is told how it goes, a line at a time.

    Raises:
        UsageError: no such model, data or chat template; weights that do not go with them; `out` is taken and
            `if_exists` refuses.
        RalmError: a model that cannot be loaded, trained or written, or does not say which token ends a text.
    """
    if weights and (len(weights) != len(data) or min(weights) <= 0):
        raise UsageError(f"--weights must be {len(data)} numbers above 0, one for each file of --data")
    reader, coder = load_reader(model, mesh=mesh, attention=attention), load_tokenizer(tokenizer or model)
    if instruct.template == "chat":
        written = partial(encode_chat, tokenizer=coder)
    elif reader.ends:
        written = partial(encode, tokenizer=coder, end=reader.ends[0])
    else:
        raise RalmError(f"{model}: its config.json has no eos_token_id, with which an answer would end")
    window = instruct.window or reader.config.max_positions
    if window > reader.config.max_positions:
        raise UsageError(f"--window {window} is more than the {reader.config.max_positions} positions of {model}")
    sources = [read_source(path, written, window) for path in data]
    for pieces, _ in sources:
        check_tokens(pieces, coder, reader.config, model)
    divided = [divide(pieces, instruct.held_out) for pieces, _ in sources]
    sets = [*(part for part, _ in divided), [piece for _, part in divided for piece in part]]
    *training, held = make_windows(sets, window, together=instruct.pack)
    check_attention(attention, held)
    for path, windows, (pieces, left_out) in zip(data, training, sources, strict=True):
        filled = f"{len(windows):,} windows, {windows.padding:.1%} of them padding"
        announce(
            f"{path}: {len(windows.pieces):,} of {len(pieces):,} conversations to train on, in {filled}; {left_out:,} "
            f"more are longer than {window:,} tokens"
        )
    total = sum(weights) or sum(map(len, training))
    shares = [weight / total for weight in weights or map(len, training)]
    evaluation = Evaluation(held, reader.mesh, settings, [0, window])
    task = Task(
        params=reader.state,
        mesh=reader.mesh,
        loss=causal_loss(reader.graphdef, reader.mesh),
        batches=lambda start: blend(training, shares, settings.batch_size, settings.seed, start, settings.steps),
        evaluate=(lambda params: evaluation(reader.graphdef, params).figures()) if len(held) else None,
        identity={
            "init_sha256": reader.fingerprint,
            "tokenizer_sha256": coder.fingerprint,
            "windows_sha256": [windows.fingerprint for windows in (*training, held)],
            "weights": list(weights),
            "instruct": asdict(instruct),
        },
        result=MODEL,
    )
    state = train(task, out, settings, if_exists=if_exists, announce=announce)
    trained = replace(reader, state=state)
    save(trained, coder, model, Path(out).expanduser() / MODEL)
    return trained
