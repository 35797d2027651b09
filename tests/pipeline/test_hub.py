"""Tests of sources on the Hugging Face hub when the hub cannot be reached."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline import cli
from tests import small_run
from workers.errors import UserError
from workers.model import pretrained
from workers.storage import hub

SOURCE = "hf://datasets/somebody/pictures/folder"


class Silent:
    """A server that accepts connections and never answers."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.connections: list[socket.socket] = []
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            try:
                self.connections.append(self.listener.accept()[0])
            except OSError:
                return


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Silent]:
    """Replace the hub by a server that does not answer."""
    from huggingface_hub import close_session, constants

    server = Silent()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(hub, "DEADLINE_S", 0.3)
    hub.check_reachable.cache_clear()
    yield server
    server.listener.close()
    for connection in server.connections:
        connection.close()
    close_session()
    hub.check_reachable.cache_clear()


def config_on(folder: Path, path: str) -> str:
    card = small_run.make_card(folder, "a", "23")
    body = yaml.safe_load(Path(card).read_text())
    Path(card).write_text(yaml.safe_dump(body | {"source": {"format": "folder", "path": path}}))
    return small_run.write_config(
        folder / "config.yaml", small_run.make_body(folder, {"a": card}, ["finetune"])
    )


@pytest.mark.parametrize("how", ["silent", "refused", "offline"])
def test_plan_reports_an_unreachable_hub_in_one_line(
    how: str,
    silent: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from huggingface_hub import constants

    if how == "refused":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    if how == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert cli.main(["plan", config_on(tmp_path, SOURCE)]) == 2
    output = capsys.readouterr().err
    assert output.startswith(
        f"accrete: source '{SOURCE}': the Hugging Face hub at {constants.ENDPOINT} cannot be "
        "reached ("
    )
    assert output.count("\n") == 1
    assert {"silent": "no answer within", "refused": "refused", "offline": "HF_HUB_OFFLINE"}[
        how
    ] in output


def test_client_timeout_is_reported_as_no_answer(
    silent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = threading.Thread.join
    monkeypatch.setattr(threading.Thread, "join", lambda thread, _: wait(thread, 30))
    assert hub.find_connection_problem() == "no answer within 0.3 s"


@pytest.mark.parametrize("classes", ["listed", "from_source"])
def test_ingested_hub_data_is_usable_when_the_hub_is_unreachable(
    classes: str, silent: Any, tmp_path: Path, quick: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    local = config_on(tmp_path, str(tmp_path / "raw" / "a"))
    card = tmp_path / "cards" / "a.yaml"
    if classes == "from_source":
        card.write_text(
            yaml.safe_dump(
                yaml.safe_load(card.read_text()) | {"classes": "from_source", "num_classes": 2}
            )
        )
    assert cli.main(["run", local]) == 0
    body = yaml.safe_load(card.read_text())
    card.write_text(yaml.safe_dump(body | {"source": body["source"] | {"path": SOURCE}}))
    capsys.readouterr()
    assert cli.main(["plan", local]) == 0
    assert "0 to run" in capsys.readouterr().out
    asked = len(silent.connections)
    assert asked == (classes == "from_source"), (
        "only class names need a request; without an answer, the remembered names are used"
    )
    assert cli.main(["run", local]) == 0, "a run asks the hub, and continues with the stored data"
    assert "nothing to do" in capsys.readouterr().out
    assert len(silent.connections) > asked


def test_unavailable_hub_weights_fail_after_one_request(
    silent: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        UserError,
        match=r"backbone\.weights is 'hub', and the weights of 'vit_tiny_patch16_224' cannot be "
        r"had",
    ):
        pretrained.from_hub("vit_tiny_patch16_224", 224)
    assert len(silent.connections) == 1, "the client must not try again"
    assert not constants.HF_HUB_OFFLINE
