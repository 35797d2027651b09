"""No URI holds a password or a key: what is written into configs and cards is written into records too."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from workers.errors import UserError

USER = re.compile(r"(?<=://)[^\s/?#]*@")
URI = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*://")
NAMES = re.compile(r"key|secret|token|pass|credential|signature|^sig$", re.IGNORECASE)
NOBODY = {"s3": "", "gs": "anonymous", "gcs": "anonymous", "http": "", "https": ""}  # schemes whose user is an account, and the one that is nobody


def refuse_secrets(value: Any, where: str = "") -> None:
    """Raises UserError where a URI, or one in a mapping or list of settings, has credentials in it; the sentence does not repeat them.
    where: what the value is called."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            refuse_secrets(part, f"{where}{'.' if where and not where.endswith(' ') else ''}{name}")
    elif isinstance(value, (list, tuple)):
        for part in value:
            refuse_secrets(part, where)
    elif isinstance(value, str) and URI.match(value) and _has_secret(value.strip()):
        raise UserError(f"{where or 'a URI'} begins with {value.strip().partition('://')[0][:12]}:// and has a user, a password or a key in it, which would "
                        "be written into records; take it out of the URI and give it in the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                        "GOOGLE_APPLICATION_CREDENTIALS, MLFLOW_TRACKING_URI), or use the role of the machine")


def _has_secret(uri: str) -> bool:
    try:
        parts = urlsplit(uri)
        _ = parts.port
    except ValueError:  # no host and port: half a password, whose other half looks like a path
        return "@" in uri
    user = parts.netloc.rpartition("@")[0]
    if ":" in user or (parts.scheme in NOBODY and user not in ("", NOBODY[parts.scheme])) or (parts.scheme == "s3" and ":" in parts.netloc):
        return True
    return any(NAMES.search(name) for name, _ in parse_qsl(parts.query, keep_blank_values=True))


def shown(text: str) -> str:
    """A URI of the environment, or an error that repeats it, as people may see it: without the user and the password."""
    return USER.sub("", text)
