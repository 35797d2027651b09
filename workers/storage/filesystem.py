"""The filesystem behind a storage URI: credentials from the environment alone, no call to find a
region, patience with servers that stumble."""

from __future__ import annotations

import contextlib
import functools
import os
import posixpath
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import pyarrow as pa
from pyarrow import fs

from workers.errors import UserError

PATIENCE_S = 120.0  # how long a storage may fail to answer before the run ends
FIRST_CONTACT_S = 20.0  # the same before the run has begun: its address may be wrong
FIRST_S, LONGEST_S = 0.2, 5.0  # pauses between tries: each is twice the one before
SAY_S = 5.0  # after so long a person is told what is waited for
# a connection without an answer, and one without a byte, are given up
CONNECT_S, SILENT_S = (
    5.0,
    20.0,
)
SMALL = 8 << 20  # bytes of an object that is written by one request
TRIES = 3  # that the client makes by itself before it reports an error
S3_OPTIONS = (
    "allow_bucket_creation",
    "endpoint_override",
    "force_virtual_addressing",
    "region",
    "scheme",
)
# What may go well when it is asked again. pyarrow has nothing but the text of an error.
# NO_SUCH_UPLOAD: the answer to an upload's end got lost.
TRANSIENT = re.compile(
    r"SLOW_DOWN|SERVICE_UNAVAILABLE|INTERNAL_FAILURE|INTERNAL_ERROR|THROTTL|REQUEST_TIMEOUT|REQUEST_LIMIT|NETWORK_CONNECTION|NO_SUCH_UPLOAD"
    r"|HTTP status "
    r"(408|429|5\d\d)|curlCode|Status\((UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED|INTERNAL)"
    r"|ServerBusy|InternalError|OperationTimedOut|[Tt]imed out|[Cc]onnection (was "
    r")?(reset|refused|closed)",
    re.ASCII,
)

T = TypeVar("T")
_patience: ContextVar[float | None] = ContextVar("patience", default=None)
_jitter = random.Random()  # of its own: what is drawn here may change no result


class StorageUnavailable(UserError):
    """A storage that did not answer for as long as it is waited for."""


def print_line(line: str) -> None:
    """Where a line about waiting goes: to people at a terminal, or into the log of a worker."""
    print(line, file=sys.stderr, flush=True)


notify: Callable[[str], None] = print_line  # the console of a run puts its own here


@contextlib.contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Inside, a storage that does not answer is given up after so long: for a first contact, where
    its address may be wrong."""
    token = _patience.set(seconds)
    try:
        yield
    finally:
        _patience.reset(token)


@functools.lru_cache(maxsize=64)
def open_filesystem(uri: str) -> tuple[fs.FileSystem, str]:
    """The patient filesystem of a URI without its path, and where its paths start. Opens no
    connection to S3 or GCS. Raises what pyarrow raises for URIs that it does not know."""
    parts = urlsplit(uri)
    if parts.scheme == "s3":
        options = dict(parse_qsl(parts.query))
        return fs.PyFileSystem(
            RetryingFilesystem(
                s3(options), f"s3://{parts.netloc}", s3(options, allow_delayed_open=True)
            )
        ), parts.netloc
    if parts.scheme in ("gs", "gcs") and "retry_limit_seconds" not in parts.query:
        mark = "&" if parts.query else "?"
        uri += f"{mark}retry_limit_seconds={timedelta(seconds=SILENT_S).seconds}"
    system, top = fs.FileSystem.from_uri(uri)
    return (
        system
        if isinstance(system, fs.LocalFileSystem)
        else fs.PyFileSystem(RetryingFilesystem(system, f"{parts.scheme}://{parts.netloc}"))
    ), top


def access_remedy(uri: str) -> str:
    """What to check where a storage or source refuses: for a bucket its name, its region, and the
    place that credentials are read from, never the credentials; for a folder its permissions."""
    parts = urlsplit(uri)
    bucket = parts.netloc.rpartition("@")[2]
    if parts.scheme == "s3":
        options = dict(parse_qsl(parts.query))
        region = (
            options.get("region")
            or os.environ.get("AWS_REGION")
            or os.environ.get("AWS_DEFAULT_REGION")
        )
        where = (
            f"region {region}"
            if region
            else "region us-east-1 (give another with ?region= in the URI or AWS_REGION)"
        )
        endpoint = (
            options.get("endpoint_override")
            or os.environ.get("AWS_ENDPOINT_URL_S3")
            or os.environ.get("AWS_ENDPOINT_URL")
        )
        server = f" at {endpoint}" if endpoint else ""
        return (
            f"check that bucket {bucket!r} exists in {where}{server}, and that the credentials, "
            f"read from {aws_credentials()}, may list, "
            "read, write and delete there"
        )
    if parts.scheme in ("gs", "gcs"):
        return (
            f"check that bucket {bucket!r} exists, and that the credentials, read from "
            f"{google_credentials(uri)}, may list, read, write and delete there"
        )
    if parts.scheme in ("", "file"):
        return "choose another folder or mend its permissions"
    return (
        f"check that {parts.scheme}://{bucket} is there, and that the credentials of this "
        "environment may list, read, write and delete there"
    )


def aws_credentials() -> str:
    """Where the AWS client takes its credentials from: the first of its places that is filled."""
    env = os.environ.get
    if env("AWS_ACCESS_KEY_ID"):
        return "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    if env("AWS_WEB_IDENTITY_TOKEN_FILE"):
        return f"the role {env('AWS_ROLE_ARN', '')} by AWS_WEB_IDENTITY_TOKEN_FILE"
    path = os.path.expanduser(env("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials")
    if os.path.exists(path):
        return f"profile {env('AWS_PROFILE') or 'default'} of {path}"
    return f"the role of this machine (AWS_ACCESS_KEY_ID is not set, and there is no {path})"


def google_credentials(uri: str) -> str:
    """Where the client of Google's storage takes its credentials from."""
    if urlsplit(uri).username == "anonymous":
        return "nowhere (anonymous@ in the URI)"
    if os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
        return "GOOGLE_APPLICATION_CREDENTIALS"
    path = os.path.expanduser("~/.config/gcloud/application_default_credentials.json")
    return (
        path
        if os.path.exists(path)
        else "the role of this machine (GOOGLE_APPLICATION_CREDENTIALS is not set, and there is "
        f"no {path})"
    )


def s3(options: dict[str, str], **rest: Any) -> fs.S3FileSystem:
    """options: the query of the URI, which goes before AWS_REGION or AWS_DEFAULT_REGION,
    AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL. Without either the region is us-east-1: an AWS bucket
    elsewhere answers with an error that names its region. Raises ValueError for other options."""
    unknown = next((name for name in options if name not in S3_OPTIONS), None)
    if unknown is not None:
        raise ValueError(f"{unknown!r} is no option; there are {', '.join(S3_OPTIONS)}")
    env = os.environ.get
    endpoint = (
        options.get("endpoint_override")
        or env("AWS_ENDPOINT_URL_S3")
        or env("AWS_ENDPOINT_URL")
        or ""
    )
    scheme, mark, host = endpoint.partition("://")
    return fs.S3FileSystem(
        region=options.get("region")
        or env("AWS_REGION")
        or env("AWS_DEFAULT_REGION")
        or "us-east-1",
        endpoint_override=(host if mark else endpoint).rstrip("/") or None,
        scheme=options.get("scheme") or (scheme if mark else "https"),
        allow_bucket_creation=options.get("allow_bucket_creation") == "true",
        force_virtual_addressing=options.get("force_virtual_addressing") == "true",
        connect_timeout=CONNECT_S,
        request_timeout=SILENT_S,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=TRIES),
        **rest,
    )


def without_retries(system: fs.FileSystem) -> fs.FileSystem:
    """The filesystem that `opened` made patient, for those who write through streams of their
    own."""
    return system.handler.system if isinstance(system, fs.PyFileSystem) else system


def put(system: fs.FileSystem, path: str, data: bytes) -> None:
    """One whole object on a filesystem that `opened` gave, or nothing: an upload in parts is
    visible once all of them are there."""
    system.handler.put(path, data)


def retry(call: Callable[[], T], where: str, doing: str, may_be_gone: bool = False) -> T:
    """`call()`, made again with growing pauses while its error is one that passes. may_be_gone: a
    path that is not there after a try that failed was taken away by that try, and the answer is
    None. Raises StorageUnavailable when patience is over, and any other error at once."""
    started, pause, said, failed = time.monotonic(), FIRST_S, False, False
    limit = PATIENCE_S if _patience.get() is None else _patience.get()
    while True:
        try:
            return call()
        except FileNotFoundError:
            if not (failed and may_be_gone):
                raise
            return None  # type: ignore[return-value]
        except OSError as error:
            text = " ".join(str(error).split())  # it may begin with a long name
            if not TRANSIENT.search(text):
                raise
            reason, waited, failed = text[:300], time.monotonic() - started, True
            if waited + pause > (limit or 0):
                raise StorageUnavailable(
                    f"storage {where} does not answer ({reason}); what finished is kept, run "
                    "the same command again when it does"
                ) from None
            if waited > SAY_S and not said:
                said = True
                notify(
                    f"storage {where} does not answer ({reason}); {doing} is tried again for up "
                    f"to {limit:.0f} s"
                )
        time.sleep(pause * _jitter.uniform(0.5, 1))
        pause = min(2 * pause, LONGEST_S)


class Reading:
    """A file that pyarrow reads through Python: every read is made again where it failed, from
    where it began."""

    def __init__(self, file: pa.NativeFile, where: str, path: str):
        self.file, self.where, self.path, self.at, self.closed = file, where, path, 0, False
        self.size = file.size()

    def read(self, size: int = -1) -> bytes:
        left = max(self.size - self.at, 0)
        size = left if size < 0 else min(size, left)
        data = (
            retry(lambda: self.file.read_at(size, self.at), self.where, f"reading {self.path}")
            if size
            else b""
        )
        self.at += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.size}[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True
        self.file.close()


class RetryingFilesystem(fs.FileSystemHandler):  # type: ignore[misc]
    """Every operation of a filesystem, made again where it failed for a reason that passes. Files
    are written whole, by `put` alone: a stream that is closed by an exception would publish what it
    has.

    small: the same filesystem, opened so that an object below 10 MB is one PUT and not three
    requests. It is for these alone: where the first request of an upload in parts fails, it leaves
    an empty object.
    """

    def __init__(self, system: fs.FileSystem, where: str, small: fs.FileSystem | None = None):
        self.system, self.where, self.small = system, where, small or system

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RetryingFilesystem) and self.system.equals(other.system)

    __hash__ = None  # type: ignore[assignment]

    def _do(self, call: Callable[[], T], doing: str, may_be_gone: bool = False) -> T:
        return retry(call, self.where, doing, may_be_gone=may_be_gone)

    def put(self, path: str, data: bytes) -> None:
        def written() -> None:
            with (self.small if len(data) < SMALL else self.system).open_output_stream(
                path
            ) as stream:
                stream.write(data)

        with ThreadPoolExecutor(
            1
        ) as aside:  # Ctrl-C arrives in the main thread, which waits for the end
            self._do(lambda: aside.submit(written).result(), f"writing {path}")

    def get_type_name(self) -> str:
        return str(self.system.type_name)

    def normalize_path(self, path: str) -> str:
        return str(self.system.normalize_path(path))

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        infos: list[fs.FileInfo] = self._do(
            lambda: self.system.get_file_info(paths), f"looking for {paths[0]}"
        )
        return infos

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        infos: list[fs.FileInfo] = self._do(
            lambda: self.system.get_file_info(selector), f"listing {selector.base_dir}"
        )
        return infos

    def open_input_file(self, path: str) -> pa.NativeFile:
        return pa.PythonFile(
            self._do(
                lambda: Reading(self.system.open_input_file(path), self.where, path),
                f"opening {path}",
            ),
            mode="r",
        )

    open_input_stream = open_input_file

    def delete_file(self, path: str) -> None:
        self._do(lambda: self.system.delete_file(path), f"deleting {path}", may_be_gone=True)

    def delete_dir(self, path: str) -> None:
        self._do(lambda: self.system.delete_dir(path), f"deleting {path}", may_be_gone=True)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        self._do(
            lambda: self.system.delete_dir_contents(path, missing_dir_ok=missing_dir_ok),
            f"deleting {path}",
            may_be_gone=True,
        )

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError("nothing deletes a whole storage")

    def create_dir(self, path: str, recursive: bool) -> None:
        self._do(lambda: self.system.create_dir(path, recursive=recursive), f"making {path}")

    def copy_file(self, src: str, dest: str) -> None:
        self._do(lambda: self.system.copy_file(src, dest), f"copying {src}")

    def move(self, src: str, dest: str) -> None:
        """An object store cannot rename: a copy, whole before the first is deleted."""
        self.copy_file(src, dest)
        self.delete_file(src)

    def open_output_stream(self, path: str, metadata: Any = None) -> pa.NativeFile:
        raise NotImplementedError(
            f"{posixpath.basename(path)}: files of a storage are written whole"
        )

    open_append_stream = open_output_stream
