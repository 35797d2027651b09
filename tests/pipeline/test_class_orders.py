"""Tests of class orders: the published orders, and the errors for invalid ones."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from timm.data import ImageNetInfo

from pipeline.data import card_files
from workers.errors import UserError

NAMES = tuple(f"class {i}" for i in range(100))


@pytest.mark.parametrize(
    ("name", "count", "digest", "first", "last"),
    [
        ("cifar100/order1", 100, "62e36f48cf4f51c7", (87, 0, 52), (26, 35, 39)),
        ("cifar100/order2", 100, "920202d4b4eafb27", (58, 30, 93), (23, 64, 61)),
        ("cifar100/order3", 100, "208ddd64ac86acb0", (71, 54, 45), (85, 43, 11)),
        (
            "imagenet/imagenet100-order1",
            100,
            "997a048a5344d216",
            (68, 56, 78),
            (57, 33),
        ),
        ("imagenet/imagenet1000-order1", 1000, "305571fb8fde3e0f", (54, 7, 894), (417,)),
    ],
)
def test_published_order_is_a_permutation_with_expected_hash(
    name: str, count: int, digest: str, first: tuple[int, ...], last: tuple[int, ...]
) -> None:
    orders = [
        int(label.split()[1])
        for label in card_files.order_classes(name, tuple(f"class {i}" for i in range(1000)))
    ]
    assert sorted(orders) == list(range(count))
    assert hashlib.sha256(",".join(map(str, orders)).encode()).hexdigest()[:16] == digest
    assert (tuple(orders[: len(first)]), tuple(orders[-len(last) :])) == (first, last)


def test_cifar100_cards_list_official_classes_in_official_order() -> None:
    listed = {
        name: card_files.load_card_file(name).classes
        for name in ("cifar100", "cifar100-part", "cifar100-folder", "cifar100-torchvision")
    }
    assert set(listed.values()) == {listed["cifar100"]}
    assert (listed["cifar100"][0], listed["cifar100"][87], listed["cifar100"][99]) == (
        "apple",
        "television",
        "worm",
    )


def test_imagenet100_order_has_first_hundred_imagenet_wnids() -> None:
    """The WNIDs are sorted, as in a card. The hash is that of BiC's list of 100 classes."""
    wnids = tuple(sorted(ImageNetInfo().label_names()))
    selected_wnids = card_files.order_classes("imagenet/imagenet100-order1", wnids)
    assert {*selected_wnids} == {*wnids[:100]}
    assert hashlib.sha256(",".join(wnids[:100]).encode()).hexdigest()[:16] == "46391eba563f110f"
    assert (wnids[0], wnids[99], selected_wnids[0]) == ("n01440764", "n01855672", wnids[68])


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(card_files, "CARDS", tmp_path)
    (tmp_path / "mine" / "orders").mkdir(parents=True)

    def write(order: object, digest: str | None = None) -> str:
        listed = ",".join(map(str, order)) if isinstance(order, list) else ""
        body = {
            "order": order,
            "sha256": digest or hashlib.sha256(listed.encode()).hexdigest()[:16],
        }
        (tmp_path / "mine" / "orders" / "own.yaml").write_text(yaml.safe_dump(body))
        return "mine/own"

    return write


def test_order_may_list_a_subset_of_classes(written: Any) -> None:
    assert card_files.order_classes(written([7, 3]), NAMES) == ("class 7", "class 3")


@pytest.mark.parametrize(
    ("order", "digest", "says"),
    [
        ([1, 1], None, "must list distinct whole numbers"),
        ([True, 0], None, "must list distinct whole numbers"),
        ("all", None, "must list distinct whole numbers"),
        ([0, 1], "0123456789abcdef", "`order` does not match `sha256`"),
        ([0, 100], None, "lists class index 100, but the card has 100 classes"),
        ([-1, 0], None, "lists class index -1, but the card has 100 classes"),
    ],
)
def test_invalid_order_is_refused(
    written: Any, order: object, digest: str | None, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        card_files.order_classes(written(order, digest), NAMES)


@pytest.mark.parametrize("name", ["mine/none", "own", "none/own"])
def test_error_for_unknown_order_lists_existing_orders(written: Any, name: str) -> None:
    written([0])
    with pytest.raises(
        UserError, match=rf"class order '{name}' does not exist .*there are: mine/own"
    ):
        card_files.order_classes(name, NAMES)
