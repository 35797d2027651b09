"""Tests of credentials: refused in every setting with a URI, and redacted in all messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline import cli
from workers.errors import UserError
from workers.storage.artifact import resolve
from workers.storage.secrets import USER, redact, refuse_secrets


@pytest.mark.parametrize(
    "uri",
    [
        "s3://AKIA:hush/hush@bucket/x",
        "s3://AKIA:hush@bucket/x",
        "s3://hush@bucket/x",
        "gs://hush@bucket",
        "https://me:hush@host/x",
        "abfs://me:hush@account/x",
        "s3://bucket/x?access_key=AKIA&secret_key=hush",
        "s3://bucket/x?region=a&session_token=hush",
        "https://host/x?sig=hush",
        "s3://bucket/x?X-Amz-Signature=hush",
        "s3://AKIA:12/hush@bucket/x",
        "gs://hush@bucket/x",
        " \n S3://AKIA:hush@bucket/x",
        "postgresql+psycopg2://me:hush@host/db",
        "https://hush@host/x",
        "http://:hush@host/x",
        "postgresql://me:pa/hush#w@host/db",
        "postgresql://me:12/hush@host/db",
        "https://me:12/hush@host/x",
        "mysql://me:?hush@host/db",
        "https://host/x?PASSWORD=hush",
        "https://host/x?a=1&awscredential=hush",
        "s3://bucket/x?secret%5Fkey=hush",
        "s3://bucket/x?secret_key=",
    ],
)
def test_a_uri_with_a_secret_is_refused_and_not_repeated(
    uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests import small_run

    for call in (
        resolve,
        refuse_secrets,
        lambda uri: refuse_secrets({"a": [{"b": uri}]}, "c.yaml: "),
    ):
        with pytest.raises(UserError, match="give it in the environment") as caught:
            call(uri)
        assert "hush" not in str(caught.value)
        assert "AKIA:" not in str(caught.value)
    card = small_run.make_card(tmp_path, "a", "01", 1, 1)
    source = {"format": "folder", "path": uri}
    bad_card = small_run.make_card(tmp_path, "b", "01", 1, 1, source=source)
    body = small_run.make_body(tmp_path, {"a": card})
    config = small_run.write_config(tmp_path / "good.yaml", body)
    for change in (
        {"storage": uri},
        {"tracking": {"uri": uri}},
        {"backbone": {"weights": uri}},
        {"stream": {"tasks": [{"card": bad_card}]}},
    ):
        bad = small_run.write_config(tmp_path / "bad.yaml", body | change)
        assert cli.main(["plan", bad]) == 2
    for argv in (
        ["plan", config, "--set", f"storage={uri}"],
        ["gc", "--storage", uri],
        ["compare", "a", "b", "--storage", uri],
        ["ui", "--storage", uri],
        ["predict", uri, "--task", "a", "image.png"],
    ):
        assert cli.main(argv) == 2
    output = "".join(capsys.readouterr())
    assert "hush" not in output
    assert "Traceback" not in output
    assert output.count("give it in the environment") == 9, output


def test_uri_with_a_secret_from_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pipeline.config.yaml_files import expand

    monkeypatch.setenv("PLACE", "s3://AKIA:hush@bucket")
    with pytest.raises(UserError, match=r"what '\$\{PLACE\}/x' stands for") as caught:
        expand("${PLACE}/x")
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket/a:b@c",
        "hdfs://me@host:8020/x",
        "gs://anonymous@bucket/x",
        "s3://bucket/x?region=eu-west-1",
        "/a:b@c",
        "sqlite:////x/mlflow.db",
        "see https://host/?key=1 for more",
        "http://host:${PORT}/",
        "https://host/x?design=1&n=2",
        "abfs://container@account/x",
    ],
)
def test_uri_without_a_secret_is_accepted(uri: str) -> None:
    refuse_secrets(uri)


def test_addresses_are_shown_without_their_user() -> None:
    assert redact("https://me:hush@host:5000/x?a=1") == "https://host:5000/x?a=1"
    assert (
        redact("API request to https://me:hush@host/x and s3://a/b@c, me@here failed")
        == "API request to https://host/x and s3://a/b@c, me@here failed"
    )
    for text in (
        "https://host/x@y",
        "https://host?a=b@c",
        "https://host#a@b",
        "sqlite:////x@y/mlflow.db",
        "http://[::1]:5000",
        "http://[",
        "",
    ):
        assert redact(text) == text


@pytest.mark.parametrize(
    "uri",
    [
        "postgresql://me:pa/hush#w@host/db",
        "postgresql://me:hush/x#w@host/db",
        "postgresql://me:hush@more@host/db",
        "mysql+pymysql://me:?hush@host/db",
        "https://me:12/hush@host/x",
        "http://me:#hush@host:5000",
        "https://hush@host/x",
        "https://host/x?token=hush",
        "https://host/x?a=1&api_key=hush#hush",
        "https://host/x?token=a&hush",
        "https://host/x?%74oken=hush",
        "https://host/x?X-Amz-Signature=hush&a=1",
        "https://host/x#access_token=hush",
        "s3://b/x?secret_key=hush",
        "https://host/x;password=hush",
        "postgresql://host/db?user=me&password=hush",
    ],
)
def test_every_form_of_secret_in_a_uri_is_redacted(uri: str) -> None:
    for text in (uri, f"cannot connect to {uri!r}, (Background on {uri})", f"a\n{uri}\nb"):
        redacted_text = redact(text)
        assert "hush" not in redacted_text
        assert "host" in redacted_text or "s3://b" in redacted_text
    assert redact(f"{uri} b").endswith(" b"), "the text after the URI must stay"


def test_password_search_is_limited_to_its_maximum_length() -> None:
    """The search from `://` to `@` is limited to the maximum length of a password."""
    assert USER.search("://a:/" + "b" * 3000 + "@")
    assert not USER.search("://a:/" + "b" * 5000 + "@")


def test_environment_secrets_are_redacted_even_without_a_uri(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://me:pa ss%2Fhush@host/db")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "c0ffee" * 8)
    monkeypatch.setenv("HF_TOKEN", "a")
    assert (
        redact("no password 'pa ss%2Fhush' or 'pa ss/hush' at host")
        == "no password '***' or '***' at host"
    )
    assert (
        redact(f"the token {'c0ffee' * 8} is wrong, and a word is a word")
        == "the token *** is wrong, and a word is a word"
    )


def test_error_names_the_setting_that_holds_the_secret() -> None:
    uri = "s3://hush@b"
    for value, named in (
        (uri, "a URI begins with s3://"),
        ({"a": ["x", {"b": uri}]}, r"a\.b begins"),
        ({"a": (uri,)}, "a begins"),
    ):
        with pytest.raises(UserError, match=rf"^{named}"):
            refuse_secrets(value)
    with pytest.raises(UserError, match=r"^c\.yaml: a\.b begins with s3://"):
        refuse_secrets({"a": {"b": uri, "c": 1, "d": None}}, "c.yaml: ")
