"""Read and write files that users name.

Only regular files are read, and only up to a maximum size. Other files can block the process: a
device like /dev/zero has no end, and a pipe without a writer blocks the reader.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader

from workers.errors import UserError

MIN_READ_BYTES = 1 << 16  # size of reads beyond the reported size, which is too small in /proc


def open_regular(path: str | os.PathLike[str], most: int) -> BufferedReader:
    """Open a regular file of at most `most` bytes.

    Raises:
        OSError: As in `regular_descriptor`, or if the file is larger (EFBIG).
    """
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
    """Open a regular file for reading, and return its descriptor.

    Raises:
        OSError: If the file cannot be opened or is not regular. A folder gives EISDIR, a socket
            ENXIO, and another file that is not regular EINVAL. A NUL character in the path also
            gives EINVAL.
    """
    name = os.fspath(path)
    if "\0" in name:
        raise OSError(errno.EINVAL, "the path contains a NUL character", name)
    descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a regular file", name)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: str | os.PathLike[str], most: int) -> bytes:
    """Return the bytes of a regular file of at most `most` bytes.

    Raises:
        OSError: As in `open_regular`.
    """
    with open_regular(path, most) as stream:
        data = stream.read(os.fstat(stream.fileno()).st_size)
        while len(data) <= most and (more := stream.read(MIN_READ_BYTES)):
            data += more
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", os.fspath(path))
    return data


def write_named_file(option: str, path: str, data: bytes) -> None:
    """Write a file that the user names with an option of the command line.

    The path can also be that of an existing device or pipe.

    Args:
        option: Name of the option, for errors.
        path: Path of the file.
        data: Content of the file.

    Raises:
        UserError: If the file cannot be written.
    """
    try:
        with open(path, "wb") as stream:
            stream.write(data)
    except OSError as error:
        raise UserError(
            f"{option} {path!r} cannot be written ({error.strerror}); "
            "name a file in an existing folder"
        ) from None
