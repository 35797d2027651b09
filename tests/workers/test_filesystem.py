"""Storage on an object store: errors that pass are outlived, others are said at once, and nothing is ever half there."""

from __future__ import annotations

import json
import os

import pytest
from pyarrow import fs

from pipeline import cli
from pipeline import store as store_module
from pipeline.store import Store
from tests import s3
from tests.s3 import Fault
from workers import checkpoint, filesystem
from workers.artefact import Artefact, Attempt, delete_dir, join, listing, read_bytes, resolve, withdraw, write_bytes
from workers.claim import claimed
from workers.errors import UserError
from workers.secrets import refuse_secrets, shown

SMALL, LARGE = os.urandom(100_000), os.urandom(12_000_000)  # one PUT, and an upload in two parts


@pytest.fixture
def patience_of_ours(monkeypatch):
    """The client tries once, so that whatever is tried again is tried by us, at once."""
    monkeypatch.setattr(filesystem, "TRIES", 1)
    monkeypatch.setattr(filesystem, "FIRST_S", 0.01)
    monkeypatch.setattr(filesystem, "SILENT_S", 1.0)


@pytest.mark.parametrize("kind", ["503", "500", "429", "cut download", "done, unsaid", "slow", "silent"])
def test_a_read_outlives_what_passes(kind, bucket, patience_of_ours):
    uri = join(bucket.uri, "a")
    write_bytes(uri, SMALL)
    bucket.faults[:] = [Fault(kind, "HEAD", times=2), Fault(kind, "GET", times=2)]
    if kind == "silent":
        bucket.faults[:] = [Fault(kind, "GET", times=1)]
    assert read_bytes(uri) == SMALL
    assert any(fault == kind for _, _, fault in bucket.seen)


@pytest.mark.parametrize("kind", ["503", "500", "429", "cut upload", "done, unsaid"])
def test_a_write_outlives_what_passes(kind, bucket, patience_of_ours):
    uri = join(bucket.uri, "a")
    bucket.faults[:] = [Fault(kind, "PUT", times=3)]
    write_bytes(uri, SMALL)
    assert s3.files(bucket.upstream, bucket.bucket) == {"storage/a": SMALL}
    assert bucket.counts("/storage/a")["PUT"] == 4


@pytest.mark.parametrize(("kind", "part"), [("503", "?uploads"), ("cut upload", "partNumber=2"), ("503", "?uploadId"), ("done, unsaid", "?uploadId")])
def test_a_large_write_is_whole_or_absent(kind, part, bucket, patience_of_ours):
    bucket.faults[:] = [Fault(kind, path=part)]
    with filesystem.patience(0), pytest.raises(UserError, match="does not answer"):
        write_bytes(join(bucket.uri, "a"), LARGE)
    done = kind == "done, unsaid" and part == "?uploadId"  # nobody heard that it was done
    assert list(s3.files(bucket.upstream, bucket.bucket).values()) == [LARGE] * done  # pyarrow itself would leave an empty object here
    bucket.faults[:] = [Fault(kind, path=part, times=2)]
    write_bytes(join(bucket.uri, "a"), LARGE)
    assert read_bytes(join(bucket.uri, "a")) == LARGE


def test_what_the_client_gives_up_is_tried_again(bucket):
    """As it is used: three tries of the client, then ours."""
    bucket.faults[:] = [Fault("500", "PUT", times=4)]
    write_bytes(join(bucket.uri, "a"), SMALL)
    assert bucket.counts()["PUT"] == 5


def test_when_patience_is_over_a_sentence_says_so(bucket, patience_of_ours, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(filesystem, "say", lines.append)
    monkeypatch.setattr(filesystem, "SAY_S", 0.0)
    bucket.share, bucket.kinds = 1.0, ("503",)
    with filesystem.patience(0.5), pytest.raises(UserError) as caught:
        write_bytes(join(bucket.uri, "runs", "r"), b"1")
    assert f"storage s3://{bucket.bucket} does not answer (" in str(caught.value)
    assert "SLOW_DOWN" in str(caught.value)
    assert "what finished is kept, run the same command again" in str(caught.value)
    (line,) = lines
    assert f"writing {bucket.bucket}/storage/runs/r is tried again" in line


@pytest.mark.parametrize("moment", ["open", "write"])
def test_what_does_not_pass_is_said_at_once(moment, bucket):
    write_bytes(join(bucket.uri, "a"), b"1")
    bucket.seen.clear()
    bucket.faults[:] = [Fault("403")]
    with pytest.raises(OSError, match="ACCESS_DENIED"):
        read_bytes(join(bucket.uri, "a")) if moment == "open" else write_bytes(join(bucket.uri, "a"), b"2")
    assert len(bucket.seen) == 1
    bucket.faults.clear()
    with pytest.raises(FileNotFoundError):
        read_bytes(join(bucket.uri, "b"))


@pytest.mark.parametrize("kind", ["503", "refused"])
def test_a_command_on_a_storage_that_is_away_ends_with_2_and_a_sentence(kind, bucket, patience_of_ours, monkeypatch, tmp_path, capsys):
    from tests import small_run

    monkeypatch.setattr(store_module, "FIRST_CONTACT_S", 0.0)
    bucket.share, bucket.kinds = 1.0, ("503",)
    if kind == "refused":
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    body = small_run.make_body(tmp_path, small_run.make_cards(tmp_path, ("a",)), storage=bucket.uri)
    assert cli.main(["run", small_run.write_config(tmp_path / "c.yaml", body)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"accrete: storage s3://{bucket.bucket} does not answer (")
    assert said.count("\n") == 1


# ---- what was done although nobody heard --------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["PUT", "DELETE", "POST"])
def test_deleting_and_moving_are_done_once(method, bucket, patience_of_ours):
    for name in ("a", "k/manifest.json", "folder/x", "folder/y"):
        write_bytes(join(bucket.uri, name), b"1")
    bucket.faults[:] = [Fault("done, unsaid", method, times=2)]
    system, path = resolve(join(bucket.uri, "a"))
    system.delete_file(path)
    withdraw(bucket.uri, "k")
    delete_dir(join(bucket.uri, "folder"))
    assert listing(bucket.uri) == {"k/manifest.json.damaged": 1}
    with pytest.raises(FileNotFoundError):
        system.delete_file(path)
    delete_dir(join(bucket.uri, "folder"))


@pytest.mark.parametrize("harm", ["missing", "shorter", None])
def test_a_stage_is_published_only_with_all_its_files(harm, bucket):
    attempt = Attempt(bucket.uri, "k")
    attempt.write("state", b"0123456789")
    attempt.write("table", b"")
    system, path = resolve(join(bucket.uri, "k", attempt.name, "state"))
    if harm == "missing":
        system.delete_file(path)
    elif harm:
        write_bytes(join(bucket.uri, "k", attempt.name, "state"), b"01234")
    if harm:
        with pytest.raises(OSError, match="bytes in the storage, 10 were written"):
            attempt.commit({})
        assert Artefact.open(bucket.uri, "k") is None
    else:
        assert attempt.commit({})
        assert Artefact.need(bucket.uri, "k").read("state") == b"0123456789"
        second = Attempt(bucket.uri, "k")
        second.write("state", b"other")
        assert not second.commit({})
        assert set(listing(join(bucket.uri, "k"))) == {"manifest.json", f"{attempt.name}/state", f"{attempt.name}/table"}


# ---- how often it is asked ----------------------------------------------------------------------------------------------
def test_few_requests_are_made(bucket):
    resolve("s3://elsewhere/without/a/region")
    assert not bucket.seen, "a region was asked for"
    attempt = Attempt(bucket.uri, "k")
    attempt.write("state", SMALL)
    assert bucket.counts() == {"PUT": 1}
    attempt.commit({})
    assert bucket.counts() == {"PUT": 2, "GET": 1}
    bucket.seen.clear()
    read_bytes(join(bucket.uri, "k", attempt.name, "state"))
    assert bucket.counts() == {"HEAD": 1, "GET": 1}
    bucket.seen.clear()
    checkpoint.drop(bucket.uri, "none")
    with claimed(bucket.uri, "k"):
        assert bucket.counts() == {"GET": 1}


def test_a_large_object_is_read_in_one_request(bucket):
    write_bytes(join(bucket.uri, "a"), LARGE)
    bucket.seen.clear()
    assert read_bytes(join(bucket.uri, "a")) == LARGE
    assert bucket.counts() == {"HEAD": 1, "GET": 1}


def test_garbage_is_found_by_one_listing_of_each_place(bucket):
    store = Store(bucket.uri)
    for key in (f"{n:032d}" for n in range(6)):
        attempt = Attempt(store.root, key)
        attempt.write("state", b"1")
        attempt.commit({})
    store.save_record({"name": "r", "stages": [{"id": f"s{n}", "key": f"{n:032d}", "step": "train"} for n in range(5)]})
    interrupted = Attempt(store.root, f"{0:032d}")
    interrupted.write("state", b"22")
    unneeded = sum(listing(join(store.root, f"{5:032d}")).values())
    bucket.seen.clear()
    assert dict(store.garbage()) == {f"stages/{0:032d}/{interrupted.name}": 2, f"stages/{5:032d}": unneeded}
    assert bucket.counts("list-type=2") == {"GET": 4}  # runs, searches, stages, checkpoints
    assert len(bucket.seen) <= 4 + 2 + 2, "a manifest was read of every stage"


# ---- where it is, and who may -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("uri", [
    "s3://AKIA:hush/hush@bucket/x", "s3://AKIA:hush@bucket/x", "s3://hush@bucket/x", "gs://hush@bucket", "https://me:hush@host/x", "abfs://me:hush@account/x",
    "s3://bucket/x?access_key=AKIA&secret_key=hush", "s3://bucket/x?region=a&session_token=hush", "https://host/x?sig=hush", "s3://bucket/x?X-Amz-Signature=hush"])
def test_a_uri_with_a_secret_is_refused_and_not_repeated(uri, tmp_path, capsys):
    from tests import small_run

    for call in (resolve, refuse_secrets, lambda uri: refuse_secrets({"a": [{"b": uri}]}, "c.yaml: ")):
        with pytest.raises(UserError, match="give it in the environment") as caught:
            call(uri)
        assert "hush" not in str(caught.value)
        assert "AKIA:" not in str(caught.value)
    card = small_run.make_card(tmp_path, "a", "01")
    bad_card = small_run.make_card(tmp_path, "b", "01", source={"format": "folder", "path": uri})
    body = small_run.make_body(tmp_path, {"a": card})
    config = small_run.write_config(tmp_path / "good.yaml", body)
    for change in ({"storage": uri}, {"tracking": {"uri": uri}}, {"backbone": {"weights": uri}}, {"stream": {"tasks": [{"card": bad_card}]}}):
        bad = small_run.write_config(tmp_path / "bad.yaml", body | change)
        assert cli.main(["plan", bad]) == 2
    for argv in (["plan", config, "--set", f"storage={uri}"], ["gc", "--storage", uri], ["compare", "a", "b", "--storage", uri], ["ui", "--storage", uri],
                 ["predict", uri, "--task", "a", "image.png"]):
        assert cli.main(argv) == 2
    said = "".join(capsys.readouterr())
    assert "hush" not in said
    assert "Traceback" not in said
    assert said.count("give it in the environment") == 9


def test_a_uri_that_names_a_secret_of_the_environment_is_refused(monkeypatch):
    from pipeline.plain_yaml import expand

    monkeypatch.setenv("PLACE", "s3://AKIA:hush@bucket")
    with pytest.raises(UserError, match=r"what '\$\{PLACE\}/x' stands for") as caught:
        expand("${PLACE}/x")
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("uri", ["s3://bucket/a:b@c", "hdfs://me@host:8020/x", "gs://anonymous@bucket/x", "s3://bucket/x?region=eu-west-1", "/a:b@c",
                                 "sqlite:////x/mlflow.db", "see https://host/?key=1 for more", "http://host:${PORT}/"])
def test_a_uri_without_a_secret_is_not(uri):
    refuse_secrets(uri)


def test_addresses_are_shown_without_their_user():
    assert shown("https://me:hush@host:5000/x?a=1") == "https://host:5000/x?a=1"


def test_the_uri_goes_before_the_environment(monkeypatch):
    made: list[dict] = []
    monkeypatch.setattr(filesystem.fs, "S3FileSystem", lambda **options: made.append(options))
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)

    def place(options: dict[str, str]) -> tuple:
        filesystem.s3(options)
        return tuple(made[-1][name] for name in ("region", "scheme", "endpoint_override"))

    assert place({}) == ("us-east-1", "https", None)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "a")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://all:1/")
    assert place({}) == ("a", "http", "all:1")
    monkeypatch.setenv("AWS_REGION", "b")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://own:2")
    assert place({}) == ("b", "https", "own:2")
    assert place({"region": "c", "endpoint_override": "here:3", "scheme": "http"}) == ("c", "http", "here:3")
    assert "access_key" not in made[-1]
    assert made[-1]["retry_strategy"].max_attempts == filesystem.TRIES
    with pytest.raises(UserError, match=r"'regoin' is no option; there are .*region"):
        resolve("s3://bucket/x?regoin=a")


def test_google_gives_up_in_time():
    system, path = resolve("gs://anonymous@bucket/x")
    assert isinstance(system, fs.PyFileSystem)
    assert path == "bucket/x"
    for text in ("google::cloud::Status(UNAVAILABLE: Retry policy exhausted in ReadObject", "AWS Error UNKNOWN (HTTP status 503) during HeadObject"):
        assert filesystem.TRANSIENT.search(text)
    assert not filesystem.TRANSIENT.search("google::cloud::Status(PERMISSION_DENIED: no)")


def test_a_stream_that_an_exception_may_close_is_not_offered(bucket):
    system, path = resolve(join(bucket.uri, "a"))
    with pytest.raises(NotImplementedError):
        system.open_output_stream(path)
    assert not bucket.seen


def test_json_of_records_comes_back(bucket):
    store = Store(bucket.uri)
    store.check_writable()
    store.remember("card", [1])
    assert (store.remembered("card"), store.remembered("other")) == ([1], None)
    store.save_record({"name": "r", "stages": []})
    assert store.run_names() == ["r"]
    assert json.loads(read_bytes(store.record_path("r"))) == store.record("r")


def test_where_mlflow_keeps_things_beside_a_bucket(monkeypatch):
    from pipeline.track_mlflow import bucket_folder, tracking_uri

    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_S3_ENDPOINT_URL", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with pytest.raises(UserError, match=r"cannot hold MLflow's SQLite database; name a tracking server in tracking\.uri"):
        tracking_uri("s3://bucket/x")
    assert bucket_folder("s3://bucket/x?region=eu-west-1&scheme=http&endpoint_override=host%3A9000") == "s3://bucket/x/mlartifacts"
    assert (os.environ["MLFLOW_S3_ENDPOINT_URL"], os.environ["AWS_DEFAULT_REGION"]) == ("http://host:9000", "eu-west-1")
