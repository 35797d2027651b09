"""Files that people name. Only regular ones are read, and no more of them than they may hold.

A device such as /dev/zero has no end, and a pipe without a writer blocks whoever opens it.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader

from workers.errors import UserError

UNSIZED = 1 << 16  # bytes that are read of a file that says it has fewer, such as the kernel's own


def open_regular(path: str | os.PathLike[str], most: int) -> BufferedReader:
    """Open a regular file of at most `most` bytes. Raise `OSError` where there is none, where it is
    another kind of file, or larger."""
    descriptor = regular_descriptor(path)
    try:
        size = os.fstat(descriptor).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size} bytes, more than {most}", os.fspath(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def regular_descriptor(path: str | os.PathLike[str]) -> int:
    """Return a descriptor of a regular file, open for reading.

    Raise `OSError` where there is none; with EISDIR or EINVAL where it is another kind of file.
    """
    name = os.fspath(path)
    if "\0" in name:
        raise OSError(errno.EINVAL, "a path has no NUL character", name)
    descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is no regular file", name)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: str | os.PathLike[str], most: int) -> bytes:
    """The bytes of a regular file of at most `most` bytes. Raise `OSError` as `open_regular`
    does."""
    with open_regular(path, most) as stream:
        size = os.fstat(stream.fileno()).st_size
        data = stream.read(max(size, UNSIZED))
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", os.fspath(path))
    return data


def write_named(option: str, path: str, data: bytes) -> None:
    """Write the file that a person names with an option of the command line. Raise `UserError`
    where it cannot be written."""
    try:
        with open(path, "wb") as stream:
            stream.write(data)
    except OSError as error:
        raise UserError(
            f"{option} {path!r} cannot be written ({error.strerror}); "
            "name a file in an existing folder"
        ) from None
