import pytest

from jdiloco.errors import UsageError
from jdiloco.store import address, open_store


@pytest.mark.parametrize(
    ("url", "kind", "bucket", "prefix", "options"),
    [
        ("s3://b", "s3", "b", "", {}),
        ("s3://b/", "s3", "b", "", {}),
        ("s3://my.bucket/a/b=1/", "s3", "my.bucket", "a/b=1", {}),
        (
            "s3://b/p?endpoint=http://127.0.0.1:8333&region=x",
            *("s3", "b", "p", {"endpoint": "http://127.0.0.1:8333", "region": "x"}),
        ),
        ("s3://b?endpoint=http%3A%2F%2F[::1]:80", "s3", "b", "", {"endpoint": "http://[::1]:80"}),
        ("s3://b/p?anonymous=true", "s3", "b", "p", {"anonymous": "true"}),
        ("gs://b/p", "gs", "b", "p", {}),
        ("az://c/p?account=name1", "az", "c", "p", {"account": "name1"}),
        ("abfs://c/p", "az", "c", "p", {}),
        ("abfss://c@name1.dfs.core.windows.net/p", "az", "c", "p", {"account": "name1"}),
        ("https://name1.blob.core.windows.net/c/p/q", "az", "c", "p/q", {"account": "name1"}),
    ],
)
def test_a_url_of_each_cloud_names_its_bucket(url, kind, bucket, prefix, options):
    found = address.parse(url)
    assert (found.kind, found.bucket, found.prefix, found.options) == (
        *(kind, bucket, prefix, options),
    )
    assert address.parse(found.url) == found


def test_what_is_passed_beside_the_url_is_as_if_it_stood_in_it():
    told = address.parse("s3://b/p?region=x", endpoint="http://h:1", region=None)
    assert told.url == "s3://b/p?region=x&endpoint=http://h:1"


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("s3://", "names no bucket"),
        ("s3:///p", "names no bucket"),
        ("s3://b//p/../q", "joined by `/`"),
        ("s3://b/p q", "joined by `/`"),
        ("s3://b/" + "p" * 201, "at most 200"),
        ("s3://b/p#x", "has no `#`"),
        ("s3://127.0.0.1:8333/b", "?endpoint=http://127.0.0.1:8333"),
        ("s3://b?endpiont=http://h", "no `endpiont`"),
        ("s3://b?anonymous=yes", "`true` or `false`"),
        ("s3://b?endpoint=h:80", "no address of a server"),
        ("https://bucket.s3.amazonaws.com/p", "only Azure's are known"),
        ("http://h/p", "memory://demo"),
    ],
)
def test_a_url_that_names_no_bucket_is_refused_with_what_to_write(url, wanted):
    with pytest.raises(UsageError) as refused:
        open_store(url)
    assert wanted in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIA:HUSH@b/p",
        "s3://b/p?secret_access_key=HUSH",
        "s3://b/p?HUSH",
        "s3://b/p?endpoint=http://user:HUSH@h:80",
        "gs://HUSH@b/p",
        "az://c/p?sv=2024&sig=HUSH",
        "abfss://c:HUSH@name1.dfs.core.windows.net/p",
        "https://name1.blob.core.windows.net/c/p?sv=2024&sig=HUSH%3D",
        "https://u:HUSH@name1.blob.core.windows.net/c/p",
        "https://u:HUSH@elsewhere/c/p",
    ],
)
def test_a_secret_in_a_url_is_refused_and_not_repeated(url):
    with pytest.raises(UsageError) as refused:
        address.parse(url)
    assert "HUSH" not in str(refused.value)
