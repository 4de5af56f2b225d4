"""A table's folder, on disk or in a bucket: a JSON manifest and chunked arrays (TensorStore, Zarr 3).

The manifest holds `settings`, which a run that resumes must share to the letter, and `about`, which it need not. A
chunk is written whole, so one that is there is done. Nothing is deleted that a table did not write.

Of several processes, the first makes the folder and its arrays and writes the manifest; all write chunks.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import tensorstore as ts

from ralm_jax import processes
from ralm_jax.errors import RalmError, UsageError, first_line
from ralm_jax.settings import IfExists
from ralm_jax.text import parse_json

MANIFEST = "manifest.json"
CONTEXT = ts.Context()


class Folder:
    """One table of some kind ("scores", "retrieval", "index") at a location.

    Attributes:
        location: as the user gave it.
        manifest: {"kind", "arrays", "settings", "about"}.
    """

    def __init__(self, location: str, store: ts.KvStore, manifest: dict[str, Any]):
        self.location, self.manifest, self._store = location, manifest, store

    @property
    def settings(self) -> dict[str, Any]:
        return self.manifest["settings"]

    @property
    def about(self) -> dict[str, Any]:
        return self.manifest["about"]

    @classmethod
    def open(cls, location: str, kind: str) -> Self:
        """An existing table.

        Raises:
            UsageError: there is none of this kind at `location`.
        """
        store = open_store(location)
        manifest = read_manifest(location, store)
        if manifest is None or manifest["kind"] != kind:
            found = f" (but {manifest['kind']})" if manifest else ""
            raise UsageError(f"{location}: no {kind} there{found}")
        return cls(location, store, manifest)

    @classmethod
    def create(
        cls,
        location: str,
        kind: str,
        settings: dict[str, Any],
        if_exists: IfExists = "refuse",
        *,
        resumable: bool = True,
    ) -> Self:
        """A new table, or the one that is there, to go on with.

        Args:
            resumable: whether a message may advise to resume.

        Raises:
            UsageError: something is there and `if_exists` refuses, or it is not a table of ours.
            RalmError: `if_exists` resumes, and the table there was made with other settings.
        """
        settings = json.loads(json.dumps(settings, allow_nan=False))  # as it will read back

        def make() -> dict[str, Any]:
            return cls._create(location, kind, settings, if_exists, resumable).manifest

        manifest = processes.once(make)
        if not processes.first() and read_manifest(location, open_store(location)) is None:
            raise UsageError(f"{location}: process 0 made it, and it is not here; all processes must see one folder")
        return cls(location, open_store(location), manifest)

    @classmethod
    def _create(cls, location: str, kind: str, settings: dict[str, Any], if_exists: IfExists, resumable: bool) -> Self:
        store = open_store(location)
        taken = is_taken(location, store)
        manifest = read_manifest(location, store) if taken else None
        if taken and (manifest is None or manifest["kind"] != kind):
            raise UsageError(f"{location}: exists and does not hold {kind} of ours; choose another folder")
        if manifest is not None and if_exists == "refuse":
            options = "--resume to go on, or --overwrite" if resumable else "--overwrite"
            raise UsageError(f"{location}: holds an earlier run's {kind}; add {options}")
        if manifest is not None and if_exists == "resume":
            refuse_mismatch(location, manifest["settings"], settings)
            return cls(location, store, manifest)
        for name in manifest["arrays"] if manifest is not None else ():
            store.delete_range(ts.KvStore.KeyRange(f"{name}/", f"{name}0")).result()
        folder = cls(location, store, {"kind": kind, "arrays": [], "settings": settings, "about": {}})
        folder.write_manifest()
        return folder

    def write_manifest(self) -> None:
        if not processes.first():
            return
        content = json.dumps(self.manifest, indent=2, allow_nan=False) + "\n"
        self.writing(lambda: self._store.write(MANIFEST, content.encode()).result())

    def array(self, name: str, shape: tuple[int, ...], chunk: tuple[int, ...], dtype: str, fill: float) -> "Array":
        """The array `name`, made if it is not there; `fill` marks what has not been written.

        Args:
            chunk: shape of what is written at once; an array that is there keeps its own.
        """
        if name not in self.manifest["arrays"]:
            self.manifest["arrays"].append(name)
            self.write_manifest()
        options: dict[str, Any] = {"dtype": dtype, "shape": shape, "fill_value": np.asarray(fill, dtype)}

        def make() -> None:
            there = self.reading(name, lambda: self._store.read(f"{name}/zarr.json").result().state == "value")
            new = {} if there else {"create": True, "chunk_layout": ts.ChunkLayout(chunk_shape=chunk)}
            self.writing(lambda: open_array(self.location, name, **options, **new))

        processes.once(make)
        return Array(self, name, self.writing(lambda: open_array(self.location, name, **options)))

    def write(self, name: str, values: np.ndarray, chunk: tuple[int, ...], dtype: str, fill: float) -> None:
        """Writes `values` as the array `name`; as `array`."""
        array = self.array(name, values.shape, chunk, dtype, fill)
        if processes.first():
            array[:] = values

    def stored(self, name: str) -> "Array":
        """The array `name`, to be read a slice at a time.

        Raises:
            RalmError: it is missing or damaged.
        """
        return Array(self, name, self.reading(name, lambda: open_array(self.location, name)))

    def read(self, name: str) -> np.ndarray:
        """The whole array `name`.

        Raises:
            RalmError: it is missing or damaged.
        """
        return self.reading(name, lambda: open_array(self.location, name).read().result())

    def reading(self, name: str, read: Callable[[], Any]) -> Any:
        """What `read` gives.

        Raises:
            RalmError: array `name` is missing or damaged.
        """
        try:
            return read()
        except (ValueError, OSError) as error:
            raise RalmError(
                f"{self.location}: array {name!r} is damaged ({first_line(error)}); make it anew with --overwrite"
            ) from None

    def writing(self, write: Callable[[], Any]) -> Any:
        """What `write` gives.

        Raises:
            RalmError: no room, or no permission.
        """
        try:
            return write()
        except (ValueError, OSError) as error:
            raise RalmError(f"{self.location}: cannot be written ({first_line(error)})") from None


class Array:
    """A chunked array that is written a slice at a time."""

    def __init__(self, folder: Folder, name: str, store: ts.TensorStore):
        self._folder, self._name, self._store = folder, name, store

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._store.shape)

    @property
    def chunk(self) -> int:
        """Rows a chunk."""
        shape = self._store.chunk_layout.read_chunk.shape
        return int(shape[0] or 1) if shape else 1

    def __getitem__(self, index: Any) -> np.ndarray:
        return self._folder.reading(self._name, lambda: self._store[index].read().result())

    def __setitem__(self, index: Any, values: np.ndarray) -> None:
        try:
            self._folder.writing(lambda: self._store[index].write(values).result())
        except RalmError as error:
            raise RalmError(f"{error}; finished chunks are kept: make room and go on with --resume") from None

    def missing(self, done: np.ndarray) -> list[range]:
        """The chunks of rows that are not done; `done` (n,) says it of each row."""
        chunks = (range(i, min(i + self.chunk, len(done))) for i in range(0, len(done), self.chunk))
        return [chunk for chunk in chunks if not done[chunk.start]]

    def unwritten(self) -> list[range]:
        """The chunks of rows that are not there, by their names alone: for arrays that are too large to be read.

        Rows are whole in a chunk. A chunk of nothing but the fill value is not there either.
        """
        keys = self._folder.reading(
            self._name, lambda: set(open_store(f"{self._folder.location.rstrip('/')}/{self._name}").list().result())
        )
        rest = "/0" * (len(self.shape) - 1)
        starts = range(0, self.shape[0], self.chunk)
        chunks = (range(start, min(start + self.chunk, self.shape[0])) for start in starts)
        return [chunk for i, chunk in enumerate(chunks) if f"c/{i}{rest}".encode() not in keys]


def store_spec(location: str) -> Any:
    """TensorStore's spec of a location: a URL such as gs://bucket/path, or a local path."""
    if "://" in location:
        return location.rstrip("/") + "/"
    return {"driver": "file", "path": f"{Path(location).expanduser().absolute()}/"}


def open_store(location: str) -> ts.KvStore:
    try:
        return ts.KvStore.open(store_spec(location), context=CONTEXT).result()
    except (ValueError, OSError) as error:
        raise UsageError(f"{location}: cannot be opened ({first_line(error)})") from None


def open_array(location: str, name: str, **options: Any) -> ts.TensorStore:
    spec = {"driver": "zarr3", "kvstore": store_spec(f"{location.rstrip('/')}/{name}")}
    return ts.open(spec, context=CONTEXT, **({"open": True} | options)).result()


def is_taken(location: str, store: ts.KvStore) -> bool:
    """Whether anything is at `location`.

    Raises:
        UsageError: it is a file, or cannot be listed.
    """
    path = Path(location).expanduser()
    try:
        if "://" in location:
            return bool(store.list().result())
        return path.exists() and any(path.iterdir())
    except NotADirectoryError:
        raise UsageError(f"{location}: exists and is not a folder") from None
    except (ValueError, OSError) as error:
        raise UsageError(f"{location}: cannot be listed ({first_line(error)})") from None


def read_manifest(location: str, store: ts.KvStore) -> dict[str, Any] | None:
    """The manifest, or None where there is none of ours.

    Raises:
        UsageError: `location` cannot be read.
        RalmError: the manifest is damaged.
    """
    try:
        result = store.read(MANIFEST).result()
    except (ValueError, OSError) as error:
        raise UsageError(f"{location}: cannot be read ({first_line(error)})") from None
    if result.state != "value":
        return None
    manifest = parse_json(result.value, f"{location.rstrip('/')}/{MANIFEST}")
    ours = isinstance(manifest, dict) and {"kind", "arrays", "settings", "about"} <= manifest.keys()
    return manifest if ours else None


def refuse_mismatch(location: str, there: dict[str, Any], here: dict[str, Any]) -> None:
    """Refuses to mix what was made in two ways.

    Raises:
        RalmError: naming the settings that differ, with both values.
    """
    listed = differences(there, here)
    if listed:
        raise RalmError(f"{location}: was made with other settings and cannot be resumed: {listed}")


def differences(there: dict[str, Any], here: dict[str, Any]) -> str:
    """The first settings that differ, with both values; nothing if none do."""
    there, here = flat(there), flat(here)
    differing = [key for key in sorted(there.keys() | here.keys()) if there.get(key) != here.get(key)]
    return "; ".join(f"{key}: {there.get(key)!r} there, {here.get(key)!r} now" for key in differing[:4])


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings within settings as "outer.inner"."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def check_disk(location: str, needed: float) -> None:
    """
    Raises:
        RalmError: the disk of the folder `location` has less than `needed` bytes.
    """
    free = shutil.disk_usage(Path(location).expanduser()).free
    if needed > free:
        told = f"{megabytes(needed)} are needed and the disk has {megabytes(free)}"
        raise RalmError(f"{location}: {told}; make room and go on with --resume")


def megabytes(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"
