"""Instruction tuning (Retrieval meets long context, section 3): conversations from several sources, of which a reader
learns the answers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from ralm_jax.errors import RalmError, UsageError
from ralm_jax.reader import Reader, load_reader
from ralm_jax.settings import AttentionName, IfExists, InstructSettings, ReaderTrainSettings
from ralm_jax.text import encodable, read_rows
from ralm_jax.tokenizer import Tokenizer, load_tokenizer
from train.causal import Batch, causal_loss
from train.context import MODEL, Evaluation, check_tokens, save
from train.data import ahead, stack
from train.loop import Task, train


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

    def pieces(self) -> Iterator[tuple[str, str]]:
        """What stands in front of each answer, and the answer: "System: …, context, User: …, Assistant:" with blank
        lines between, the last two again for every turn."""
        head = [f"System: {self.system}"] if self.system else []
        head += [self.context] if self.context else []
        for question, answer in self.turns:
            yield "\n\n".join([*head, f"User: {question}", "Assistant:"]), f" {answer}"
            head = [""]


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


def encode(conversation: Conversation, tokenizer: Tokenizer, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (n,) int32 of a conversation, and whether each is learned: what an answer has of its text, and the token
    `end` behind every answer. A BOS stands in front, if the tokenizer adds one."""
    tokens, learned = [np.array(tokenizer.prefix, np.int32)], [np.zeros(len(tokenizer.prefix), bool)]
    for prompt, answer in conversation.pieces():
        found, offsets = tokenizer.encode_with_offsets(prompt + answer)
        tokens += [found, np.array([end], np.int32)]
        learned += [offsets[:, 1] > len(prompt), np.ones(1, bool)]
    return np.concatenate(tokens), np.concatenate(learned)


@dataclass(frozen=True)
class Conversations:
    """Encoded conversations of a source, each a window by itself, padded where it ends.

    Attributes:
        encoded: what `encode` makes of each.
        length: T, tokens that a window reads.
        left_out: those that have no room in it.
    """

    encoded: Sequence[tuple[np.ndarray, np.ndarray]]
    length: int
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.encoded)

    def __call__(self, row: int) -> Batch:
        """Conversation `row`, without the batch axis."""
        tokens, learned = self.encoded[row]
        padding = (0, self.length + 1 - len(tokens))
        return Batch(*(np.pad(part, padding) for part in (tokens[:-1], tokens[1:], learned[1:].astype(np.float32))))

    def only(self, rows: slice) -> "Conversations":
        return replace(self, encoded=self.encoded[rows])


def read_source(path: str, tokenizer: Tokenizer, end: int, length: int) -> Conversations:
    """The conversations of a jsonl file.

    Raises:
        UsageError: no such file.
        RalmError: a row that is none, or none that has room in `length` tokens.
    """
    rows = read_rows(Path(path).expanduser())
    encoded = [encode(read_conversation(row, where), tokenizer, end) for where, row in rows]
    fitting = [one for one in encoded if len(one[0]) <= length + 1]
    if not fitting:
        raise RalmError(f"{path}: none of its {len(encoded)} conversations has room in {length:,} tokens")
    return Conversations(fitting, length, len(encoded) - len(fitting))


def blend(
    sources: Sequence[Conversations], shares: Sequence[float], batch_size: int, seed: int, start: int, stop: int
) -> Iterator[Batch]:
    """Batches `start` to `stop`, each of which follows from `seed` alone: of each source its share, shuffled, and
    again from its beginning when it ends."""
    from grain import MapDataset

    def shuffled(source: Conversations) -> Any:
        rows = MapDataset.source(range(len(source))).seed(seed).shuffle()
        return rows.repeat(-(-stop * batch_size // len(source))).map(source)

    mixed = MapDataset.mix([shuffled(source) for source in sources], weights=list(shares))
    return ahead(mixed.batch(batch_size, batch_fn=stack).slice(slice(start, stop)))


def divide(source: Conversations, held_out: float) -> tuple[Conversations, Conversations]:
    """Those to train on, and the share `held_out` that comes last, at least one of it."""
    held = min(len(source) - 1, max(1, round(held_out * len(source)))) if held_out else 0
    return source.only(slice(len(source) - held)), source.only(slice(len(source) - held, None))


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
        weights: of the files in the blend; none for as many as each has.
        tokenizer: where it is, if not with the model.
        mesh: None for all devices, as `load_reader` has it.
        announce: is told how it goes, a line at a time.

    Raises:
        UsageError: no such model or data; weights that do not go with them; `out` is taken and `if_exists` refuses.
        RalmError: a model that cannot be loaded, trained or written, or does not say which token ends a text.
    """
    if weights and (len(weights) != len(data) or min(weights) <= 0):
        raise UsageError(f"--weights must be {len(data)} numbers above 0, one for each file of --data")
    reader, coder = load_reader(model, mesh=mesh, attention=attention), load_tokenizer(tokenizer or model)
    if not reader.ends:
        raise RalmError(f"{model}: its config.json has no eos_token_id, with which an answer would end")
    window = instruct.window or reader.config.max_positions
    if window > reader.config.max_positions:
        raise UsageError(f"--window {window} is more than the {reader.config.max_positions} positions of {model}")
    sources = [read_source(path, coder, reader.ends[0], window) for path in data]
    for path, source in zip(data, sources, strict=True):
        for tokens, _ in source.encoded:
            check_tokens(tokens, coder, reader.config, model)
        announce(f"{path}: {len(source):,} conversations; {source.left_out:,} are longer than {window:,} tokens")
    divided = [divide(source, instruct.held_out) for source in sources]
    training = [part for part, _ in divided]
    held = Conversations([one for _, part in divided for one in part.encoded], window)
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
            "conversations_sha256": [fingerprint(source.encoded) for source in sources],
            "weights": list(weights),
            "instruct": asdict(instruct),
        },
        result=MODEL,
    )
    state = train(task, out, settings, if_exists=if_exists, announce=announce)
    trained = replace(reader, state=state)
    save(trained, coder, model, Path(out).expanduser() / MODEL)
    return trained


def fingerprint(encoded: Iterable[tuple[np.ndarray, np.ndarray]]) -> str:
    digest = sha256()
    for tokens, learned in encoded:
        digest.update(len(tokens).to_bytes(8, "little") + tokens.tobytes() + learned.tobytes())
    return digest.hexdigest()
