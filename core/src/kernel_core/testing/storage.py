"""What every storage backend must do, as tests: subclass the contracts in the backend's own tests.

    class TestMyStorage(StorageContract):
        def make_storage(self) -> Storage:
            return MyStorage("my://bucket/" + secrets.token_hex(4))

``FaultContract`` is for stores behind HTTP: the same with a server that is busy, breaks off, or refuses.
"""

# ruff: noqa: D102 (the name of a test is what it documents)

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kernel_core.errors import (
    StorageConflictError,
    StorageError,
    StorageExistsError,
    StorageForbiddenError,
    StorageKeyError,
    StorageMissingError,
    StorageRootError,
    StorageTransientError,
)
from kernel_core.storage import Entry, Storage, is_temporary, join_url
from kernel_core.testing.faults import Fault, FaultProxy, Request

ODD_KEYS = (
    "with space",
    "ü/ñ",
    "a+b",
    "per%cent%20",
    "hash#q?x=1&y",
    "star*",
    "co:lon",
    "x..y",
    "...",
    "tilde~",
    "[x]{y}",
    "q\"uote's",
    "dot.",
    ".hidden",
    "emoji🙂",
    "-",
    "a" * 200,
    "d" * 60 + "/" + "e" * 60,
)
BAD_KEYS = (
    "",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "../a",
    "a/../b",
    "a/./b",
    "a\\b",
    "a\0b",
    "a\nb",
    "\ud800",
    ".tmp-" + "0" * 16,
)


class StorageContract:
    """The clauses of ``kernel_core.storage.Storage``, one test each.

    Attributes:
        large_bytes: Size of the large object; more than the backend sends in one request.
        num_many: Objects in the listing that must not fit on one page; 0 leaves the test out.
        num_writers: Threads that race.
    """

    large_bytes: int = 40 * 2**20
    num_many: int = 1100
    num_writers: int = 8

    def make_storage(self) -> Storage:
        """Return a storage that holds nothing yet. Called again, it returns another."""
        raise NotImplementedError

    def fill(self, storage: Storage, keys: Sequence[str]) -> None:
        """Put a byte under each key; a server in the same process may have a faster way."""
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: storage.put(key, b"x"), keys))

    @pytest.fixture
    def storage(self) -> Storage:
        """The storage under test."""
        return self.make_storage()

    def test_what_was_put_is_got(self, storage: Storage) -> None:
        for key, data in {"one": b"1", "a/b/c": b"\0\xff", "a/b/d": b""}.items():
            storage.put(key, data)
            assert storage.get(key) == data
            assert type(storage.get(key)) is bytes
            assert storage.size(key) == len(data)
            assert storage.exists(key)

    def test_put_replaces(self, storage: Storage) -> None:
        storage.put("a/b", b"a long old content")
        storage.put("a/b", b"new")
        assert storage.get("a/b") == b"new"
        storage.put("a/b", b"")
        assert storage.get("a/b") == b""
        assert list(storage.list()) == [Entry("a/b", 0)]

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_any_buffer_will_do(self, storage: Storage, kind: Callable[[bytes], Any]) -> None:
        storage.put("one", kind(b"data"))
        storage.create("two", kind(b"data"))
        assert storage.get("one") == storage.get("two") == b"data"

    def test_pieces_are_joined_in_order(self, storage: Storage) -> None:
        wide = memoryview(bytes(range(16))).cast("I")
        pieces: Sequence[memoryview | bytes] = [b"", b"ab", memoryview(b"cdef")[1:3], b"", wide, b"end"]
        expected = b"ab" + b"de" + bytes(range(16)) + b"end"
        storage.put("put", pieces)
        storage.create("create", pieces)
        storage.put("none", [])
        assert storage.get("put") == storage.get("create") == expected
        assert storage.size("none") == 0

    def test_large_objects_in_pieces_of_any_size(self, storage: Storage, tmp_path: Path) -> None:
        data = memoryview(bytes(range(251)) * (self.large_bytes // 251 + 1))[: self.large_bytes]
        bounds = [0, 1, 70_000, 70_001, 17 * 2**20, 17 * 2**20 + 3, self.large_bytes]
        storage.put("large", [data[start:end] for start, end in itertools.pairwise(bounds)])
        assert storage.size("large") == self.large_bytes
        assert storage.get("large") == data
        assert storage.get("large", 17 * 2**20 - 5, 17 * 2**20 + 5) == data[17 * 2**20 - 5 : 17 * 2**20 + 5]
        storage.fetch("large", tmp_path / "large")
        assert (tmp_path / "large").read_bytes() == data
        assert [path.name for path in tmp_path.iterdir()] == ["large"]

    def test_ranges_are_those_of_a_slice(self, storage: Storage) -> None:
        data = b"0123456789"
        storage.put("ten", data)
        storage.put("empty", b"")
        for start, end in itertools.product((0, 1, 9, 10, 11), (None, 0, 1, 5, 9, 10, 11, 100)):
            assert storage.get("ten", start, end) == data[start:end], (start, end)
            assert storage.get("empty", start, end) == b"", (start, end)
        for start, end in ((-1, None), (0, -1)):
            with pytest.raises(StorageKeyError, match="Expected bounds of at least 0"):
                storage.get("ten", start, end)

    def test_what_is_not_there_is_missing(self, storage: Storage, tmp_path: Path) -> None:
        storage.put("folder/file", b"1")
        for key in ("nothing", "folder", "folder/nothing", "no/such/folder", "folder/file/below"):
            where = join_url(storage.url, key).replace("?", r"\?")
            assert not storage.exists(key)
            assert storage.version(key) is None
            for ask in (
                lambda key=key: storage.get(key),
                lambda key=key: storage.get(key, 0, 5),
                lambda key=key: storage.get(key, 3, 3),
                lambda key=key: storage.size(key),
                lambda key=key: storage.fetch(key, tmp_path / "file"),
            ):
                with pytest.raises(StorageMissingError, match=f"{where}: there is no such object") as caught:
                    ask()
                assert isinstance(caught.value, FileNotFoundError)
        assert list(tmp_path.iterdir()) == []

    def test_small_files_are_fetched_and_replace_what_is_there(self, storage: Storage, tmp_path: Path) -> None:
        storage.put("a", b"new")
        storage.put("empty", b"")
        (tmp_path / "file").write_bytes(b"old and longer")
        storage.fetch("a", tmp_path / "file")
        storage.fetch("empty", tmp_path / "empty")
        assert (tmp_path / "file").read_bytes() == b"new"
        assert (tmp_path / "empty").read_bytes() == b""

    def test_listing_is_sorted_by_key_and_ends_at_the_folder(self, storage: Storage) -> None:
        for key in ("b/x", "a/z", "a.txt", "a/b/c", "a/b.c", "ab", "a-", "ä/1"):
            storage.put(key, key.encode())
        keys = sorted(["b/x", "a/z", "a.txt", "a/b/c", "a/b.c", "ab", "a-", "ä/1"])
        assert list(storage.list()) == [Entry(key, len(key.encode())) for key in keys]
        assert [entry.key for entry in storage.list("a")] == ["a/b.c", "a/b/c", "a/z"]
        assert [entry.key for entry in storage.list("a/")] == ["a/b.c", "a/b/c", "a/z"]
        assert [entry.key for entry in storage.list("a/b")] == ["a/b/c"]
        assert list(storage.list("ab")) == list(storage.list("nothing")) == []

    def test_folders_are_the_next_level(self, storage: Storage) -> None:
        for key in ("a/x/1", "a/y/z/2", "a/file", "b/1", "top"):
            storage.put(key, b"")
        assert list(storage.list_folders()) == ["a", "b"]
        assert list(storage.list_folders("a")) == list(storage.list_folders("a/")) == ["x", "y"]
        assert list(storage.list_folders("b")) == list(storage.list_folders("nothing")) == []

    def test_listing_goes_on_after_the_first_page(self, storage: Storage) -> None:
        if not self.num_many:
            pytest.skip("too dear for this store")
        keys = [f"many/{number:05d}/file" for number in range(self.num_many)]
        self.fill(storage, keys)
        assert [entry.key for entry in storage.list("many")] == keys
        assert list(storage.list_folders("many")) == [key.split("/")[1] for key in keys]

    def test_deleting_removes_one_object_and_what_became_empty(self, storage: Storage) -> None:
        for key in ("a/b/c", "a/b/d", "a/bb", "x/y/z"):
            storage.put(key, b"1")
        storage.delete("a/b/c")
        storage.delete("a/b/c")
        storage.delete("nothing/at/all")
        storage.delete("a")  # a folder is no object
        assert [entry.key for entry in storage.list()] == ["a/b/d", "a/bb", "x/y/z"]
        storage.delete("x/y/z")
        storage.delete("a/b/d")
        assert list(storage.list_folders()) == ["a"]
        assert list(storage.list_folders("a")) == []
        storage.delete("a/bb")
        assert not [*storage.list(), *storage.list_folders()]
        storage.put("a/b/c", b"again")
        assert storage.get("a/b/c") == b"again"

    @pytest.mark.parametrize("key", ODD_KEYS)
    def test_odd_keys_are_keys(self, storage: Storage, key: str) -> None:
        storage.put(key, b"1")
        storage.create(f"folder/{key}", b"22")
        assert storage.get(key) == b"1"
        assert storage.exists(f"folder/{key}")
        assert [entry.key for entry in storage.list()] == sorted([key, f"folder/{key}"])
        assert [entry.key for entry in storage.list("folder")] == [f"folder/{key}"]
        storage.put(f"{key}.folder/x", b"")
        assert list(storage.list(f"{key}.folder")) == [Entry(f"{key}.folder/x", 0)]
        storage.delete(key)
        assert not storage.exists(key)

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_bad_keys_are_refused_by_every_method(self, storage: Storage, key: str, tmp_path: Path) -> None:
        calls: list[Callable[[], Any]] = [
            lambda: storage.put(key, b""),
            lambda: storage.create(key, b""),
            lambda: storage.replace(key, b"", None),
            lambda: storage.replace(key, b"", "version"),
            lambda: storage.get(key),
            lambda: storage.size(key),
            lambda: storage.exists(key),
            lambda: storage.version(key),
            lambda: storage.local_path(key),
            lambda: storage.fetch(key, tmp_path / "file"),
        ]
        if key not in ("", "a/"):
            calls += [lambda: list(storage.list(key)), lambda: list(storage.list_folders(key))]
        if not is_temporary(key):
            calls.append(lambda: storage.delete(key))
        for call in calls:
            with pytest.raises(StorageKeyError, match=r"got the key .* Expected names joined by '/'") as caught:
                call()
            assert isinstance(caught.value, ValueError)
        assert list(storage.list()) == []

    def test_create_refuses_what_is_there(self, storage: Storage) -> None:
        storage.create("a/b", b"first")
        with pytest.raises(StorageExistsError, match="a/b: ") as caught:
            storage.create("a/b", b"second")
        assert isinstance(caught.value, FileExistsError)
        assert storage.get("a/b") == b"first"
        storage.delete("a/b")
        storage.create("a/b", b"third")
        assert storage.get("a/b") == b"third"
        assert list(storage.list()) == [Entry("a/b", 5)]

    def test_of_several_creates_exactly_one_wins(self, storage: Storage) -> None:
        for key in ("race/1", "race/2", "race/3"):
            outcomes = self._race(partial(_create_with_name, storage, key))
            winners = [name for name, error in outcomes.items() if error is None]
            assert len(winners) == 1
            assert storage.get(key) == winners[0].encode()
            assert {type(error) for error in outcomes.values()} == {type(None), StorageExistsError}

    def test_the_version_follows_the_content(self, storage: Storage) -> None:
        assert storage.version("a") is None
        storage.put("a", b"1")
        first = storage.version("a")
        assert first
        assert storage.version("a") == first
        storage.put("a", b"2")
        assert storage.version("a") not in (None, first)
        storage.delete("a")
        assert storage.version("a") is None

    def test_replace_compares_first(self, storage: Storage) -> None:
        storage.replace("f/a", b"1", None)
        with pytest.raises(StorageConflictError, match="f/a: somebody else changed it in the meantime"):
            storage.replace("f/a", b"2", None)
        first = storage.version("f/a")
        storage.replace("f/a", b"2", first)
        assert storage.get("f/a") == b"2"
        with pytest.raises(StorageConflictError, match="somebody else changed it"):
            storage.replace("f/a", b"3", first)
        second = storage.version("f/a")
        storage.delete("f/a")
        with pytest.raises(StorageConflictError, match="somebody else changed it"):
            storage.replace("f/a", b"3", second)
        assert not [*storage.list(), *storage.list_folders()]

    def test_no_update_is_lost_when_several_replace(self, storage: Storage) -> None:
        storage.put("counter", b"0")
        rounds = 4

        def count(name: str) -> None:
            for _ in range(rounds):
                while True:
                    version, value = storage.version("counter"), int(storage.get("counter"))
                    if version != storage.version("counter"):
                        continue  # the value belongs to another version
                    with suppress(StorageConflictError):
                        storage.replace("counter", str(value + 1).encode(), version)
                        break

        outcomes = self._race(count)
        assert set(outcomes.values()) == {None}
        assert int(storage.get("counter")) == rounds * self.num_writers
        assert list(storage.list()) == [Entry("counter", 2)]

    def test_a_reader_sees_the_old_or_the_new_bytes(self, storage: Storage) -> None:
        size, stop = 300_000, threading.Event()
        storage.put("flipping", b"a" * size)
        seen: list[bytes] = []

        def read() -> None:
            while not stop.is_set():
                seen.append(storage.get("flipping"))

        reader = threading.Thread(target=read)
        reader.start()
        for letter in b"bcdefghijk":
            storage.put("flipping", [bytes([letter]) * (size // 2)] * 2)
        stop.set()
        reader.join()
        assert seen
        for data in seen:
            assert len(data) == size
            assert len(set(data)) == 1

    def test_objects_and_folders_come_and_go_at_the_same_time(self, storage: Storage) -> None:
        def work(name: str) -> None:
            for _ in range(10):
                storage.put(f"shared/{name}", name.encode())
                assert storage.get(f"shared/{name}") == name.encode()
                list(storage.list("shared"))
                storage.delete(f"shared/{name}")

        assert set(self._race(work).values()) == {None}
        assert not [*storage.list(), *storage.list_folders()]

    def test_a_local_path_is_the_file_or_none(self, storage: Storage) -> None:
        storage.put("a/b", b"mapped")
        path = storage.local_path("a/b")
        assert path is None or path.read_bytes() == b"mapped"

    def test_nothing_temporary_is_listed_or_left(self, storage: Storage) -> None:
        storage.put("a/b", b"1")
        with suppress(StorageExistsError):
            storage.create("a/b", b"2")
        assert not [entry for entry in storage.list() if any(map(is_temporary, entry.key.split("/")))]
        assert storage.get("a/b") == b"1"

    def test_it_says_what_it_is(self, storage: Storage) -> None:
        assert storage.url in repr(storage)

    def _race(self, work: Callable[[str], Any]) -> dict[str, BaseException | None]:
        """Call ``work`` on several threads at the same moment; return how each ended."""
        together = threading.Barrier(self.num_writers)

        def run(name: str) -> BaseException | None:
            together.wait()
            try:
                work(name)
            except StorageError as error:
                return error
            return None

        names = [f"writer-{number}" for number in range(self.num_writers)]
        with ThreadPoolExecutor(self.num_writers) as pool:
            return dict(zip(names, pool.map(run, names), strict=True))


PASSING = {
    "429": Fault("status", 429),
    "503": Fault("status", 503),
    "503 retry-after": Fault("status", 503, headers={"Retry-After": "1"}),
    "reset": Fault("reset"),
    "lost": Fault("lost"),
    "hang": Fault("hang"),
    "truncate": Fault("truncate", matches=lambda request: request.method == "GET"),
}
REFUSALS = {"403": Fault("status", 403), "401": Fault("status", 401)}
OPERATIONS: dict[str, Callable[[Storage], Any]] = {
    "put": lambda storage: storage.put("new/key", b"new"),
    "create": lambda storage: storage.create("new/key", b"new"),
    "replace": lambda storage: storage.replace("there", b"new", storage.version("there")),
    "get": lambda storage: storage.get("there"),
    "get a range": lambda storage: storage.get("there", 1, 3),
    "size": lambda storage: storage.size("there"),
    "exists": lambda storage: storage.exists("there"),
    "version": lambda storage: storage.version("there"),
    "list": lambda storage: list(storage.list()),
    "list_folders": lambda storage: list(storage.list_folders()),
    "delete": lambda storage: storage.delete("there"),
}
READS_A_BODY = {"get", "get a range", "list", "list_folders"}


class FaultContract:
    """The same of a store behind HTTP when requests go wrong.

    Attributes:
        time_limit_s: What ``make_storage`` sets as the limit of all tries of an operation.
        large_bytes: Size of an object that is sent in several requests.
        is_part: Recognises the request that carries one part of a large object.
    """

    time_limit_s: float = 3.0
    large_bytes: int = 12 * 2**20

    def server_url(self) -> str:
        """Return the URL of the loopback server that the faults are put in front of."""
        raise NotImplementedError

    def make_storage(self, endpoint: str) -> Storage:
        """Return a storage that holds nothing, reached through ``endpoint``: four tries, short waits, 1 s a request."""
        raise NotImplementedError

    def make_storage_of_missing_bucket(self, endpoint: str) -> Storage:
        """Return a storage in a bucket that does not exist."""
        raise NotImplementedError

    def is_part(self, request: Request) -> bool:
        """Say whether a request carries one part of a large object."""
        raise NotImplementedError

    def num_unfinished(self, storage: Storage) -> int:
        """Return how many uploads the server holds that were begun and neither completed nor given up."""
        raise NotImplementedError

    @pytest.fixture
    def proxy(self) -> Iterator[FaultProxy]:
        """The proxy that storage and server are on different sides of."""
        with FaultProxy(self.server_url()) as proxy:
            yield proxy

    @pytest.fixture
    def storage(self, proxy: FaultProxy) -> Storage:
        """A storage with one object, ``there``."""
        storage = self.make_storage(proxy.url)
        storage.put("there", b"12345")
        return storage

    @pytest.mark.parametrize("name", [name for name in PASSING if name != "hang"])
    def test_a_fault_that_passes_changes_nothing(self, storage: Storage, proxy: FaultProxy, name: str) -> None:
        for operation, run in _operations(name):
            _reset(storage)
            expected, after = run(storage), _content(storage)
            _reset(storage)
            with proxy.failing(_some(PASSING[name], 2)):
                got = run(storage)
                assert proxy.hit == 2, operation
            assert got == expected, operation
            assert _content(storage) == after, operation

    @pytest.mark.parametrize("operation", ["put", "get"])
    def test_a_request_that_hangs_is_given_up_and_sent_again(
        self, storage: Storage, proxy: FaultProxy, operation: str
    ) -> None:
        with proxy.failing(_some(PASSING["hang"], 1)):
            OPERATIONS[operation](storage)
            assert proxy.hit == 1

    @pytest.mark.parametrize("name", ["429", "503", "reset", "truncate"])
    def test_a_fault_that_stays_is_transient_and_leaves_everything_as_it_was(
        self, storage: Storage, proxy: FaultProxy, name: str
    ) -> None:
        for operation, run in _operations(name):
            with proxy.failing(PASSING[name]), pytest.raises(StorageTransientError, match=r"Tried \d+ times") as caught:
                run(storage)
            assert caught.value.attempts > 1, operation
            assert caught.value.__cause__ is not None, operation
            assert _content(storage) == [("there", b"12345")], operation

    def test_the_time_limit_ends_it(self, storage: Storage, proxy: FaultProxy) -> None:
        started = time.monotonic()
        with proxy.failing(PASSING["hang"]), pytest.raises(StorageTransientError, match="Tried"):
            storage.get("there")
        assert time.monotonic() - started < self.time_limit_s + 3.0

    @pytest.mark.parametrize("name", REFUSALS)
    def test_refused_is_forbidden_at_once_and_never_missing(
        self, storage: Storage, proxy: FaultProxy, name: str
    ) -> None:
        for operation, run in _operations(name):
            with proxy.failing(REFUSALS[name]), pytest.raises(StorageForbiddenError) as caught:
                run(storage)
            assert proxy.hit == 1, operation
            assert isinstance(caught.value, PermissionError), operation
            assert not isinstance(caught.value, FileNotFoundError), operation
            assert _content(storage) == [("there", b"12345")], operation

    def test_a_bucket_that_does_not_exist_is_no_missing_object(self, proxy: FaultProxy) -> None:
        for _, run in _operations("404"):
            storage = self.make_storage_of_missing_bucket(proxy.url)
            with pytest.raises(StorageRootError, match="does not exist"):
                run(storage)

    @pytest.mark.parametrize("operation", ["create", "replace"])
    def test_an_answer_that_got_lost_is_no_defeat(self, storage: Storage, proxy: FaultProxy, operation: str) -> None:
        with proxy.failing(Fault("lost", times=1, matches=lambda request: request.method == "PUT")):
            OPERATIONS[operation](storage)
            assert proxy.hit == 1
        with pytest.raises((StorageExistsError, StorageConflictError)):  # but somebody else's is
            storage.create("there", b"other")

    @pytest.mark.parametrize("name", ["429", "503", "reset", "lost"])
    def test_a_part_that_fails_is_sent_again_and_the_others_are_not(
        self, storage: Storage, proxy: FaultProxy, name: str
    ) -> None:
        data = bytes(range(256)) * (self.large_bytes // 256)
        proxy.requests.clear()
        with proxy.failing(_some(PASSING[name], 2, self.is_part)):
            storage.put("large", [memoryview(data)[: 2**20], memoryview(data)[2**20 :]])
            assert proxy.hit == 2
        parts = [request for request in proxy.requests if self.is_part(request)]
        distinct = {request.path for request in parts}
        assert len(distinct) > 1
        assert len(parts) == len(distinct) + 2
        assert storage.get("large") == data
        assert self.num_unfinished(storage) == 0

    def test_a_large_put_that_fails_leaves_nothing_behind(self, storage: Storage, proxy: FaultProxy) -> None:
        storage.put("large", b"old")
        with proxy.failing(Fault("status", 503, matches=self.is_part)), pytest.raises(StorageTransientError):
            storage.put("large", bytes(self.large_bytes))
        assert storage.get("large") == b"old"
        with proxy.failing(Fault("status", 403, matches=self.is_part)), pytest.raises(StorageForbiddenError):
            storage.put("other", bytes(self.large_bytes))
        assert not storage.exists("other")
        assert self.num_unfinished(storage) == 0

    def test_a_writer_that_fails_in_the_middle_leaves_nothing_behind(self, storage: Storage) -> None:
        class Pieces(list[bytes]):
            def __iter__(self) -> Iterator[bytes]:
                yield from list.__iter__(self)
                raise RuntimeError("the next piece cannot be made")

        with pytest.raises(RuntimeError, match="the next piece"):
            storage.put("large", Pieces([bytes(2**20)] * 9))
        assert not storage.exists("large")
        assert self.num_unfinished(storage) == 0

    def test_a_part_of_a_large_object_that_breaks_off_is_read_again(
        self, storage: Storage, proxy: FaultProxy, tmp_path: Path
    ) -> None:
        data = bytes(range(256)) * (20 * 2**20 // 256)
        storage.put("large", data)
        with proxy.failing(Fault("truncate", times=2, matches=lambda request: request.method == "GET")):
            storage.fetch("large", tmp_path / "large")
            assert proxy.hit == 2
        assert (tmp_path / "large").read_bytes() == data
        with proxy.failing(PASSING["truncate"]), pytest.raises(StorageTransientError):
            storage.fetch("large", tmp_path / "other")
        assert [path.name for path in tmp_path.iterdir()] == ["large"]


def _create_with_name(storage: Storage, key: str, name: str) -> None:
    storage.create(key, name.encode())


def _operations(name: str) -> list[tuple[str, Callable[[Storage], Any]]]:
    return [(key, run) for key, run in OPERATIONS.items() if name != "truncate" or key in READS_A_BODY]


def _reset(storage: Storage) -> None:
    for entry in storage.list():
        storage.delete(entry.key)
    storage.put("there", b"12345")


def _some(fault: Fault, times: int, matches: Callable[[Request], bool] | None = None) -> Fault:
    return replace(fault, times=times, matches=matches or fault.matches)


def _content(storage: Storage) -> list[tuple[str, bytes]]:
    return [(entry.key, storage.get(entry.key)) for entry in storage.list()]
