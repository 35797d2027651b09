"""Tests of constraints.txt with pip-audit: no package has a known vulnerability."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"
# words in pip-audit's error if the advisory service does not answer
AWAY = (
    "connect",
    "timed out",
    "resolve",
    "unreachable",
    "retries",
)


def judge(report: dict[str, Any]) -> tuple[list[str], str]:
    """Evaluate pip-audit's JSON.

    Returns:
        A sentence for each known vulnerability, and a sentence about packages that could not be
        audited ("" if there are none).
    """
    packages = report["dependencies"]
    vulnerabilities = [
        f"{p['name']} {p['version']} has {v['id']}, fixed in "
        f"{', '.join(v['fix_versions']) or 'no version yet'}"
        for p in packages
        for v in p.get("vulns", ())
    ]
    unknown = [p for p in packages if "vulns" not in p]
    why = unknown[0].get("skip_reason", "no reason given") if unknown else ""
    return (
        vulnerabilities,
        f"{len(unknown)} of {len(packages)} packages could not be audited; the first: {why}"
        if unknown or not packages
        else "",
    )


def sound(name: str) -> dict[str, Any]:
    return {"name": name, "version": "1.0", "vulns": []}


def holed(name: str, *fixed: str) -> dict[str, Any]:
    return {
        "name": name,
        "version": "1.0",
        "vulns": [
            {"id": "PYSEC-1", "fix_versions": list(fixed), "aliases": [], "description": "bad"}
        ],
    }


def skipped(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "skip_reason": f"Dependency not found and could not be audited: {name} (1.0)",
    }


@pytest.mark.parametrize(
    ("packages", "vulnerabilities", "unknown"),
    [
        ([sound("a"), sound("b")], [], ""),
        ([sound("a"), holed("b", "1.1", "2.0")], ["b 1.0 has PYSEC-1, fixed in 1.1, 2.0"], ""),
        ([holed("a")], ["a 1.0 has PYSEC-1, fixed in no version yet"], ""),
        ([sound("a"), skipped("b"), skipped("c")], [], "2 of 3 packages could not be audited"),
        ([holed("a", "2"), skipped("b")], ["a 1.0 has PYSEC-1, fixed in 2"], "1 of 2 packages"),
        ([], [], "0 of 0 packages"),
        ([{"name": "a", "version": "1.0"}], [], "1 of 1 packages"),
    ],
)
def test_audit_report_passes_only_if_every_package_was_audited(
    packages: Any, vulnerabilities: Any, unknown: str
) -> None:
    sentences, left = judge({"dependencies": packages})
    assert sentences == vulnerabilities
    assert left.startswith(unknown)
    assert bool(left) == bool(unknown)


@pytest.mark.slow
def test_no_dependency_has_a_known_vulnerability() -> None:
    command = [
        sys.executable,
        "-m",
        "pip_audit",
        "--no-deps",
        "--disable-pip",
        "--progress-spinner",
        "off",
        "-f",
        "json",
        "-r",
        str(CONSTRAINTS),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    try:
        report = json.loads(done.stdout)
    except ValueError:
        if any(word in done.stderr.lower() for word in AWAY):
            pytest.skip(
                f"the advisory service does not answer: {done.stderr.strip().splitlines()[-1]}"
            )
        raise AssertionError(done.stderr) from None
    vulnerabilities, unknown = judge(report)
    assert not vulnerabilities, "; ".join(vulnerabilities)
    assert len(report["dependencies"]) == len(CONSTRAINTS.read_text().split()), (
        "some packages are not in the report"
    )
    if unknown:
        pytest.skip(unknown)
