"""List and open files of the Hugging Face hub, and read ranges of their bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from workers.errors import UserError, describe_error
from workers.storage import hub
from workers.storage.filesystem import retry
from workers.storage.web import FileVersion, hash_version


def open_hub(uri: str) -> tuple[Any, str]:
    """Return fsspec's file system of an `hf://` URI and the path in it.

    Each thread gets its own file system.

    Raises:
        StorageUnavailable: If the hub cannot be reached.
        UserError: If the URI cannot be opened.
    """
    try:
        import fsspec  # lazy import: takes a second, and only files of the hub need it

        hub.check_reachable()
        system, path = fsspec.core.url_to_fs(uri)
    except UserError as error:
        raise type(error)(f"source {uri!r}: {error}") from None
    except (ImportError, ValueError) as error:
        raise UserError(
            f"source {uri!r} cannot be opened ({error}); "
            "install huggingface_hub or download the files"
        ) from None
    return system, path


def list_hub_folder(uri: str) -> dict[str, FileVersion]:
    """List the files of a folder: name -> size and version; {} if the folder is missing."""
    system, path = open_hub(uri)
    with _as_os_errors():
        try:
            infos = system.ls(path, detail=True)
        except FileNotFoundError:
            return {}
    versions: dict[str, FileVersion] = {}
    for info in infos:
        if info["type"] == "file":
            number = hash_version(str(info.get("blob_id") or info.get("xet_hash") or ""))
            versions[info["name"].rpartition("/")[2]] = FileVersion(int(info["size"]), number)
    return versions


class HubFile:
    """A file of the hub. Several threads can read it at the same time."""

    def __init__(self, uri: str):
        """Request the size of the file.

        Raises:
            OSError: If the file does not exist.
        """
        self.uri = uri
        self.size = int(retry(self._info, "hf://", f"opening {uri}")["size"])

    def _info(self) -> dict[str, Any]:
        system, path = open_hub(self.uri)
        with _as_os_errors():
            info: dict[str, Any] = system.info(path)
        return info

    def read_at(self, size: int, offset: int) -> bytes:
        """Return `size` bytes at `offset`, or fewer at the end of the file. Thread-safe."""
        count = min(size, self.size - offset)
        if count <= 0:
            return b""

        def read() -> bytes:
            system, path = open_hub(self.uri)
            with _as_os_errors():
                data: bytes = system.cat_file(path, start=offset, end=offset + count)
            if len(data) != count:
                raise OSError(f"connection closed ({len(data)} bytes of {count})")
            return data

        data: bytes = retry(read, "hf://", f"reading {self.uri}")
        return data


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Context manager that converts errors of the hub's client to OSError.

    The texts are chosen for `filesystem.retry`, which retries some HTTP statuses and "connection
    closed". Every error without a status gets the text "connection closed".
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:  # the HTTP client has its own error classes
        text = describe_error(error)[:300]
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            raise OSError(f"HTTP status {status} ({text})") from None
        raise OSError(f"connection closed ({text})") from None
