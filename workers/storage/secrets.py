"""Reject URIs that contain a password or a key, and remove secrets from texts.

This is needed because URIs of configs and cards are copied to records that other people read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from workers.errors import UserError

# A user, or a user and a password, up to the last "@". A password may contain characters that a URI
# does not allow there ("/", "?", "#", "@"). The length is limited so that the time is linear in the
# length of the text.
USER = re.compile(r"(?<=://)(?:[^\s/?#:@]*:\S{0,4000}@|[^\s/?#]*@)")
# A parameter of a query: its separator, its name and its value. The value may contain an "&".
PARAMETER = re.compile(r"([?&;#])([^\s=&;?#]{1,100})=([^\s&]*(?:&[^\s&=]+(?=&|\s|$))*)")
PASSWORD = re.compile(r"://[^\s/?#:@]*:(.*)@", re.DOTALL)
# environment variables that are secrets
VARIABLES = (
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "RAY_AUTH_TOKEN",
    "HF_TOKEN",
)
# environment variables with a URI, which can contain a password
URIS = (
    "MLFLOW_TRACKING_URI",
    "MLFLOW_REGISTRY_URI",
    "MLFLOW_BACKEND_STORE_URI",
    "MLFLOW_REGISTRY_STORE_URI",
)
SHORTEST = 4  # minimum length of a secret; shorter strings occur in ordinary words
HIDDEN = "***"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # replaces a character that cannot be printed
URI = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*://")
NAMES = re.compile(r"key|secret|token|pass|credential|signature|^sig$", re.IGNORECASE)
WITH_PORT = ("hdfs", "ray")  # schemes of URIs with a port, and possibly an "@" in the path
# Scheme in which a user is an account -> the user that means no account.
NOBODY = {
    "s3": "",
    "gs": "anonymous",
    "gcs": "anonymous",
    "http": "",
    "https": "",
}


def refuse_secrets(value: Any, where: str = "") -> None:
    """Raise `UserError` if a URI contains credentials. The message does not contain them.

    Args:
        value: A URI, or a mapping or list of settings to search for URIs.
        where: Name of the value in the message.
    """
    if isinstance(value, Mapping):
        prefix = where
        if where and not where.endswith(" "):
            prefix += "."
        for name, part in value.items():
            refuse_secrets(part, f"{prefix}{name}")
    elif isinstance(value, (list, tuple)):
        for part in value:
            refuse_secrets(part, where)
    elif isinstance(value, str) and URI.match(value) and _has_secret(value.strip()):
        raise UserError(
            f"{where or 'a URI'} begins with {value.strip().partition('://')[0][:12]}:// and "
            "has a user, a password or a key in it, which would "
            "be written into records; take it out of the URI and give it in the environment "
            "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "GOOGLE_APPLICATION_CREDENTIALS, MLFLOW_TRACKING_URI), or use the role of the machine"
        )


def _has_secret(uri: str) -> bool:
    try:
        parts = urlsplit(uri)
        _ = parts.port
    except ValueError:
        # not a host and port, but possibly the first part of a password with a "/"
        return "@" in uri
    user = parts.netloc.rpartition("@")[0]
    if ":" in parts.netloc and not user and parts.scheme not in WITH_PORT and "@" in uri:
        return True  # a password that begins with digits like a port, and contains a "/"
    if ":" in user:
        return True
    if parts.scheme in NOBODY and user not in ("", NOBODY[parts.scheme]):
        return True
    if parts.scheme == "s3" and ":" in parts.netloc:
        return True
    return any(NAMES.search(name) for name, _ in parse_qsl(parts.query, keep_blank_values=True))


def redact(text: str) -> str:
    """Return a text, for example a URI, an error or a log, without secrets.

    Users and passwords of URIs, values of URI parameters with names like `key` or `token`, and the
    values of secret environment variables of this process are removed.
    """
    for secret in _environment_secrets():
        text = text.replace(secret, HIDDEN)
    return PARAMETER.sub(_without_value, USER.sub("", text))


def redact_texts(value: Any, most: int | None = None) -> Any:
    """Return a JSON value with redacted strings, cut to `most` characters. Keys become strings."""
    if isinstance(value, str):
        return redact(value)[:most]
    if isinstance(value, Mapping):
        return {str(name): redact_texts(item, most) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_texts(item, most) for item in value]
    return value


def printable(text: str) -> str:
    """Return an untrusted text without secrets and control characters, except newlines."""
    return "".join(c if c.isprintable() or c == "\n" else REPLACEMENT for c in redact(text))


def _without_value(match: re.Match[str]) -> str:
    mark, name, value = match.groups()
    if value and NAMES.search(unquote(name)):
        return f"{mark}{name}={HIDDEN}"
    return match.group()


def _environment_secrets() -> list[str]:
    """Return the secrets in environment variables, the longest first.

    They are searched separately, because errors of libraries may contain a password without its
    URI.
    """
    secrets = {os.environ.get(name, "") for name in VARIABLES}
    for name in URIS:
        password = PASSWORD.search(os.environ.get(name, ""))
        if password:
            secrets |= {password.group(1), unquote(password.group(1))}
    long_enough = [secret for secret in secrets if len(secret) >= SHORTEST]
    return sorted(long_enough, key=len, reverse=True)
