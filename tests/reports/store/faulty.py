"""Shared storage in memory that loses requests and replies, for the tests of shared storage."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import fsspec
from fsspec.spec import AbstractFileSystem

LOST = "the connection was reset"


class Faulty(AbstractFileSystem):
    """Objects in memory, with the six requests that runs are stored by.

    Args of `make`:
        replies: fraction of requests that take effect and whose reply is an error.
        requests: fraction of requests that take no effect and are answered by an error.
        conditions: "kept", "ignored" as by servers that do not know them, or "refused".
    """

    protocol = "faulty"
    cachable = False
    stores: ClassVar[dict[str, Faulty]] = {}
    objects: dict[str, tuple[bytes, datetime]]
    chance: random.Random
    lock: Any
    replies: float
    requests: float
    conditions: str
    written: Counter[str]
    down: str
    bucket: str
    shift: timedelta
    before: Callable[[str, str], None]

    @classmethod
    def make(
        cls, seed: int = 0, replies: float = 0.0, requests: float = 0.0, conditions: str = "kept"
    ) -> Faulty:
        """Return the storage of `faulty://` addresses from now on, which is empty."""
        fsspec.register_implementation("faulty", cls, clobber=True)
        store = super().__new__(cls)
        AbstractFileSystem.__init__(store)
        store.objects = {}
        store.chance, store.lock = random.Random(seed), threading.RLock()
        store.replies, store.requests, store.conditions = replies, requests, conditions
        store.written = Counter()
        store.down, store.bucket, store.shift = "", "bucket", timedelta()
        store.before = lambda request, path: None
        cls.stores["now"] = store
        return store

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return cls.stores["now"]

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _request(self, name: str, path: str, work: Any) -> Any:
        self.before(name, path)
        with self.lock:
            if self.down and self.down in (name, "all"):
                raise ConnectionError(LOST)
            lot = self.chance.random()
            if lot < self.requests:
                raise ConnectionError(LOST)
            answer = work()
            if lot < self.requests + self.replies:
                raise ConnectionError(LOST)
            return answer

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """Write an object."""
        path = str(self._strip_protocol(path))

        def work() -> None:
            if mode == "create" and self.conditions == "refused":
                raise NotImplementedError("A header you provided implies functionality")
            if mode == "create" and self.conditions == "kept" and path in self.objects:
                raise FileExistsError(path)
            self.objects[path] = bytes(value), datetime.now(UTC) + self.shift
            self.written[path] += 1

        self._request("put", path, work)

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        """Write a file as an object."""
        with open(lpath, "rb") as file:
            self.pipe_file(rpath, file.read())

    def cat_file(self, path: str, **_: Any) -> bytes:
        """Return the content of an object."""
        path = str(self._strip_protocol(path))
        return self._request("get", path, lambda: self._object(path)[0])

    def get_file(self, rpath: str, lpath: str, **_: Any) -> None:
        """Copy an object to a file, of which a half is there where the reply is lost."""
        content = str(self._strip_protocol(rpath))
        content = self._request("get", content, lambda: self._object(content)[0])
        with open(lpath, "wb") as file:
            file.write(content)

    def _object(self, path: str) -> tuple[bytes, datetime]:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path]

    def modified(self, path: str) -> datetime:
        """Return when an object was written."""
        path = str(self._strip_protocol(path))
        return self._request("head", path, lambda: self._object(path)[1])

    def rm_file(self, path: str) -> None:
        """Delete an object."""
        path = str(self._strip_protocol(path))

        def work() -> None:
            self._object(path)
            del self.objects[path]

        self._request("delete", path, work)

    def find(self, path: str, detail: bool = False, **_: Any) -> Any:
        """Return the objects below a folder."""
        place = f"{self._strip_protocol(path)!s}/"

        def work() -> dict[str, Any]:
            return {
                name: {"name": name, "size": len(content), "type": "file"}
                for name, (content, _) in sorted(self.objects.items())
                if name.startswith(place)
            }

        found = self._request("list", place, work)
        return found if detail else list(found)

    def ls(self, path: str, detail: bool = False, **_: Any) -> list[str]:
        """Return the folders and objects in a folder."""
        place = f"{self._strip_protocol(path)!s}/"

        def work() -> list[str]:
            names = {n.removeprefix(place).partition("/")[0] for n in self.objects if place in n}
            if not names and place != f"{self.bucket}/":
                raise FileNotFoundError(place)
            return sorted(place + name for name in names)

        return self._request("list", place, work)

    def runs(self, root: str) -> dict[str, bytes]:
        """Return the run.json of every run below a folder, by the folder's name."""
        found = {}
        for path, (content, _) in self.objects.items():
            name, _, file = path.removeprefix(f"{root}/").partition("/")
            if file == "run.json":
                found[name] = content
        return found
