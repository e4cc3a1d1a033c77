"""A bucket in memory behind HTTP, which answers as badly as a test wants.

Speaks as much of S3 (path style) and of Google's XML API as a mailbox needs, with conditional
writes, and checks no signature. `server.faults` says what goes wrong: a function of a `Request`
that returns a `Fault` or None, or a list whose first is taken by the next `PUT`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.server
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "mailbox"
PAGE = 1000


@dataclasses.dataclass(frozen=True)
class Request:
    """One request as it arrived."""

    number: int  # The first is 1.
    verb: str
    key: str  # Empty for a listing.
    at: float  # Seconds.
    query: dict[str, list[str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong with one request."""

    status: int = 0  # Answered with this status; 0: as it should be.
    code: str = "InternalError"
    drop: bool = False  # Not answered at all: the connection ends.
    wait: float = 0.0  # Seconds before it is answered.
    lands: bool = False  # Whether it is carried out all the same.
    late: bool = False  # Whether that happens only after the wait.
    echo: bool = False  # Whether the answer repeats the request's headers.


class Stub:
    """The server. `objects` is what the bucket holds, `requests` what it was asked."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.requests: list[Request] = []
        self.faults: list[Fault] | Callable[[Request], Fault | None] = []
        self.ignores_after = False
        self.ignores_conditions = False
        self.races = False  # Whether it looks first and writes a moment later.
        self.says_what_is_missing = False  # To a delete, as Google does and S3 does not.
        self.lock = threading.Lock()
        self.generation = 0
        stub = self

        class Handler(_Handler):
            server_stub = stub

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        """Ends the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def url(self, prefix: str, scheme: str = "s3") -> str:
        """What `open_store` takes."""
        return f"{scheme}://{BUCKET}/{prefix}?endpoint={self.endpoint}&anonymous=true"

    def arrived(self, verb: str, key: str, query: dict[str, list[str]]) -> Fault:
        """Writes the request down; what is to go wrong with it."""
        with self.lock:
            number = len(self.requests) + 1
            self.requests.append(Request(number, verb, key, time.monotonic(), query))
            if callable(self.faults):
                return self.faults(self.requests[-1]) or Fault()
            return self.faults.pop(0) if self.faults and verb == "PUT" else Fault()

    def put(self, key: str, body: bytes, *, only_if_absent: bool) -> int:
        """The generation of the new object; 0 when the key is taken."""
        if only_if_absent and not self.ignores_conditions and key in self.objects:
            return 0
        if self.races:
            time.sleep(0.05)
        with self.lock:
            if (
                only_if_absent
                and not (self.ignores_conditions or self.races)
                and key in self.objects
            ):
                return 0
            self.generation += 1
            self.objects[key] = (body, self.generation)
            return self.generation


@contextlib.contextmanager
def running() -> Iterator[Stub]:
    stub = Stub()
    try:
        yield stub
    finally:
        stub.close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server_stub: Stub

    def log_message(self, format: str, *args: object) -> None:
        del format, args

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        key = unquote(parts.path).removeprefix(f"/{BUCKET}").lstrip("/")
        query = parse_qs(parts.query, keep_blank_values=True)
        stub = self.server_stub
        fault = stub.arrived(self.command, key, query)
        work = getattr(self, f"_{self.command.lower()}")
        if fault == Fault():
            return self._answer(*work(key, query, body))
        if fault.lands and not fault.late:
            work(key, query, body)
        time.sleep(fault.wait)
        if fault.lands and fault.late:
            work(key, query, body)
        if fault.drop:
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        elif fault.status:
            said = escape(" ".join(map(str, self.headers.items()))) if fault.echo else "as wanted"
            self._answer(fault.status, _error(fault.code, said), {"Retry-After": "1"})
        else:
            self._answer(*work(key, query, body))

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _handle

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        with contextlib.suppress(OSError):  # Whoever asked may have given up.
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    def _put(self, key: str, query: object, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        google = self.headers.get("x-goog-if-generation-match")
        absent = self.headers.get("If-None-Match") == "*" or google == "0"
        generation = self.server_stub.put(key, body, only_if_absent=absent)
        if not generation:
            return 412, _error("PreconditionFailed"), {}
        return 200, b"", _tags(body, generation)

    def _get(self, key: str, query: dict, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        if not key:
            return self._list(query)
        with self.server_stub.lock:
            found = self.server_stub.objects.get(key)
        if found is None:
            return 404, _error("NoSuchKey"), {}
        data, generation = found
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if not wanted:
            return 200, data, _tags(data, generation)
        first = int(wanted[1])
        last = min(int(wanted[2] or len(data)), len(data) - 1)
        if first >= len(data):
            return 416, _error("InvalidRange"), {}
        spelled = {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
        return 206, data[first : last + 1], _tags(data, generation) | spelled

    _head = _get

    def _list(self, query: dict[str, list[str]]) -> tuple[int, bytes, dict[str, str]]:
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        after = "" if self.server_stub.ignores_after else query.get("start-after", [""])[0]
        after = query.get("continuation-token", [after])[0]
        rows: list[str] = []
        with self.server_stub.lock:
            keys = sorted(self.server_stub.objects)
            for key in keys:
                name = key
                if delimiter and delimiter in key[len(prefix) :]:
                    name = prefix + key[len(prefix) :].partition(delimiter)[0] + delimiter
                if key.startswith(prefix) and name > after and name not in rows[-1:]:
                    rows.append(name)
            more = len(rows) > PAGE
            rows = rows[:PAGE]
            text = "".join(_row(name, self.server_stub.objects) for name in rows)
        token = f"<NextContinuationToken>{escape(rows[-1])}</NextContinuationToken>" if more else ""
        xml = (
            f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{text}"
            "</ListBucketResult>"
        )
        return 200, xml.encode(), {"Content-Type": "application/xml"}

    def _delete(self, key: str, query: object, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        with self.server_stub.lock:
            found = self.server_stub.objects.pop(key, None)
        missed = found is None and self.server_stub.says_what_is_missing
        return (404, _error("NoSuchKey"), {}) if missed else (204, b"", {})

    def _post(self, key: str, query: object, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        names = [unquote(name) for name in re.findall(r"<Key>([^<]*)</Key>", body.decode())]
        with self.server_stub.lock:
            for name in names:
                self.server_stub.objects.pop(name, None)
        rows = "".join(f"<Deleted><Key>{escape(name)}</Key></Deleted>" for name in names)
        return 200, f"<DeleteResult>{rows}</DeleteResult>".encode(), {}


def _row(name: str, objects: dict[str, tuple[bytes, int]]) -> str:
    if name not in objects:
        return f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
    body, generation = objects[name]
    return (
        f"<Contents><Key>{escape(name)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        f"<ETag>{_tags(body, generation)['ETag']}</ETag><Size>{len(body)}</Size></Contents>"
    )


def _tags(body: bytes, generation: int) -> dict[str, str]:
    return {
        "ETag": f'"{hashlib.md5(body).hexdigest()}"',
        "x-goog-generation": str(generation),
        "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
    }


def _error(code: str, said: str = "as it is") -> bytes:
    return f"<Error><Code>{code}</Code><Message>{said}</Message></Error>".encode()
