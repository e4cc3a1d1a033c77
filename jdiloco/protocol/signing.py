"""Who may write: what only those can make who hold the key of a run.

Without a run key everything is named and written as `keys` and `records` say, and whoever can write
to the mailbox takes part. With one, what nodes say to each other goes through one door on its way
out and one on its way in (`jdiloco.store.signed`), and both are made of the functions here:

    every name     ends in a MAC of the run and the whole key:
                   `{run}/log/0000000/0000000042.0.{32 hexadecimal digits}`. So nobody else can take
                   a key in advance, and what a name says (a beat, who has reported, that there is a
                   newer life) has been said by somebody who holds the key
    small objects  end in a line that holds a MAC of the run, the whole key and their bytes
    contributions  hold such a MAC of what they say of themselves, with the hash of their tensors
    payloads, files of checkpoints
                   are covered by the hashes in signed objects; of a checkpoint the MAC stands in
                   the name of its directory, since other programs restore what lies in it
    parts of a pod's contribution
                   have their hash in their names
    beats, arrivals at barriers
                   are their names; the account in a beat is read by `status` alone, unsigned

What does not pass on the way in counts as absent. An object that is copied to another key, or from
another run of the same key, does not pass; one that was deleted may be put back under its own key,
by anybody. That is harmless: a round record, a claim, an incarnation or a manifest is never
deleted, contributions and payloads are so only once a record has made them needless, and of beats
only one that is higher than all before is a sign of life.

Each MAC is HMAC-SHA256 under a key of its own that is derived from the run's, over parts of which
each is preceded by its length.
"""

from __future__ import annotations

import hashlib
import hmac
import re

from jdiloco.errors import UsageError
from jdiloco.protocol.keys import CREATING, MANIFEST

SECRET_BYTES_MIN = 16
"""Whoever sees a mailbox can try keys on it, without asking anybody and as fast as they like."""

NAME_DIGITS = 32
"""Hexadecimal digits of a MAC in a name: 128 bits."""

_ENDED = re.compile(rf"(?P<key>.+)\.(?P<mac>[0-9a-f]{{{NAME_DIGITS}}})", re.DOTALL)
_MANIFEST = re.compile(rf"{MANIFEST}(\.[0-9a-f]{{{NAME_DIGITS}}})?")
_KINDS = ("log", "node", "unit", "rank", "barrier", "data", "save")
_CONTRIBUTION = re.compile(r"[^/]+/log/[0-9]{7}/[0-9]{10}\.2\.[^/]*")


class RunKey:
    """The key of a run. Shows nothing of itself, and is neither compared nor saved.

    `secret` is at least 16 bytes that nobody can guess; UsageError for fewer.
    """

    __slots__ = ("_messages", "_names", "_objects")

    def __init__(self, secret: bytes) -> None:
        if len(secret) < SECRET_BYTES_MIN:
            raise UsageError(
                f"The run key has {len(secret)} bytes, wanted {SECRET_BYTES_MIN} or more that "
                "nobody can guess: make one with `openssl rand -hex 32`."
            )
        self._names = _derive(secret, "names")
        self._objects = _derive(secret, "objects")
        self._messages = _derive(secret, "messages")

    def __repr__(self) -> str:
        return "RunKey(…)"

    def __reduce__(self) -> str:
        raise UsageError("A run key is not copied anywhere: read it where it is needed.")

    # Names

    def name(self, key: str) -> str:
        """How what `key` says is called in the mailbox of a signed run."""
        top, below = _split(key)
        return f"{top}.{self._name_mac(top)}{below}" if _is_ours(key) else key

    def read_name(self, name: str) -> str | None:
        """The key that a name stands for; None for one that nobody who holds the key has made.

        What cannot be anything of a run stands for itself.
        """
        if not (_is_ours(name) or _MANIFEST.fullmatch(name)):
            return name
        top, below = _split(name)
        match = _ENDED.fullmatch(top)
        if match is None or not hmac.compare_digest(self._name_mac(match["key"]), match["mac"]):
            return None
        return f"{match['key']}{below}"

    def prefix(self, prefix: str) -> str:
        """With what the names of all keys begin that begin with `prefix`."""
        return self.name(prefix) if _is_in_checkpoint(prefix) else prefix

    def after(self, key: str) -> str:
        """A name that comes before those of all keys past `key`."""
        return "" if _is_in_checkpoint(key) else key

    def _name_mac(self, key: str) -> str:
        return _mac(self._names, run_of(key), key)[:NAME_DIGITS]

    # Small objects

    def close(self, key: str, data: bytes) -> bytes:
        """A small object with its signature."""
        return data + self._object_line(key, data)

    def open(self, key: str, data: bytes) -> bytes | None:
        """What was signed under `key`; None unless these bytes were."""
        body = data[: -len(self._object_line(key, b""))]
        return body if hmac.compare_digest(self.close(key, body), data) else None

    def _object_line(self, key: str, data: bytes) -> bytes:
        return f"{_mac(self._objects, run_of(key), key, data)}\n".encode()

    # Contributions

    def sign(self, key: str, said: str) -> str:
        """The signature of what the message under `key` says of itself."""
        return _mac(self._messages, run_of(key), key, said)

    def vouches(self, key: str, said: str, signature: str) -> bool:
        """Whether it is that."""
        return hmac.compare_digest(self.sign(key, said).encode(), signature.encode())


def is_signed(key: str) -> bool:
    """Whether the bytes under `key` end in a signature.

    All do but those that a name, a hash or a signature within them vouches for. A key of a kind
    that is unknown here is signed.
    """
    if not _is_ours(key) or key.startswith(CREATING) or _is_in_checkpoint(key):
        return False
    kind, _, rest = key.partition("/")[2].partition("/")
    if kind in ("data", "barrier", "save"):
        return False
    return not (kind == "log" and rest.startswith("live/")) and not is_contribution(key)


def names_a_manifest(name: str) -> bool:
    """Whether a manifest may be called so, whatever the key of its run, or without any."""
    return _MANIFEST.fullmatch(name) is not None


def run_of(key: str) -> str:
    """The id of the run that a key belongs to; "" for what lies above all runs."""
    run, found, _ = key.partition("/")
    return run if found and not key.startswith(CREATING) else ""


def is_contribution(key: str) -> bool:
    """Whether a contribution lies under `key`: its signature stands within."""
    return _CONTRIBUTION.fullmatch(key) is not None


def _is_ours(key: str) -> bool:
    """Whether a key can be of a run; anything else in a mailbox is nobody's business."""
    parts = key.split("/")
    return key == MANIFEST or key.startswith(CREATING) or (len(parts) > 1 and parts[1] in _KINDS)


def _is_in_checkpoint(key: str) -> bool:
    """Parts of a pod's initial values lie there too, and count by their names."""
    parts = key.split("/")
    return len(parts) > 3 and parts[1] == "save" and not parts[3].startswith("part.")


def _split(key: str) -> tuple[str, str]:
    """Where the MAC goes: after a file's directory, at the end of everything else."""
    if not _is_in_checkpoint(key):
        return key, ""
    run, save, prefix, rest = key.split("/", 3)
    return f"{run}/{save}/{prefix}", f"/{rest}"


def _derive(secret: bytes, purpose: str) -> bytes:
    return hmac.digest(secret, f"jdiloco run key: {purpose}".encode(), hashlib.sha256)


def _mac(key: bytes, *parts: str | bytes) -> str:
    data = [part if isinstance(part, bytes) else part.encode() for part in parts]
    framed = b"".join(len(part).to_bytes(8, "big") + part for part in data)
    return hmac.digest(key, framed, hashlib.sha256).hex()
