"""What AWS's shared files say: `~/.aws/credentials` and `~/.aws/config`, for one profile.

The client below us reads the environment, web identity tokens and the metadata of containers and
instances, but not these files. Plain keys are taken from them here. What needs a conversation
with AWS first (`role_arn`, `sso_session`, `credential_process`) is left to boto3 when that is
installed.
"""

from __future__ import annotations

import configparser
import datetime
import os
from collections.abc import Callable, Mapping
from typing import Any

from jdiloco.errors import UsageError

REREAD = datetime.timedelta(minutes=5)
"""Keys with a session token are read again after so long: whoever made them replaces them there."""

_CONVERSATIONS = ("role_arn", "sso_session", "sso_start_url", "credential_process", "login_session")


def profile(environment: Mapping[str, str]) -> dict[str, str]:
    """Everything both files say of the profile in use; empty where there are none.

    Raises UsageError when `AWS_PROFILE` names one that is in neither.
    """
    wanted = environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE")
    name = wanted or "default"
    config = _read(environment, "AWS_CONFIG_FILE", "~/.aws/config")
    credentials = _read(environment, "AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    sections = [
        *(file[section] for file, section in ((config, name), (config, f"profile {name}"))
          if section in file and (section == "default" or section != name)),
        *([credentials[name]] if name in credentials else []),
    ]  # fmt: skip
    if wanted and not sections:
        raise UsageError(
            f"`AWS_PROFILE` is `{name}`, which is neither in the file of AWS credentials nor in "
            "that of its configuration. `aws configure list-profiles` shows what there is."
        )
    return {key: value for section in sections for key, value in section.items()}


def credentials(
    found: Mapping[str, str], environment: Mapping[str, str]
) -> Callable[[], Any] | None:
    """What gives the client the profile's keys whenever it asks; None when it holds none."""
    if "aws_access_key_id" in found and "aws_secret_access_key" in found:
        return lambda: _keys(profile(environment))
    needs = [name for name in _CONVERSATIONS if name in found]
    return _through_boto3(needs[0]) if needs else None


def _keys(found: Mapping[str, str]) -> dict[str, Any]:
    token = found.get("aws_session_token")
    return {
        "access_key_id": found["aws_access_key_id"],
        "secret_access_key": found["aws_secret_access_key"],
        "token": token,
        "expires_at": datetime.datetime.now(datetime.UTC) + REREAD if token else None,
    }


def _through_boto3(needs: str) -> Callable[[], Any]:
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise UsageError(
            f"The AWS profile in use has a `{needs}`, which needs boto3. Run `pip install boto3`, "
            "or put keys into the environment: `aws configure export-credentials --format env`."
        ) from error
    return Boto3CredentialProvider()


def _read(
    environment: Mapping[str, str], variable: str, usual: str
) -> dict[str, Mapping[str, str]]:
    path = os.path.expanduser(environment.get(variable) or usual)
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):
        # What is in it is secret, and the parser's message would repeat it.
        raise UsageError(f"`{path}` is no file of AWS settings: it cannot be parsed.") from None
    return {name: dict(parser[name]) for name in parser.sections()}
