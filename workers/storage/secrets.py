"""No URI holds a password or a key: what is written into configs and cards is written into records
too."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from workers.errors import UserError

# A user, or a user and a password, which may hold what a URI forbids there ("/", "?", "#", "@"): up
# to the last "@". No further than the longest password, so that a long text takes time in
# proportion.
USER = re.compile(r"(?<=://)(?:[^\s/?#:@]*:\S{0,4000}@|[^\s/?#]*@)")
# A parameter of a query: its mark, its name, its value, and parts that an "&" within the value
# would make of it.
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
SHORTEST = 4  # characters of a value that is looked for: a shorter one stands in every second word
HIDDEN = "***"
URI = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*://")
NAMES = re.compile(r"key|secret|token|pass|credential|signature|^sig$", re.IGNORECASE)
WITH_PORT = ("hdfs", "ray")  # schemes whose host has a port, and whose path may hold an "@"
NOBODY = {
    "s3": "",
    "gs": "anonymous",
    "gcs": "anonymous",
    "http": "",
    "https": "",
}  # schemes whose user is an account, and the one that is nobody


def refuse_secrets(value: Any, where: str = "") -> None:
    """Raises UserError where a URI, or one in a mapping or list of settings, has credentials in it;
    the sentence does not repeat them. where: what the value is called."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            refuse_secrets(part, f"{where}{'.' if where and not where.endswith(' ') else ''}{name}")
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
    except ValueError:  # no host and port: half a password, whose other half looks like a path
        return "@" in uri
    user = parts.netloc.rpartition("@")[0]
    if ":" in parts.netloc and not user and parts.scheme not in WITH_PORT and "@" in uri:
        return True  # a password that begins like a port, and goes on like a path
    if (
        ":" in user
        or (parts.scheme in NOBODY and user not in ("", NOBODY[parts.scheme]))
        or (parts.scheme == "s3" and ":" in parts.netloc)
    ):
        return True
    return any(NAMES.search(name) for name, _ in parse_qsl(parts.query, keep_blank_values=True))


def redact(text: str) -> str:
    """A URI of the environment, or an error or log that repeats it, as people may see it: without
    users, passwords, values of parameters that are named like secrets, and without the secrets that
    stand in the environment of this process."""
    for secret in _of_environment():
        text = text.replace(secret, HIDDEN)
    return PARAMETER.sub(_without_value, USER.sub("", text))


def _without_value(match: re.Match[str]) -> str:
    mark, name, value = match.groups()
    return f"{mark}{name}={HIDDEN}" if value and NAMES.search(unquote(name)) else match.group()


def _of_environment() -> Iterator[str]:
    """Secrets that errors of libraries may repeat without the URI around them, the longest
    first."""
    found = {os.environ.get(name, "") for name in VARIABLES}
    for name in URIS:
        password = PASSWORD.search(os.environ.get(name, ""))
        found |= {password.group(1), unquote(password.group(1))} if password else set()
    return iter(
        sorted((secret for secret in found if len(secret) >= SHORTEST), key=len, reverse=True)
    )
