"""moto's server, answering one request at a time.

It looks whether a key is there and stores it in two steps, in threads: of racing creates two can
win. In turn, it keeps the promise that AWS keeps.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto import server
from moto.moto_server.werkzeug_app import DomainDispatcherApplication


class InTurn(DomainDispatcherApplication):
    """The application of the server, called by one thread at a time."""

    turn = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable:
        with self.turn:
            return super().__call__(environ, start_response)


if __name__ == "__main__":
    setattr(server, "DomainDispatcherApplication", InTurn)  # noqa: B010 - it is private there.
    server.main()
