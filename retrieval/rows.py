"""Rows of files: jsonl, JSON, TSV, Parquet and Arrow, each row with its place, and what becomes of broken ones.

Lines are split on "\\n" only, and every refusal names file and line (or row).
"""

import csv
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from ralm_jax.errors import RalmError, UsageError, first_line
from ralm_jax.text import encodable, read_content, read_lines, read_rows, refuse

OnBad = Callable[[RalmError], None]

COLUMNS = ("id", "_id", "title", "text")  # of Parquet and Arrow files; others (embeddings, say) are not read

SCROLLS = {"pid", "input"}  # fields that its rows have, and no others
HEADER = re.compile(r"\A(Question|Query|Question and Possible Answers):\n")  # in front of ZeroSCROLLS's questions

GAP = re.compile(r"[ \t\r\n,:]*")  # what stands between the elements of a JSON text that is known to be valid


@dataclass
class RowCount:
    """How many rows were read, and how many of them were skipped because they are broken.

    Attributes:
        skip_bad: skip broken rows; they are refused otherwise.
        rows: rows of tables, lines of running text.
        bad: those of them that were skipped.
        first_bad: what is wrong with the first one.
    """

    skip_bad: bool = False
    rows: int = 0
    bad: int = 0
    first_bad: str = ""

    def on_bad(self, error: RalmError) -> None:
        """
        Raises:
            RalmError: `error`, unless bad rows are skipped.
        """
        if not self.skip_bad:
            raise error
        self.rows, self.bad, self.first_bad = self.rows + 1, self.bad + 1, self.first_bad or str(error)

    def __str__(self) -> str:
        skipped = f", {self.bad:,} of them bad and skipped (the first: {self.first_bad})" if self.bad else ""
        return f"{self.rows:,} row{'s' * (self.rows != 1)} read{skipped}"


def json_rows(file: Path, on_bad: OnBad = refuse) -> Iterator[tuple[str, dict]]:
    """Place (file:line) and object of every row of a jsonl file."""
    for where, row in read_rows(file, on_bad):
        if isinstance(row, dict):
            yield where, row
        else:
            on_bad(RalmError(f"{where}: expected a JSON object, found {type(row).__name__}"))


def json_entries(file: Path, on_bad: OnBad = refuse) -> Iterator[tuple[str, str | None, dict]]:
    """Place (file:line), key and object of every entry: of a list, by itself or as TriviaQA's "Data", of an object of
    objects by key, or of jsonl.

    Only an object of objects has keys. A list or an object is read whole; jsonl is streamed.

    Raises:
        UsageError: there is no such file.
        RalmError: not JSON, or an entry is not an object.
    """
    head = list(islice((line for _, line in read_lines(file) if line.strip()), 2))
    first = parsed(head[0]) if head else {}
    if isinstance(first, dict) and (len(head) != 1 or entries_of(first) is None):
        yield from ((where, None, row) for where, row in json_rows(file, on_bad))
        return
    content = read_content(file)
    try:
        whole = json.loads(content)
    except (ValueError, RecursionError) as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else 1
        raise RalmError(f"{file}:{line}: not JSON ({error})") from None
    entries = entries_of(whole)
    if entries is None:
        raise RalmError(f"{file}:1: expected a list of objects, an object of objects, or an object a line")
    keyed, count, decode = isinstance(entries, dict), len(entries), json.JSONDecoder().raw_decode
    start = skip_gap(content, 0) if keyed or entries is whole else start_of("Data", content)
    del whole, entries
    key, line, passed, position = None, 1, 0, start + 1
    for _ in range(count):
        if keyed:
            key, position = decode(content, skip_gap(content, position))
        start = skip_gap(content, position)
        value, position = decode(content, start)
        line, passed = line + content.count("\n", passed, start), start
        if isinstance(value, dict):
            yield f"{file}:{line}", key, value
        else:
            on_bad(RalmError(f"{file}:{line}: expected a JSON object, found {type(value).__name__}"))
    if content[skip_gap(content, position)] not in "]}":
        raise RalmError(f"{file}:{line}: a key stands in the object twice")


def parsed(line: str) -> Any:
    """The value of a JSON text; None if it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def entries_of(value: Any) -> list | dict | None:
    """A list, by itself or as TriviaQA's "Data", or an object of objects; None if `value` is none of these."""
    if isinstance(value, dict) and isinstance(value.get("Data"), list):
        return value["Data"]
    keyed = isinstance(value, dict) and bool(value) and all(isinstance(inner, dict) for inner in value.values())
    return value if keyed or isinstance(value, list) else None


def start_of(name: str, content: str) -> int:
    """Where the value of the key `name`, which is there, starts in the JSON text of an object."""
    decode, position = json.JSONDecoder().raw_decode, content.index("{") + 1
    while True:
        key, position = decode(content, skip_gap(content, position))
        start = skip_gap(content, position)
        if key == name:
            return start
        _, position = decode(content, start)


def skip_gap(content: str, position: int) -> int:
    match = GAP.match(content, position)
    return match.end() if match else position


def tsv_rows(file: Path, on_bad: OnBad = refuse) -> Iterator[tuple[str, list[str]]]:
    """Place (file:line) and fields of every row of a TSV file, quoted as CSV; blank lines are passed over.

    What stands inside quotes is content: tabs, line ends of either kind, doubled quotes for quotes. A quote that is
    never closed, or goes on after closing, spoils its row and not the lines below.
    """
    csv.field_size_limit(1 << 30)
    lines, again = read_lines(file, on_bad=on_bad), deque[tuple[int, str]]()
    taken: list[tuple[int, str]] = []  # by the row at hand
    reader = None
    while True:
        reader = reader or csv.reader(take_lines(lines, again, taken), delimiter="\t", strict=True)
        taken.clear()
        try:
            row = next(reader, None)
        except csv.Error as error:
            on_bad(RalmError(f"{file}:{taken[0][0]}: {error}; the quoting of this row is broken"))
            again.extendleft(reversed(taken[1:]))
            reader = None
            continue
        if row is None:
            return
        whole = taken[-1][0] - taken[0][0] == len(taken) - 1  # else a line in it was not UTF-8, and was skipped
        if row and whole:
            yield f"{file}:{taken[0][0]}", row


def take_lines(
    lines: Iterator[tuple[int, str]], again: deque[tuple[int, str]], taken: list[tuple[int, str]]
) -> Iterator[str]:
    """Lines with their ends, those of `again` first; they are noted in `taken`."""
    while (numbered := again.popleft() if again else next(lines, None)) is not None:
        taken.append(numbered)
        yield numbered[1] + "\n"


def tsv_line(fields: Iterable[str]) -> str:
    """The line(s) that `tsv_rows` reads as `fields`; only what needs quotes has them."""
    return "\t".join('"' + f.replace('"', '""') + '"' if re.search('["\t\r\n\ufeff]', f) else f for f in fields)


def named_tsv_rows(file: Path, names: Sequence[str], on_bad: OnBad = refuse) -> Iterator[tuple[str, dict[str, str]]]:
    """The rows of a TSV file whose header has these names in any order, by name.

    Raises:
        RalmError: another header, whatever `on_bad` does.
    """
    header: list[str] | None = None
    for where, row in tsv_rows(file, on_bad):
        if header is None:
            if sorted(row) != sorted(names):
                raise RalmError(f"{where}: expected the header {', '.join(names)}; found {', '.join(row)[:80]}")
            header = row
        elif len(row) != len(names):
            on_bad(RalmError(f"{where}: {len(row)} fields, expected {len(names)} ({', '.join(names)})"))
        else:
            yield where, dict(zip(header, row, strict=True))


def parquet_rows(
    file: Path, on_bad: OnBad = refuse, *, columns: Sequence[str] | None = COLUMNS
) -> Iterator[tuple[str, dict]]:
    """Place (file: row N) and `columns`, all with None, of every row of a Parquet file."""
    import pyarrow.parquet as pq

    def batches() -> Iterator[pa.RecordBatch]:
        opened = pq.ParquetFile(file)
        names = [name for name in opened.schema_arrow.names if columns is None or name in columns]
        return opened.iter_batches(columns=names)

    yield from batch_rows(file, batches, on_bad, columns)


def arrow_rows(
    file: Path, on_bad: OnBad = refuse, *, columns: Sequence[str] | None = COLUMNS
) -> Iterator[tuple[str, dict]]:
    """As `parquet_rows`, of an Arrow file, or an Arrow stream such as `datasets` saves."""

    def batches() -> Iterator[pa.RecordBatch]:
        source = pa.memory_map(str(file))
        if source.read(6) == b"ARROW1":
            opened = pa.ipc.open_file(source)
            return (opened.get_batch(i) for i in range(opened.num_record_batches))
        source.seek(0)
        return iter(pa.ipc.open_stream(source))

    yield from batch_rows(file, batches, on_bad, columns)


def batch_rows(
    file: Path, batches: Callable[[], Iterator[pa.RecordBatch]], on_bad: OnBad, names: Sequence[str] | None
) -> Iterator[tuple[str, dict]]:
    """
    Raises:
        UsageError: there is no such file.
        RalmError: it is damaged.
    """
    number = 0
    try:
        for batch in batches():
            columns = [(name, batch[name]) for name in batch.schema.names if names is None or name in names]
            for i in range(batch.num_rows):
                number += 1
                where = f"{file}: row {number}"
                try:
                    row = {name: column[i].as_py() for name, column in columns}
                except UnicodeDecodeError as error:
                    on_bad(RalmError(f"{where}: not UTF-8 ({error.reason})"))
                    continue
                yield where, row
    except FileNotFoundError:
        raise UsageError(f"{file}: no such file") from None
    except (pa.ArrowException, OSError) as error:
        raise RalmError(f"{file}: row {number + 1}: cannot be read ({first_line(error)})") from None


def field(row: dict, names: Sequence[str], where: str, *, default: str | None = None) -> str:
    """The first of `names` that `row` has, as clean text; numbers are accepted as ids.

    Raises:
        RalmError: it is not text, or missing without a `default`.
    """
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
    """`text` with spaces for NULs.

    Raises:
        RalmError: a lone surrogate is in it.
    """
    return encodable(text, where).replace("\0", " ")


def split_input(row: dict, where: str) -> tuple[str, str]:
    """Question and document of a row of SCROLLS: what stands before and after its first blank line, without the
    options that QuALITY has there; of ZeroSCROLLS, what its indexes say; its tasks without questions have empty ones.

    Raises:
        RalmError: there is no blank line, or an index is none.
    """
    content = field(row, ["input"], where)
    if row.get("document_start_index") is not None:
        question, document = (indexed(row, content, part, where) for part in ("query", "document"))
        return HEADER.sub("", question.strip()), document.strip()
    question, blank, document = content.partition("\n\n")
    if not blank:
        raise RalmError(f"{where}: input: expected a question, a blank line and a document")
    options, blank, rest = document.lstrip().partition("\n\n")
    has_options = blank and options.startswith("(A)") and "(D)" in options
    return question.strip(), (rest if has_options else document).strip()


def indexed(row: dict, content: str, part: str, where: str) -> str:
    """
    Raises:
        RalmError: the row's start and end of `part` are not places in `content`.
    """
    start, end = row.get(f"{part}_start_index"), row.get(f"{part}_end_index")
    if start == end:  # both may be missing
        return ""
    if not (type(start) is type(end) is int and 0 <= start < end <= len(content)):
        raise RalmError(f"{where}: {part} from {start} to {end}: not a part of the input, of {len(content)} characters")
    return content[start:end]
