"""Which bucket, where, and with what credentials: from options, the environment and AWS's files, in this order."""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kernel_core.errors import StorageForbiddenError, StorageRootError

WHAT_TO_SET = (
    "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN for temporary ones), or AWS_PROFILE; for a "
    "public bucket open it with anonymous=True or set AWS_SKIP_SIGNATURE=true."
)
# credentials that the client gets by itself, and asks for again before they expire
_ROLES = (
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
)
_UNSUPPORTED = ("credential_process", "sso_session", "sso_start_url", "source_profile", "credential_source")


@dataclass(frozen=True)
class Credentials:
    """A key and its secret; ``token`` comes with temporary ones."""

    access_key_id: str
    secret_access_key: str
    token: str | None = None


@dataclass(frozen=True)
class Settings:
    """What a client of a bucket needs.

    Attributes:
        bucket: Its name.
        prefix: What all keys begin with; may be empty.
        region: For the signature.
        endpoint_url: Of another store, or None for AWS.
        credentials: None: the instance's or container's role, or with ``anonymous`` nobody's.
        anonymous: Whether requests are not signed.
    """

    bucket: str
    prefix: str
    region: str
    endpoint_url: str | None
    credentials: Credentials | None
    anonymous: bool


def split_url(url: str) -> tuple[str, str]:
    """Return bucket and prefix of ``s3://bucket/prefix``.

    Raises:
        StorageRootError: it is no such URL.
    """
    parts = urlsplit(url, allow_fragments=False)
    if parts.scheme != "s3" or not parts.netloc or "@" in parts.netloc or parts.query:
        raise StorageRootError(f"{url}: it names no bucket. Expected s3://bucket/prefix. Correct the URL.")
    return parts.netloc, unquote(parts.path).strip("/")


def settle(
    url: str, given: Mapping[str, str | None], environment: Mapping[str, str], anonymous: bool = False
) -> Settings:
    """Return the settings for ``url``.

    Args:
        url: ``s3://bucket/prefix``.
        given: The options ``endpoint_url``, ``region``, ``access_key_id``, ``secret_access_key``, ``session_token`` and
            ``profile``; None where not given. They win.
        environment: The environment's variables, which come before AWS's files.
        anonymous: Do not sign.

    Raises:
        StorageRootError: the URL names no bucket.
        StorageForbiddenError: there are no credentials, or half of them.
    """
    bucket, prefix = split_url(url)
    profile = read_profile(given.get("profile") or environment.get("AWS_PROFILE"), environment, url)
    endpoint = (
        given.get("endpoint_url")
        or _first(environment, "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "S3_ENDPOINT_URL")
        or profile.get("endpoint_url")
    )
    region = given.get("region") or _first(environment, "AWS_REGION", "AWS_DEFAULT_REGION") or profile.get("region")
    anonymous = anonymous or environment.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true")
    credentials = None if anonymous else _credentials(url, given, environment, profile)
    return Settings(bucket, prefix, region or "us-east-1", endpoint, credentials, anonymous)


def read_profile(name: str | None, environment: Mapping[str, str], url: str) -> dict[str, str]:
    """Return what AWS's config and credentials files say of a profile; ``default`` need not be there.

    Raises:
        StorageForbiddenError: a profile that was asked for is not there.
    """
    home = Path(environment.get("HOME", "~")).expanduser() / ".aws"
    config = environment.get("AWS_CONFIG_FILE") or home / "config"
    shared = environment.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials"
    wanted, found = name or "default", dict[str, str]()
    sections = ((config, wanted if wanted == "default" else f"profile {wanted}"), (shared, wanted))
    seen = False
    for path, section in sections:
        parser = configparser.ConfigParser(interpolation=None, strict=False)
        try:
            parser.read(Path(path).expanduser(), encoding="utf-8")
        except (OSError, configparser.Error, UnicodeDecodeError) as error:
            raise StorageForbiddenError(f"{url}: {path} cannot be read: {error}. Mend the file.") from error
        if parser.has_section(section):
            seen = True
            found |= dict(parser[section])
    if name and not seen:
        raise StorageForbiddenError(
            f"{url}: there is no profile {name!r} in {config} or {shared}. Expected one of that name. Correct AWS_PROFILE."
        )
    return found


def _credentials(
    url: str, given: Mapping[str, str | None], environment: Mapping[str, str], profile: Mapping[str, str]
) -> Credentials | None:
    sources = (
        ("the options", given.get("access_key_id"), given.get("secret_access_key"), given.get("session_token")),
        *(
            (where, source.get(key), source.get(secret), source.get(token))
            for where, source, key, secret, token in (
                (
                    "the environment's variables",
                    environment,
                    "AWS_ACCESS_KEY_ID",
                    "AWS_SECRET_ACCESS_KEY",
                    "AWS_SESSION_TOKEN",
                ),
                ("the keys of the profile", profile, "aws_access_key_id", "aws_secret_access_key", "aws_session_token"),
            )
        ),
    )
    for where, key, secret, token in sources:
        if key and secret:
            return Credentials(key, secret, token or None)
        if key or secret:
            half = "a secret without its key" if secret else "a key without its secret"
            raise StorageForbiddenError(f"{url}: {where} have {half}. Expected both. {WHAT_TO_SET}")
    if any(environment.get(name) for name in _ROLES):
        return None
    if kinds := [kind for kind in _UNSUPPORTED if kind in profile]:
        raise StorageForbiddenError(
            f"{url}: the profile gets its credentials by {' and '.join(kinds)}, which is not supported. Expected keys. "
            "`aws configure export-credentials --format env` prints some to set."
        )
    if environment.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        raise StorageForbiddenError(f"{url}: there are no credentials. {WHAT_TO_SET}")
    return None  # those of the machine's role, if it has one


def _first(environment: Mapping[str, str], *names: str) -> str | None:
    return next((environment[name] for name in names if environment.get(name)), None)
