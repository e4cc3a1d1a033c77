"""The contract in buckets: a real server, a mock, an emulator and a stub."""

import itertools

import pytest

from jdiloco.store import open_store
from jdiloco.testing.conformance import StoreConformance
from tests.store import servers, stub

names = itertools.count()

pytestmark = pytest.mark.usefixtures("credentials")


class BucketConformance(StoreConformance):
    """What all buckets have in common here."""

    kills = 4
    kill_bytes = 8_000_000

    def process_url(self, store):
        return store.url


class TestSeaweed(BucketConformance):
    """The contract, on a real server. There a race of eight takes seconds."""

    threads = 3
    processes = 2
    process_keys = 20

    @pytest.fixture
    def store(self, seaweed_server):
        return open_store(seaweed_server.url(f"conformance/{next(names)}"))


class TestMoto(BucketConformance):
    """The contract, on a mock of AWS."""

    @pytest.fixture
    def store(self, moto_server):
        return open_store(moto_server.url(f"conformance/{next(names)}"))


class TestAzurite(BucketConformance):
    """The contract, on Azure's own emulator."""

    @pytest.fixture
    def store(self, azurite_server, monkeypatch):
        for name, value in servers.azure_credentials().items():
            monkeypatch.setenv(name, value)
        endpoint = f"{azurite_server.endpoint}/{servers.AZURE_ACCOUNT}"
        return open_store(f"az://{servers.BUCKET}/conformance/{next(names)}?endpoint={endpoint}")


class TestGoogle(BucketConformance):
    """The contract over Google's XML API, which no server here speaks: a stub of our own does."""

    @pytest.fixture
    def store(self):
        with stub.running() as server:
            server.says_what_is_missing = True
            yield open_store(server.url("conformance", "gs"))


class TestStub(BucketConformance):
    """The contract on the stub itself, or the faults it is made for would prove nothing."""

    @pytest.fixture
    def store(self):
        with stub.running() as server:
            yield open_store(server.url("conformance"))
