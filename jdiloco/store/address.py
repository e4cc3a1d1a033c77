"""Which bucket a URL names, written as people of each cloud write it.

    s3://bucket/prefix                          AWS, or `?endpoint=https://…&region=…` of another
    gs://bucket/prefix                          Google Cloud Storage
    az://container/prefix?account=name          Azure; the environment may name the account
    abfs[s]://container@name.dfs.core.windows.net/prefix      the same
    https://name.blob.core.windows.net/container/prefix       the same

Nothing secret belongs in a URL: it is shown in logs, in errors and in lists of processes. One that
holds a secret all the same is refused without repeating it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from urllib.parse import parse_qsl, urlsplit

from jdiloco.errors import UsageError

SCHEMES = ("s3", "gs", "az", "abfs", "abfss")
"""What a bucket's URL begins with; and `https`, of an Azure account."""

PREFIX_CHARACTERS_MAX = 200
"""What the 1,024 bytes that buckets allow a key leave to the prefix."""

_OPTIONS = {
    "s3": ("endpoint", "region", "anonymous"),
    "gs": ("endpoint", "anonymous"),
    "az": ("endpoint", "account", "anonymous"),
}
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PREFIX_PART = re.compile(r"(?!\.\.?$)[A-Za-z0-9._=@+,-]+")
_AZURE_HOST = re.compile(r"([a-z0-9]{3,24})\.(?:blob|dfs)\.(?:core\.windows\.net|[a-z.]+)")
_ENDPOINT = re.compile(r"https?://[A-Za-z0-9._-]+(?::\d+)?(?:/[A-Za-z0-9._~/-]*)?|"
                       r"https?://\[[0-9a-fA-F:]+\](?::\d+)?(?:/[A-Za-z0-9._~/-]*)?")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Address:
    """Where a bucket store is. Holds no secret."""

    kind: str  # `s3`, `gs` or `az`.
    bucket: str
    prefix: str  # Without a `/` at either end; empty for the whole bucket.
    options: Mapping[str, str]

    @property
    def url(self) -> str:
        """As `parse` takes it."""
        path = f"{self.kind}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")
        query = "&".join(f"{name}={value}" for name, value in self.options.items())
        return f"{path}?{query}" if query else path


def parse(url: str, **options: str | None) -> Address:
    """The address in a URL. `options` that are not None are as if they stood behind its `?`."""
    parts = urlsplit(url)
    shown = url.partition("?")[0].partition("#")[0]
    if parts.fragment or "#" in url:
        raise UsageError(f"`{_without_user(shown)}#…`: a bucket's URL has no `#`.")
    kind, bucket, path, found = _split(parts.scheme, parts.netloc, parts.path, shown)
    found |= _query(parts.query, kind, shown)
    found |= {name: value for name, value in options.items() if value is not None}
    if not _BUCKET.fullmatch(bucket):
        raise UsageError(f"`{shown}` names no bucket. Write `{kind}://bucket/prefix`.")
    _check_endpoint(found.get("endpoint"), shown)
    return Address(kind, bucket, _prefix(path, shown), found)


def _split(scheme: str, netloc: str, path: str, shown: str) -> tuple[str, str, str, dict[str, str]]:
    """Kind, bucket, path and what the host says."""
    user, at, host = netloc.rpartition("@")
    if scheme == "https":
        account = _AZURE_HOST.fullmatch(host)
        if not account or at:
            raise UsageError(
                f"`{_without_user(shown)}`: of https URLs only Azure's are known, "
                "`https://account.blob.core.windows.net/container/prefix`. Write "
                "`s3://bucket/prefix?endpoint=https://…` or `gs://bucket/prefix`."
            )
        container, _, rest = path.lstrip("/").partition("/")
        return "az", container, rest, {"account": account[1]}
    if scheme in ("abfs", "abfss"):
        account = _AZURE_HOST.fullmatch(host) if at else None
        if at and (not account or ":" in user):
            raise UsageError(
                f"`{_without_user(shown)}`: write "
                f"`{scheme}://container@account.dfs.core.windows.net/prefix`."
            )
        return "az", user or host, path, {"account": account[1]} if account else {}
    if at or ":" in netloc:
        raise UsageError(
            f"`{_without_user(shown)}`: only a bucket stands between `{scheme}://` and the next "
            "`/`. Credentials come from the environment, and a server's address goes behind a "
            "question mark, as in `s3://bucket/prefix?endpoint=http://127.0.0.1:8333`."
        )
    return scheme, netloc, path, {}


def _query(query: str, kind: str, shown: str) -> dict[str, str]:
    known = _OPTIONS[kind]
    pairs = parse_qsl(query)
    names = {item.partition("=")[0] if "=" in item else "…" for item in query.split("&") if item}
    unknown = sorted(name[:20] for name in names - {*known})
    if unknown:
        raise UsageError(
            f"`{shown}?…`: there is no `{'`, `'.join(unknown)}` here, only `{'`, `'.join(known)}`. "
            "Keys, tokens and signatures come from the environment, never from a URL."
        )
    found = dict(pairs)
    if found.get("anonymous", "true") not in ("true", "false"):
        raise UsageError(f"`{shown}?…`: `anonymous` is `true` or `false`.")
    return found


def _check_endpoint(endpoint: str | None, shown: str) -> None:
    if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
        raise UsageError(
            f"`{shown}`: its `endpoint` is no address of a server, such as "
            "`http://127.0.0.1:8333`. A user and a password do not belong there."
        )


def _prefix(path: str, shown: str) -> str:
    prefix = path.strip("/")
    parts = prefix.split("/") if prefix else []
    if len(prefix) > PREFIX_CHARACTERS_MAX or not all(map(_PREFIX_PART.fullmatch, parts)):
        raise UsageError(
            f"`{shown}`: a prefix is parts of [A-Za-z0-9._=@+,-] joined by `/`, neither `.` nor "
            f"`..`, and has at most {PREFIX_CHARACTERS_MAX} characters."
        )
    return prefix


def _without_user(shown: str) -> str:
    return re.sub(r"//[^/]*@", "//…@", shown)
