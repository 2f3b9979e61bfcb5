"""Objects in the memory of this process: the reference implementation, for tests and first steps.

"Durable" here means until the process ends. Where another store behaves differently, the other one is
wrong. The promises: ckptstore/store/base.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import ClassVar

from ckptstore.errors import AlreadyExistsError, InvalidInputError, NotFoundError
from ckptstore.store.base import (
    Buffer,
    ObjectInfo,
    Store,
    Upload,
    Way,
    byte_views,
    check_key,
    check_prefix,
    check_range,
    writable_views,
)
from ckptstore.store.collected import CollectedUpload


class MemoryStore:
    """A Store in this process; other processes never see it."""

    _named: ClassVar[dict[str, MemoryStore]] = {}
    _named_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, *, name: str = "") -> None:
        self._name = name
        self._lock = threading.Lock()
        self._objects: dict[str, bytes] = {}

    @classmethod
    def named(cls, name: str) -> MemoryStore:
        """The one store of that name in this process, the same at every call."""
        if not name:
            raise InvalidInputError("memory:// needs a name; write memory://NAME")
        with cls._named_lock:
            return cls._named.setdefault(name, cls(name=name))

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    def create(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        check_key(key)
        value = b"".join(byte_views(data))  # a copy: the caller may reuse its memory
        with self._lock:
            if key in self._objects:
                raise AlreadyExistsError(
                    f"{key} in {self.url} is taken; read it to see by whom", url=self.url, key=key
                )
            self._objects[key] = value

    def upload(self, key: str, nbytes_max: int) -> Upload:
        check_key(key)
        return CollectedUpload(lambda blocks: self.create(key, blocks), way=Way("memory"))

    def read(self, key: str, *, start: int = 0, nbytes: int | None = None) -> bytes:
        value = self._get(key)
        wanted = check_range(self.url, key, len(value), start, nbytes)
        return value[start : start + wanted]

    def read_into(self, key: str, start: int, targets: Sequence[Buffer]) -> None:
        value = self._get(key)
        views = writable_views(targets)
        check_range(self.url, key, len(value), start, sum(view.nbytes for view in views))
        for view in views:
            view[:] = value[start : start + view.nbytes]
            start += view.nbytes

    def size(self, key: str) -> int:
        return len(self._get(key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        with self._lock:
            found = [
                ObjectInfo(key=key, nbytes=len(value))
                for key, value in self._objects.items()
                if key.startswith(prefix)
            ]
        return iter(found)

    def delete(self, key: str) -> None:
        check_key(key)
        with self._lock:
            self._objects.pop(key, None)

    def replace(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        check_key(key)
        value = b"".join(byte_views(data))
        with self._lock:
            self._objects[key] = value

    def settle(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)

    def close(self) -> None:
        """Objects stay for the next one that opens the name."""

    def _get(self, key: str) -> bytes:
        check_key(key)
        with self._lock:
            value = self._objects.get(key)
        if value is None:
            raise NotFoundError(f"there is no {key} in {self.url}", url=self.url, key=key)
        return value


def _conforms(store: MemoryStore) -> Store:
    return store  # checked by mypy
