"""Open the filesystem of a storage URI. Operations are retried after transient errors.

Credentials come only from the environment. No request is made to find the region of a bucket.
"""

from __future__ import annotations

import contextlib
import functools
import mimetypes
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

# times in seconds
PATIENCE_S = 120.0  # time that operations are retried before the run ends
FIRST_CONTACT_S = 20.0  # the same at the first contact (see `patience`)
FIRST_S = 0.2  # first pause between tries; each pause is twice as long as the previous pause
LONGEST_S = 5.0  # longest pause between tries
SAY_S = 5.0  # time of retrying after which a message is printed
CONNECT_S = 5.0  # time limit of establishing a connection
SILENT_S = 20.0  # time limit of a request without any received byte
SMALL = 8 << 20  # bytes; smaller objects are written by one request
TRIES = 3  # tries of the S3 client before it reports an error
DEFAULT_REGION = "us-east-1"
# accepted in the query of an `s3://` URI
S3_OPTIONS = (
    "allow_bucket_creation",
    "endpoint_override",
    "force_virtual_addressing",
    "region",
    "scheme",
)
# Transient errors, recognised by their text because pyarrow gives no error codes. NO_SUCH_UPLOAD
# occurs if the answer to the completion of an upload was lost.
AWS_ERRORS = (
    "SLOW_DOWN|SERVICE_UNAVAILABLE|INTERNAL_FAILURE|INTERNAL_ERROR|THROTTL|REQUEST_TIMEOUT"
    "|REQUEST_LIMIT|NETWORK_CONNECTION|NO_SUCH_UPLOAD"
)
HTTP_ERRORS = r"HTTP status (408|429|5\d\d)|curlCode"
GOOGLE_ERRORS = r"Status\((UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED|INTERNAL)"
OTHER_ERRORS = (
    "ServerBusy|InternalError|OperationTimedOut|[Tt]imed out"
    "|[Cc]onnection (was )?(reset|refused|closed)"
)
TRANSIENT = re.compile("|".join((AWS_ERRORS, HTTP_ERRORS, GOOGLE_ERRORS, OTHER_ERRORS)), re.ASCII)

T = TypeVar("T")
_patience: ContextVar[float | None] = ContextVar("patience", default=None)
_jitter = random.Random()  # separate generator, because pauses must not change results


class StorageUnavailable(UserError):
    """A storage did not answer within the time limit of retries."""


def print_line(line: str) -> None:
    """Print a line to stderr: the terminal of the driver or the log of a worker."""
    print(line, file=sys.stderr, flush=True)


notify: Callable[[str], None] = print_line  # replaced by the console of a run


@contextlib.contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Context manager that retries operations for `seconds` instead of `PATIENCE_S`.

    It is used at the first contact with a storage, whose address may be wrong.
    """
    token = _patience.set(seconds)
    try:
        yield
    finally:
        _patience.reset(token)


@functools.lru_cache(maxsize=64)
def open_filesystem(uri: str) -> tuple[fs.FileSystem, str]:
    """Return a filesystem that retries operations, and the path of the URI in it.

    No connection to S3 or GCS is opened.

    Args:
        uri: A URI without a path.
    """
    parts = urlsplit(uri)
    if parts.scheme == "s3":
        options = dict(parse_qsl(parts.query))
        for_small_objects = s3(options, allow_delayed_open=True)
        handler = RetryingFilesystem(s3(options), f"s3://{parts.netloc}", for_small_objects)
        return fs.PyFileSystem(handler), parts.netloc
    if parts.scheme in ("gs", "gcs") and "retry_limit_seconds" not in parts.query:
        mark = "&" if parts.query else "?"
        uri += f"{mark}retry_limit_seconds={timedelta(seconds=SILENT_S).seconds}"
    system, top = fs.FileSystem.from_uri(uri)
    if isinstance(system, fs.LocalFileSystem):
        return system, top
    handler = RetryingFilesystem(system, f"{parts.scheme}://{parts.netloc}")
    return fs.PyFileSystem(handler), top


def access_remedy(uri: str) -> str:
    """Return the remedy for a storage or source that refuses access.

    For a bucket the remedy names the bucket, its region, and the sources of credentials (never the
    credentials). For a folder it names the permissions.
    """
    parts = urlsplit(uri)
    bucket = parts.netloc.rpartition("@")[2]
    if parts.scheme == "s3":
        options = dict(parse_qsl(parts.query))
        location = f"region {aws_region(options)}"
        if not aws_region(options):
            location = (
                f"region {DEFAULT_REGION} (give another with ?region= in the URI or AWS_REGION)"
            )
        endpoint = aws_endpoint(options)
        if endpoint:
            location += f" at {endpoint}"
        return (
            f"check that bucket {bucket!r} exists in {location}, and that the credentials, "
            f"read from {aws_credentials()}, may list, "
            "read, write and delete there"
        )
    if parts.scheme in ("gs", "gcs"):
        return (
            f"check that bucket {bucket!r} exists, and that the credentials, read from "
            f"{google_credentials(uri)}, may list, read, write and delete there"
        )
    if parts.scheme in ("", "file"):
        return "choose another folder or fix its permissions"
    return (
        f"check that {parts.scheme}://{bucket} is there, and that the credentials of this "
        "environment may list, read, write and delete there"
    )


def aws_region(options: dict[str, str]) -> str:
    """Return the region in the options of a URI, else in the environment, else ""."""
    env = os.environ.get
    return options.get("region") or env("AWS_REGION") or env("AWS_DEFAULT_REGION") or ""


def aws_endpoint(options: dict[str, str]) -> str:
    """Return the endpoint in the options of a URI, else in the environment, else ""."""
    env = os.environ.get
    return (
        options.get("endpoint_override")
        or env("AWS_ENDPOINT_URL_S3")
        or env("AWS_ENDPOINT_URL")
        or ""
    )


def aws_credentials() -> str:
    """Describe the source from which the AWS client takes its credentials."""
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
    """Describe the source from which the client of Google Cloud Storage takes its credentials."""
    if urlsplit(uri).username == "anonymous":
        return "nowhere (anonymous@ in the URI)"
    if os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
        return "GOOGLE_APPLICATION_CREDENTIALS"
    path = os.path.expanduser("~/.config/gcloud/application_default_credentials.json")
    if os.path.exists(path):
        return path
    return (
        "the role of this machine (GOOGLE_APPLICATION_CREDENTIALS is not set, and there is "
        f"no {path})"
    )


def s3(options: dict[str, str], **rest: Any) -> fs.S3FileSystem:
    """Return the S3 client for the options of a URI and the environment.

    The default region is us-east-1. A bucket in another region answers with an error that names its
    region.

    Args:
        options: The query of a URI. It takes precedence over AWS_REGION, AWS_DEFAULT_REGION,
            AWS_ENDPOINT_URL_S3 and AWS_ENDPOINT_URL.
        rest: Further arguments of `S3FileSystem`.

    Raises:
        ValueError: If an option is unknown.
    """
    unknown = next((name for name in options if name not in S3_OPTIONS), None)
    if unknown is not None:
        raise ValueError(f"{unknown!r} is not an option; there are {', '.join(S3_OPTIONS)}")
    scheme, host = "https", aws_endpoint(options)
    if "://" in host:
        scheme, _, host = host.partition("://")
    return fs.S3FileSystem(
        region=aws_region(options) or DEFAULT_REGION,
        endpoint_override=host.rstrip("/") or None,
        scheme=options.get("scheme") or scheme,
        allow_bucket_creation=options.get("allow_bucket_creation") == "true",
        force_virtual_addressing=options.get("force_virtual_addressing") == "true",
        connect_timeout=CONNECT_S,
        request_timeout=SILENT_S,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=TRIES),
        **rest,
    )


def unwrap_filesystem(system: fs.FileSystem) -> fs.FileSystem:
    """Return the filesystem that a retrying filesystem wraps, for callers that open streams."""
    if isinstance(system, fs.PyFileSystem):
        return system.handler.system
    return system


def put_object(system: fs.FileSystem, path: str, data: bytes) -> None:
    """Write one object completely or not at all, to a remote system of `open_filesystem`.

    A multipart upload becomes visible only when all parts have arrived.
    """
    system.handler.put(path, data)


def retry(call: Callable[[], T], where: str, doing: str, may_be_gone: bool = False) -> T:
    """Return `call()`. After a transient error, pause and call it again.

    Args:
        call: The function.
        where: The storage in messages, for example "s3://b".
        doing: The action in messages, for example "reading a".
        may_be_gone: Whether the call is a deletion. Then a missing path after a failed attempt
            means that this attempt deleted it, and the result is None.

    Raises:
        StorageUnavailable: If the call still fails at the time limit.
    """
    started = time.monotonic()
    pause = FIRST_S
    has_failed = False
    has_notified = False
    limit_s = _patience.get()
    if limit_s is None:
        limit_s = PATIENCE_S
    while True:
        try:
            return call()
        except FileNotFoundError:
            if not (has_failed and may_be_gone):
                raise
            return None  # type: ignore[return-value]
        except OSError as error:
            text = " ".join(str(error).split())  # searched in full: a long name may come first
            if not TRANSIENT.search(text):
                raise
            has_failed = True
            reason = text[:300]
            waited_s = time.monotonic() - started
            if waited_s + pause > limit_s:
                raise StorageUnavailable(
                    f"storage {where} does not answer ({reason}); finished stages are kept, run "
                    "the same command again when it does"
                ) from None
            if waited_s > SAY_S and not has_notified:
                has_notified = True
                notify(
                    f"storage {where} does not answer ({reason}); {doing} is tried again for up "
                    f"to {limit_s:.0f} s"
                )
        time.sleep(pause * _jitter.uniform(0.5, 1))
        pause = min(2 * pause, LONGEST_S)


class Reading:
    """A file for `pa.PythonFile`. After a transient error, the whole read is repeated."""

    def __init__(self, file: pa.NativeFile, where: str, path: str):
        self.file = file
        self.where = where
        self.path = path
        self.offset = 0
        self.closed = False
        self.size = file.size()

    def read(self, size: int = -1) -> bytes:
        """Return the next `size` bytes, or all remaining bytes if `size` is negative."""
        left = max(self.size - self.offset, 0)
        count = min(size, left)
        if size < 0:
            count = left
        if not count:
            return b""
        data: bytes = retry(
            lambda: self.file.read_at(count, self.offset), self.where, f"reading {self.path}"
        )
        self.offset += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to an offset from the start, the position or the end. Return the new position."""
        starts = {os.SEEK_SET: 0, os.SEEK_CUR: self.offset, os.SEEK_END: self.size}
        self.offset = offset + starts[whence]
        return self.offset

    def tell(self) -> int:
        """Return the current position."""
        return self.offset

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Close the file."""
        self.closed = True
        self.file.close()


class RetryingFilesystem(fs.FileSystemHandler):  # type: ignore[misc]
    """A filesystem that repeats operations after transient errors.

    Files can only be written as a whole with `put_object`, because a stream that is closed by an
    exception would publish a part of the file.

    Args:
        system: The filesystem without retries.
        where: Name of the storage in messages.
        small: The same filesystem, but it writes objects below 10 MB by one PUT instead of three
            requests. It is used only for small objects, because a multipart upload whose first
            request fails would leave an empty object there. None: `system`.
    """

    def __init__(self, system: fs.FileSystem, where: str, small: fs.FileSystem | None = None):
        self.system = system
        self.where = where
        self.small = small or system

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RetryingFilesystem) and self.system.equals(other.system)

    __hash__ = None  # type: ignore[assignment]

    def _do(self, call: Callable[[], T], doing: str, may_be_gone: bool = False) -> T:
        return retry(call, self.where, doing, may_be_gone=may_be_gone)

    def put(self, path: str, data: bytes) -> None:
        """Write one object completely or not at all. Its name determines its content type."""
        system = self.system
        if len(data) < SMALL:
            system = self.small
        content_type, _ = mimetypes.guess_type(path)
        metadata = {"Content-Type": content_type or "application/octet-stream"}

        def write() -> None:
            with system.open_output_stream(path, metadata=metadata) as stream:
                stream.write(data)

        # The write is in a thread, so that Ctrl-C in the main thread does not interrupt it.
        with ThreadPoolExecutor(1) as executor:
            self._do(lambda: executor.submit(write).result(), f"writing {path}")

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
        reading = self._do(
            lambda: Reading(self.system.open_input_file(path), self.where, path), f"opening {path}"
        )
        return pa.PythonFile(reading, mode="r")

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
        """Copy the object, then delete the source, because an object store cannot rename."""
        self.copy_file(src, dest)
        self.delete_file(src)

    def open_output_stream(self, path: str, metadata: Any = None) -> pa.NativeFile:
        raise NotImplementedError(
            f"{posixpath.basename(path)}: files of a storage are written whole"
        )

    open_append_stream = open_output_stream
