"""Corpora: rows or running text in, passages out; and the passages of an index, memory-mapped.

Lines are split on "\\n" only, and every refusal names file and line.
"""

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ralm_jax.errors import RalmError, UsageError
from ralm_jax.settings import at_least
from ralm_jax.text import encodable, read_lines, read_rows, writing

Format = Literal["auto", "pyserini", "beir", "dpr", "text"]

HEADING = re.compile(r"\s*(?:#{1,6}\s+(.+?)\s*#*|=+ (.+?) =+)\s*")  # Markdown's and WikiText's
TEXT_SUFFIXES = re.compile(r"(\.(txt|text|md))?(\.gz)?$")
BATCH_ROWS = 1 << 14
SCHEMA = pa.schema([("id", pa.string()), ("title", pa.string()), ("text", pa.string())])


class Passage(NamedTuple):
    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """What is indexed, and what stands in front of a prefix: title, newline, text; the text alone without title."""
        return f"{self.title}\n{self.text}" if self.title else self.text

    @property
    def identity(self) -> bytes:
        """What a corpus is hashed by."""
        return repr(tuple(self)).encode()


def read_corpus(
    path: str, format: Format = "auto", *, passage_words: int = 100, split_rows: bool = False
) -> Iterator[Passage]:
    """The passages of a file, or of all files of a folder in the order of their names.

    Args:
        format: of the files: "pyserini" jsonl {id, contents}; "beir" jsonl {_id or id, title, text}; "dpr" TSV with
            the header id, text, title; "text"; or "auto", by file name and first row.
        passage_words: running text is cut into passages of so many words that do not overlap.
        split_rows: cut the rows of jsonl and TSV files as well; they are passages as they are otherwise.

    Raises:
        UsageError: no such file or folder, or `passage_words` below 1.
        RalmError: no passages, or a row that is not of the format; file and line are named.
    """
    at_least(1, passage_words=passage_words)
    passages = corpus_passages(path, format, passage_words, split_rows)
    first = next(passages, None)
    if first is None:
        raise RalmError(f"{path}: no passages in it")
    yield first
    yield from passages


def corpus_passages(path: str, format: Format, passage_words: int, split_rows: bool) -> Iterator[Passage]:
    for file, name in corpus_files(path):
        kind = detect_format(file) if format == "auto" else format
        if kind == "text":
            yield from text_passages(file, name, passage_words)
            continue
        for passage in {"pyserini": pyserini_rows, "beir": beir_rows, "dpr": dpr_rows}[kind](file):
            if split_rows:
                for i, text in enumerate(cut_words(passage.text, passage_words) or [""]):
                    yield Passage(f"{passage.id}-{i}", passage.title, text)
            else:
                yield passage


def corpus_files(path: str) -> list[tuple[Path, str]]:
    """The files of a corpus and their names without suffix, below the folder if it is one; of a BEIR data set only
    the corpus.

    Raises:
        UsageError: a folder without files.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        return [(root, TEXT_SUFFIXES.sub("", root.name))]
    files = sorted(file for file in root.rglob("*") if file.is_file())
    if any(file.name.startswith("queries.jsonl") for file in files):
        files = [file for file in files if file.name.startswith("corpus.jsonl")] or files
    if not files:
        raise UsageError(f"{path}: the folder has no files")
    return [(file, TEXT_SUFFIXES.sub("", str(file.relative_to(root)))) for file in files]


def describe_corpus(path: str, format: Format, *, passage_words: int, split_rows: bool) -> dict[str, Any]:
    """What the passages of `read_corpus` depend on, without reading the files: their names, sizes and times."""
    digest = sha256()
    for file, _ in corpus_files(path):
        state = file.stat() if file.exists() else None
        digest.update(f"{file}:{state and state.st_size}:{state and state.st_mtime_ns}\n".encode())
    return {
        "corpus": path,
        "files": digest.hexdigest(),
        "corpus_format": format,
        "passage_words": passage_words,
        "split_rows": split_rows,
    }


def detect_format(file: Path) -> Literal["pyserini", "beir", "dpr", "text"]:
    """By suffix, and for jsonl by the fields of the first row.

    Raises:
        RalmError: a suffix that is not one of running text either.
    """
    suffix = file.with_suffix("").suffix if file.suffix == ".gz" else file.suffix
    if suffix == ".tsv":
        return "dpr"
    if suffix == ".jsonl":
        return next(("pyserini" if "contents" in row else "beir" for _, row in json_rows(file)), "beir")
    if suffix in (".json", ".csv", ".parquet", ".arrow"):
        raise RalmError(
            f"{file}: {suffix} is not one of the formats; if it is one by another name, say --corpus-format"
        )
    return "text"


def json_rows(file: Path) -> Iterator[tuple[str, dict]]:
    """Place (file:line) and object of every row."""
    for where, row in read_rows(file):
        if not isinstance(row, dict):
            raise RalmError(f"{where}: expected a JSON object, found {type(row).__name__}")
        yield where, row


def field(row: dict, names: Sequence[str], where: str, *, default: str | None = None) -> str:
    """The first of `names` that `row` has, as clean text; numbers are accepted as ids."""
    if not isinstance(row, dict):
        raise RalmError(f"{where}: expected an object, found {type(row).__name__}")
    for name in names:
        value = row.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise RalmError(f"{where}: field {name!r} is {type(value).__name__}, expected a string")
        return clean(str(value), where)
    if default is None:
        raise RalmError(f"{where}: field {' or '.join(map(repr, names))} is missing")
    return default


def clean(text: str, where: str) -> str:
    return encodable(text, where).replace("\0", " ")


def pyserini_rows(file: Path) -> Iterator[Passage]:
    """{id, contents: "title\\ntext"}; contents of one line have no title."""
    for where, row in json_rows(file):
        contents = field(row, ["contents"], where)
        title, newline, text = contents.partition("\n")
        yield Passage(field(row, ["id"], where), *((title, text) if newline else ("", contents)))


def beir_rows(file: Path) -> Iterator[Passage]:
    """{_id, title, text}; `id` will do, and a title may be missing."""
    for where, row in json_rows(file):
        yield Passage(
            field(row, ["_id", "id"], where), field(row, ["title"], where, default=""), field(row, ["text"], where)
        )


def dpr_rows(file: Path) -> Iterator[Passage]:
    """DPR's TSV: header id, text, title (text before title), quoted as CSV, newlines inside quotes allowed."""
    csv.field_size_limit(1 << 30)
    # strict: a quote that is never closed, or goes on after closing, is an error instead of a swallowed row
    lines = (line.removesuffix("\r") + "\n" for _, line in read_lines(file))
    reader = csv.reader(lines, delimiter="\t", strict=True)
    columns: dict[str, int] | None = None
    while True:
        where = f"{file}:{reader.line_num + 1}"
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise RalmError(f"{where}: {error}; the quoting of this row is broken") from None
        if columns is None:
            if sorted(row) != ["id", "text", "title"]:
                raise RalmError(f"{where}: expected the header id, text, title; found {', '.join(row)[:80]}")
            columns = {name: i for i, name in enumerate(row)}
            continue
        if len(row) != 3:
            raise RalmError(f"{where}: {len(row)} fields, expected 3 (id, text, title)")
        yield Passage(*(clean(row[columns[name]], where) for name in ("id", "title", "text")))


def text_passages(file: Path, name: str, words: int) -> Iterator[Passage]:
    """Running text, cut into passages; the title is the last heading, or the file's name."""
    title, pending, count = name, [], 0
    for number, line in read_lines(file):
        heading = HEADING.fullmatch(line)
        pending += [] if heading else clean(line, f"{file}:{number}").split()
        while len(pending) >= words or (heading and pending):
            yield Passage(f"{name}-{count}", title, " ".join(pending[:words]))
            pending, count = pending[words:], count + 1
        if heading:
            title = heading.group(1) or heading.group(2)
    if pending:
        yield Passage(f"{name}-{count}", title, " ".join(pending))


def cut_words(text: str, words: int) -> list[str]:
    split = text.split()
    return [" ".join(split[i : i + words]) for i in range(0, len(split), words)]


# --- the passages of an index ---


def write_passages(passages: Iterable[Passage], path: Path) -> Iterator[Passage]:
    """Passes `passages` through while writing them to `path` as an Arrow file.

    Raises:
        RalmError: it cannot be written.
    """
    with writing(path), pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        batch: list[Passage] = []
        for passage in passages:
            batch.append(passage)
            if len(batch) == BATCH_ROWS:
                writer.write_batch(as_batch(batch))
                batch = []
            yield passage
        if batch:
            writer.write_batch(as_batch(batch))


class Passages:
    """Passages by row, in Arrow batches of `BATCH_ROWS` rows; those of a file stay on disk until they are asked for."""

    def __init__(self, batches: Sequence[pa.RecordBatch]):
        self._batches = batches
        self._titled: tuple[frozenset[str], np.ndarray] | None = None

    @classmethod
    def open(cls, path: Path) -> "Passages":
        """The file that `write_passages` wrote, memory-mapped.

        Raises:
            RalmError: it is missing or damaged.
        """
        try:
            file = pa.ipc.open_file(pa.memory_map(str(path)))
            return cls([file.get_batch(i) for i in range(file.num_record_batches)])
        except (OSError, pa.ArrowInvalid) as error:
            raise RalmError(f"{path}: the index's passages cannot be read ({error}); build the index again") from None

    @classmethod
    def of(cls, passages: Sequence[Passage]) -> "Passages":
        """Passages in memory."""
        return cls([as_batch(passages[i : i + BATCH_ROWS]) for i in range(0, len(passages), BATCH_ROWS)])

    def __len__(self) -> int:
        return sum(batch.num_rows for batch in self._batches)

    def rows(self, rows: Iterable[int] | np.ndarray) -> list[Passage]:
        """The passages of `rows`, in their order."""
        places = (divmod(int(row), BATCH_ROWS) for row in rows)
        return [Passage(*(column[i].as_py() for column in self._batches[b].columns)) for b, i in places]

    def contents(self, rows: Iterable[int] | np.ndarray) -> list[str]:
        """`Passage.contents` of `rows`."""
        return [passage.contents for passage in self.rows(rows)]

    def titled(self, titles: frozenset[str]) -> np.ndarray:
        """(N,) bool: the passages whose title is one of `titles`; a title in double quotes counts without them."""
        if self._titled is None or self._titled[0] != titles:  # a text asks for the same titles again and again
            wanted = pa.array(sorted(titles | {f'"{title}"' for title in titles}), pa.string())
            found = [
                pc.is_in(batch["title"], value_set=wanted).to_numpy(zero_copy_only=False) for batch in self._batches
            ]
            self._titled = titles, np.concatenate([np.zeros(0, bool), *found])
        return self._titled[1]


def as_batch(passages: Sequence[Passage]) -> pa.RecordBatch:
    return pa.record_batch([list(column) for column in zip(*passages, strict=True)], SCHEMA)


def read_titles(path: str) -> frozenset[str]:
    """One title a line, as the paper's list of removed articles."""
    return frozenset(line.strip() for _, line in read_lines(Path(path).expanduser()) if line.strip())


def read_queries(path: str) -> list[str]:
    """The queries of a jsonl file of rows {"query"}.

    Raises:
        UsageError: there is no such file.
        RalmError: a row without a query; file and line are named.
    """
    return [field(row, ["query"], where) for where, row in json_rows(Path(path).expanduser())]
