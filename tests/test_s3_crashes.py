"""Losing the connection at every request of a save to S3, before and after it was heard: the newest checkpoint loads."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kernel_core.checkpoint.locate import read_pointer
from kernel_core.checkpoint.retention import clear_up
from kernel_core.checkpoint.writer import Writer
from kernel_core.errors import CheckpointError, SaveFailedError, StorageError
from kernel_core.storage import Retry
from kernel_core.testing.checkpoints import good, named, save, save_job
from kernel_core.testing.faults import Fault, FaultProxy, Request
from kernel_plugin_s3 import S3Storage

MIB = 2**20
LARGE = 11 * MIB  # three parts
SEED = int(os.environ.get("KERNEL_TEST_SEED", "0"))


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        disable_nagle_algorithm = True  # else every answer waits 40 ms

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    lock, application = threading.Lock(), DomainDispatcherApplication(create_backend_app)

    def one_at_a_time(environment: Any, start_response: Any) -> list[bytes]:
        with lock:  # moto checks a condition and stores in two steps, S3 in one
            return list(application(environment, start_response))

    server = make_server("127.0.0.1", 0, one_at_a_time, threaded=True, request_handler=Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "S3_"))]:
        monkeypatch.delenv(name)


class Cutting(FaultProxy):
    """Breaks the connection at one request, and at all that follow if it is cut for good.

    Attributes:
        at: The number of that request.
        heard: Whether the server got it.
        for_good: Whether the client is cut off from then on, as one that died.
    """

    at = -1
    heard = False
    for_good = True

    def fault_for(self, request: Request) -> Fault | None:
        with self._lock:
            number = len(self.requests)
            self.requests.append(request)
        if number == self.at:
            return Fault("lost" if self.heard else "reset")
        return Fault("reset") if self.for_good and 0 <= self.at < number else None

    @contextmanager
    def cutting(self, at: int, heard: bool = False, for_good: bool = True) -> Iterator[None]:
        with self._lock:
            self.requests.clear()
            self.at, self.heard, self.for_good = at, heard, for_good
        try:
            yield
        finally:
            self.at = -1


@pytest.fixture(scope="module")
def proxy(moto: str) -> Iterator[Cutting]:
    with Cutting(moto) as proxy:
        yield proxy


class Bucket:
    """A bucket with two checkpoints of a run in it."""

    def __init__(self, moto: str, proxy: Cutting, num_bytes: int) -> None:
        self.url, self.moto, self.proxy, self.num_bytes = f"s3://b-{secrets.token_hex(4)}/runs", moto, proxy, num_bytes
        request = urllib.request.Request(f"{moto}/{self.url.split('/')[2]}", method="PUT")
        urllib.request.urlopen(request).close()
        for batch in (3, 6):
            self.save(self.opened(moto), batch)

    def opened(self, endpoint: str, attempts: int = 1) -> S3Storage:
        return S3Storage(
            self.url,
            endpoint_url=endpoint,
            access_key_id="key",
            secret_access_key="secret",
            part_size_bytes=5 * MIB,
            request_timeout_s=10.0,
            retry=Retry(attempts=attempts, time_limit_s=5.0, first_wait_s=0.002, longest_wait_s=0.01),
        )

    def job(self, storage: S3Storage, batch: int) -> Any:
        return save_job(storage, batch, keep=2, latest="latest", num_bytes=self.num_bytes)

    def save(self, storage: S3Storage, batch: int) -> None:
        save(Writer(0, 1, None), self.job(storage, batch))

    def begin_again(self) -> None:
        clear_up(self.opened(self.moto), "run", "saver", 2, latest="latest")

    def save_through_the_proxy(self, attempts: int = 1) -> bool:
        """Begin again and save batch 9; say whether the run could take it for saved."""
        storage = self.opened(self.proxy.url, attempts)
        try:
            clear_up(storage, "run", "saver", 2, latest="latest")
            self.save(storage, 9)
        except (SaveFailedError, StorageError):
            return False
        return True

    def check(self, was_told: bool) -> None:
        """Whatever happened, a fresh reader finds the newest good one; the run goes on, and nothing is left behind."""
        fresh = self.opened(self.moto)
        found = good(fresh, num_bytes=self.num_bytes)
        newest = max(found.values())
        assert newest == 9 if was_told else newest in (6, 9)
        pointed = read_pointer(fresh)[0]
        assert pointed in found
        self.begin_again()
        following = 9 if newest == 6 else 12
        self.save(fresh, following)
        assert sorted(good(fresh, num_bytes=self.num_bytes).values()) == ([6, 9] if following == 9 else [9, 12])
        keys = {entry.key for entry in fresh.list()}
        assert keys == {path for path in named(fresh, "latest") if not path.endswith("/")}
        assert read_pointer(fresh)[0] == f"ba{following}"


def count(moto: str, proxy: Cutting, num_bytes: int) -> list[str]:
    bucket = Bucket(moto, proxy, num_bytes)
    with proxy.cutting(-1):
        assert bucket.save_through_the_proxy()
        done = [f"{request.method} {request.path}" for request in proxy.requests]
    bucket.check(was_told=True)
    return done


def test_a_save_asks_for_everything_that_a_store_can_do(moto: str, proxy: Cutting) -> None:
    bucket = Bucket(moto, proxy, LARGE)
    with proxy.cutting(-1):
        assert bucket.save_through_the_proxy()
        asked = [f"{request.method} {request.path}" for request in proxy.requests]
    assert {one.split()[0] for one in asked} == {"GET", "HEAD", "PUT", "POST", "DELETE"}
    assert sum("partNumber=" in one for one in asked) == 3
    assert 30 < len(asked) < 90
    puts = [one.split("?")[0].rpartition("/")[2] for one in asked if one.startswith("PUT")]
    assert puts[0] == "lock.json"
    assert puts[-2:] == ["manifest.json", "latest"]
    deletes = [one.rpartition("/")[2] for one in asked if one.startswith("DELETE")]
    assert (deletes[0], deletes[-1]) == ("manifest.json", "lock.json")
    bucket.check(was_told=True)


def cut(moto: str, proxy: Cutting, at: int, heard: bool, num_bytes: int) -> bool:
    bucket = Bucket(moto, proxy, num_bytes)
    with proxy.cutting(at, heard):
        was_told = bucket.save_through_the_proxy()
    bucket.check(was_told)
    return was_told


@pytest.mark.parametrize("stride", [19, pytest.param(1, marks=pytest.mark.slow)])
def test_a_process_cut_off_at_any_request_loses_nothing(moto: str, proxy: Cutting, stride: int) -> None:
    done = count(moto, proxy, 1000)
    told = {
        cut(moto, proxy, at, heard, 1000) for at in range(SEED % stride, len(done), stride) for heard in (False, True)
    }
    assert False in told


@pytest.mark.parametrize("which", [slice(2, 3), pytest.param(slice(None), marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_process_cut_off_in_the_middle_of_a_large_file_loses_nothing(moto: str, proxy: Cutting, which: slice) -> None:
    done = count(moto, proxy, LARGE)
    first = next(
        at for at, request in enumerate(done) if request.startswith("POST")
    )  # begins, then three parts and the end
    assert sum("uploadId" in request for request in done[first:]) == 4
    for at in range(first, first + 5)[which]:
        for heard in (False, True):
            assert not cut(moto, proxy, at, heard, LARGE)


@pytest.mark.parametrize("stride", [29, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("attempts", [1, 4], ids=["tried once", "tried again"])
def test_a_single_lost_request_loses_nothing(moto: str, proxy: Cutting, stride: int, attempts: int) -> None:
    done = count(moto, proxy, 1000)
    for at in range(SEED % stride, len(done), stride):
        for heard in (False, True):
            bucket = Bucket(moto, proxy, 1000)
            with proxy.cutting(at, heard, for_good=False):
                was_told = bucket.save_through_the_proxy(attempts)
            assert was_told or attempts == 1
            bucket.check(was_told)


def test_a_store_that_refuses_is_never_taken_for_an_empty_one(moto: str, proxy: Cutting) -> None:
    bucket = Bucket(moto, proxy, 1000)
    with proxy.cutting(-1), proxy_refusing(proxy):
        with pytest.raises(StorageError):
            clear_up(bucket.opened(proxy.url), "run", "saver", 2)
        with pytest.raises(SaveFailedError) as caught:
            bucket.save(bucket.opened(proxy.url), 9)
    assert not isinstance(caught.value.__cause__, CheckpointError)
    bucket.check(was_told=False)


@contextmanager
def proxy_refusing(proxy: Cutting) -> Iterator[None]:
    refuse = Fault("status", status=403, body=b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>")
    proxy.fault_for = lambda request: refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        del proxy.fault_for
