"""A table's folder, on disk or in a bucket: a JSON manifest and chunked arrays (TensorStore, Zarr 3).

The manifest holds `settings`, which a run that resumes must share to the letter, and `about`, which it need not. A
chunk is written whole, so one that is there is done. Nothing is deleted that a table did not write.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import tensorstore as ts

from ralm_jax.errors import RalmError, UsageError

MANIFEST = "manifest.json"
CONTEXT = ts.Context()


def kvstore_spec(location: str) -> Any:
    """TensorStore's spec of a location: a URL such as gs://bucket/path, or a local path."""
    if "://" in location:
        return location.rstrip("/") + "/"
    return {"driver": "file", "path": f"{Path(location).expanduser().absolute()}/"}


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.split("\n")[0].split(" [")[0] if text else type(error).__name__


class Folder:
    """One table of some kind ("scores", "retrieval") at a location.

    Attributes:
        location: as the user gave it.
        manifest: {"kind", "settings", "about"}.
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
        *,
        resume: bool | None = False,
        overwrite: bool = False,
    ) -> Self:
        """A new table, or the one that is there, to go on with.

        Args:
            resume: None for a kind of table that cannot be resumed.

        Raises:
            UsageError: something is there and neither `resume` nor `overwrite` is set, or it is not a table of ours.
            RalmError: `resume`, and the table there was made with other settings.
        """
        store = open_store(location)
        try:
            taken = bool(store.list(ts.KvStore.KeyRange("", "")).result()) if "://" in location else any_file(location)
        except ValueError as error:
            raise RalmError(f"{location}: cannot be listed ({first_line(error)})") from None
        manifest = read_manifest(location, store) if taken else None
        settings = json.loads(json.dumps(settings, allow_nan=False))  # as it will read back
        if taken and (manifest is None or manifest["kind"] != kind):
            raise UsageError(f"{location}: exists and does not hold {kind} of ours; choose another folder")
        if manifest is not None and resume:
            refuse_mismatch(location, manifest["settings"], settings)
            return cls(location, store, manifest)
        if manifest is not None and not overwrite:
            options = "--overwrite" if resume is None else "--resume to go on, or --overwrite"
            raise UsageError(f"{location}: holds an earlier run's {kind}; add {options}")
        if manifest is not None:
            for name in manifest["arrays"]:
                store.delete_range(ts.KvStore.KeyRange(f"{name}/", f"{name}0")).result()
        folder = cls(location, store, {"kind": kind, "arrays": [], "settings": settings, "about": {}})
        folder.write_manifest()
        return folder

    def write_manifest(self) -> None:
        content = json.dumps(self.manifest, indent=2, allow_nan=False) + "\n"
        self._write(lambda: self._store.write(MANIFEST, content.encode()).result())

    def array(self, name: str, shape: tuple[int, ...], chunk: tuple[int, ...], dtype: str, fill: float) -> "Array":
        """The array `name`, made if it is not there; `fill` marks what has not been written.

        Args:
            chunk: shape of what is written at once; an array that is there keeps its own.
        """
        if name not in self.manifest["arrays"]:
            self.manifest["arrays"].append(name)
            self.write_manifest()
        spec = {"driver": "zarr3", "kvstore": self._kvstore(name)}
        schema: dict[str, Any] = {"dtype": ts.dtype(dtype), "shape": shape, "fill_value": np.asarray(fill, dtype)}
        if self._store.read(f"{name}/zarr.json").result().state == "value":
            return Array(self._write(lambda: ts.open(spec, open=True, context=CONTEXT, **schema).result()), self)
        layout = ts.ChunkLayout(write_chunk_shape=chunk)
        return Array(
            self._write(lambda: ts.open(spec, create=True, chunk_layout=layout, context=CONTEXT, **schema).result()),
            self,
        )

    def read(self, name: str) -> np.ndarray:
        """The whole array `name`.

        Raises:
            RalmError: it is missing or damaged.
        """
        try:
            spec = {"driver": "zarr3", "kvstore": self._kvstore(name)}
            return ts.open(spec, open=True, context=CONTEXT).result().read().result()
        except (ValueError, OSError) as error:
            raise RalmError(f"{self.location}: array {name!r} cannot be read ({first_line(error)})") from None

    def _kvstore(self, name: str) -> Any:
        return kvstore_spec(f"{self.location.rstrip('/')}/{name}")

    def _write(self, write: Callable[[], Any]) -> Any:
        try:
            return write()
        except (ValueError, OSError) as error:
            raise RalmError(
                f"{self.location}: cannot be written ({first_line(error)}); what was written is kept: make room, "
                "then add --resume"
            ) from None


class Array:
    """A chunked array that is written a slice at a time."""

    def __init__(self, store: ts.TensorStore, folder: Folder):
        self._store, self._folder = store, folder

    @property
    def chunk(self) -> int:
        """Rows a chunk."""
        return (self._store.chunk_layout.write_chunk.shape or ())[0] or 1

    def __getitem__(self, index: Any) -> np.ndarray:
        return self._store[index].read().result()

    def __setitem__(self, index: Any, values: np.ndarray) -> None:
        self._folder._write(lambda: self._store[index].write(values).result())


def any_file(location: str) -> bool:
    """Whether a local folder exists and has something in it.

    Raises:
        UsageError: `location` is a file.
    """
    path = Path(location).expanduser()
    if path.exists() and not path.is_dir():
        raise UsageError(f"{location}: exists and is not a folder")
    return path.is_dir() and any(path.iterdir())


def open_store(location: str) -> ts.KvStore:
    try:
        return ts.KvStore.open(kvstore_spec(location), context=CONTEXT).result()
    except (ValueError, OSError) as error:
        raise UsageError(f"{location}: cannot be opened ({first_line(error)})") from None


def read_manifest(location: str, store: ts.KvStore) -> dict[str, Any] | None:
    """The manifest, or None where there is none."""
    try:
        result = store.read(MANIFEST).result()
    except (ValueError, OSError) as error:
        raise UsageError(f"{location}: cannot be read ({first_line(error)})") from None
    if result.state != "value":
        return None
    try:
        manifest = json.loads(result.value)
        return manifest if {"kind", "arrays", "settings", "about"} <= manifest.keys() else None
    except (ValueError, AttributeError):
        raise RalmError(f"{location}: {MANIFEST} is damaged") from None


def refuse_mismatch(location: str, there: dict[str, Any], here: dict[str, Any]) -> None:
    """
    Raises:
        RalmError: naming every setting that differs, with both values.
    """
    differing = [key for key in sorted(there.keys() | here.keys()) if there.get(key) != here.get(key)]
    if differing:
        listed = "; ".join(f"{key}: {there.get(key)!r} there, {here.get(key)!r} now" for key in differing[:4])
        raise RalmError(f"{location}: was made with other settings and cannot be resumed: {listed}")
