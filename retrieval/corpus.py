"""Corpora: rows or running text in, passages out; and the passages of an index, memory-mapped.

Lines are split on "\\n" only, and every refusal names file and line.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ralm_jax.errors import RalmError, UsageError
from ralm_jax.settings import at_least
from ralm_jax.text import (
    data_suffix,
    encodable,
    json_line,
    read_lines,
    read_object,
    refuse,
    replacing,
    write_lines,
    writing,
)
from retrieval.rows import (
    SCROLLS,
    OnBad,
    RowCount,
    arrow_rows,
    clean,
    field,
    json_rows,
    named_tsv_rows,
    parquet_rows,
    split_input,
    tsv_line,
)

FileFormat = Literal["pyserini", "beir", "longbench", "scrolls", "dpr", "parquet", "arrow", "text"]
Format = Literal["auto", FileFormat]
WrittenFormat = Literal["pyserini", "beir", "dpr", "parquet"]

log = logging.getLogger("ralm")

HEADING = re.compile(r"\s*(?:#{1,6}\s+(.+?)\s*#*|=+ (.+?) =+)\s*")  # Markdown's and WikiText's
TEXT_SUFFIXES = re.compile(r"(\.(txt|text|md))?(\.(gz|zst))?$")
ROW_SUFFIXES: dict[str, FileFormat | None] = {".jsonl": None, ".tsv": "dpr", ".parquet": "parquet", ".arrow": "arrow"}
UNKNOWN_SUFFIXES = (".json", ".csv")
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
    path: str,
    format: Format = "auto",
    *,
    passage_words: int = 100,
    split_rows: bool = False,
    count: RowCount | None = None,
) -> Iterator[Passage]:
    """The passages of a file, or of all files of a folder in the order of their names. Which these are is settled at
    once; they are read while the passages are.

    Args:
        format: of the files: "pyserini" jsonl {id, contents}; "beir" jsonl {_id or id, title, text}; "longbench"
            {_id, input, context} or "scrolls" {id, pid, input}, whose documents are running text; "dpr" TSV with the
            header id, text, title; "parquet" or "arrow" (a `datasets` folder) with the columns id, title, text; "text";
            or "auto", by file name and first row.
        passage_words: running text is cut into passages of so many words that do not overlap.
        split_rows: cut the rows of the other files as well; they are passages as they are otherwise.
        count: counts the rows while they are read, and says whether bad ones are skipped; they are refused otherwise.

    Raises:
        UsageError: no such file or folder, or `passage_words` below 1.
        RalmError: no passages, or a row that is not of the format; file and line are named.
    """
    at_least(1, passage_words=passage_words)
    files, left_out = corpus_files(path, format)
    if left_out:
        log.warning(
            "%s: running text beside files with rows is left out, %d in all (%s); index it by itself",
            path, len(left_out), ", ".join(file.name for file in left_out[:3]),
        )  # fmt: skip
    count = count or RowCount()
    return some_passages(path, corpus_passages(files, format, passage_words, split_rows, count), count)


def some_passages(path: str, passages: Iterator[Passage], count: RowCount) -> Iterator[Passage]:
    """
    Raises:
        RalmError: there are none.
    """
    first = next(passages, None)
    if first is None:
        raise RalmError(f"{path}: no passages in it" + (f": {count}" if count.bad else ""))
    yield first
    yield from passages


def corpus_passages(
    files: Iterable[tuple[Path, str]], format: Format, passage_words: int, split_rows: bool, count: RowCount
) -> Iterator[Passage]:
    for file, name in files:
        kind = detect_format(file) if format == "auto" else format
        if kind == "text":
            yield from text_passages(file, name, passage_words, count)
            continue
        for passage in row_passages(file, kind, count):
            if split_rows or kind in DOCUMENTS:
                for i, text in enumerate(cut_words(passage.text, passage_words) or [""]):
                    yield Passage(f"{passage.id}-{i}", passage.title, text)
            else:
                yield passage


def row_passages(file: Path, format: Format, count: RowCount) -> Iterator[Passage]:
    """The passages of a file that has a row for each; a document that stands in several rows comes once.

    Raises:
        RalmError: a row that is not of the format, or two documents of one id; file and line are named.
    """
    rows, as_passage = ROWS[format]
    seen: dict[str, int] = {}
    for where, row in rows(file, count.on_bad):
        try:
            passage = as_passage(row, where)
            repeated = format in DOCUMENTS and was_seen(passage, seen, where)
        except RalmError as error:
            count.on_bad(error)
            continue
        count.rows += 1
        if not repeated:
            yield passage


def was_seen(document: Passage, seen: dict[str, int], where: str) -> bool:
    """Whether `document` stands in `seen`, where it is noted: SCROLLS has a row for each reference.

    Raises:
        RalmError: another one of its id does.
    """
    before, text = document.id in seen, hash(document.text)
    if seen.setdefault(document.id, text) != text:
        raise RalmError(f"{where}: the id {document.id} is that of another document above")
    return before


def corpus_files(path: str, format: Format) -> tuple[list[tuple[Path, str]], list[Path]]:
    """The files of a corpus and their names without suffix, below the folder if it is one; of a BEIR data set only
    the corpus, of what `datasets` saved the files that hold its rows. Hidden and unfinished files are not among them.
    And the files of running text that are left out where others have rows: a README, say.

    Raises:
        UsageError: a folder without files.
        RalmError: a state.json that is not of `datasets`.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        return [(root, TEXT_SUFFIXES.sub("", root.name))], []
    files = sorted(file for file in root.rglob("*") if file.is_file() and is_whole(file.relative_to(root)))
    if any(file.name.startswith("queries.jsonl") for file in files):
        files = [file for file in files if file.name.startswith("corpus.jsonl")] or files
    if any(file.name == "state.json" for file in files):
        files = [data for file in files if file.name == "state.json" for data in datasets_files(file)]
    if not files:
        raise UsageError(f"{path}: the folder has no files")
    kept = files
    if format != "text" and any(data_suffix(file) in ROW_SUFFIXES for file in files):
        kept = [file for file in files if data_suffix(file) in (*ROW_SUFFIXES, *UNKNOWN_SUFFIXES)]
    names = [(file, TEXT_SUFFIXES.sub("", str(file.relative_to(root)))) for file in kept]
    return names, sorted({*files} - {*kept})


def is_whole(place: Path) -> bool:
    """Whether a file, by its place in a folder, is neither hidden nor still being written."""
    return place.suffix != ".part" and not any(part.startswith(".") for part in place.parts)


def datasets_files(state: Path) -> list[Path]:
    """The files that a `datasets` folder's state.json lists."""
    try:
        return [state.parent / Path(entry["filename"]).name for entry in read_object(state)["_data_files"]]
    except (KeyError, TypeError):
        raise RalmError(f"{state}: lists no _data_files, as the state.json of a datasets folder does") from None


def describe_corpus(
    path: str, format: Format, *, passage_words: int, split_rows: bool, skip_bad_rows: bool = False
) -> dict[str, Any]:
    """What the passages of `read_corpus` depend on, without reading the files: their names, sizes and times."""
    return {
        "corpus": path,
        "files": describe_files(file for file, _ in corpus_files(path, format)[0]),
        "corpus_format": format,
        "passage_words": passage_words,
        "split_rows": split_rows,
        "skip_bad_rows": skip_bad_rows,
    }


def describe_files(files: Iterable[Path]) -> str:
    """A hash of their names, sizes and times."""
    digest = sha256()
    for file in files:
        state = file.stat() if file.exists() else None
        digest.update(f"{file}:{state and state.st_size}:{state and state.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def detect_format(file: Path) -> FileFormat:
    """By suffix, and for jsonl by the fields of the first row that can be read.

    Raises:
        RalmError: a suffix that is not one of running text either.
    """
    suffix = data_suffix(file)
    if suffix == ".jsonl":
        rows = json_rows(file, lambda error: None)  # whoever reads the rows finds out about bad ones
        row = next((row for _, row in rows), {})
        return next((format for format, fields in FIELDS.items() if fields <= row.keys()), "beir")
    if suffix in UNKNOWN_SUFFIXES:
        raise RalmError(
            f"{file}: {suffix} is not one of the formats; if it is one by another name, say --corpus-format"
        )
    return ROW_SUFFIXES.get(suffix) or "text"


def pyserini_passage(row: dict, where: str) -> Passage:
    """{id, contents: "title\\ntext"}; contents of one line have no title."""
    return Passage(field(row, ["id"], where), *split_contents(field(row, ["contents"], where)))


def split_contents(contents: str) -> tuple[str, str]:
    """Title and text of `Passage.contents`."""
    title, newline, text = contents.partition("\n")
    return (title, text) if newline else ("", contents)


def columns_passage(row: dict, where: str) -> Passage:
    """{_id or id, title, text}; a title may be missing."""
    title = field(row, ["title"], where, default="")
    return Passage(field(row, ["_id", "id"], where), title, field(row, ["text"], where))


def longbench_document(row: dict, where: str) -> Passage:
    """{_id, input, context, …}: the context."""
    return document(row, field(row, ["context"], where), where)


def scrolls_document(row: dict, where: str) -> Passage:
    """{id, pid, input, output}: what follows the question; of ZeroSCROLLS, what its indexes say."""
    return document(row, split_input(row, where)[1], where)


def document(row: dict, text: str, where: str) -> Passage:
    return Passage(field(row, ["_id", "id"], where), field(row, ["title"], where, default=""), text)


def dpr_rows(file: Path, on_bad: OnBad = refuse) -> Iterator[tuple[str, dict]]:
    """DPR's TSV: header id, text, title (text before title), quoted as CSV, newlines inside quotes allowed."""
    return named_tsv_rows(file, ["id", "text", "title"], on_bad)


ROWS: dict[str, tuple[Callable[[Path, OnBad], Iterator[tuple[str, dict]]], Callable[[dict, str], Passage]]] = {
    "pyserini": (json_rows, pyserini_passage),
    "beir": (json_rows, columns_passage),
    "longbench": (json_rows, longbench_document),
    "scrolls": (json_rows, scrolls_document),
    "dpr": (dpr_rows, columns_passage),
    "parquet": (parquet_rows, columns_passage),
    "arrow": (arrow_rows, columns_passage),
}
FIELDS: dict[FileFormat, set[str]] = {"pyserini": {"contents"}, "longbench": {"input", "context"}, "scrolls": SCROLLS}
DOCUMENTS = ("longbench", "scrolls")  # rows of running text, which are always cut


def text_passages(file: Path, name: str, words: int, lines: RowCount) -> Iterator[Passage]:
    """Running text, cut into passages; the title is the last heading, or the file's name."""
    title, pending, count = name, [], 0
    for number, line in read_lines(file, on_bad=lines.on_bad):
        lines.rows += 1
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


# --- written for other programs ---


def write_corpus(passages: Iterable[Passage], path: str, format: WrittenFormat) -> int:
    """Writes `passages` as a file that `read_corpus` reads back, whole or not at all; returns their number. Lines are
    compressed if the name ends in .gz or .zst.

    Raises:
        RalmError: it cannot be written, or a title of more than one line in the format "pyserini".
    """
    if format == "parquet":
        return write_parquet(passages, path)
    lines = {"pyserini": pyserini_lines, "beir": beir_lines, "dpr": dpr_lines}[format](passages)
    return write_lines(path, lines) - (format == "dpr")


def pyserini_lines(passages: Iterable[Passage]) -> Iterator[str]:
    for passage in passages:
        yield json_line({"id": passage.id, "contents": join_contents(passage)})


def join_contents(passage: Passage) -> str:
    """What `split_contents` splits: as `Passage.contents`, but a text of several lines keeps an empty title.

    Raises:
        RalmError: a title of more than one line.
    """
    if "\n" in passage.title:
        raise RalmError(f"passage {passage.id!r}: its title has more than one line, which Pyserini's files cannot hold")
    return f"\n{passage.text}" if not passage.title and "\n" in passage.text else passage.contents


def beir_lines(passages: Iterable[Passage]) -> Iterator[str]:
    for passage in passages:
        yield json_line({"_id": passage.id, "title": passage.title, "text": passage.text})


def dpr_lines(passages: Iterable[Passage]) -> Iterator[str]:
    yield tsv_line(["id", "text", "title"])
    for passage in passages:
        yield tsv_line([passage.id, passage.text, passage.title])


def write_parquet(passages: Iterable[Passage], path: str) -> int:
    """As `write_corpus`, with a row group every `BATCH_ROWS` passages."""
    import pyarrow.parquet as pq

    count = 0
    with replacing(path) as part, part.open("wb") as raw, pq.ParquetWriter(raw, SCHEMA) as writer:
        for batch in batches(passages):
            for passage in batch:
                encodable("".join(passage), f"{path}: passage {passage.id!r}")
            writer.write_batch(as_batch(batch))
            count += len(batch)
    return count


def batches(passages: Iterable[Passage]) -> Iterator[list[Passage]]:
    passages = iter(passages)
    while batch := list(islice(passages, BATCH_ROWS)):
        yield batch


# --- the passages of an index ---


def write_passages(passages: Iterable[Passage], path: Path) -> Iterator[Passage]:
    """Passes `passages` through while writing them to `path` as an Arrow file.

    Raises:
        RalmError: it cannot be written.
    """
    with writing(path), pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        for batch in batches(passages):
            writer.write_batch(as_batch(batch))
            yield from batch


class PassageRows(Protocol):
    """Passages by row: what the rows of a retriever's hits are."""

    def __len__(self) -> int: ...

    def rows(self, rows: Iterable[int] | np.ndarray) -> list[Passage]:
        """The passages of `rows`, in their order."""

    def contents(self, rows: Iterable[int] | np.ndarray) -> list[str]:
        """`Passage.contents` of `rows`."""

    def titled(self, titles: frozenset[str], rows: np.ndarray) -> np.ndarray:
        """Which of `rows`, in their shape, have one of `titles`; a title in double quotes counts without them."""


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

    def titled(self, titles: frozenset[str], rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Which of `rows`, all by default, have one of `titles`; a title in double quotes counts without them."""
        if self._titled is None or self._titled[0] != titles:  # a text asks for the same titles again and again
            wanted = pa.array(sorted(titles | {f'"{title}"' for title in titles}), pa.string())
            found = [
                pc.is_in(batch["title"], value_set=wanted).to_numpy(zero_copy_only=False) for batch in self._batches
            ]
            self._titled = titles, np.concatenate([np.zeros(0, bool), *found])
        return self._titled[1][rows]


def as_batch(passages: Sequence[Passage]) -> pa.RecordBatch:
    return pa.record_batch([list(column) for column in zip(*passages, strict=True)], SCHEMA)


def read_field(path: str, name: str) -> list[str]:
    """The texts under `name` in the rows of a jsonl file.

    Raises:
        UsageError: there is no such file.
        RalmError: a row without it, or no rows; file and line are named.
    """
    found = [field(row, [name], where) for where, row in json_rows(Path(path).expanduser())]
    if not found:
        raise RalmError(f"{path}: no rows in it")
    return found
