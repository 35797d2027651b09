"""Refuse URIs that contain a password or a key, and remove secrets from printed texts.

URIs of configs and cards are copied into records that other people read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from workers.errors import UserError

# A user, or a user and a password, up to the last "@": a password may contain characters that a URI
# forbids there ("/", "?", "#", "@"). The bound on its length keeps the time linear in the text.
USER = re.compile(r"(?<=://)(?:[^\s/?#:@]*:\S{0,4000}@|[^\s/?#]*@)")
# A parameter of a query: its mark, its name and its value, also where the value contains an "&".
PARAMETER = re.compile(r"([?&;#])([^\s=&;?#]{1,100})=([^\s&]*(?:&[^\s&=]+(?=&|\s|$))*)")
PASSWORD = re.compile(r"://[^\s/?#:@]*:(.*)@", re.DOTALL)
VARIABLES = (
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "RAY_AUTH_TOKEN",
    "HF_TOKEN",
)
URIS = (
    "MLFLOW_TRACKING_URI",
    "MLFLOW_REGISTRY_URI",
    "MLFLOW_BACKEND_STORE_URI",
    "MLFLOW_REGISTRY_STORE_URI",
)
SHORTEST = 4  # characters of a secret; shorter ones occur in ordinary words
HIDDEN = "***"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # of a character that cannot be printed
URI = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*://")
NAMES = re.compile(r"key|secret|token|pass|credential|signature|^sig$", re.IGNORECASE)
WITH_PORT = ("hdfs", "ray")  # schemes with a port in the host, and possibly an "@" in the path
# Schemes with an account as the user, and the user that means no account.
NOBODY = {
    "s3": "",
    "gs": "anonymous",
    "gcs": "anonymous",
    "http": "",
    "https": "",
}


def refuse_secrets(value: Any, where: str = "") -> None:
    """Raise `UserError` if a URI contains credentials. The message does not repeat them.

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
    except (
        ValueError
    ):  # not a host and port: the first half of a password that continues like a path
        return "@" in uri
    user = parts.netloc.rpartition("@")[0]
    if ":" in parts.netloc and not user and parts.scheme not in WITH_PORT and "@" in uri:
        return True  # a password that begins like a port, and continues like a path
    if ":" in user:
        return True
    if parts.scheme in NOBODY and user not in ("", NOBODY[parts.scheme]):
        return True
    if parts.scheme == "s3" and ":" in parts.netloc:
        return True
    return any(NAMES.search(name) for name, _ in parse_qsl(parts.query, keep_blank_values=True))


def redact(text: str) -> str:
    """Return a text, for example a URI, an error or a log, without secrets.

    Users and passwords of URIs, values of parameters with suspicious names, and the secrets in the
    environment of this process are removed.
    """
    for secret in _environment_secrets():
        text = text.replace(secret, HIDDEN)
    return PARAMETER.sub(_without_value, USER.sub("", text))


def redact_texts(value: Any, most: int | None = None) -> Any:
    """Return a JSON value with redacted texts of at most `most` characters; keys become texts."""
    if isinstance(value, str):
        return redact(value)[:most]
    if isinstance(value, Mapping):
        return {str(name): redact_texts(item, most) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_texts(item, most) for item in value]
    return value


def printable(text: str) -> str:
    """Return lines without secrets and control characters: they may come from a stranger."""
    return "".join(c if c.isprintable() or c == "\n" else REPLACEMENT for c in redact(text))


def _without_value(match: re.Match[str]) -> str:
    mark, name, value = match.groups()
    if value and NAMES.search(unquote(name)):
        return f"{mark}{name}={HIDDEN}"
    return match.group()


def _environment_secrets() -> list[str]:
    """Return the secrets of the environment, the longest first.

    Errors of libraries may repeat them without the URI around them.
    """
    secrets = {os.environ.get(name, "") for name in VARIABLES}
    for name in URIS:
        password = PASSWORD.search(os.environ.get(name, ""))
        if password:
            secrets |= {password.group(1), unquote(password.group(1))}
    long_enough = [secret for secret in secrets if len(secret) >= SHORTEST]
    return sorted(long_enough, key=len, reverse=True)
