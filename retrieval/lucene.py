"""Lucene through Pyserini: indexes of 21 million passages that stay on disk, one's own or Pyserini's prebuilt ones.

Pyserini brings the jar and the JVM (pyjnius); the searching is Lucene's own `IndexSearcher`, because Anserini's breaks
ties by the spelling of the id, and here they go to the lower row. Pyserini's own searcher would also import PyTorch and
an OpenAI client that wants a key.

A row is Lucene's own number of a document. It stays while the index stays as it is; `fingerprint` changes with it. An
index that `build_index` made is written by one thread, so that its rows are those of the corpus; unless it is so large
that Lucene merges parts of it, which `build_index` warns of.
"""

import functools
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numba
import numpy as np
from tqdm import tqdm

from ralm_jax.errors import RalmError, UsageError, first_line
from ralm_jax.settings import IfExists, at_least
from ralm_jax.storage import Folder
from ralm_jax.text import parse_json, writing
from retrieval.bm25 import K1, B
from retrieval.corpus import Passage, columns_passage, pyserini_passage
from retrieval.retriever import KIND, Hits, first_kept, new_index

log = logging.getLogger("ralm")

PREBUILT = "lucene:"  # "lucene:NAME" is Pyserini's prebuilt index NAME
OLDEST_JAVA = 21  # what Pyserini's jar is compiled for
SETTINGS = {"engine": "lucene", "analyzer": "DefaultEnglishAnalyzer", "k1": K1, "b": B}
ADVICE = "install a JDK and name it with JAVA_HOME, or use the embedded engine (ralm index without --engine)"

# one thread, for more would shuffle the rows
INDEXER = (
    "pyserini.index.lucene", "--collection", "JsonCollection", "--generator", "DefaultLuceneDocumentGenerator",
    "--threads", "1", "--storeRaw",
)  # fmt: skip

# where systems put a JDK; JAVA_HOME, JVM_PATH and the `java` of the PATH come first
USUAL_FOLDERS = (
    f"{sys.prefix}/lib/jvm",
    "/usr/lib/jvm/*",
    "/usr/lib64/jvm/*",
    "/usr/java/*",
    "/opt/java/*",
    "/opt/jdk*",
    "/Library/Java/JavaVirtualMachines/*/Contents/Home",
    "/opt/homebrew/opt/openjdk*/libexec/openjdk.jdk/Contents/Home",
    "~/.sdkman/candidates/java/*",
    "~/.jdks/*",
)
LIBRARIES = ("lib/server/libjvm.so", "lib/server/libjvm.dylib", "bin/server/jvm.dll")


# --- Java ---


def find_java() -> tuple[Path, int]:
    """Home and version of the first Java that is new enough.

    Raises:
        RalmError: there is none.
    """
    homes = dict.fromkeys(java_homes())
    found = [(home, version) for home in homes for version in [java_version(home)] if version]
    for home, version in found:
        if version >= OLDEST_JAVA:
            return home, version
    seen = "none found" if not found else f"found only {', '.join(f'{version} in {home}' for home, version in found)}"
    raise RalmError(f"Lucene needs Java {OLDEST_JAVA} or newer ({seen}): {ADVICE}")


def java_homes() -> Iterator[Path]:
    """Folders that may hold a Java, the user's choice first."""
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home)
    if library := os.environ.get("JVM_PATH"):
        yield Path(library).resolve().parent.parent.parent
    if command := shutil.which("java"):
        yield Path(command).resolve().parent.parent
    for pattern in USUAL_FOLDERS:
        path = Path(pattern).expanduser()
        yield from sorted(home.resolve() for home in Path(path.anchor).glob(str(path.relative_to(path.anchor))))


def java_version(home: Path) -> int | None:
    """The major version by the file `release` of a Java's home; None where no JVM can be loaded from."""
    try:
        stated = re.search(r'^JAVA_VERSION="(?:1\.)?(\d+)', (home / "release").read_text("utf-8"), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return None
    return int(stated.group(1)) if stated and library_of(home) else None


def library_of(home: Path) -> Path | None:
    return next((home / name for name in LIBRARIES if (home / name).exists()), None)


def java_environment() -> dict[str, str]:
    """What makes pyjnius, and a process of Pyserini's, take the Java of `find_java`."""
    home, _ = find_java()
    return {"JAVA_HOME": str(home), "JVM_PATH": str(library_of(home))}


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Environment variables for a while."""
    before = {name: os.environ.pop(name, None) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


@functools.cache
def java() -> Callable[..., Any]:
    """pyjnius' `autoclass` over Pyserini's jar; the JVM starts at the first call and stays.

    Raises:
        RalmError: no Pyserini, or no Java that is new enough, or it does not start.
    """
    try:
        import jnius_config
        import pyserini
        from pyserini.setup import configure_classpath
    except ImportError as error:
        raise RalmError(f"Lucene needs Pyserini: pip install 'ralm-jax[lucene]' ({error})") from None
    try:
        _, version = find_java()
        if not jnius_config.vm_running:
            configure_classpath(str(Path(pyserini.__path__[0]) / "resources" / "jars"))
            # Ctrl-C stays Python's; and no warning about how Lucene maps its files
            quiet = ["--sun-misc-unsafe-memory-access=allow"] if version >= 23 else []
            jnius_config.set_options("-Xrs", *quiet)
        with environment(**java_environment()):
            import jnius

            level = jnius.autoclass("java.util.logging.Level").SEVERE
        jnius.autoclass("java.util.logging.Logger").getLogger("org.apache.lucene").setLevel(level)
        searcher = jnius.autoclass("org.apache.lucene.search.IndexSearcher")
        searcher.setMaxClauseCount(2**31 - 1)  # queries of more than 1,024 terms
    except RalmError:
        raise
    except Exception as error:  # pyjnius and Pyserini raise bare ones
        raise RalmError(f"Java does not start ({first_line(error)}): {ADVICE}") from None
    return jnius.autoclass


# --- the index ---


def build_index(
    passages: Iterable[Passage],
    location: str,
    *,
    source: dict[str, Any] | None = None,
    if_exists: IfExists = "refuse",
    progress: bool | None = None,
) -> "LuceneIndex":
    """Indexes `passages` (title and text) with Pyserini's indexer into the folder `location`; Lucene's own files, which
    Pyserini opens too, are in `lucene` there.

    Args:
        source: where the passages come from (`corpus.describe_corpus`), for whoever looks at the index later.
        progress: show a progress bar; None for "if there is a terminal".

    Raises:
        UsageError: `location` is taken and `if_exists` refuses, or it is not an index, or not a local folder; or
            `if_exists` resumes, which Lucene's indexer cannot.
        RalmError: no Java or no Pyserini, a row of the corpus is broken, there are no passages, or the indexer fails.
    """
    if if_exists == "resume":
        raise UsageError(f"{location}: a Lucene index is made in one go; make it anew with --overwrite")
    java()
    folder, passages = new_index(location, passages, SETTINGS, if_exists, resumable=False)
    root = Path(location).expanduser().absolute()
    with tempfile.TemporaryDirectory(dir=root, prefix="passages-") as rows:
        bar = tqdm(passages, unit=" passages", disable=None if progress is None else not progress)
        count, corpus = write_rows(bar, rows)
        run_indexer(rows, root / "lucene")
    index = LuceneIndex.of(location, root / "lucene", {})
    if len(index.passages) != count:
        raise RalmError(f"{location}: Lucene indexed {len(index.passages):,} of {count:,} passages")
    if merged(root / "lucene"):
        log.warning("%s: Lucene merged parts of the index; its rows may not be in the order of the corpus", location)
    folder.about.update(passages=count, corpus=corpus, source=source or {})
    folder.write_manifest()
    return LuceneIndex.open(location)


def write_rows(passages: Iterable[Passage], folder: str) -> tuple[int, str]:
    """Writes Pyserini's jsonl; gives the number of passages and the corpus's hash.

    Title and text stand in it besides, for `contents` alone could not be split into them for sure. A passage without
    text is written as a full stop, which has no terms either: the indexer drops empty ones and would shift all rows.
    """
    count, digest = 0, sha256()
    path = Path(folder) / "passages.jsonl"
    with writing(path), path.open("w", encoding="ascii") as file:
        for count, passage in enumerate(passages, start=1):  # noqa: B007
            row = passage._asdict() | {"contents": passage.contents if passage.contents.strip() else "."}
            file.write(json.dumps(row) + "\n")
            digest.update(passage.identity)
    return count, digest.hexdigest()


def run_indexer(rows: str, index: Path) -> None:
    """Pyserini's documented command, in a process of its own.

    Raises:
        RalmError: it fails; its last line is given.
    """
    before = set(index.glob("segments_*"))
    command = [sys.executable, "-m", *INDEXER, "--input", rows, "--index", str(index)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | java_environment(), check=False)
    if done.returncode or set(index.glob("segments_*")) <= before:  # its errors can have code 0
        last = (done.stderr.strip() or done.stdout.strip() or "it says nothing").splitlines()[-1]
        raise RalmError(f"{index}: Pyserini's indexer failed with code {done.returncode} ({last})")


def merged(files: Path) -> bool:
    """Whether Lucene has put parts of an index together, which it does in any order."""
    segments = java()("org.apache.lucene.index.SegmentInfos").readLatestCommit(open_directory(files)).asList()
    return any(segment.info.getDiagnostics().get("source") != "flush" for segment in segments.toArray())


def open_directory(files: Path) -> Any:
    """Lucene's view of a folder."""
    path = java()("java.nio.file.Paths").get(str(files.absolute()))
    return java()("org.apache.lucene.store.FSDirectory").open(path)


def download_prebuilt(name: str) -> str:
    """The folder of Pyserini's prebuilt index `name`, downloaded into Pyserini's cache if it is not there.

    Raises:
        UsageError: Pyserini has no index of this name.
        RalmError: it cannot be downloaded.
    """
    java()
    from pyserini.prebuilt_index_info import TF_INDEX_INFO
    from pyserini.util import download_prebuilt_index

    if name not in TF_INDEX_INFO:
        raise UsageError(f"{PREBUILT}{name}: not one of Pyserini's prebuilt BM25 indexes")
    try:
        with redirect_stdout(sys.stderr):
            return str(download_prebuilt_index(name, verbose=False))
    except (ValueError, OSError) as error:
        raise RalmError(f"{PREBUILT}{name}: cannot be downloaded ({first_line(error)})") from None


class LucenePassages:
    """The documents of an index by their numbers; those used last are kept."""

    def __init__(self, location: str, reader: Any):
        self._location, self._reader = location, reader
        self._read = functools.lru_cache(maxsize=1 << 16)(self._read_document)

    def __len__(self) -> int:
        return int(self._reader.maxDoc())

    def rows(self, rows: Iterable[int] | np.ndarray) -> list[Passage]:
        """The passages of `rows`, in their order.

        Raises:
            RalmError: the index does not store its documents, or not as JSON with contents or text.
        """
        return [self._read(int(row)) for row in rows]

    def contents(self, rows: Iterable[int] | np.ndarray) -> list[str]:
        """`Passage.contents` of `rows`."""
        return [passage.contents for passage in self.rows(rows)]

    def titled(self, titles: frozenset[str], rows: np.ndarray) -> np.ndarray:
        """Which of `rows`, in their shape, have one of `titles`; a title in double quotes counts without them."""
        distinct, places = np.unique(rows, return_inverse=True)
        found = (passage.title for passage in self.rows(distinct))
        return np.array([not titles.isdisjoint((title, unquoted(title))) for title in found], bool)[places]

    def _read_document(self, row: int) -> Passage:
        where = f"{self._location}: document {row}"
        raw = self._reader.storedFields().document(row).get("raw")
        if raw is None:
            raise RalmError(f"{where}: its text is not stored; the index must be built with --storeRaw")
        stored = parse_json(raw, where)
        apart = isinstance(stored, dict) and "text" in stored  # title and text
        return columns_passage(stored, where) if apart else pyserini_passage(stored, where)


def unquoted(title: str) -> str:
    return title[1:-1] if len(title) > 1 and title[0] == title[-1] == '"' else title


@dataclass(frozen=True)
class LuceneIndex:
    """A Lucene index, opened. Queries are analysed as English, as Pyserini does by default; Lucene does not record how
    an index was made.

    Attributes:
        commit: hash of Lucene's list of segments, which no other index and no other state of this one has.
    """

    location: str
    passages: LucenePassages
    settings: dict[str, Any]
    about: dict[str, Any]
    commit: str
    searcher: Any

    @classmethod
    def open(cls, location: str) -> "LuceneIndex":
        """The index at `location`: a folder that `build_index` made, or one with Lucene's own files (segments_N), or a
        prebuilt one of Pyserini's, written "lucene:wikipedia-dpr-100w".

        Raises:
            UsageError: there is none.
            RalmError: not complete or damaged, no Java, no Pyserini, or it cannot be downloaded.
        """
        if location.startswith(PREBUILT):
            location = download_prebuilt(location.removeprefix(PREBUILT))
        root = Path(location).expanduser()
        if any(root.glob("segments_*")):
            return cls.of(location, root, {"source": {"corpus": location}})
        folder = Folder.open(location, KIND)
        if "passages" not in folder.about:
            raise RalmError(f"{location}: the index was not finished; build it again with --overwrite")
        return cls.of(location, root / "lucene", folder.about)

    @classmethod
    def of(cls, location: str, files: Path, about: dict[str, Any]) -> "LuceneIndex":
        """Lucene's `files`, called `location`."""
        autoclass = java()
        from jnius import JavaException

        try:
            reader = autoclass("org.apache.lucene.index.DirectoryReader").open(open_directory(files))
        except JavaException as error:
            raise RalmError(f"{location}: Lucene cannot open the index ({first_line(error)})") from None
        kind = "(Lorg/apache/lucene/index/IndexReader;)V"  # pyjnius would take another of the constructors
        searcher = autoclass("org.apache.lucene.search.IndexSearcher")(reader, signature=kind)
        searcher.setSimilarity(autoclass("org.apache.lucene.search.similarities.BM25Similarity")(K1, B))
        segments = files / reader.getIndexCommit().getSegmentsFileName()
        commit = sha256(segments.read_bytes()).hexdigest()
        return cls(location, LucenePassages(location, reader), SETTINGS, about, commit, searcher)

    @property
    def tokenizer(self) -> None:
        return None

    @property
    def fingerprint(self) -> str:
        return sha256(json.dumps([self.settings, self.commit], sort_keys=True).encode()).hexdigest()

    def search(self, queries: Sequence[str], k: int, excluded: frozenset[str] = frozenset()) -> Hits:
        """The best `k` passages of each query, on all cores; fewer where fewer match.

        Args:
            excluded: titles that are left out: each query goes as deep as it must for k hits to remain.

        Raises:
            UsageError: `k` is below 1.
        """
        at_least(1, k=k)
        if not excluded:
            return self._best(queries, k)
        rows, scores = np.full((len(queries), k), -1, np.int64), np.zeros((len(queries), k), np.float32)
        pending, depth = np.arange(len(queries)), 2 * k
        while len(pending):
            hits = self._best([queries[i] for i in pending.tolist()], depth)
            keep = hits.rows >= 0
            keep[keep] = ~self.passages.titled(excluded, hits.rows[keep])
            rows[pending], scores[pending] = first_kept(hits, keep, k)
            pending = pending[(keep.sum(axis=1) < k) & (hits.rows[:, -1] >= 0)]
            depth = min(4 * depth, len(self.passages) + 1)
        return Hits(rows, scores)

    def _best(self, queries: Sequence[str], k: int) -> Hits:
        """The best `k` of each query, nothing excluded."""
        rows, scores = np.full((len(queries), k), -1, np.int64), np.zeros((len(queries), k), np.float32)
        autoclass = java()
        generator = autoclass("io.anserini.search.query.BagOfWordsQueryGenerator")()
        analyzer = autoclass("io.anserini.analysis.DefaultEnglishAnalyzer").newDefaultInstance()
        depth = min(k, max(1, len(self.passages)))

        def work(mine: range) -> None:
            import jnius

            try:
                for j in mine:
                    query = generator.buildQuery("contents", analyzer, queries[j])
                    for i, hit in enumerate(self.searcher.search(query, depth).scoreDocs):
                        rows[j, i], scores[j, i] = hit.doc, hit.score
            finally:
                jnius.detach()  # a thread that ends attached to the JVM would crash it

        threads = max(1, min(numba.get_num_threads(), len(queries)))
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, [range(thread, len(queries), threads) for thread in range(threads)]))
        return Hits(rows, scores)
