"""Where credentials come from, and that they go nowhere else."""

import logging
import traceback

import pytest

from jdiloco.errors import StoreDenied, StoreUnavailable, UsageError
from jdiloco.store import address, aws_files, clients, open_store
from jdiloco.store.bucket import BucketStore
from tests.store import servers, stub

pytestmark = pytest.mark.usefixtures("credentials")


def made(url, **environment):
    """What the client of a URL is told in an environment, and what gives it keys."""
    maker = clients.Maker(address.parse(url), environment)
    return maker._config, maker._credentials


@pytest.fixture
def files(tmp_path):
    """An environment whose AWS files are in a folder of the test."""
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id = plain\naws_secret_access_key = HUSH\n"
        "[work]\naws_access_key_id = worker\naws_secret_access_key = HUSH2\n"
        "aws_session_token = TOKEN\n"
    )
    (tmp_path / "config").write_text(
        "[default]\nregion = eu-north-1\n"
        "[profile work]\nregion = eu-west-3\nendpoint_url = https://minio.example:9000\n"
        "[profile sso]\nsso_session = x\nregion = eu-west-1\n"
    )
    return {
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
    }


def test_the_default_profile_gives_keys_and_region(files):
    config, keys = made("s3://b", **files)
    assert config["region"] == "eu-north-1"
    assert keys() == {
        "access_key_id": "plain",
        "secret_access_key": "HUSH",
        "token": None,
        "expires_at": None,
    }


def test_a_named_profile_gives_its_own_and_a_token_is_read_again_in_time(files, tmp_path):
    config, keys = made("s3://b", AWS_PROFILE="work", **files)
    assert config["region"] == "eu-west-3"
    assert config["endpoint"] == "https://minio.example:9000"
    assert keys()["token"] == "TOKEN"
    assert keys()["expires_at"] is not None
    path = tmp_path / "credentials"
    path.write_text(path.read_text().replace("TOKEN", "NEWER"))
    assert keys()["token"] == "NEWER"


@pytest.mark.parametrize(
    "environment",
    [{"AWS_ACCESS_KEY_ID": "a"}, {"AWS_WEB_IDENTITY_TOKEN_FILE": "/run/token"}],
    ids=str,
)
def test_the_environment_comes_before_the_files(files, environment):
    _, keys = made("s3://b", **environment, **files)
    assert keys is None


def test_the_url_comes_before_the_environment_and_that_before_the_files(files):
    told = {"AWS_PROFILE": "work", "AWS_REGION": "r", "AWS_ENDPOINT_URL": "http://e", **files}
    config, _ = made("s3://b?region=mine&endpoint=http://mine", **told)
    assert (config["region"], config["endpoint"]) == ("mine", "http://mine")
    config, _ = made("s3://b", **told)
    assert (config["region"], config["endpoint"]) == ("r", "http://e")
    config, _ = made("s3://b", AWS_ENDPOINT_URL_S3="http://s3", **told)
    assert config["endpoint"] == config["aws_endpoint_url_s3"] == "http://s3"


def test_anonymous_access_asks_for_no_keys(files):
    config, keys = made("s3://b?anonymous=true", **files)
    assert config["skip_signature"] is True
    assert keys is None


def test_a_profile_that_is_nowhere_is_named(files):
    with pytest.raises(UsageError, match="`AWS_PROFILE` is `wrok`"):
        made("s3://b", AWS_PROFILE="wrok", **files)


def test_a_profile_that_needs_a_conversation_is_left_to_boto3(files, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "obstore.auth.boto3", None)
    with pytest.raises(UsageError, match=r"`sso_session`, which needs boto3"):
        made("s3://b", AWS_PROFILE="sso", **files)


def test_a_damaged_file_is_not_quoted(files, tmp_path):
    (tmp_path / "credentials").write_text("aws_secret_access_key = HUSH\n")
    with pytest.raises(UsageError, match="cannot be parsed") as refused:
        aws_files.profile(files)
    assert "HUSH" not in "".join(traceback.format_exception(refused.value))


def test_google_is_told_of_an_endpoint_and_of_an_emulator():
    assert made("gs://b")[0] == {}
    assert made("gs://b?endpoint=http://h:1")[0] == {"base_url": "http://h:1"}
    emulated, _ = made("gs://b", STORAGE_EMULATOR_HOST="localhost:4443")
    assert emulated["base_url"] == "http://localhost:4443"
    assert emulated["skip_signature"] is True


def test_azure_takes_the_names_of_its_own_command_line_and_its_connection_string():
    config, _ = made("az://c/p", AZURE_STORAGE_ACCOUNT="name1", AZURE_STORAGE_KEY="KEY")
    assert config == {"account_name": "name1", "account_key": "KEY"}
    text = "DefaultEndpointsProtocol=https;AccountName=name2;AccountKey=S0VZ==;EndpointSuffix=x"
    config, _ = made("az://c/p", AZURE_STORAGE_CONNECTION_STRING=text)
    assert config == {"account_name": "name2", "account_key": "S0VZ=="}
    config, _ = made("az://c/p?account=name3", AZURE_STORAGE_SAS_TOKEN="sv=1&sig=2")
    assert config == {"account_name": "name3", "sas_key": "sv=1&sig=2"}
    config, _ = made("az://c/p", AZURE_STORAGE_CONNECTION_STRING="UseDevelopmentStorage=true")
    assert config == {"account_name": "devstoreaccount1", "use_emulator": True}


def test_a_container_of_nobody_is_refused():
    with pytest.raises(UsageError, match="AZURE_STORAGE_ACCOUNT"):
        made("az://c/p")


def test_no_secret_is_in_a_url_a_repr_an_error_or_a_log(monkeypatch, caplog):
    """Also when the server sends everything back that it was sent."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAHUSH")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "HUSH")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "HUSHTOKEN")
    with stub.running() as server:
        server.faults = lambda request: stub.Fault(status=403, code="AccessDenied", echo=True)
        store = open_store(f"s3://{stub.BUCKET}/p?endpoint={server.endpoint}")
        with pytest.raises(StoreDenied) as refused:
            store.get("k")
    told = "".join(traceback.format_exception(refused.value)) + caplog.text + store.url
    assert "HUSH" not in told + repr(store)
    assert "AccessDenied" in told


def test_a_wrong_key_is_said_to_be_wrong(seaweed_server, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StoreDenied, match="SignatureDoesNotMatch"):
        open_store(seaweed_server.url("wrong")).get("k")


def test_keys_of_a_profile_open_a_real_bucket(seaweed_server, tmp_path, monkeypatch):
    (tmp_path / "credentials").write_text(
        f"[tests]\naws_access_key_id={servers.ACCESS_KEY}\n"
        f"aws_secret_access_key={servers.SECRET_KEY}\n"
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_PROFILE", "tests")
    store = open_store(seaweed_server.url("profile"))
    assert store.create("k", b"1")
    assert store.get("k") == b"1"


def test_where_nobody_listens_is_said(monkeypatch):
    store = BucketStore("s3://b/p?endpoint=http://127.0.0.1:1&anonymous=true").within(0.5)
    with pytest.raises(StoreUnavailable, match="Connection refused"):
        store.get("k")
