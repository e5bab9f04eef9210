"""URLs are plain strings, and no credentials of theirs get into a text."""

import pytest

from xrank.errors import UsageError
from xrank.storage.url import Location, clean_path, is_url, split_url


@pytest.mark.parametrize(
    ("given", "cleaned"),
    [
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        ("s3:/bucket/a", "s3://bucket/a"),  # pathlib.Path("s3://bucket/a")
        ("S3a://bucket/a", "s3://bucket/a"),
        ("gcs://bucket", "gs://bucket"),
        ("abfss://box@account.dfs.core.windows.net/a", "abfs://box@account.dfs.core.windows.net/a"),
        ("hf://org/name@main/a", "hf://org/name@main/a"),
        ("s3://bucket/what?/a#b", "s3://bucket/what?/a#b"),
        ("file:///a/b%20c", "/a/b c"),
        ("file://localhost/a", "/a"),
        ("file:/a", "/a"),
        ("models/a", "models/a"),
        ("C:/models/a", "C:/models/a"),
    ],
)
def test_a_url_has_one_form(given, cleaned):
    assert clean_path(given) == cleaned
    assert is_url(cleaned) == (not cleaned.startswith(("/", "models", "C:")))


@pytest.mark.parametrize(
    "given",
    [
        "https://marked:secret@host/a",
        "s3://marked:secret@bucket/a",
        "https://secret@host/a",
        "az://marked:secret@box/a",
        "s3://bucket/a?X-Amz-Signature=secret",
        "https://host/a.safetensors?marked=secret",
        "https://marked:secret@host/a?sig=secret",
    ],
)
def test_credentials_in_a_url_are_refused_without_being_repeated(given):
    with pytest.raises(UsageError) as failure:
        clean_path(given)
    assert "secret" not in str(failure.value.to_dict()) and "marked" not in str(failure.value.to_dict())


@pytest.mark.parametrize(
    ("given", "next_step"),
    [
        ("s3://", "give one, as in s3://NAME/folder"),
        ("https://", "give one, as in https://NAME/folder"),
        ("gs//bucket/a", "give gs://bucket/a, or ./gs//bucket/a for a folder of this machine"),
        ("s3:bucket/a", "give s3://bucket/a, or ./s3:bucket/a for a folder of this machine"),
    ],
)
def test_a_slip_in_a_url_is_not_a_folder(given, next_step):
    with pytest.raises(UsageError) as failure:
        clean_path(given)
    assert given in failure.value.message and failure.value.next_step == next_step
    assert clean_path(f"./{given}") == f"./{given}"


def test_another_machines_file_is_refused():
    with pytest.raises(UsageError, match="another machine"):
        clean_path("file://server/share")


@pytest.mark.parametrize(
    ("url", "root", "key"),
    [
        ("s3://bucket/a/b", "s3://bucket", "a/b"),
        ("s3://bucket", "s3://bucket", ""),
        ("hf://org/name/a", "hf://org/name", "a"),
        ("hf://datasets/org/name/a", "hf://datasets/org/name", "a"),
    ],
)
def test_a_url_has_a_root_and_a_key(url, root, key):
    assert split_url(url) == Location(url.partition(":")[0], root, key)
