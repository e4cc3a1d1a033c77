"""Servers that tests share: each starts when first asked for, and is gone when the tests are."""

import signal

import pytest

from tests.store import servers

pytest.register_assert_rewrite("jdiloco.testing.conformance")


def pytest_configure():
    """A shell that starts the tests in the background has all of them ignore Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def seaweed_server(tmp_path_factory):
    """A real S3 store."""
    with servers.seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory):
    """A mock of S3."""
    with servers.moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def rclone_server(tmp_path_factory):
    """A gateway that ignores conditions."""
    with servers.rclone(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture(scope="session")
def azurite_server(tmp_path_factory):
    """An emulator of Azure, where npm has brought it."""
    if not servers.AZURITE.exists():
        pytest.skip("Azurite is not here: `npm install --prefix .azurite azurite` brings it")
    with servers.azurite(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture
def credentials(monkeypatch):
    """The environment of whoever may use those servers, and nothing else of any cloud."""
    for name in servers.foreign_variables():
        monkeypatch.delenv(name)
    for name, value in servers.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
