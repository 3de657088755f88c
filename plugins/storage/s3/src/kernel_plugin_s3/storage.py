"""The storage ``s3://``, on obstore."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import obstore
from kernel_core.errors import (
    OptionError,
    StorageConflictError,
    StorageError,
    StorageExistsError,
    StorageMissingError,
    StorageTransientError,
)
from kernel_core.storage.base import (
    Buffers,
    Entry,
    Storage,
    blocks,
    check_key,
    check_prefix,
    check_range,
    join_url,
    num_bytes,
)
from kernel_core.storage.retry import Retry
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import S3Store

from kernel_plugin_s3.errors import status_of, storage_error
from kernel_plugin_s3.settings import Credentials, Settings, settle

T = TypeVar("T")
MIB = 2**20
MAX_PARTS = 10_000  # of one object, says S3
MIN_PART_BYTES = 5 * MIB
REQUEST_BYTES = 32 * MIB  # a larger object is got in ranges of this size
WRITTEN_BY = "kernel-write"  # metadata of objects that were written on a condition
_RESTARTS = 3  # of reading an object that is replaced meanwhile


class S3Storage(Storage):
    """Objects in a bucket, under a prefix.

    What is not given is read from the environment and AWS's files; see the README.

    Args:
        url: ``s3://bucket/prefix``.
        endpoint_url: Another store that speaks S3's protocol, ``http://`` or ``https://``.
        region: The bucket's region.
        access_key_id: The key.
        secret_access_key: Its secret.
        session_token: The token of temporary credentials.
        profile: A profile of AWS's files.
        anonymous: Do not sign requests: a public bucket.
        virtual_hosted: Address the bucket as a host, ``bucket.endpoint``, not as the first part of the path.
        part_size_bytes: Size of the parts of a large object, at least 5 MiB; larger for objects of more than 10,000 parts.
        max_concurrency: How many parts are sent or ranges are read at a time.
        request_timeout_s: Longest time of one request, body included.
        connect_timeout_s: Longest time to get a connection.
        retry: How often and for how long an operation is tried.
    """

    def __init__(
        self,
        url: str,
        *,
        endpoint_url: str | None = None,
        region: str | None = None,
        access_key_id: str | None = None,
        secret_access_key: str | None = None,
        session_token: str | None = None,
        profile: str | None = None,
        anonymous: bool = False,
        virtual_hosted: bool = False,
        part_size_bytes: int = 16 * MIB,
        max_concurrency: int = 8,
        request_timeout_s: float = 120.0,
        connect_timeout_s: float = 10.0,
        retry: Retry | None = None,
    ) -> None:
        if part_size_bytes < MIN_PART_BYTES:
            raise OptionError(f"s3.part_size_bytes: got {part_size_bytes}. Expected at least {MIN_PART_BYTES}.")
        if max_concurrency < 1:
            raise OptionError(f"s3.max_concurrency: got {max_concurrency}. Expected at least 1.")
        given = {
            "endpoint_url": endpoint_url,
            "region": region,
            "access_key_id": access_key_id,
            "secret_access_key": secret_access_key,
            "session_token": session_token,
            "profile": profile,
        }
        settings = settle(url, given, os.environ, anonymous)
        self.url = url
        self.parallel_ranges = max_concurrency
        self._part_size = part_size_bytes
        self._concurrency = max_concurrency
        self._retry = retry or Retry()
        timeouts = {"timeout": _seconds(request_timeout_s), "connect_timeout": _seconds(connect_timeout_s)}
        # one rule for retries: ours. Only the parts of a large object are obstore's to send again.
        self._store = _client(settings, virtual_hosted, timeouts, {"max_retries": 0})
        self._parts_store = _client(settings, virtual_hosted, timeouts, _as_obstore(self._retry))
        self._bucket_seen = False

    def put(self, key: str, data: Buffers) -> None:
        """Send the object: in one request, or in parts, several at a time, that S3 joins at the end or not at all."""
        path, size = check_key(key, self.url), num_bytes(data)
        if size <= self._part_size:
            body = _joined(data)
            self._call(key, "writing it", lambda: obstore.put(self._store, path, body, use_multipart=False))
            return
        part = max(self._part_size, math.ceil(size / MAX_PARTS / MIB) * MIB)

        def send() -> Any:
            return obstore.put(
                self._parts_store,
                path,
                blocks(data, part),
                use_multipart=True,
                chunk_size=part,
                max_concurrency=self._concurrency,
            )

        # failed parts were sent again by obstore: this is for what it does not try again
        self._call(key, "writing it", send, replace(self._retry, attempts=min(2, self._retry.attempts)))

    def create(self, key: str, data: Buffers) -> None:
        """Send the object in one request with the condition that there is none (``If-None-Match``)."""
        refused = StorageExistsError(
            f"{self._where(key)}: something is stored there already. Choose another key, or delete it first."
        )
        self._put_if(key, data, "create", refused)

    def replace(self, key: str, data: Buffers, version: str | None) -> None:
        """Send the object in one request with the condition that the old one has this tag (``If-Match``)."""
        refused = StorageConflictError(
            f"{self._where(key)}: somebody else changed it in the meantime. Read it again, then decide."
        )
        self._put_if(key, data, "create" if version is None else {"e_tag": version}, refused)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Read the object, or a part: what is large in several requests at a time, all of the same version."""
        check_range(start, end, self._where(key))
        path = check_key(key, self.url)
        if end is not None and end <= start:
            self.size(key)
            return b""
        for _ in range(_RESTARTS):
            try:
                return self._read(key, path, start, end)
            except _Replaced:
                continue
        raise StorageTransientError(
            f"{self._where(key)}: it was replaced again and again while it was read. Try again later.", _RESTARTS
        )

    def size(self, key: str) -> int:
        """Ask for the size."""
        return int(self._head(key)["size"])

    def exists(self, key: str) -> bool:
        """Ask whether there is such an object."""
        try:
            self._head(key)
        except StorageMissingError:
            return False
        return True

    def version(self, key: str) -> str | None:
        """Return the entity tag."""
        try:
            return str(self._head(key)["e_tag"])
        except StorageMissingError:
            return None

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Ask for all objects below the folder, 1,000 a request.

        Consoles and other tools mark folders by empty objects ``folder/``, which obstore shows without the ``/``: an empty
        object is asked for once more.
        """
        path = check_prefix(prefix, self.url)
        found = self._call(prefix, "listing it", lambda: obstore.list(self._store, path or None).collect())
        entries = [Entry(meta["path"], meta["size"]) for meta in found if meta["path"] not in ("", path)]
        for entry in sorted(entries, key=lambda entry: entry.key):
            if entry.size or self.exists(entry.key):
                yield entry

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        """Ask for the next level only, 1,000 names a request."""
        path = check_prefix(prefix, self.url)
        found = self._call(prefix, "listing it", lambda: obstore.list_with_delimiter(self._store, path or None))
        yield from sorted(folder.rstrip("/").rpartition("/")[2] for folder in found["common_prefixes"])

    def delete(self, key: str) -> None:
        """Remove the object. S3 has no folders that could stay."""
        path = check_key(key, self.url, own=True)
        try:
            self._call(key, "deleting it", lambda: obstore.delete(self._store, path))
        except StorageMissingError:
            return

    def _put_if(self, key: str, data: Buffers, mode: Any, refused: StorageError) -> None:
        """Write on a condition. A try whose answer got lost may have succeeded: the object says who wrote it."""
        path, body, token = check_key(key, self.url), _joined(data), secrets.token_hex(16)
        unsure = False

        def send() -> None:
            nonlocal unsure
            try:
                obstore.put(self._store, path, body, use_multipart=False, mode=mode, attributes={WRITTEN_BY: token})
            except (AlreadyExistsError, PreconditionError) as error:
                if status_of(error) == 409:  # two conditional writes met; S3 asks to try again
                    raise StorageTransientError(f"{self._where(key)}: another write was under way.") from error
                if not (unsure and self._was_written_by(key, path, token)):
                    raise refused from error
            except BaseError:
                unsure = True
                raise

        self._call(key, "writing it", send)

    def _was_written_by(self, key: str, path: str, token: str) -> bool:
        def ask() -> bool:
            return obstore.get(self._store, path, options={"head": True}).attributes.get(WRITTEN_BY) == token

        try:
            return self._call(key, "reading it", ask)
        except StorageMissingError:
            return False

    def _read(self, key: str, path: str, start: int, end: int | None) -> bytes:
        stop = start + REQUEST_BYTES if end is None else min(end, start + REQUEST_BYTES)
        first, meta = self._call(key, "reading it", lambda: self._read_range(key, path, start, stop))
        last = meta["size"] if end is None else min(end, meta["size"])
        if stop >= last:
            return first

        def read(begin: int) -> bytes:
            ends, tag = min(begin + REQUEST_BYTES, last), meta["e_tag"]
            return self._call(key, "reading it", lambda: self._read_range(key, path, begin, ends, tag))[0]

        with ThreadPoolExecutor(self._concurrency) as pool:
            return b"".join([first, *pool.map(read, range(stop, last, REQUEST_BYTES))])

    def _read_range(self, key: str, path: str, start: int, end: int, tag: str | None = None) -> tuple[bytes, Any]:
        options: Any = {"range": (start, end)} if tag is None else {"range": (start, end), "if_match": tag}
        try:
            result = obstore.get(self._store, path, options=options)
        except PreconditionError as error:
            raise _Replaced from error
        except BaseError as error:
            if status_of(error) == 416:  # it is there, and ends before
                return b"", {"size": 0}
            raise
        data, wanted = result.bytes().to_bytes(), min(end, result.meta["size"]) - start
        if len(data) != wanted:
            raise StorageTransientError(f"{self._where(key)}: got {len(data)} bytes. Expected {wanted}.")
        return data, result.meta

    def _head(self, key: str) -> Any:
        path = check_key(key, self.url)
        try:
            return self._call(key, "reading its size", lambda: obstore.head(self._store, path))
        except StorageMissingError:
            if self._bucket_seen:
                raise
        # a HEAD has no body that could say whether the object or the bucket is missing
        return self._call(key, "reading its size", lambda: obstore.get(self._store, path).meta)

    def _call(self, key: str, doing: str, function: Callable[[], T], retry: Retry | None = None) -> T:
        def once() -> T:
            try:
                result = function()
            except StorageError:
                raise
            except (BaseError, FileNotFoundError) as error:
                raise storage_error(self._where(key), doing, error) from error
            self._bucket_seen = True
            return result

        try:
            return (retry or self._retry).call(once)
        except StorageMissingError as error:
            self._bucket_seen |= "NoSuchKey" in str(error.__cause__)
            raise

    def _where(self, key: str) -> str:
        return join_url(self.url, key)


class _Replaced(StorageError):
    """The object is not the one that reading began with."""


def _client(settings: Settings, virtual_hosted: bool, timeouts: dict[str, timedelta], retries: Any) -> S3Store:
    config: Any = {
        "region": settings.region,
        "virtual_hosted_style_request": virtual_hosted,
        "disable_bulk_delete": True,  # one DELETE an object: fewer rights, and other stores know it too
        "conditional_put": "etag",
    }
    if settings.endpoint_url:
        config["endpoint"] = settings.endpoint_url
    if settings.anonymous:
        config["skip_signature"] = True
    client: Any = {**timeouts, "allow_http": (settings.endpoint_url or "").startswith("http://")}
    try:
        return S3Store(
            settings.bucket,
            prefix=settings.prefix or None,
            config=config,
            client_options=client,
            retry_config=retries,
            # a provider, since obstore would put a session token of the environment beside other keys
            credential_provider=_provider(settings.credentials) if settings.credentials else None,
        )
    except BaseError as error:
        raise storage_error(f"s3://{settings.bucket}", "opening", error) from error


def _provider(credentials: Credentials) -> Any:
    def provide() -> dict[str, Any]:
        return {
            "access_key_id": credentials.access_key_id,
            "secret_access_key": credentials.secret_access_key,
            "token": credentials.token,
            "expires_at": None,
        }

    return provide


def _as_obstore(retry: Retry) -> dict[str, Any]:
    backoff = {"init_backoff": _seconds(retry.first_wait_s), "max_backoff": _seconds(retry.longest_wait_s), "base": 2}
    return {
        "max_retries": retry.attempts - 1,
        "retry_timeout": _seconds(retry.time_limit_s),
        "backoff": backoff,
    }


def _joined(data: Buffers) -> bytes | memoryview:
    """Return the object as one buffer, a view of it where it is one already."""
    pieces = [*blocks(data, max(1, num_bytes(data)))]
    return b"" if not pieces else pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _seconds(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)
