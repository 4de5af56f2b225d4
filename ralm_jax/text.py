"""Evaluated texts: plain files, or rows joined by the paper's data-set rule."""

import gzip
import hashlib
import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ralm_jax.errors import RalmError, UsageError

COMPRESSED = (".gz", ".zst")


@dataclass(frozen=True)
class Text:
    """An evaluated text and where it came from."""

    content: str
    origin: str

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.content.encode()).hexdigest()

    def words(self, start: int, end: int) -> int:
        """The paper's word count of characters `start` to `end`: spaces in the raw string."""
        return self.content.count(" ", start, end)


def read_text(path: str) -> Text:
    """Reads a text file, or rows from .jsonl, either compressed (gzip, zstd) or not.

    A row is a string or an object with "text"; rows are joined with nothing between them, and an empty row becomes
    " \\n", as the released code joins a data set.

    Raises:
        UsageError: there is no such file.
        RalmError: not UTF-8, a row that is neither a string nor has a text, or nothing in it.
    """
    file = Path(path).expanduser()
    if ".jsonl" in file.suffixes:
        content = "".join(row_text(row, where) or " \n" for where, row in read_rows(file))
    else:
        content = "\n".join(line.removesuffix("\r") for _, line in read_lines(file, keep_last=True))
    if not content:
        raise RalmError(f"{path}: the text is empty")
    return Text(content, path)


def read_content(path: Path) -> str:
    """What a UTF-8 file holds, compressed or not.

    Raises:
        UsageError, RalmError: as `read_lines`.
    """
    return "\n".join(line for _, line in read_lines(path, keep_last=True))


def parse_json(content: str | bytes, where: str) -> Any:
    """The value of a JSON text.

    Raises:
        RalmError: it is none; `where` says what it is called.
    """
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RalmError(f"{where}: not JSON ({error})") from None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty if there is no such file.

    Raises:
        RalmError: it is not one.
    """
    content = parse_json(path.read_bytes(), str(path)) if path.exists() else {}
    if not isinstance(content, dict):
        raise RalmError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def row_text(row: Any, where: str) -> str:
    """The text of a data set's row: itself, or its "text"."""
    text = row.get("text") if isinstance(row, dict) else row
    if not isinstance(text, str):
        raise RalmError(f'{where}: expected a string or an object with "text"')
    return encodable(text, where)


def refuse(error: RalmError) -> None:
    """What becomes of a row that cannot be read, unless the caller wants to go on without it."""
    raise error


def read_rows(file: Path, on_bad: Callable[[RalmError], None] = refuse) -> Iterator[tuple[str, Any]]:
    """Place (file:line) and value of every row of a jsonl file; blank lines are passed over.

    Args:
        on_bad: is given what is wrong with a row; the row is skipped if it returns.
    """
    for number, line in read_lines(file, on_bad=on_bad):
        if line.strip():
            where = f"{file}:{number}"
            try:
                value = parse_json(line, where)
            except RalmError as error:
                on_bad(error)
                continue
            yield where, value


def encodable(text: str, where: str) -> str:
    """`text` itself; a lone surrogate in it, which JSON can smuggle in, is refused."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RalmError(f"{where}: a lone surrogate, which is not text") from None
    return text


def read_lines(
    path: Path, *, keep_last: bool = False, on_bad: Callable[[RalmError], None] = refuse
) -> Iterator[tuple[int, str]]:
    """Numbered lines of a UTF-8 file, of the name's compression, split on "\\n" only; a byte-order mark is dropped.

    Args:
        keep_last: also yield what follows the last newline when that is nothing, so that joining restores the file.
        on_bad: is given what is wrong with a line that is not UTF-8; the line is skipped if it returns.

    Raises:
        UsageError: there is no such file.
        RalmError: not UTF-8, or a damaged compressed file; the line is named.
    """
    number = 0
    try:
        with open_compressed(path) as file:
            ended = True
            for number, raw in enumerate(file, start=1):
                ended = raw.endswith(b"\n")
                try:
                    line = raw.removesuffix(b"\n").decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    on_bad(RalmError(f"{path}:{number}: not UTF-8 ({error.reason})"))
                    continue
                yield number, line
            if keep_last and ended and number:
                yield number + 1, ""
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UsageError(f"{path}: is a folder, not a file") from None
    except (EOFError, zlib.error, OSError) as error:
        raise RalmError(f"{path}:{number + 1}: cannot be read ({error})") from None


def data_suffix(path: Path) -> str:
    """The suffix of a file, or of what is compressed in it."""
    return path.with_suffix("").suffix if path.suffix in COMPRESSED else path.suffix


def open_compressed(path: Path) -> BinaryIO:
    """The bytes inside a file whose name ends in one of `COMPRESSED`, or of the file itself; several gzip members or
    zstd frames in a row are one content."""
    if path.suffix == ".gz":
        return gzip.open(path)  # type: ignore[return-value]
    file = path.open("rb")
    if path.suffix != ".zst":
        return file
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))


def write_text(path: str, content: str) -> None:
    """Writes a UTF-8 file, whole or not at all: a full disk leaves what was there before.

    Raises:
        RalmError: it cannot be written.
    """
    with replacing(path) as part:
        part.write_text(content, encoding="utf-8")


def write_lines(path: str, lines: Iterable[str]) -> int:
    """Writes lines, each ended by "\\n", as `write_text` does; compressed if the name says so. Returns their number.

    Raises:
        RalmError: it cannot be written, or a lone surrogate is in a line.
    """
    number = 0
    with replacing(path) as part, part.open("wb") as raw, compressing(raw, path) as file:
        for number, line in enumerate(lines, start=1):
            file.write(encodable(line, f"{path}:{number}").encode() + b"\n")
    return number


def compressing(raw: BinaryIO, path: str) -> Any:
    """What compresses into `raw`, if the name `path` says so; the same lines are the same bytes."""
    if path.endswith(".gz"):
        return gzip.GzipFile("", "wb", fileobj=raw, mtime=0)  # neither name nor time
    if path.endswith(".zst"):
        import pyarrow

        return pyarrow.CompressedOutputStream(raw, "zstd")
    return nullcontext(raw)


def json_line(value: Any) -> str:
    """`value` as JSON that every program takes for one line: what Unicode calls a line end is escaped too."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return line.replace("\x85", "\\u0085").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


@contextmanager
def replacing(path: str) -> Iterator[Path]:
    """The file to write instead of `path`, which it replaces in the end; of a link, what the link leads to.

    Raises:
        RalmError: it cannot be written.
    """
    file = Path(path).expanduser()
    with writing(path):
        if file.exists() and not file.is_file():  # /dev/stdout, a pipe
            yield file
            return
        file = Path(os.path.realpath(file))
        part = file.with_name(f"{file.name}.part")
        try:
            yield part
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """
    Raises:
        RalmError: `path` cannot be written: no room, or no permission.
    """
    try:
        yield
    except OSError as error:
        raise RalmError(f"{path}: cannot be written ({error.strerror or error})") from None
