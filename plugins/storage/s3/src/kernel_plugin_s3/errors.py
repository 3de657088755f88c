"""From what obstore raises to the storage errors.

obstore has types for a few statuses and one for all the rest, whose text alone tells them apart, and for listings not
even those. This is the one place that reads that text: the status, the store's code, and the address that answered.
"""

from __future__ import annotations

import re

from kernel_core.errors import (
    StorageError,
    StorageForbiddenError,
    StorageFullError,
    StorageRootError,
    StorageTransientError,
)
from kernel_core.storage.base import missing

from kernel_plugin_s3.settings import WHAT_TO_SET

_TRANSIENT = {408, 409, 425, 429, 500, 502, 503, 504, 509}
_TRANSIENT_CODES = {"RequestTimeout", "SlowDown", "InternalError", "NoSuchUpload", "OperationAborted"}
_FORBIDDEN_CODES = {
    "AccessDenied",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
}
_ELSEWHERE = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
_FULL_CODES = {"XMinioStorageFull", "QuotaExceeded", "XMinioAdminBucketQuotaExceeded"}
_PERMISSIONS = (
    "Expected credentials that allow it: s3:GetObject, s3:PutObject, s3:DeleteObject, s3:AbortMultipartUpload, and "
    "s3:ListBucket, without which S3 says the same of an object that is not there."
)
# where credentials of a role come from: the machine's or container's metadata service, or the token service
_CREDENTIALS_FROM = re.compile(
    r"https?://(169\.254\.170\.\d+/|[^/]+/latest/(api/token$|meta-data/iam/)|[^?]*\?(.*&)?Action=AssumeRole)"
)


def status_of(error: BaseException) -> int | None:
    """Return the status of the answer, None if there was none."""
    found = re.search(r"status code: (\d{3})\b", _text(error))
    return int(found[1]) if found else None


def code_of(error: BaseException) -> str:
    """Return the store's own word for what is wrong, or an empty string."""
    found = re.search(r"<Code>\s*([\w.]+)\s*</Code>", _text(error))
    return found[1] if found else ""


def storage_error(where: str, doing: str, error: BaseException) -> StorageError:
    """Return the storage error for ``error``.

    Args:
        where: URL of the object.
        doing: What was tried, for the message.
        error: What obstore raised.
    """
    status, code, text = status_of(error), code_of(error), _text(error)
    said = f"{where}: {doing} failed: {_summary(error, status, code)}."
    if _asked_for_credentials(error):
        if status in _TRANSIENT:
            return StorageTransientError(f"{said} No credentials could be had from the machine's role.")
        return StorageForbiddenError(
            f"{where}: there are no credentials: none are set, and the machine has no role that gives some. {WHAT_TO_SET}"
        )
    if status is None and re.search(r"Missing (AccessKeyId|SecretAccessKey)", text):
        return StorageForbiddenError(
            f"{where}: one half of the credentials is missing in the environment. {WHAT_TO_SET}"
        )
    if code == "NoSuchBucket":
        return StorageRootError(f"{said} The bucket does not exist. Make it, or correct the URL.")
    if code in _ELSEWHERE or status in (301, 307) or (status is None and "redirect without" in text):
        return StorageRootError(f"{said} The bucket is in another region. Set AWS_REGION to that region.")
    if code in _TRANSIENT_CODES:
        return StorageTransientError(f"{said} The store is busy or restarting.")
    if status in (401, 403) or code in _FORBIDDEN_CODES:
        return StorageForbiddenError(f"{said} {_PERMISSIONS} {WHAT_TO_SET}")
    if status == 507 or code in _FULL_CODES:
        return StorageFullError(f"{said} The store is full. Make room, or ask for a larger quota.")
    if status in _TRANSIENT:
        return StorageTransientError(f"{said} The store is busy or restarting.")
    if status == 404:
        return missing(where)
    if status is None and "HTTP error" in text:
        return StorageTransientError(f"{said} The store cannot be reached, or is too slow. Check network and endpoint.")
    return StorageError(f"{said} Look at what the store says.")


def _text(error: BaseException) -> str:
    return str(error).partition("\n\nDebug source")[0]


def _asked_for_credentials(error: BaseException) -> bool:
    found = re.search(r"Error performing \w+ (\S+)", _text(error))
    return found is not None and _CREDENTIALS_FROM.match(found[1]) is not None


def _summary(error: BaseException, status: int | None, code: str) -> str:
    if status is None:
        kind = re.search(r"kind: (\w+)", str(error))
        text = _text(error).strip().splitlines()[0][:300].rstrip(".")
        return f"{text} ({kind[1].lower()})" if kind else text
    message = re.search(r"<Message>([^<]*)</Message>", _text(error))
    return ": ".join(filter(None, [f"status {status}", code, message[1].rstrip(".") if message else ""]))
