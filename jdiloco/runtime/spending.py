"""What nodes ask of their store, and what Amazon would charge for it.

Every node counts (`store.counting`). It says what it has asked for so far in its beats, since an
object that it writes anyway costs no more for having a body, and in its contributions, whose heads
stay in the round records when beats have been swept. So of a life all is known that it had asked
before its newest beat; once it is gone, before the last contribution that was merged.
"""

from __future__ import annotations

from jdiloco.errors import FormatError
from jdiloco.protocol.keys import Keys
from jdiloco.protocol.records import Account, unseal
from jdiloco.protocol.rules import Life
from jdiloco.runtime.inspect import Stock
from jdiloco.store.base import Store
from jdiloco.types import Spent

PRICES = "list prices of S3 Standard in us-east-1 (https://aws.amazon.com/s3/pricing)"
"""What the figures below are, in US dollars. They change, and other regions and clouds differ."""
WRITE = 0.005 / 1000  # PUT and LIST.
READ = 0.0004 / 1000  # GET. Deleting is free.
STORED = 0.023 / 10**9  # A byte for a month.
RECEIVED = 0.09 / 10**9  # A byte that leaves the region; inside it, and sent, it costs nothing.


def requests_dollars(spent: Spent) -> float:
    """What the requests cost."""
    return WRITE * (spent.creates + spent.lists) + READ * spent.gets


def transfer_dollars(spent: Spent) -> float:
    """What the bytes received cost a node outside the bucket's region."""
    return RECEIVED * spent.received


def storage_dollars(stored: int) -> float:
    """What so many bytes cost in a month."""
    return STORED * stored


def read_accounts(store: Store, stock: Stock, keys: Keys) -> dict[Life, Spent]:
    """What every life says in its newest beat, where that is still there and whole."""
    newest = {
        Life(beat.node, beat.incarnation): keys.beat(beat)
        for beat in sorted(stock.beats)
        if stock.sizes[keys.beat(beat)]
    }
    found = {life: _account(key, store.get(key)) for life, key in newest.items()}
    return {life: spent for life, spent in found.items() if spent is not None}


def _account(key: str, data: bytes | None) -> Spent | None:
    try:
        return None if data is None else unseal(key, data, Account).spent
    except FormatError:
        return None
