"""Tests of storage on an object store: retries, permanent errors, atomic writes, and requests."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyarrow import fs

from pipeline import cli
from pipeline.app.garbage import find_garbage
from pipeline.graph import store as store_module
from pipeline.graph.store import Store
from pipeline.tracking import ui
from tests import s3
from tests.s3 import Fault
from workers.errors import UserError
from workers.storage import checkpoint, filesystem
from workers.storage.artifact import (
    Artifact,
    Attempt,
    delete_dir,
    join,
    list_files,
    read_bytes,
    resolve,
    withdraw,
    write_bytes,
)
from workers.storage.lock import stage_lock

SMALL, LARGE = os.urandom(100_000), os.urandom(12_000_000)  # one PUT, and an upload in two parts


@pytest.fixture
def patience_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the client to one try, so that this project makes all retries, with short pauses."""
    monkeypatch.setattr(filesystem, "TRIES", 1)
    monkeypatch.setattr(filesystem, "FIRST_S", 0.01)
    monkeypatch.setattr(filesystem, "SILENT_S", 1.0)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "kind", ["503", "500", "429", "cut download", "done, unsaid", "slow", "silent"]
)
def test_read_survives_transient_errors(kind: str, bucket: Any, patience_of_ours: Any) -> None:
    uri = join(bucket.uri, "a")
    write_bytes(uri, SMALL)
    bucket.faults[:] = [Fault(kind, "HEAD", times=2), Fault(kind, "GET", times=2)]
    if kind == "silent":
        bucket.faults[:] = [Fault(kind, "GET", times=1)]
    assert read_bytes(uri) == SMALL
    assert any(fault == kind for _, _, fault in bucket.seen)


@pytest.mark.parametrize("kind", ["503", "500", "429", "cut upload", "done, unsaid"])
def test_write_survives_transient_errors(kind: str, bucket: Any, patience_of_ours: Any) -> None:
    uri = join(bucket.uri, "a")
    bucket.faults[:] = [Fault(kind, "PUT", times=3)]
    write_bytes(uri, SMALL)
    assert s3.files(bucket.upstream, bucket.bucket) == {"storage/a": SMALL}
    assert bucket.counts("/storage/a")["PUT"] == 4


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("503", "?uploads"),
        ("cut upload", "partNumber=2"),
        ("503", "?uploadId"),
        ("done, unsaid", "?uploadId"),
    ],
)
def test_large_write_is_atomic(kind: str, part: str, bucket: Any, patience_of_ours: Any) -> None:
    bucket.faults[:] = [Fault(kind, path=part)]
    with filesystem.patience(0), pytest.raises(UserError, match="does not answer"):
        write_bytes(join(bucket.uri, "a"), LARGE)
    done = kind == "done, unsaid" and part == "?uploadId"  # the answer was lost
    # pyarrow itself would leave an empty object here
    assert list(s3.files(bucket.upstream, bucket.bucket).values()) == [LARGE] * done
    bucket.faults[:] = [Fault(kind, path=part, times=2)]
    write_bytes(join(bucket.uri, "a"), LARGE)
    assert read_bytes(join(bucket.uri, "a")) == LARGE


def test_request_is_retried_after_the_client_gives_up(bucket: Any) -> None:
    """With the default settings, the client tries three times, and then this project tries."""
    bucket.faults[:] = [Fault("500", "PUT", times=4)]
    write_bytes(join(bucket.uri, "a"), SMALL)
    assert bucket.counts()["PUT"] == 5


def test_exhausted_retries_raise_an_explained_error(
    bucket: Any, patience_of_ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(filesystem, "notify", lines.append)
    monkeypatch.setattr(filesystem, "SAY_S", 0.0)
    bucket.share, bucket.kinds = 1.0, ("503",)
    with filesystem.patience(0.5), pytest.raises(UserError) as caught:
        write_bytes(join(bucket.uri, "runs", "r"), b"1")
    assert f"storage s3://{bucket.bucket} does not answer (" in str(caught.value)
    assert "SLOW_DOWN" in str(caught.value)
    assert "finished stages are kept, run the same command again" in str(caught.value)
    (line,) = lines
    assert f"writing {bucket.bucket}/storage/runs/r is tried again" in line


@pytest.mark.parametrize("moment", ["open", "write"])
def test_permanent_bucket_errors_are_raised_without_retry(moment: str, bucket: Any) -> None:
    write_bytes(join(bucket.uri, "a"), b"1")
    bucket.seen.clear()
    bucket.faults[:] = [Fault("403")]
    with pytest.raises(OSError, match="ACCESS_DENIED"):
        read_bytes(join(bucket.uri, "a")) if moment == "open" else write_bytes(
            join(bucket.uri, "a"), b"2"
        )
    assert len(bucket.seen) == 1
    bucket.faults.clear()
    with pytest.raises(FileNotFoundError):
        read_bytes(join(bucket.uri, "b"))


@pytest.mark.parametrize("kind", ["503", "refused"])
def test_unavailable_storage_ends_command_with_code_2(
    kind: str,
    bucket: Any,
    patience_of_ours: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tests import small_run

    monkeypatch.setattr(store_module, "FIRST_CONTACT_S", 0.0)
    bucket.share, bucket.kinds = 1.0, ("503",)
    if kind == "refused":
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    body = small_run.make_body(tmp_path, small_run.make_cards(tmp_path, ("a",)), storage=bucket.uri)
    assert cli.main(["run", small_run.write_config(tmp_path / "c.yaml", body)]) == 2
    output = capsys.readouterr().err
    assert output.startswith(f"accrete: storage s3://{bucket.bucket} does not answer (")
    assert output.count("\n") == 1


# ---- pauses, and retried errors ------------------------------------------------------------------
class Clock:
    """Replaces `time`: `sleep` returns at once, and records the seconds in `slept`."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return sum(self.slept)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(filesystem, "time", clock)
    return clock


def fails(*errors: Exception, forever: bool = False) -> Any:
    """Return a function that raises these errors one by one, and then returns "answer".

    forever: raise the first error at every call.
    """
    left = [*errors]

    def call() -> str:
        if left:
            raise left[0] if forever else left.pop(0)
        return "answer"

    return call


PASSES = OSError("AWS Error SLOW_DOWN (HTTP status 503)")


def test_storage_is_retried_with_growing_pauses(
    clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[tuple[float, str]] = []
    monkeypatch.setattr(filesystem, "notify", lambda line: lines.append((clock.monotonic(), line)))
    state = random.getstate()
    with pytest.raises(filesystem.StorageUnavailable, match="storage s3://b does not answer"):
        filesystem.retry(fails(PASSES, forever=True), "s3://b", "reading a")
    assert 120 - filesystem.LONGEST_S <= clock.monotonic() <= 120
    for number, pause in enumerate(clock.slept):
        most = min(filesystem.FIRST_S * 2**number, filesystem.LONGEST_S)
        assert most / 2 <= pause <= most, (
            "pauses are random, so that clients do not all retry at the same moment"
        )
    assert len({*clock.slept}) == len(clock.slept)
    ((when, line),) = lines
    assert filesystem.SAY_S < when < 2 * filesystem.LONGEST_S + filesystem.SAY_S, (
        "short failures must not be reported"
    )
    assert line.endswith("reading a is tried again for up to 120 s")
    assert random.getstate() == state, "a random pause must not change the state of `random`"


def test_patience_context_limits_retries_only_inside(clock: Any) -> None:
    call = fails(PASSES, forever=True)
    with pytest.raises(filesystem.StorageUnavailable), filesystem.patience(1.0):
        filesystem.retry(call, "s3://b", "reading a")
    assert 0 < clock.monotonic() <= 1.0
    with filesystem.patience(0), pytest.raises(filesystem.StorageUnavailable):
        filesystem.retry(call, "s3://b", "reading a")
    assert clock.monotonic() <= 1.0
    with pytest.raises(filesystem.StorageUnavailable):
        filesystem.retry(call, "s3://b", "reading a")
    assert clock.monotonic() > 100


@pytest.mark.parametrize(
    "text",
    [
        *(
            f"AWS Error {name} during PutObject operation"
            for name in (
                "SLOW_DOWN",
                "SERVICE_UNAVAILABLE",
                "INTERNAL_FAILURE",
                "INTERNAL_ERROR",
                "THROTTLING",
                "REQUEST_TIMEOUT",
                "REQUEST_LIMIT_EXCEEDED",
                "NETWORK_CONNECTION",
                "NO_SUCH_UPLOAD",
            )
        ),
        *(
            f"AWS Error UNKNOWN (HTTP status {code}) during HeadObject operation"
            for code in (408, 429, 500, 502, 503, 504)
        ),
        "curlCode: 28, Timeout was reached",
        *(
            f"google::cloud::Status({name}: x)"
            for name in (
                "UNAVAILABLE",
                "DEADLINE_EXCEEDED",
                "RESOURCE_EXHAUSTED",
                "ABORTED",
                "INTERNAL",
            )
        ),
        "503 ServerBusy",
        "InternalError",
        "OperationTimedOut",
        "the read Timed out",
        "it timed out",
        "Connection reset by peer",
        "connection was closed",
        "Connection refused",
    ],
)
def test_transient_errors_are_retried(text: Any, clock: Any) -> None:
    assert (
        filesystem.retry(fails(OSError(text), OSError(f"{text}\nonce more")), "s3://b", "reading a")
        == "answer"
    )
    assert len(clock.slept) == 2


@pytest.mark.parametrize(
    "error",
    [
        *(
            OSError(f"AWS Error {text})")
            for text in (
                "ACCESS_DENIED (HTTP status 403",
                "NO_SUCH_BUCKET (HTTP status 404",
                "UNKNOWN (HTTP status 400",
            )
        ),
        OSError("google::cloud::Status(PERMISSION_DENIED: no)"),
        OSError("google::cloud::Status(NOT_FOUND: no)"),
        PermissionError(13, "Permission denied"),
        FileNotFoundError("SLOW_DOWN"),
        ValueError("HTTP status 503"),
        UserError("HTTP status 503"),
    ],
)
def test_permanent_errors_are_not_retried(error: Any, clock: Any) -> None:
    with pytest.raises(type(error)) as caught:
        filesystem.retry(fails(error), "s3://b", "reading a")
    assert caught.value is error
    assert clock.slept == []


def test_transient_error_is_recognised_after_a_long_key(clock: Any) -> None:
    text = (
        f"When reading information for key '{'folder/' * 60}a' in bucket 'b': AWS Error "
        "SLOW_DOWN during HeadObject operation"
    )
    assert filesystem.retry(fails(OSError(text)), "s3://b", "reading a") == "answer"
    with filesystem.patience(0), pytest.raises(UserError) as caught:
        filesystem.retry(fails(OSError(text * 50)), "s3://b", "reading a")
    assert len(str(caught.value)) < 500, "the message must stay short"


def test_missing_path_after_a_retry_is_accepted_only_for_deletes(
    clock: Any,
) -> None:
    def call() -> Any:
        return fails(PASSES, FileNotFoundError("a"))

    filesystem.retry(call(), "s3://b", "deleting a", may_be_gone=True)
    with pytest.raises(FileNotFoundError):
        filesystem.retry(call(), "s3://b", "reading a")
    with pytest.raises(FileNotFoundError):
        filesystem.retry(fails(FileNotFoundError("a")), "s3://b", "deleting a", may_be_gone=True)


# ---- every operation -----------------------------------------------------------------------------
class Stumbles:
    """A disk on which the first call of each operation fails with a transient error."""

    def __init__(self) -> None:
        self.disk = fs.LocalFileSystem()
        self.failed: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **how: Any) -> Any:
            if name not in self.failed:
                self.failed.append(name)
                raise PASSES
            return getattr(self.disk, name)(*args, **how)

        return call


def put_and_list(system: fs.FileSystem, folder: str) -> bool:
    filesystem.put_object(system, f"{folder}/b", b"12")
    return list_files(folder) == {"a": 4, "b": 2}


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("get_file_info", lambda system, folder: system.get_file_info(f"{folder}/a").size == 4),
        (
            "get_file_info",
            lambda system, folder: (
                [info.size for info in system.get_file_info(fs.FileSelector(folder))] == [4]
            ),
        ),
        (
            "open_input_file",
            lambda system, folder: system.open_input_file(f"{folder}/a").read() == b"1234",
        ),
        (
            "open_input_file",
            lambda system, folder: system.open_input_stream(f"{folder}/a").read() == b"1234",
        ),
        (
            "open_output_stream",
            put_and_list,
        ),
        (
            "create_dir",
            lambda system, folder: (
                system.create_dir(f"{folder}/b/c") or os.path.isdir(f"{folder}/b/c")
            ),
        ),
        (
            "copy_file",
            lambda system, folder: (
                system.copy_file(f"{folder}/a", f"{folder}/b")
                or list_files(folder) == {"a": 4, "b": 4}
            ),
        ),
        (
            "copy_file",
            lambda system, folder: (
                system.move(f"{folder}/a", f"{folder}/b") or list_files(folder) == {"b": 4}
            ),
        ),
        (
            "delete_file",
            lambda system, folder: system.delete_file(f"{folder}/a") or list_files(folder) == {},
        ),
        (
            "delete_dir",
            lambda system, folder: system.delete_dir(folder) or not os.path.exists(folder),
        ),
        (
            "delete_dir_contents",
            lambda system, folder: system.delete_dir_contents(folder) or list_files(folder) == {},
        ),
    ],
)
def test_every_file_system_operation_is_retried(
    name: str, call: Any, clock: Any, tmp_path: Path
) -> None:
    (tmp_path / "a").write_bytes(b"1234")
    below = Stumbles()
    assert call(fs.PyFileSystem(filesystem.RetryingFilesystem(below, "s3://b")), str(tmp_path))
    assert name in below.failed
    assert len(clock.slept) == len(below.failed)


def test_files_can_be_read_from_any_position(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    system = fs.PyFileSystem(filesystem.RetryingFilesystem(fs.LocalFileSystem(), "s3://b"))
    with system.open_input_file(str(tmp_path / "a")) as file:
        assert (file.size(), file.read(3), file.tell(), file.read(), file.read(5)) == (
            10,
            b"012",
            3,
            b"3456789",
            b"",
        )
        assert (
            file.seek(-4, os.SEEK_END),
            file.read(2),
            file.seek(-1, os.SEEK_CUR),
            file.read(1),
        ) == (6, b"67", 7, b"7")
        assert file.seek(12) == 12
        assert file.read(1) == b""
        assert file.read_at(2, 9) == b"9"
    below = fs.LocalFileSystem().open_input_file(str(tmp_path / "a"))
    reading = filesystem.Reading(below, "s3://b", "a")
    assert (reading.seek(3), reading.seek(2, os.SEEK_CUR), reading.tell(), reading.read(100)) == (
        3,
        5,
        5,
        b"56789",
    )
    below.close()
    assert reading.read(1) == b"", "there is no request beyond the end"


def test_deleting_the_root_and_appending_are_not_supported(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    patient = filesystem.RetryingFilesystem(fs.LocalFileSystem(), "s3://b")
    for call in (
        patient.delete_root_dir_contents,
        lambda: patient.open_append_stream(str(tmp_path / "a"), None),
    ):
        with pytest.raises(NotImplementedError):
            call()
    assert (tmp_path / "a").read_bytes() == b"1"


# ---- operations with a lost answer ---------------------------------------------------------------
@pytest.mark.parametrize("method", ["PUT", "DELETE", "POST"])
def test_retried_deletes_and_moves_take_effect_once(
    method: str, bucket: Any, patience_of_ours: Any
) -> None:
    for name in ("a", "k/manifest.json", "folder/x", "folder/y"):
        write_bytes(join(bucket.uri, name), b"1")
    bucket.faults[:] = [Fault("done, unsaid", method, times=2)]
    system, path = resolve(join(bucket.uri, "a"))
    system.delete_file(path)
    withdraw(bucket.uri, "k")
    delete_dir(join(bucket.uri, "folder"))
    assert list_files(bucket.uri) == {"k/manifest.json.damaged": 1}
    with pytest.raises(FileNotFoundError):
        system.delete_file(path)
    delete_dir(join(bucket.uri, "folder"))


@pytest.mark.parametrize("harm", ["missing", "shorter", None])
def test_stage_is_published_only_if_all_files_are_complete(harm: str | None, bucket: Any) -> None:
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
        assert Artifact.open(bucket.uri, "k") is None
    else:
        assert attempt.commit({})
        assert Artifact.need(bucket.uri, "k").read("state") == b"0123456789"
        second = Attempt(bucket.uri, "k")
        second.write("state", b"other")
        assert not second.commit({})
        assert set(list_files(join(bucket.uri, "k"))) == {
            "manifest.json",
            f"{attempt.name}/state",
            f"{attempt.name}/table",
        }


# ---- number of requests --------------------------------------------------------------------------
def test_storage_operations_make_few_requests(bucket: Any) -> None:
    resolve("s3://elsewhere/without/a/region")
    assert not bucket.seen, "the region was requested"
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
    with stage_lock(bucket.uri, "k"):
        assert bucket.counts() == {"GET": 1}


def test_large_object_is_read_in_one_request(bucket: Any) -> None:
    write_bytes(join(bucket.uri, "a"), LARGE)
    bucket.seen.clear()
    assert read_bytes(join(bucket.uri, "a")) == LARGE
    assert bucket.counts() == {"HEAD": 1, "GET": 1}


def test_garbage_search_lists_each_place_once(bucket: Any) -> None:
    store = Store(bucket.uri)
    for key in (f"{n:032d}" for n in range(6)):
        attempt = Attempt(store.root, key)
        attempt.write("state", b"1")
        attempt.commit({})
    store.save_record(
        cast(
            Any,
            {
                "name": "r",
                "stages": [{"id": f"s{n}", "key": f"{n:032d}", "step": "train"} for n in range(5)],
            },
        )
    )
    interrupted = Attempt(store.root, f"{0:032d}")
    interrupted.write("state", b"22")
    unneeded = sum(list_files(join(store.root, f"{5:032d}")).values())
    bucket.seen.clear()
    garbage = {folder.path: folder.size_bytes for folder in find_garbage(store)}
    assert garbage == {
        f"stages/{0:032d}/{interrupted.name}": 2,
        f"stages/{5:032d}": unneeded,
    }
    assert bucket.counts("list-type=2") == {
        "GET": 7
    }  # existence, runs, earlier records of r, searches, stages, checkpoints, failures
    assert len(bucket.seen) <= 7 + 3 + 2, "the manifest of every stage was read"


# ---- addresses and options -----------------------------------------------------------------------
def test_uri_options_override_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(fs, "S3FileSystem", lambda **options: made.append(options))
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)

    def endpoint_of(options: dict[str, str]) -> tuple[Any, ...]:
        filesystem.s3(options)
        return tuple(made[-1][name] for name in ("region", "scheme", "endpoint_override"))

    assert endpoint_of({}) == ("us-east-1", "https", None)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "a")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://all:1/")
    assert endpoint_of({}) == ("a", "http", "all:1")
    monkeypatch.setenv("AWS_REGION", "b")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://own:2")
    assert endpoint_of({}) == ("b", "https", "own:2")
    assert endpoint_of({"region": "c", "endpoint_override": "here:3", "scheme": "http"}) == (
        "c",
        "http",
        "here:3",
    )
    assert "access_key" not in made[-1]
    assert made[-1]["retry_strategy"].max_attempts == filesystem.TRIES
    assert (made[-1]["connect_timeout"], made[-1]["request_timeout"]) == (
        filesystem.CONNECT_S,
        filesystem.SILENT_S,
    )
    flags = "allow_bucket_creation", "force_virtual_addressing"
    assert [made[-1][flag] for flag in flags] == [False, False]
    for flag in flags:
        filesystem.s3({flag: "true"})
        assert [made[-1][name] for name in flags] == [name == flag for name in flags]
    with pytest.raises(UserError, match=r"'regoin' is not an option; there are .*region"):
        resolve("s3://bucket/x?regoin=a")


def test_google_storage_uris_get_a_retry_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    system, path = resolve("gs://anonymous@bucket/x")
    assert isinstance(system, fs.PyFileSystem)
    assert path == "bucket/x"
    for text in (
        "google::cloud::Status(UNAVAILABLE: Retry policy exhausted in ReadObject",
        "AWS Error UNKNOWN (HTTP status 503) during HeadObject",
    ):
        assert filesystem.TRANSIENT.search(text)
    assert not filesystem.TRANSIENT.search("google::cloud::Status(PERMISSION_DENIED: no)")
    made: list[str] = []

    def from_uri(uri: str) -> tuple[fs.FileSystem, str]:
        made.append(uri)
        return fs.LocalFileSystem(), ""

    monkeypatch.setattr(fs, "FileSystem", SimpleNamespace(from_uri=from_uri))
    filesystem.open_filesystem.cache_clear()
    for uri in ("gs://one/", "gcs://two/?a=b", "gs://three/?retry_limit_seconds=3", "hdfs://four/"):
        filesystem.open_filesystem(uri)
    filesystem.open_filesystem.cache_clear()
    assert made == [
        "gs://one/?retry_limit_seconds=20",
        "gcs://two/?a=b&retry_limit_seconds=20",
        "gs://three/?retry_limit_seconds=3",
        "hdfs://four/",
    ]


def test_output_streams_are_not_supported(bucket: Any) -> None:
    system, path = resolve(join(bucket.uri, "a"))
    assert isinstance(filesystem.unwrap_filesystem(system), fs.S3FileSystem), (
        "the wrapped file system offers such a stream"
    )
    assert filesystem.unwrap_filesystem(resolve("/a")[0]) == resolve("/a")[0]
    with pytest.raises(NotImplementedError):
        system.open_output_stream(path)
    assert not bucket.seen


def test_json_records_read_back_equal(bucket: Any) -> None:
    store = Store(bucket.uri)
    store.check_writable()
    store.remember("card", [1])
    assert (store.remembered("card"), store.remembered("other")) == ([1], None)
    store.save_record(cast(Any, {"name": "r", "stages": []}))
    assert store.run_names() == ["r"]
    assert json.loads(read_bytes(store.record_path("r"))) == store.record("r")


def test_mlflow_uses_a_bucket_folder_and_needs_a_tracking_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pipeline.tracking.mlflow_client import get_bucket_folder, tracking_uri

    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_S3_ENDPOINT_URL", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with pytest.raises(
        UserError,
        match=r"cannot hold MLflow's SQLite database; name a tracking server in tracking\.uri",
    ):
        tracking_uri("s3://bucket/x")
    assert (
        get_bucket_folder(
            "s3://bucket/x?region=eu-west-1&scheme=http&endpoint_override=host%3A9000"
        )
        == "s3://bucket/x/mlartifacts"
    )
    assert (os.environ["MLFLOW_S3_ENDPOINT_URL"], os.environ["AWS_DEFAULT_REGION"]) == (
        "http://host:9000",
        "eu-west-1",
    )


# ---- errors of a bucket --------------------------------------------------------------------------
CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_PROFILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_SHARED_CREDENTIALS_FILE",
    "GOOGLE_APPLICATION_CREDENTIALS",
)


@pytest.mark.parametrize(
    ("uri", "environment", "message"),
    [
        (
            "s3://mine/x",
            {
                "AWS_ACCESS_KEY_ID": "AKIA1",
                "AWS_SECRET_ACCESS_KEY": "hush",
                "AWS_REGION": "eu-west-1",
            },
            ["bucket 'mine'", "region eu-west-1", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"],
        ),
        (
            "s3://mine/x?region=eu-north-1&endpoint_override=minio:9000",
            {},
            ["region eu-north-1 at minio:9000", "the role of this machine"],
        ),
        (
            "s3://mine",
            {"AWS_WEB_IDENTITY_TOKEN_FILE": "/t", "AWS_ROLE_ARN": "arn:1"},
            ["region us-east-1 (give another", "the role arn:1"],
        ),
        (
            "gs://mine/x",
            {"GOOGLE_APPLICATION_CREDENTIALS": "/hush.json"},
            ["bucket 'mine'", "GOOGLE_APPLICATION_CREDENTIALS"],
        ),
        ("gs://anonymous@mine/x", {}, ["bucket 'mine'", "anonymous@ in the URI"]),
    ],
)
def test_bucket_error_names_region_and_credentials(
    uri: str, environment: Any, message: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in CREDENTIALS:
        monkeypatch.delenv(name, raising=False)
    for name, value in {**environment, "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    remedy = filesystem.access_remedy(uri)
    for part in message:
        assert part in remedy
    assert "folder" not in remedy
    assert "AKIA1" not in remedy
    assert "hush" not in remedy


def test_access_error_names_the_credentials_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in CREDENTIALS:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "credentials").write_text("[lab]\naws_access_key_id = AKIA1\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    assert f"profile lab of {tmp_path}/credentials" in filesystem.access_remedy("s3://mine")


@pytest.mark.parametrize("why", ["missing", "denied"])
def test_refused_storage_error_names_the_bucket(
    why: str, bucket: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests import small_run

    name = "nobodys-bucket" if why == "missing" else bucket.bucket
    bucket.faults[:] = [Fault("403")] if why == "denied" else []
    body = small_run.make_body(
        tmp_path, small_run.make_cards(tmp_path, ("a",)), storage=f"s3://{name}/x"
    )
    assert cli.main(["plan", small_run.write_config(tmp_path / "c.yaml", body)]) == 2
    output = capsys.readouterr().err
    assert f"bucket '{name}' exists in region us-east-1" in output
    assert "read from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in output
    assert "folder" not in output
    assert output.count("\n") == 1


def test_bucket_refusal_during_a_command_names_the_bucket(
    bucket: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket.faults[:] = [Fault("403")]
    write = [lambda *_: write_bytes(join(bucket.uri, "x"), b"1")]
    monkeypatch.setattr(ui, "serve_ui", lambda *_: write[0]())
    assert cli.main(["ui", "--storage", bucket.uri]) == 2
    output = capsys.readouterr().err
    assert output.startswith("accrete: the storage refuses (")
    assert f"bucket '{bucket.bucket}' exists in region" in output
    assert output.count("\n") == 1


def test_full_disk_is_reported_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store_module, "write_bytes", full)
    with pytest.raises(UserError, match=r"No space left on device.*free some space there"):
        store_module.Store(str(tmp_path)).check_writable()
