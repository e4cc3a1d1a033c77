"""One of the two processes that race for keys: `python -m jdiloco.cli.doctor_racer URL BODY`.

Creates each key that it reads, with that body, and prints whether it was the first.
"""

from __future__ import annotations

import sys

from jdiloco.errors import JDilocoError
from jdiloco.store import open_store


def main() -> None:
    _, url, body = sys.argv
    store = open_store(url)
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            answer = str(store.create(line.strip(), body.encode()))
        except JDilocoError as error:
            answer = type(error).__name__
        print(answer, flush=True)


if __name__ == "__main__":
    main()
