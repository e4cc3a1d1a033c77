"""Clients for one bucket: with its credentials, and with limits that a run can live with.

Credentials and whatever an address leaves open come from where each cloud's own tools look. S3:
`AWS_ACCESS_KEY_ID` and its kin, `AWS_WEB_IDENTITY_TOKEN_FILE`, the profile of `AWS_PROFILE` in the
shared files, the metadata of a container or an instance; `AWS_REGION`; `AWS_ENDPOINT_URL`. Google:
`GOOGLE_APPLICATION_CREDENTIALS`, what `gcloud auth application-default login` left, the metadata of
an instance; `STORAGE_EMULATOR_HOST`. Azure: `AZURE_STORAGE_ACCOUNT` with `AZURE_STORAGE_KEY` or
`AZURE_STORAGE_SAS_TOKEN`, `AZURE_STORAGE_CONNECTION_STRING`, `AZURE_CLIENT_ID` and its kin,
`AZURE_FEDERATED_TOKEN_FILE`, the metadata of an instance. What the client itself reads from the
environment is not repeated here.
"""

from __future__ import annotations

import datetime
import math
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jdiloco.errors import UsageError
from jdiloco.store import aws_files
from jdiloco.store.address import Address

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, S3Store

    Client = S3Store | GCSStore | AzureStore

FIRST_WAIT = 0.05
"""Seconds before a failed request is made again, for those that are; doubled each time."""

CONNECT_SECONDS_MAX = 5.0

BYTES_PER_SECOND_MIN = 64 * 1024
"""A line slower than this is as good as broken."""

PIECE_BYTES = 64 * 1024 * 1024
"""How much of an object one request reads."""

PATIENCE_SECONDS = 30.0
"""What a request may take beyond its bytes; also how long nothing may arrive of an answer, and how
long after the first a request that changes nothing is made again."""

_EMULATOR_ACCOUNT = "devstoreaccount1"
_CONNECTION_STRING = {
    "accountname": "account_name",
    "accountkey": "account_key",
    "sharedaccesssignature": "sas_key",
    "blobendpoint": "endpoint",
}
_AZURE_NAMES = {
    "account_name": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"),
    "account_key": ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_KEY"),
    "sas_key": ("AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_SAS_TOKEN"),
}


class Maker:
    """Makes clients for one address. Reads the environment once, when it is made."""

    def __init__(self, address: Address, environment: Mapping[str, str]) -> None:
        configure = {"s3": _s3, "gs": _google, "az": _azure}[address.kind]
        self._address = address
        self._config, self._credentials = configure(address, environment)
        endpoint = self._config.get("endpoint") or self._config.get("base_url") or ""
        self._allow_http = endpoint.startswith("http://") or "use_emulator" in self._config

    def make(self, *, seconds: float, again_within: float = 0.0, stall: float = 0.0) -> Client:
        """A client with connections of its own.

        Arguments:
          seconds: how long one request may take, its answer included.
          again_within: a request that fails is made again as long as it began less than this ago;
            0 never makes one again.
          stall: how long nothing may arrive, if that is to be less than `seconds`.
        """
        from obstore import store as obstore

        classes: dict[str, Any] = {
            "s3": obstore.S3Store,
            "gs": obstore.GCSStore,
            "az": obstore.AzureStore,
        }
        options: dict[str, Any] = {
            "timeout": datetime.timedelta(seconds=seconds),
            "connect_timeout": datetime.timedelta(seconds=min(seconds, CONNECT_SECONDS_MAX)),
            "allow_http": self._allow_http,
        }
        if stall:
            options["read_timeout"] = datetime.timedelta(seconds=stall)
        arguments: dict[str, Any] = {
            "prefix": self._address.prefix or None,
            "config": self._config,
            "client_options": options,
            "retry_config": _retries(again_within),
        }
        if self._credentials is not None:
            arguments["credential_provider"] = self._credentials
        return classes[self._address.kind](self._address.bucket, **arguments)


class AnySize:
    """The clients for objects of any size: the larger, the longer they may take."""

    def __init__(self, maker: Maker, bytes_per_second_min: float) -> None:
        self.maker = maker
        self._rate = bytes_per_second_min
        self._lock = threading.Lock()
        self._writers: dict[int, Client] = {}
        self.reader = maker.make(
            seconds=PATIENCE_SECONDS + PIECE_BYTES / self._rate,
            stall=PATIENCE_SECONDS,
            again_within=PATIENCE_SECONDS,
        )

    def writer(self, size: int) -> Client:
        """One that gives an object of `size` bytes enough time, and at most twice as much."""
        seconds = PATIENCE_SECONDS + size / self._rate
        doublings = math.ceil(math.log2(seconds / PATIENCE_SECONDS))
        with self._lock:
            if doublings not in self._writers:
                limit = PATIENCE_SECONDS * 2.0**doublings
                self._writers[doublings] = self.maker.make(seconds=limit)
            return self._writers[doublings]


class Small:
    """The clients for small objects: every request ends within `seconds`.

    Half of them is for repeating what failed at once, the other for a last request that hangs.
    """

    def __init__(self, maker: Maker, seconds: float) -> None:
        self.maker = maker
        self.reader = maker.make(seconds=seconds / 2, again_within=0.4 * seconds)
        self._writer = maker.make(seconds=seconds)

    def writer(self, size: int) -> Client:
        """One that makes each request once."""
        del size
        return self._writer


def _retries(within: float) -> dict[str, Any]:
    seconds = datetime.timedelta
    return {
        "max_retries": 10 if within else 0,
        "retry_timeout": seconds(seconds=within),
        "backoff": {
            "init_backoff": seconds(seconds=FIRST_WAIT),
            "max_backoff": seconds(seconds=max(FIRST_WAIT, within / 4)),
            "base": 2,
        },
    }


def _anonymous(address: Address) -> dict[str, Any]:
    return {"skip_signature": True} if address.options.get("anonymous") == "true" else {}


def _s3(address: Address, environment: Mapping[str, str]) -> tuple[dict[str, Any], Any]:
    config = _anonymous(address)
    found = aws_files.profile(environment)
    endpoint = (
        address.options.get("endpoint")
        or environment.get("AWS_ENDPOINT_URL_S3")
        or environment.get("AWS_ENDPOINT_URL")
        or environment.get("AWS_ENDPOINT")
        or found.get("endpoint_url")
    )
    if endpoint:
        # The client would rather believe `AWS_ENDPOINT_URL_S3` than what it is told.
        config |= {"endpoint": endpoint, "aws_endpoint_url_s3": endpoint}
    region = (
        address.options.get("region")
        or environment.get("AWS_REGION")
        or environment.get("AWS_DEFAULT_REGION")
        or found.get("region")
    )
    if region:
        config["region"] = region
    decided = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE")
    if config.get("skip_signature") or any(environment.get(name) for name in decided):
        return config, None
    return config, aws_files.credentials(found, environment)


def _google(address: Address, environment: Mapping[str, str]) -> tuple[dict[str, Any], Any]:
    config = _anonymous(address)
    emulator = environment.get("STORAGE_EMULATOR_HOST")
    if endpoint := address.options.get("endpoint"):
        config["base_url"] = endpoint
    elif emulator:
        # Emulators know no credentials, and Google's own libraries send them none.
        config["base_url"] = emulator if "://" in emulator else f"http://{emulator}"
        config["skip_signature"] = True
    if "skip_signature" in config:
        config["bearer_token"] = "nobody"  # The client signs writes all the same.
    return config, None


def _azure(address: Address, environment: Mapping[str, str]) -> tuple[dict[str, Any], Any]:
    config = _anonymous(address)
    for name, variables in _AZURE_NAMES.items():
        value = next((environment[var] for var in variables if environment.get(var)), None)
        if value:
            config[name] = value
    config = _connection_string(environment.get("AZURE_STORAGE_CONNECTION_STRING", "")) | config
    for option, name in (("account", "account_name"), ("endpoint", "endpoint")):
        if option in address.options:
            config[name] = address.options[option]
    emulated = environment.get("AZURE_STORAGE_USE_EMULATOR") or "use_emulator" in config
    if "account_name" not in config and not emulated:
        raise UsageError(
            f"`{address.url}` does not say whose container it is. Write `?account=name` behind it, "
            "or set AZURE_STORAGE_ACCOUNT."
        )
    return config, None


def _connection_string(text: str) -> dict[str, Any]:
    """What Azure's portal offers for copying: `AccountName=…;AccountKey=…;BlobEndpoint=…`."""
    pairs = (part.partition("=") for part in text.split(";") if "=" in part)
    found = {name.strip().lower(): value.strip() for name, _, value in pairs}
    if found.get("usedevelopmentstorage") == "true":
        return {"account_name": _EMULATOR_ACCOUNT, "use_emulator": True}
    return {_CONNECTION_STRING[name]: v for name, v in found.items() if name in _CONNECTION_STRING}
