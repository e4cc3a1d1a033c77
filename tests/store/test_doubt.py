"""What a bucket answers, and what becomes of it: one object and one commit, every time."""

import contextlib
import threading
import time

import pytest

from jdiloco.errors import FormatError, StoreUnavailable, UsageError
from jdiloco.store import create_contested, create_owned, open_store, small_requests
from jdiloco.store.bucket import BucketStore
from tests.store import stub
from tests.store.stub import Fault

pytestmark = pytest.mark.usefixtures("credentials")

DOUBTFUL = {
    "409 with nothing stored": Fault(status=409, code="ConditionalRequestConflict"),
    "409 on Azure with nothing stored": Fault(status=409, code="BlobAlreadyExists"),
    "412 with nothing stored": Fault(status=412, code="PreconditionFailed"),
    "412 after the write": Fault(status=412, code="PreconditionFailed", lands=True),
    "429": Fault(status=429, code="TooManyRequests"),
    "500 before the write": Fault(status=500),
    "500 after the write": Fault(status=500, lands=True),
    "503": Fault(status=503, code="SlowDown"),
    "a connection dropped before the write": Fault(drop=True),
    "a connection dropped after the write": Fault(drop=True, lands=True),
    "no answer in time, and nothing written": Fault(wait=2.0, drop=True),
    "no answer in time, but written": Fault(wait=2.0, drop=True, lands=True),
    "no answer in time, and written when nobody waits any more": Fault(
        wait=2.0, drop=True, lands=True, late=True
    ),
}


@pytest.fixture
def server():
    with stub.running() as running:
        yield running


@pytest.fixture(params=["s3", "gs"])
def store(server, request):
    return open_store(server.url("p", request.param))


def small(store):
    return small_requests(store, 0.5)


def attempts(server, key="p/k"):
    return [request for request in server.requests if request.key == key and request.verb == "PUT"]


@pytest.mark.parametrize("doubt", DOUBTFUL)
def test_a_doubtful_answer_comes_after_one_request_and_is_no_success(doubt, server, store):
    """Were it sent again below us, our own object would be taken for somebody else's (B66)."""
    server.faults = [DOUBTFUL[doubt]]
    with contextlib.suppress(StoreUnavailable):
        assert small(store).create("k", b"1") is False
    assert len(attempts(server)) == 1


@pytest.mark.parametrize("again", [1, 2])
@pytest.mark.parametrize("doubt", DOUBTFUL)
def test_an_owned_object_is_there_once_whatever_was_answered(doubt, again, server, store):
    server.faults = [DOUBTFUL[doubt]] * again
    create_owned(small(store), "k", b"mine", waits=(0.0, 0.0, 0.0), sleep=lambda seconds: None)
    assert server.objects["p/k"][0] == b"mine"
    assert server.generation == 1


@pytest.mark.parametrize("doubt", DOUBTFUL)
def test_a_contested_object_is_the_first_writers_whatever_was_answered(doubt, server, store):
    server.put("p/k", b"theirs", only_if_absent=True)
    server.faults = [DOUBTFUL[doubt]] * 2
    found = create_contested(
        small(store), "k", b"mine", waits=(0.0, 0.0), sleep=lambda seconds: None
    )
    assert found == b"theirs"
    assert server.generation == 1


@pytest.mark.parametrize("doubt", DOUBTFUL)
def test_of_two_writers_in_doubt_both_learn_the_same(doubt, server, store):
    server.faults = lambda request: (
        DOUBTFUL[doubt] if request.verb == "PUT" and request.number <= 2 else None
    )
    found = {}

    def write(body):
        found[body] = create_contested(
            small(store), "k", body, waits=(0.0, 0.0, 0.0), sleep=lambda seconds: None
        )

    writers = [threading.Thread(target=write, args=(body,)) for body in (b"one", b"two")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert found[b"one"] == found[b"two"] == server.objects["p/k"][0]
    assert server.generation == 1


def test_a_key_that_is_taken_is_asked_for_once(server, store):
    """412 is final, where 409 is not (B68)."""
    server.put("p/k", b"theirs", only_if_absent=True)
    assert store.create("k", b"mine") is False
    assert len(attempts(server)) == 1


def test_a_conflict_twice_and_then_success_is_success(server, store):
    server.faults = [DOUBTFUL["409 with nothing stored"]] * 2
    create_owned(store, "k", b"mine", waits=(0.0, 0.0), sleep=lambda seconds: None)
    assert len(attempts(server)) == 3


def test_somebody_elses_bytes_under_an_owned_key_are_an_error(server, store):
    server.put("p/k", b"theirs", only_if_absent=True)
    with pytest.raises(FormatError, match="holds other bytes"):
        create_owned(store, "k", b"mine", waits=(), sleep=lambda seconds: None)


@pytest.mark.parametrize("status", [429, 500, 503])
@pytest.mark.parametrize("verb", ["get", "list", "delete"])
def test_what_changes_nothing_is_asked_again_with_growing_waits(server, store, verb, status):
    server.put("p/a/k", b"1", only_if_absent=True)
    server.faults = lambda request: Fault(status=status) if request.number <= 3 else None
    answer = {
        "get": lambda: store.get("a/k"),
        "list": lambda: [row.key for row in store.list("a/")],
        "delete": lambda: store.delete(["a/k"]),
    }[verb]()
    assert answer == {"get": b"1", "list": ["a/k"], "delete": None}[verb]
    times = [request.at for request in server.requests]
    assert len(times) == 4
    assert times[3] - times[0] > 0.1


def test_an_answer_that_breaks_off_is_asked_for_again(server, store):
    server.put("p/k", b"1", only_if_absent=True)
    server.faults = lambda request: Fault(drop=True) if request.number <= 2 else None
    assert store.get("k") == b"1"


@pytest.mark.parametrize("verb", ["create", "get", "list", "delete"])
@pytest.mark.parametrize(
    "fault", [Fault(wait=3.0, drop=True), Fault(status=503), Fault(drop=True)], ids=repr
)
def test_a_small_request_ends_within_its_limit_repeats_included(server, store, verb, fault):
    server.faults = lambda request: fault
    bounded = small_requests(store, 0.6)
    began = time.monotonic()
    with pytest.raises(StoreUnavailable):
        {
            "create": lambda: bounded.create("k", b"1"),
            "get": lambda: bounded.get("k"),
            "list": lambda: bounded.list(""),
            "delete": lambda: bounded.delete(["k"]),
        }[verb]()
    assert time.monotonic() - began < 0.6 + 1.5  # What a busy machine may add; a repeat waits 3 s.


def test_small_requests_do_not_wait_for_large_ones_on_one_connection(server):
    """Twenty uploads that hang take no connection from a beat."""
    store = open_store(server.url("p"))
    server.faults = lambda request: Fault(wait=1.5) if "bulk" in request.key else None
    uploads = [
        threading.Thread(target=store.create, args=(f"bulk/{n}", bytes(100_000))) for n in range(20)
    ]
    for upload in uploads:
        upload.start()
    bounded = small_requests(store, 0.6)
    for n in range(5):
        assert bounded.create(f"beat/{n}", b"")
    assert len(bounded.list("beat/")) == 5
    assert any(upload.is_alive() for upload in uploads)
    for upload in uploads:
        upload.join()


def test_an_upload_may_take_longer_than_a_small_request(server, store):
    server.faults = lambda request: Fault(wait=1.0) if request.verb == "PUT" else None
    with pytest.raises(StoreUnavailable, match="No answer in time"):
        small_requests(store, 0.5).create("small", b"1")
    assert store.create("large", bytes(1_000_000))


def test_an_upload_may_take_as_long_as_its_size_does_over_the_slowest_rate(server, monkeypatch):
    monkeypatch.setattr("jdiloco.store.clients.PATIENCE_SECONDS", 0.2)
    store = BucketStore(server.url("p"), bytes_per_second_min=1_000_000)
    server.faults = lambda request: Fault(wait=1.0) if request.verb == "PUT" else None
    assert store.create("large", bytes(2_000_000))
    with pytest.raises(StoreUnavailable, match="No answer in time"):
        store.create("slow", bytes(100_000))


def test_a_missing_bucket_is_no_empty_one(server, store):
    server.faults = lambda request: Fault(status=404, code="NoSuchBucket")
    for ask in (lambda: store.get("k"), lambda: store.list(""), lambda: store.create("k", b"")):
        with pytest.raises(StoreUnavailable, match="no such bucket"):
            ask()


def test_a_refusal_says_which_rights_a_run_needs_and_is_not_repeated(server, store):
    server.faults = lambda request: Fault(status=403, code="AccessDenied")
    with pytest.raises(StoreUnavailable, match=r"AccessDenied.*read, write, list and delete"):
        store.get("k")
    assert len(server.requests) == 1


# Listings


def test_a_bucket_that_ignores_after_is_asked_by_directory_once_that_has_cost_a_page(server, store):
    server.ignores_after = True
    for n in range(1500):
        server.put(f"p/log/{n // 1000}/{n:04}", b"", only_if_absent=True)
    server.put("p/log/live/n", b"", only_if_absent=True)
    wanted = ["log/1/1499", "log/live/n"]
    for requests in (2, 4, 4):
        server.requests.clear()
        assert [row.key for row in store.list("log/", after="log/1/1498")] == wanted
        assert len(server.requests) <= requests
    asked = {request.query["prefix"][0] for request in server.requests}
    assert asked == {"p/log/", "p/log/1/", "p/log/live/"}


def test_a_listing_goes_on_where_a_page_ended(server, store):
    for n in range(2300):
        server.put(f"p/k/{n:04}", b"", only_if_absent=True)
    server.faults = lambda request: Fault(status=500) if request.number == 2 else None
    assert len(store.list("k/")) == 2300
    assert len(server.requests) == 4


# Large objects


@pytest.fixture
def pieces(monkeypatch):
    monkeypatch.setattr("jdiloco.store.bucket.PIECE_BYTES", 1000)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 2000, 3500])
def test_a_large_object_is_read_in_pieces(server, store, size):
    body = bytes(n % 251 for n in range(size))
    store.create("k", body)
    server.requests.clear()
    assert store.get("k") == body
    assert len(server.requests) <= 1 + (size > 1000) * -(-size // 1000)
    for start, stop in ((0, 2500), (500, 1700), (999, 1001), (size, None), (3, 9999)):
        assert store.get("k", start=start, stop=stop) == body[start:stop]


@pytest.mark.usefixtures("pieces")
def test_a_line_that_breaks_costs_a_piece(server, store):
    body = bytes(n % 251 for n in range(3500))
    store.create("k", body)
    server.requests.clear()
    server.faults = lambda request: Fault(drop=True) if request.number == 3 else None
    assert store.get("k") == body
    assert len(server.requests) == 1 + 4 + 1


@pytest.mark.usefixtures("pieces")
def test_an_object_that_is_deleted_while_it_is_read_is_not_there(server, store):
    store.create("k", bytes(3500))
    server.requests.clear()

    def vanish(request):
        if request.number == 3:
            server.objects.clear()

    server.faults = lambda request: vanish(request)
    assert store.get("k") is None


def test_an_object_that_no_bucket_takes_in_one_write_is_refused(server, store, monkeypatch):
    monkeypatch.setattr("jdiloco.store.bucket.OBJECT_BYTES_MAX", 100)
    with pytest.raises(UsageError, match="more `fragments`"):
        store.create("k", bytes(101))
    assert server.requests == []
