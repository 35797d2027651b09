"""Read ranges of bytes from files of web servers. The user's cards name these files.

No connection to a private address is made, even if a host name or a redirection leads there: the
address of each socket is checked before it is connected. Proxies from environment variables are
not used, because the addresses to which they connect cannot be checked.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import ipaddress
import os
import re
import socket
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from workers.errors import UserError, describe_error, require_package
from workers.storage.filesystem import CONNECT_S, SILENT_S, retry
from workers.storage.secrets import refuse_secrets

SCHEMES = ("http://", "https://")
CONNECTIONS = 32  # maximum number of simultaneous connections
MAX_REDIRECTIONS = 5
REFUSED = "is a private address"
CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
NAT64 = ipaddress.ip_network("64:ff9b::/96")  # the last 32 bits are an IPv4 address


class FileVersion(NamedTuple):
    """Size of a file, and a number that changes if the server reports another version."""

    size: int
    number: int


class Part(NamedTuple):
    """A range of bytes of a file, and the version of the whole file."""

    data: bytes
    version: FileVersion


def is_web(uri: str) -> bool:
    """Return whether a URI names a file of a web server."""
    return uri.lower().startswith(SCHEMES)


def is_private(host: str) -> bool:
    """Return whether an IP address (without brackets) is not a public unicast address."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            address = inner
    return not address.is_global or address.is_multicast


def _checked_socket(addr_info: Any) -> socket.socket:
    """Create the socket for an entry of `getaddrinfo`. Raise `OSError` for a private address."""
    family, kind, protocol, _, address = addr_info
    if is_private(address[0]):
        raise OSError(errno.EACCES, f"{address[0]} {REFUSED}")
    return socket.socket(family, kind, protocol)


async def _new_session(**_: Any) -> Any:
    import aiohttp  # lazy import: takes a second, and only web servers need it

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=CONNECTIONS, socket_factory=_checked_socket),
        timeout=aiohttp.ClientTimeout(None, sock_connect=CONNECT_S, sock_read=SILENT_S),
        auto_decompress=False,  # ranges count the bytes of the uncompressed file
        headers={"Accept-Encoding": "identity"},
        trust_env=False,
    )


@functools.cache
def _filesystem(process: int) -> Any:
    """Return fsspec's file system with its thread for requests.

    Args:
        process: Id of this process, because a forked process needs its own thread.
    """
    from fsspec.implementations.http import HTTPFileSystem

    return HTTPFileSystem(get_client=_new_session, skip_instance_cache=True)


class WebFile:
    """A file of a web server. Several threads can read it at the same time."""

    def __init__(self, url: str):
        """Request the first byte of the file, whose response contains the size and the version.

        Raises:
            OSError: If the file does not exist.
            UserError: If the address is private or invalid, the URL contains a secret, a package is
                missing, or the server does not support ranges.
        """
        for package in ("aiohttp", "fsspec"):
            require_package(package, f"shard {url}", "download the shards")
        refuse_secrets(url)
        self.url = url
        try:
            self.where = "://".join(urlsplit(url)[:2])
        except ValueError as error:
            raise UserError(f"shard {url!r} is not an address ({error}); fix it") from None
        self.version = retry(lambda: self._fetch(0, 1), self.where, f"opening {url}").version

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return self.version.size

    def read_at(self, size: int, offset: int) -> bytes:
        """Return `size` bytes at `offset`, or fewer at the end of the file. Thread-safe."""
        count = min(size, self.size - offset)
        if count <= 0:
            return b""
        part = retry(lambda: self._fetch(offset, count), self.where, f"reading {self.url}")
        return part.data

    def _fetch(self, offset: int, count: int) -> Part:
        from fsspec.asyn import sync

        system = _filesystem(os.getpid())
        part: Part = sync(system.loop, _request, system, self.url, offset, count)
        return part


async def _request(system: Any, url: str, offset: int, count: int) -> Part:
    """Request `count` bytes at `offset`.

    Raises:
        OSError: If the request fails. `filesystem.retry` recognises transient errors by the text.
        UserError: If the URL is invalid or leads to a private address.
    """
    import aiohttp

    session = await system.set_session()
    headers = {"Range": f"bytes={offset}-{offset + count - 1}"}
    try:
        async with session.get(
            system.encode_url(url), headers=headers, max_redirects=MAX_REDIRECTIONS
        ) as response:
            return await _parse_part(response, url, offset, count)
    except aiohttp.InvalidURL as error:
        raise UserError(
            f"{url} is not an address of a web server ({error}); fix the card"
        ) from None
    except aiohttp.TooManyRedirects:
        raise OSError(f"{url} leads from one address to the next without an end") from None
    except (TimeoutError, aiohttp.ClientError) as error:
        text = describe_error(error)
        if REFUSED in text:
            raise UserError(
                f"{url} leads to an address that {REFUSED}, which no card may name ({text}); put "
                "the shards into a storage (s3://, gs://), or mount them as a folder"
            ) from None
        raise OSError(f"Connection closed ({text})") from None


async def _parse_part(response: Any, url: str, offset: int, count: int) -> Part:
    if response.status in (404, 410):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url)
    if response.status == 200:
        raise UserError(
            f"{url}: its server gives no parts of a file (it does not know Range); download the "
            "shards, or put them into a storage (s3://, gs://)"
        )
    if response.status != 206:
        raise OSError(f"HTTP status {response.status} {response.reason or ''}".strip())
    match = CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    first, last, size = map(int, match.groups()) if match else (-1, -1, -1)
    expected = min(count, size - offset)
    if first != offset or last - first + 1 != expected:
        raise OSError(f"{url}: its server gives another part than was asked for")
    data = bytearray()
    async for piece in response.content.iter_any():
        data += piece
        if len(data) > expected:
            break
    if len(data) != expected:
        raise OSError(f"Connection closed ({len(data)} bytes of {expected})")
    text = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
    return Part(bytes(data), FileVersion(size, hash_version(text)))


def hash_version(text: str) -> int:
    """Convert the version of a file that a server reports to a number; 0 without a version."""
    if not text:
        return 0
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
