"""Object stores on this machine, each in a process of its own, for as long as a block lasts."""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import obstore
import obstore.exceptions
import obstore.store

ACCESS_KEY, SECRET_KEY = "tester", "a-secret-of-the-tests"
BUCKET = "mailbox"

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": ACCESS_KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    "AWS_REGION": "us-east-1",
}
"""The environment of whoever may use these servers."""

START_SECONDS = 60.0


class Server:
    """A process that can be killed and started again on the same data and ports."""

    def __init__(
        self, command: list[str], port: int, folder: Path, *, makes_bucket: bool = False
    ) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"
        self._makes_bucket = makes_bucket
        self._command = command
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns once it answers requests and, if it makes the bucket itself, that is there."""
        with open(self._folder / "server.log", "ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                start_new_session=True,
                env={**os.environ, **CREDENTIALS, "HOME": str(self._folder)},
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                log_text = (self._folder / "server.log").read_text(errors="replace")
                raise AssertionError(f"{self._command[0]} did not start:\n{log_text[-3000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        """With SIGKILL; what it had not brought to the disk is lost."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def url(self, prefix: str) -> str:
        """What `open_store` takes to reach a prefix of the bucket."""
        return f"s3://{BUCKET}/{prefix}?endpoint={self.endpoint}"

    def _answers(self) -> bool:
        return self._listens() and (not self._makes_bucket or self._has_bucket())

    def _has_bucket(self) -> bool:
        client = obstore.store.S3Store(
            BUCKET,
            endpoint=self.endpoint,
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            region="us-east-1",
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )
        try:
            obstore.list_with_delimiter(client)
        except obstore.exceptions.BaseError:
            return False
        return True

    def _listens(self) -> bool:
        try:
            with urllib.request.urlopen(self.endpoint, timeout=1.0):
                return True
        except urllib.error.HTTPError as error:
            return error.code < 500
        except OSError:
            return False


@contextlib.contextmanager
def seaweed(folder: Path) -> Iterator[Server]:
    """SeaweedFS: a real store with conditional writes, whose data survive SIGKILL."""
    roles = ("s3", "master", "volume", "filer", "admin")
    ports = dict(zip(roles, _free_ports(2 * len(roles))[::2], strict=True))
    grpc = dict(zip(roles, _free_ports(2 * len(roles))[1::2], strict=True))
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    command = [
        *(_program("weed"), "mini", f"-dir={folder / 'data'}", f"-s3.config={folder / 's3.json'}"),
        *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false"),
        *(f"-bucket={BUCKET}", "-webdav=false", "-admin.ui=false"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false"),
        *(f"-{role}.port={port}" for role, port in ports.items()),
        *(f"-{role}.port.grpc={port}" for role, port in grpc.items()),
    ]
    server = Server(command, ports["s3"], folder, makes_bucket=True)
    with _running(server):
        yield server


@contextlib.contextmanager
def moto(folder: Path) -> Iterator[Server]:
    """moto: a mock of AWS, in memory."""
    [port] = _free_ports(1)
    command = [sys.executable, str(Path(__file__).with_name("moto_in_turn.py"))]
    server = Server([*command, "-H", "127.0.0.1", "-p", str(port)], port, folder)
    with _running(server):
        make_bucket(server)
        yield server


@contextlib.contextmanager
def rclone(folder: Path) -> Iterator[Server]:
    """rclone over a folder: speaks S3 but ignores the condition of a write."""
    [port] = _free_ports(1)
    (folder / "data" / BUCKET).mkdir(parents=True)
    command = [
        *(_program("rclone"), "serve", "s3", "--addr", f"127.0.0.1:{port}"),
        *("--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", "--vfs-cache-mode", "off"),
        *("--config", str(folder / "rclone.conf"), str(folder / "data")),
    ]
    server = Server(command, port, folder)
    with _running(server):
        yield server


AZURITE = Path(__file__).parents[2] / ".azurite" / "node_modules" / ".bin" / "azurite-blob"
"""Where `npm install --prefix .azurite azurite` puts Azure's emulator, which pip cannot bring."""

AZURE_ACCOUNT = "devstoreaccount1"
_AZURE_KEY = (  # Every Azurite has this one; Microsoft publishes it.
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[Server]:
    """Azure's own emulator, in memory."""
    [port] = _free_ports(1)
    command = [
        *(str(AZURITE), "--blobHost", "127.0.0.1", "--blobPort", str(port)),
        *("--inMemoryPersistence", "--disableTelemetry", "--silent", "--skipApiVersionCheck"),
    ]
    server = Server(command, port, folder)
    with _running(server):
        _make_container(server)
        yield server


def azure_credentials() -> dict[str, str]:
    """The environment of whoever may use Azurite."""
    return {"AZURE_STORAGE_ACCOUNT": AZURE_ACCOUNT, "AZURE_STORAGE_KEY": _AZURE_KEY}


def _make_container(server: Server) -> None:
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())
    headers = {"x-ms-date": date, "x-ms-version": "2021-12-02"}
    to_sign = (
        "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:2021-12-02\n"
        f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{BUCKET}\nrestype:container"
    )
    key = base64.b64decode(_AZURE_KEY)
    signature = base64.b64encode(hmac.digest(key, to_sign.encode(), "sha256")).decode()
    headers["Authorization"] = f"SharedKey {AZURE_ACCOUNT}:{signature}"
    url = f"{server.endpoint}/{AZURE_ACCOUNT}/{BUCKET}?restype=container"
    request = urllib.request.Request(url, method="PUT", headers=headers)
    with urllib.request.urlopen(request, timeout=10.0):
        pass


@contextlib.contextmanager
def _running(server: Server) -> Iterator[None]:
    try:
        server.start()
        yield
    finally:
        server.kill()


def make_bucket(server: Server) -> None:
    """Creates the bucket of the tests; only a mock takes that without a signature."""
    request = urllib.request.Request(f"{server.endpoint}/{BUCKET}", method="PUT")
    with urllib.request.urlopen(request, timeout=10.0):
        pass


def _program(name: str) -> str:
    """A program that a package of the test dependencies brings."""
    found = shutil.which(name, path=sysconfig.get_path("scripts"))
    assert found, f"`{name}` is not installed: `pip install -e '.[test]'` brings it"
    return found


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for found in sockets:
            found.bind(("127.0.0.1", 0))
        return [found.getsockname()[1] for found in sockets]


def foreign_variables() -> list[str]:
    """What the environment of these tests says to clients of any cloud."""
    return [
        name
        for name in os.environ
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_", "STORAGE_EMULATOR"))
    ]
