"""What a bucket's answer means, without repeating what it may hold.

The client's own messages quote whole answers and addresses, and a server may answer with what it
was sent. So only the status and the name that the server gave the error are passed on.
"""

from __future__ import annotations

import re

_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>\s*([A-Za-z0-9.]{1,60})\s*</Code>")

_TROUBLES = (
    ("kind: Timeout", "No answer in time"),
    ("TimedOut", "No answer in time"),
    ("ConnectionRefused", "Connection refused: is the server up, and `endpoint` its address?"),
    ("ConnectionReset", "The connection was reset"),
    ("dns error", "The name of the server is not known"),
    ("InvalidContentType", "The server speaks no https: write `http://` if it is one to trust"),
    ("BadScheme", "The server has an `http://` address where `https://` is wanted"),
    ("UnknownIssuer", "The certificate of the server is not trusted"),
    ("CertificateUnknown", "The certificate of the server is not trusted"),
    ("connection closed before message completed", "The connection was dropped"),
    ("IncompleteMessage", "The connection was dropped"),
    ("error decoding response body", "The connection was dropped within the answer"),
)
_METADATA = ("169.254.169.254", "metadata.google", "fd00:ec2", "token request")

_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_HINTS = {
    "credentials": "No credentials were found where this cloud's own tools look for them: for S3 "
    "in `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY` or a profile in ~/.aws, for Google in "
    "`GOOGLE_APPLICATION_CREDENTIALS`, for Azure in `AZURE_STORAGE_ACCOUNT` and "
    "`AZURE_STORAGE_KEY` (`help(jdiloco.store.clients)` lists them all)",
    "NoSuchBucket": "There is no such bucket: create it, or correct its name",
    "ContainerNotFound": "There is no such container: create it, or correct its name",
    "RequestTimeTooSkewed": "Set this machine's clock",
    "PermanentRedirect": "The bucket is in another region: say `region`",
    "AuthorizationHeaderMalformed": "The bucket is in another region: say `region`",
    "InvalidAccessKeyId": "The credentials are not valid here",
    "SignatureDoesNotMatch": "The credentials are not valid here",
    "401": "The credentials are not valid here",
    "403": "These credentials may not do that: a run has to read, write, list and delete",
    "429": "It is asked too often",
    "503": "It is asked too often, or not up",
}


def status(error: BaseException) -> int | None:
    """The HTTP status that an error of the client stands for."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def code(error: BaseException) -> str:
    """What the server calls the error; empty when it says nothing."""
    found = _CODE.search(str(error))
    return found[1] if found else ""


def is_missing_bucket(error: BaseException) -> bool:
    """Whether nothing is there because the bucket is not: a 404 alone would read as no object."""
    return code(error) in _NO_BUCKET


def is_denied(error: BaseException) -> bool:
    """Whether the same request will go on failing until somebody puts something right."""
    if any(part in str(error) for part in _METADATA):
        return True
    return is_missing_bucket(error) or status(error) in (401, 403)


def is_past_the_end(error: BaseException) -> bool:
    """Whether an object is there but has no byte in the range that was asked for."""
    return status(error) == 416 or "StartTooLarge" in str(error)


def is_not_partial(error: BaseException) -> bool:
    """Whether what came was not the part that was asked for, so that the whole is needed."""
    text = str(error)
    return "NotPartial" in text or "ParseContentRange" in text


def reason(error: BaseException) -> str:
    """An error of the client in a few words, with the way out where there is one."""
    text, number, name = str(error), status(error), code(error)
    if any(part in text for part in _METADATA):
        return f"{_HINTS['credentials']}."
    if number is None:
        found = [words for part, words in _TROUBLES if part in text]
        said = found[0] if found else f"The client says {type(error).__name__}"
        return said if said.endswith("?") else f"{said}."
    hint = _HINTS.get(name) or _HINTS.get(str(number))
    said = f"HTTP {number} ({name})" if name else f"HTTP {number}"
    return f"{said}. {hint}." if hint else f"{said}."
