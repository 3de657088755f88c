"""The contract against moto's server, an emulator of S3 on loopback, and what only S3 has."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_core import Trainer
from kernel_core.errors import (
    OptionError,
    StorageError,
    StorageExistsError,
    StorageForbiddenError,
    StorageFullError,
    StorageMissingError,
    StorageRootError,
    StorageTransientError,
)
from kernel_core.models import Classifier
from kernel_core.storage import Retry, Storage, open_storage
from kernel_core.testing.faults import Fault, FaultProxy, Request
from kernel_core.testing.storage import FaultContract, StorageContract
from kernel_plugin_s3 import S3Storage
from kernel_plugin_s3.errors import storage_error
from kernel_plugin_s3.settings import Credentials, settle, split_url
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MIB = 2**20
KEYS = {"access_key_id": "key", "secret_access_key": "secret"}
IMPATIENT = Retry(attempts=4, time_limit_s=3.0, first_wait_s=0.002, longest_wait_s=0.01)


class Serial:
    """One request at a time: moto checks a condition and stores in two steps, S3 in one."""

    def __init__(self, application: Any) -> None:
        self.application, self.lock = application, threading.Lock()

    def __call__(self, environment: Any, start_response: Any) -> list[bytes]:
        with self.lock:
            return list(self.application(environment, start_response))


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        disable_nagle_algorithm = True  # else every answer waits 40 ms

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = Serial(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "S3_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


def make_bucket(server: str) -> str:
    name = f"bucket-{secrets.token_hex(4)}"
    urllib.request.urlopen(urllib.request.Request(f"{server}/{name}", method="PUT")).close()
    return name


def opened(server: str, **options: Any) -> S3Storage:
    options = {"endpoint_url": server, "part_size_bytes": 5 * MIB, **KEYS, **options}
    return S3Storage(f"s3://{make_bucket(server)}/runs/ü", **options)


class TestS3Storage(StorageContract):
    large_bytes = 34 * MIB  # more than one range is read at a time
    num_writers = 4

    @pytest.fixture(autouse=True)
    def server(self, moto: str) -> None:
        self.moto = moto

    def make_storage(self) -> Storage:
        return opened(self.moto)

    def fill(self, storage: Storage, keys: Sequence[str]) -> None:
        from moto.core import DEFAULT_ACCOUNT_ID
        from moto.s3.models import s3_backends

        bucket, prefix = split_url(storage.url)
        for key in keys:
            s3_backends[DEFAULT_ACCOUNT_ID]["aws"].put_object(bucket, f"{prefix}/{key}", b"x")


class TestS3Faults(FaultContract):
    @pytest.fixture(autouse=True)
    def server(self, moto: str) -> None:
        self.moto = moto

    def server_url(self) -> str:
        return self.moto

    def make_storage(self, endpoint: str) -> Storage:
        name = make_bucket(self.moto)
        return S3Storage(
            f"s3://{name}/p",
            endpoint_url=endpoint,
            part_size_bytes=5 * MIB,
            request_timeout_s=1.0,
            retry=IMPATIENT,
            **KEYS,
        )

    def make_storage_of_missing_bucket(self, endpoint: str) -> Storage:
        return S3Storage("s3://no-such-bucket/p", endpoint_url=endpoint, retry=IMPATIENT, **KEYS)

    def is_part(self, request: Request) -> bool:
        return request.method == "PUT" and "partNumber=" in request.path

    def num_unfinished(self, storage: Storage) -> int:
        bucket = storage.url.split("/")[2]
        with urllib.request.urlopen(f"{self.moto}/{bucket}?uploads") as answer:
            return answer.read().count(b"<Upload>")


def test_keys_lie_below_the_prefix_and_nowhere_else(moto: str) -> None:
    bucket = make_bucket(moto)
    inner, outer = (S3Storage(f"s3://{bucket}{end}", endpoint_url=moto, **KEYS) for end in ("/a/b/", ""))
    inner.put("x/y", b"1")
    outer.put("a/bb", b"2")
    outer.put("c", b"3")
    assert [entry.key for entry in inner.list()] == ["x/y"]
    assert [entry.key for entry in outer.list()] == ["a/b/x/y", "a/bb", "c"]
    assert list(outer.list_folders("a")) == ["b"]
    assert inner.local_path("x/y") is None


def test_objects_that_only_mark_folders_are_none(moto: str) -> None:
    bucket = make_bucket(moto)
    for key in ("p/", "p/dir/", "p/dir/sub/", "p/dir/sub/empty", "p/other/"):
        urllib.request.urlopen(urllib.request.Request(f"{moto}/{bucket}/{key}", b"", method="PUT")).close()
    storage = S3Storage(f"s3://{bucket}/p", endpoint_url=moto, **KEYS)
    assert [entry.key for entry in storage.list()] == ["dir/sub/empty"]
    assert [entry.key for entry in storage.list("dir")] == ["dir/sub/empty"]
    assert list(storage.list_folders()) == ["dir", "other"]
    assert not storage.exists("dir")


def test_parts_are_of_one_size_and_sent_at_the_same_time(moto: str) -> None:
    with FaultProxy(moto) as proxy:
        storage = opened(proxy.url, max_concurrency=3)
        proxy.requests.clear()
        data = bytes(range(256)) * (17 * MIB // 256)
        storage.put("large", [memoryview(data)[:7], memoryview(data)[7 : 9 * MIB], memoryview(data)[9 * MIB :]])
        sizes = sorted(request.size for request in proxy.requests if "partNumber" in request.path)
        assert sizes == [2 * MIB, 5 * MIB, 5 * MIB, 5 * MIB]
        assert storage.get("large") == data
        proxy.requests.clear()
        storage.put("small", data[: 5 * MIB])
        assert [request.method for request in proxy.requests] == ["PUT"]


def test_an_operation_costs_one_request(moto: str) -> None:
    with FaultProxy(moto) as proxy:
        storage = opened(proxy.url)
        storage.put("a/b", b"1")
        for call in (
            lambda: storage.get("a/b"),
            lambda: storage.get("a/b", 0, 1),
            lambda: storage.size("a/b"),
            lambda: storage.exists("a/b"),
            lambda: storage.exists("a/c"),
            lambda: storage.version("a/b"),
            lambda: list(storage.list()),
            lambda: list(storage.list_folders()),
            lambda: storage.create("new", b"1"),
            lambda: storage.put("new", b"1"),
            lambda: storage.delete("new"),
        ):
            proxy.requests.clear()
            call()
            assert len(proxy.requests) == 1


def test_an_object_that_is_replaced_while_it_is_read_is_read_again(moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernel_plugin_s3 import storage as module

    monkeypatch.setattr(module, "REQUEST_BYTES", MIB)
    reader, times = opened(moto), []
    reader.put("a", b"1" * 3 * MIB)
    original = reader._read_range

    def read(key: str, path: str, start: int, end: int, tag: str | None = None) -> Any:
        if tag is None and len(times) < limit:
            got = original(key, path, start, end, tag)
            times.append(1)
            reader.put("a", bytes([65 + len(times)]) * 3 * MIB)
            return got
        return original(key, path, start, end, tag)

    monkeypatch.setattr(reader, "_read_range", read)
    limit = 2
    assert reader.get("a") == b"C" * 3 * MIB
    limit = 100
    with pytest.raises(StorageTransientError, match="it was replaced again and again while it was read"):
        reader.get("a")


def test_without_credentials_nothing_is_missing(monkeypatch: pytest.MonkeyPatch, moto: str) -> None:
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")  # nobody is there
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto)
    storage = open_storage(f"s3://{make_bucket(moto)}/runs")
    for call in (
        lambda: storage.exists("latest.json"),
        lambda: storage.version("latest.json"),
        lambda: storage.get("latest.json"),
        lambda: list(storage.list()),
        lambda: storage.put("a", b""),
    ):
        with pytest.raises(
            StorageForbiddenError, match=r"there are no credentials.* Set AWS_ACCESS_KEY_ID and AWS_SECRET"
        ):
            call()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "")
    with pytest.raises(StorageForbiddenError, match="one half of the credentials is missing"):
        open_storage("s3://bucket")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(StorageForbiddenError, match=r"there are no credentials\. Set AWS_ACCESS_KEY_ID"):
        open_storage("s3://bucket")


def test_a_run_saves_to_a_bucket_and_goes_on_from_there(monkeypatch: pytest.MonkeyPatch, moto: str) -> None:
    for name, value in {
        "ACCESS_KEY_ID": "id",
        "SECRET_ACCESS_KEY": "key",
        "REGION": "us-east-1",
        "ENDPOINT_URL": moto,
    }.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    folder = f"s3://{make_bucket(moto)}/runs/{{run_name}}"

    def train(**options: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = Classifier(nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 3)), num_classes=3)
        data = TensorDataset(torch.arange(96.0).reshape(24, 4) / 96, torch.arange(24) % 3)
        with Trainer(
            model=model,
            train_dataloader=DataLoader(data, 4, shuffle=True),
            optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
            run_name="there",
            seed=1,
            progress_bar=False,
            save_folder=folder,
            save_interval="4ba",
            save_num_checkpoints_to_keep=2,
            autoresume=True,
            **options,
        ) as trainer:
            trainer.fit()
            return trainer.state.model.state_dict()

    train(max_duration="7ba")
    storage = open_storage(folder.format(run_name="there"))
    assert list(storage.list_folders()) == ["ep0-ba4", "ep1-ba7"]
    resumed = train(max_duration="12ba")  # in the middle of the second epoch
    assert list(storage.list_folders()) == ["ep1-ba12", "ep1-ba8"]
    assert json.loads(storage.get("latest"))["checkpoint"] == "ep1-ba12"
    for entry in list(storage.list()):
        storage.delete(entry.key)
    straight = train(max_duration="12ba")
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)


def test_a_metadata_service_that_is_busy_is_asked_again_and_one_that_knows_none_is_not(
    monkeypatch: pytest.MonkeyPatch, moto: str
) -> None:
    bucket = make_bucket(moto)
    for status, expected in ((503, StorageTransientError), (404, StorageForbiddenError)):
        with FaultProxy(moto) as proxy:
            monkeypatch.setenv("AWS_METADATA_ENDPOINT", proxy.url)
            storage = S3Storage(f"s3://{bucket}", endpoint_url=moto, retry=IMPATIENT)
            with proxy.failing(Fault("status", status)), pytest.raises(expected):
                storage.exists("a")
            assert (proxy.hit > 1) == (status == 503)


def test_wrong_credentials_are_forbidden_and_the_message_says_what_to_set(moto: str) -> None:
    body = b"<Error><Code>InvalidAccessKeyId</Code><Message>No such key id.</Message></Error>"
    with FaultProxy(moto) as proxy:
        storage = opened(proxy.url)
        with proxy.failing(Fault("status", 403, body)):
            with pytest.raises(StorageForbiddenError) as caught:
                storage.get("latest.json")
    said = str(caught.value)
    assert said.startswith(
        f"{storage.url}/latest.json: reading it failed: status 403: InvalidAccessKeyId: No such key id."
    )
    assert "s3:ListBucket" in said
    assert "Set AWS_ACCESS_KEY_ID" in said
    assert "Debug source" not in said


def test_a_store_that_is_not_there_is_transient(moto: str) -> None:
    storage = S3Storage("s3://bucket/p", endpoint_url="http://127.0.0.1:1", retry=IMPATIENT, **KEYS)
    for call in (lambda: storage.exists("a"), lambda: list(storage.list()), lambda: storage.put("a", b"")):
        with pytest.raises(StorageTransientError, match=r"cannot be reached.*Tried 4 times"):
            call()


def answer(status: int | None, code: str = "", url: str = "https://s3.amazonaws.com/b/k", text: str = "") -> Exception:
    said = f"Generic S3 error: Error performing GET {url} in 1ms - "
    said += f"Server returned non-2xx status code: {status} X: <Error><Code>{code}</Code></Error>" if status else text
    return Exception(said + "\n\nDebug source:\nstatus code: 404 kind: Timeout")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (answer(400, "ExpiredToken"), StorageForbiddenError),
        (answer(400, "InvalidToken"), StorageForbiddenError),
        (answer(403), StorageForbiddenError),
        (answer(403, "RequestTimeTooSkewed"), StorageForbiddenError),
        (answer(401), StorageForbiddenError),
        (answer(404, "NoSuchKey"), StorageMissingError),
        (answer(404, "NoSuchBucket"), StorageRootError),
        (answer(404, "NoSuchUpload"), StorageTransientError),
        (answer(301, "PermanentRedirect"), StorageRootError),
        (answer(400, "AuthorizationHeaderMalformed"), StorageRootError),
        (answer(None, text="Received redirect without LOCATION, this normally indicates …"), StorageRootError),
        (answer(400, "RequestTimeout"), StorageTransientError),
        (answer(409, "OperationAborted"), StorageTransientError),
        (answer(503, "SlowDown"), StorageTransientError),
        (answer(None, text="HTTP error: error sending request"), StorageTransientError),
        (answer(507, "XMinioStorageFull"), StorageFullError),
        (answer(400, "EntityTooLarge"), StorageError),
        (answer(501, "NotImplemented"), StorageError),
        (answer(None, text="Could not parse path"), StorageError),
        (answer(None, url="http://169.254.169.254/latest/api/token", text="HTTP error: x"), StorageForbiddenError),
        (answer(404, url="http://169.254.169.254/latest/meta-data/iam/security-credentials/"), StorageForbiddenError),
        (answer(404, url="http://169.254.170.2/v2/credentials/x"), StorageForbiddenError),
        (
            answer(403, url="https://sts.amazonaws.com/?Version=1&Action=AssumeRoleWithWebIdentity"),
            StorageForbiddenError,
        ),
        (answer(429, url="http://169.254.169.254/latest/api/token"), StorageTransientError),
        (answer(404, url="https://s3.amazonaws.com/b/redirect/latest/meta-data"), StorageMissingError),
    ],
)
def test_every_answer_has_its_error(error: Exception, kind: type[StorageError]) -> None:
    found = storage_error("s3://b/k", "reading it", error)
    assert type(found) is kind
    assert str(found).startswith("s3://b/k: ")
    assert "Debug" not in str(found)


def test_a_url_names_a_bucket() -> None:
    assert split_url("s3://bucket") == ("bucket", "")
    assert split_url("s3://bucket/a/b%20c/") == ("bucket", "a/b c")
    assert split_url("s3://bucket/a#b") == ("bucket", "a#b")
    for url in ("s3://", "s3:///a", "http://bucket/a", "s3://user@bucket/a", "s3://bucket/a?x=1"):
        with pytest.raises(StorageRootError, match=r"it names no bucket\. Expected s3://bucket/prefix"):
            split_url(url)


ENVIRONMENT = {"HOME": "/nowhere", "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}


def test_options_come_before_the_environment_and_that_before_files(tmp_path: Path) -> None:
    aws = tmp_path / ".aws"
    aws.mkdir()
    (aws / "config").write_text("[default]\nregion = here\n[profile p]\nregion = there\nendpoint_url = http://e\n")
    (aws / "credentials").write_text("[p]\naws_access_key_id = pk\naws_secret_access_key = p%s\n")
    home = {"HOME": str(tmp_path)}
    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_SESSION_TOKEN": "t"}
    found = settle("s3://b/p", {}, {**home, "AWS_PROFILE": "p"})
    assert (found.bucket, found.prefix, found.region, found.endpoint_url) == ("b", "p", "there", "http://e")
    assert found.credentials == Credentials("pk", "p%s")
    found = settle("s3://b", {}, {**home, **keys, "AWS_DEFAULT_REGION": "r", "S3_ENDPOINT_URL": "http://c"})
    assert (found.region, found.endpoint_url) == ("r", "http://c")
    assert found.credentials == Credentials("k", "s", "t")
    given = {"access_key_id": "ok", "secret_access_key": "os", "region": "or", "endpoint_url": "http://o"}
    found = settle("s3://b", given, {**home, **keys, "AWS_REGION": "r", "AWS_ENDPOINT_URL": "http://c"})
    assert (found.region, found.endpoint_url) == ("or", "http://o")
    assert found.credentials == Credentials("ok", "os")
    assert settle("s3://b", {}, {**home, **keys}).region == "here"
    assert settle("s3://b", {"profile": "p"}, home).credentials == Credentials("pk", "p%s")
    assert settle("s3://b", {}, ENVIRONMENT).region == "us-east-1"
    order = {"AWS_ENDPOINT_URL_S3": "1", "AWS_ENDPOINT_URL": "2", "S3_ENDPOINT_URL": "3"}
    assert settle("s3://b", {}, {**ENVIRONMENT, **order}).endpoint_url == "1"


def test_half_credentials_a_missing_profile_and_other_ways_to_get_keys_are_said(tmp_path: Path) -> None:
    aws = tmp_path / ".aws"
    aws.mkdir()
    (aws / "config").write_text("[profile sso]\nsso_session = x\n[profile broken]\n")
    home = {"HOME": str(tmp_path)}
    for environment, said in (
        ({"AWS_ACCESS_KEY_ID": "k"}, "variables have a key without its secret"),
        ({"AWS_SECRET_ACCESS_KEY": "k"}, "variables have a secret without its key"),
        ({"AWS_PROFILE": "none"}, "there is no profile 'none' in .*config or .*credentials"),
        ({"AWS_PROFILE": "sso"}, "gets its credentials by sso_session, which is not supported"),
    ):
        with pytest.raises(StorageForbiddenError, match=said):
            settle("s3://b", {}, {**home, **environment})
    (aws / "credentials").write_text("no section\n")
    with pytest.raises(StorageForbiddenError, match="credentials cannot be read"):
        settle("s3://b", {}, home)


def test_nobodys_credentials_and_those_of_a_role() -> None:
    home = {"HOME": "/nowhere"}
    assert settle("s3://b", {}, home, anonymous=True).anonymous
    assert settle("s3://b", {}, {**home, "AWS_SKIP_SIGNATURE": "true"}).anonymous
    role = {**home, "AWS_EC2_METADATA_DISABLED": "true", "AWS_WEB_IDENTITY_TOKEN_FILE": "/token"}
    assert settle("s3://b", {}, role).credentials is None


def authorization(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    seen: list[dict[str, str]] = []
    handler: Any = proxy._server.RequestHandlerClass
    original = handler._forward

    def forward(self: Any, body: bytes) -> Any:
        seen.append({name.lower(): value for name, value in self.headers.items()})
        return original(self, body)

    monkeypatch.setattr(handler, "_forward", forward)
    return seen


def test_keys_of_the_options_go_without_the_environments_token(moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "other")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "other")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token")
    with FaultProxy(moto) as proxy:
        seen = authorization(proxy, monkeypatch)
        opened(proxy.url).exists("a")
        assert "Credential=key/" in seen[-1]["authorization"]
        assert "x-amz-security-token" not in seen[-1]
        opened(proxy.url, access_key_id=None, secret_access_key=None).exists("a")
        assert "Credential=other/" in seen[-1]["authorization"]
        assert seen[-1]["x-amz-security-token"] == "token"
        opened(proxy.url, anonymous=True).exists("a")
        assert "authorization" not in seen[-1]


def test_options_are_checked() -> None:
    with pytest.raises(OptionError, match=r"s3\.part_size_bytes: got 1\. Expected at least 5242880"):
        S3Storage("s3://b", part_size_bytes=1, **KEYS)
    with pytest.raises(OptionError, match=r"s3\.max_concurrency: got 0\. Expected at least 1"):
        S3Storage("s3://b", max_concurrency=0, **KEYS)


def test_the_scheme_leads_here_and_every_option_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    storage = open_storage("s3://bucket/prefix")
    assert type(storage) is S3Storage
    assert storage.url == "s3://bucket/prefix"
    for name in S3Storage.__init__.__annotations__:
        assert name == "return" or re.search(rf"^ +{name}:", S3Storage.__doc__ or "", re.MULTILINE), name


@pytest.mark.slow
def test_a_large_put_needs_little_more_memory_than_the_object() -> None:
    code = """
import resource, sys
from kernel_plugin_s3 import S3Storage
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
storage = S3Storage("s3://bucket", endpoint_url=sys.argv[1], access_key_id="k", secret_access_key="s")
storage.put("warm", bytes(2**20))
data = [memoryview(bytearray(64 * 2**20)) for _ in range(4)]
for part in data:
    part[::4096] = b"x" * len(part[::4096])
before = peak()
storage.put("large", data)
print(peak() - before)
"""
    with Sink() as url:
        done = subprocess.run([sys.executable, "-c", code, url], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 48  # MiB; the object has 256


class Sink:
    """A server that takes uploads and keeps nothing."""

    def __enter__(self) -> str:
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def take(self) -> None:
                left = int(self.headers.get("Content-Length") or 0)
                while left:
                    left -= len(self.rfile.read(min(left, MIB)))
                body = b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>"
                if self.path.endswith("uploads="):
                    body = b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
                body = body if self.command == "POST" else b""
                self.send_response(200)
                self.send_header("ETag", '"x"')
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_PUT = do_POST = take

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self.server.server_port}"

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def test_an_existing_object_is_no_reason_to_try_again(moto: str) -> None:
    with FaultProxy(moto) as proxy:
        storage = opened(proxy.url)
        storage.put("a", b"1")
        proxy.requests.clear()
        with pytest.raises(StorageExistsError, match=r"/a: something is stored there already"):
            storage.create("a", b"2")
        assert len(proxy.requests) == 1


def test_an_answer_shorter_than_the_range_is_asked_for_again(moto: str) -> None:
    headers = {"Content-Range": "bytes 0-4/5", "ETag": '"x"', "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}
    short = Fault("status", 206, b"12", headers, times=2, matches=lambda request: request.method == "GET")
    with FaultProxy(moto) as proxy:
        storage = opened(proxy.url, retry=IMPATIENT)
        storage.put("a", b"12345")
        with proxy.failing(short):
            assert storage.get("a") == b"12345"
            assert proxy.hit == 2
        short.times = None
        with (
            proxy.failing(short),
            pytest.raises(StorageTransientError, match=r"/a: got 2 bytes\. Expected 5\. Tried 4"),
        ):
            storage.get("a")


def test_conditional_writes_that_met_are_tried_again(moto: str) -> None:
    body = b"<Error><Code>ConditionalRequestConflict</Code></Error>"
    met = Fault("status", 409, body, times=2, matches=lambda request: request.method == "PUT")
    with FaultProxy(moto) as proxy:
        storage = opened(proxy.url, retry=IMPATIENT)
        with proxy.failing(met):
            storage.create("a", b"1")
            assert proxy.hit == 2
        with proxy.failing(met):
            storage.replace("a", b"2", storage.version("a"))
            assert proxy.hit == 2
