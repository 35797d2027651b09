"""Tests of the command `methods`: its list of methods, and the description of each setting."""

from __future__ import annotations

import pytest

from pipeline.app.method_list import describe_method, list_methods, method_rows
from pipeline.cli import main
from workers.errors import UserError
from workers.methods import METHODS


def test_every_method_has_one_line_of_at_most_100_columns() -> None:
    lines = list_methods().splitlines()
    for name, method in METHODS.items():
        (line,) = [line for line in lines if line.split()[:1] == [name]]
        assert all(name[0].upper() in line.split() for name in method.scenarios)
        assert line.endswith(method.keeps)
        assert len(line) <= 100


def test_methods_are_grouped_by_their_needs() -> None:
    text = list_methods()
    order = [line.split()[0] for line in text.splitlines() if line.split()[:1][:1]]
    given = order.index("the")
    for name, method in METHODS.items():
        assert (order.index(name) > given) == (method.scenarios == {"task"})
    assert order.index("ncm") < order.index("ease") < order.index("finetune") < order.index("er")
    rows = {row["method"]: row for row in method_rows()}
    assert rows["ncm"]["trains"] == "nothing"
    assert rows["lora"]["trains"] == "modules"
    assert rows["finetune"]["trains"] == "backbone"
    assert (rows["ncm"]["removal"], rows["ewc"]["removal"]) == ("exact", "trains again")
    needs = {name: rows[name]["old images"] for name in ("meat", "icarl", "joint")}
    assert needs == {"meat": "none", "icarl": "exemplars", "joint": "all"}


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_is_explained(name: str) -> None:
    text = describe_method(name)
    flat = " ".join(text.split())
    assert METHODS[name].train_defaults.source in flat
    for field, info in METHODS[name].Settings.model_fields.items():
        assert f"{info.alias or field}: " in text
        assert info.description, f"{name}.{field} has no description"
        assert " ".join(info.description.split()) in flat
    assert all(len(line) <= 100 for line in text.splitlines())


def test_settings_show_type_range_default_and_paper_value() -> None:
    lines = describe_method("meat").splitlines()
    at = lines.index("lambda: number")
    assert lines[at + 1] == "    default 0.9; >= 0, <= 1"
    assert "mask_lr: number or auto or paper" in lines
    assert any("in the paper paper" in line for line in lines)


def test_unknown_method_error_suggests_the_nearest_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(UserError, match="did you mean 'meat'"):
        describe_method("maet")
    assert main(["methods", "maet"]) == 2
    assert "did you mean 'meat'" in capsys.readouterr().err


def test_methods_command_prints_the_list_or_one_method(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods"]) == 0
    assert capsys.readouterr().out.strip() == list_methods()
    assert main(["methods", "hat"]) == 0
    assert capsys.readouterr().out.strip() == describe_method("hat")
