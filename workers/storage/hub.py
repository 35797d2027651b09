"""The Hugging Face hub: files of models, and a check whether the hub can be reached.

The check has a deadline, because the hub's own client waits for minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Thread
from time import monotonic

from workers.errors import UserError, describe_error
from workers.job import HUB_MODEL
from workers.storage.filesystem import SILENT_S, StorageUnavailable

# seconds until the first answer, including the resolution of the host name
DEADLINE_S = 5.0


def find_connection_problem() -> str:
    """Return the reason why the hub cannot be reached, in one line; "" if it gives any answer.

    The request is made in a thread, because the resolution of a host name has no timeout. This
    function also sets a timeout for later requests of this process.
    """
    from huggingface_hub import constants, get_session

    outcome: list[str] = []
    end = monotonic() + DEADLINE_S

    def ask() -> None:
        try:
            session = get_session()
            session.timeout = SILENT_S  # the default is no timeout
            session.head(constants.ENDPOINT, timeout=DEADLINE_S, follow_redirects=False)
            outcome.append("")
        except Exception as error:  # errors of the HTTP client, the system and HF_HUB_OFFLINE
            if monotonic() < end:  # a later error is a timeout, which is described below
                outcome.append(describe_error(error)[:200])

    thread = Thread(target=ask, name="hub", daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    return outcome[0] if outcome else f"no answer within {DEADLINE_S:g} s"


@cache
def check_reachable() -> None:
    """Check that the hub can be reached. After a success the process does not check again.

    Raises:
        StorageUnavailable: If the hub cannot be reached.
    """
    from huggingface_hub import constants

    if reason := find_connection_problem():
        raise StorageUnavailable(
            f"the Hugging Face hub at {constants.ENDPOINT} cannot be reached ({reason}); fix "
            "the network, "
            "HTTPS_PROXY or HF_ENDPOINT, or download the files and point source.path of the "
            "card (or the "
            "environment variable in it) to them"
        )


@contextmanager
def offline_if_unreachable() -> Iterator[None]:
    """Context manager that restricts the hub's client to its cache if the hub cannot be reached.

    The client then answers immediately instead of waiting for the hub.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or bool(find_connection_problem())
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def is_hub_model(weights: str) -> bool:
    """Return whether `weights` names a hub model, `hf-hub:OWNER/NAME[@REVISION]`."""
    return HUB_MODEL.fullmatch(weights) is not None


def pinned(weights: str, commit: str) -> str:
    """Return the name of a model at one commit. This name always refers to the same files."""
    return f"{weights.partition('@')[0]}@{commit}"


def model_file(weights: str, name: str, may_connect: bool = True) -> str:
    """Return the path of a file of a hub model in the client's cache. Download a missing file.

    If the hub cannot be reached or `may_connect` is false, the file must be in the cache.

    Args:
        weights: `hf-hub:OWNER/NAME[@REVISION]`.
        name: Name of the file.
        may_connect: Whether a connection is allowed.

    Raises:
        UserError: If the file is not available.
    """
    from huggingface_hub import constants, errors, hf_hub_download

    match = HUB_MODEL.fullmatch(weights)
    assert match is not None
    if not may_connect:
        before = constants.HF_HUB_OFFLINE
        constants.HF_HUB_OFFLINE = True
        try:
            return model_file(weights, name)
        finally:
            constants.HF_HUB_OFFLINE = before
    try:
        with offline_if_unreachable():
            is_offline = bool(constants.HF_HUB_OFFLINE)
            return hf_hub_download(match[1], name, revision=match[2], local_files_only=is_offline)
    except errors.LocalEntryNotFoundError:
        reason = f"its {name} is not in the cache of this machine, and the hub is not asked"
        remedy = "run the same config with `run` on a machine with a network, which downloads it"
    except errors.EntryNotFoundError:
        reason = f"it has no {name}"
        remedy = "choose a model that timm has stored there as safetensors"
    except Exception as error:  # errors of the HTTP client, the hub and the system
        reason = describe_error(error, only_first_line=True)[:200]
        remedy = "correct its name, or fix the network, HF_TOKEN or HF_ENDPOINT"
    raise UserError(f"backbone.weights is {weights!r}: {reason}; {remedy}")
