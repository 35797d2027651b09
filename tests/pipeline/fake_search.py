"""Records of a search as `search` leaves them, written without training anything."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

TASKS = ["flowers", "birds", "textures", "aircraft", "digits"]
SPACE = {
    "methods.meat.mask_lr": {
        "when": {},
        "dist": "loguniform",
        "low": 0.0025,
        "high": 0.025,
        "points": 3,
    },
    "methods.meat.lambda": {"when": {}, "dist": "uniform", "low": 0.5, "high": 1.0, "points": 3},
    "methods.meat.alpha": {"when": {}, "dist": "choice", "values": [0.5, 1, 2, 4]},
    "methods.meat.token_mask_blocks": {"when": {}, "dist": "choice", "values": ["all", [3, 6, 9]]},
    "methods.meat.keep": {
        "dist": "uniform",
        "low": 0.1,
        "high": 0.9,
        "points": 3,
        "when": {"methods.meat.token_mask_blocks": [[3, 6, 9]]},
    },
}
ERROR = (
    "loss is not finite in step 212 of meat/birds/train; lower train.lr <or> mask_lr & try again"
)


def draw(rng: random.Random) -> dict[str, Any]:
    """Settings of one trial; `keep` only where blocks are listed."""
    params: dict[str, Any] = {
        "methods.meat.mask_lr": round(10 ** rng.uniform(math.log10(0.0025), math.log10(0.025)), 6),
        "methods.meat.lambda": round(rng.uniform(0.5, 1), 4),
        "methods.meat.alpha": rng.choice([0.5, 1, 2, 4]),
        "methods.meat.token_mask_blocks": rng.choice(["all", [3, 6, 9]]),
    }
    if params["methods.meat.token_mask_blocks"] != "all":
        params["methods.meat.keep"] = round(rng.uniform(0.1, 0.9), 3)
    return params


def results(
    params: dict[str, Any], tasks: list[str], rng: random.Random, offset: int = 0
) -> list[dict[str, Any]]:
    """A known function of the settings with a little noise: the learning rate matters most, then
    alpha; lambda sets the size."""
    level = (
        0.86
        - 0.16 * (math.log10(params["methods.meat.mask_lr"]) + 2.0) ** 2 / 0.25
        - 0.012 * abs(params["methods.meat.alpha"] - 2)
    )
    level -= 0.05 * (params.get("methods.meat.keep", 0.5) - 0.5) ** 2 + 0.03 * (
        1 - params["methods.meat.lambda"]
    )
    per_task: dict[str, float] = {}
    results_so_far = []
    for position, task in enumerate(tasks, offset):
        per_task[task] = round(max(level - 0.02 * position + rng.gauss(0, 0.006), 0.05), 4)
        results_so_far.append(
            {
                "task": task,
                "position": position,
                "accuracy": sum(per_task.values()) / len(per_task),
                "bytes": round(
                    452_000
                    * params["methods.meat.lambda"] ** 3
                    * params.get("methods.meat.keep", 1) ** 0.5
                    + 20_000,
                    0,
                ),
                "per_task": dict(per_task),
            }
        )
    return results_so_far


def trial(
    number: int, params: dict[str, Any] | None = None, status: str = "finished", **other: Any
) -> dict[str, Any]:
    """A record of one trial; without settings it has seeded ones. accuracy, bytes: its only
    result."""
    rng = random.Random(number)
    params = draw(rng) if params is None else params
    if "accuracy" in other:
        results_of_trial = [
            {
                "task": "flowers",
                "position": 0,
                "accuracy": other.pop("accuracy"),
                "bytes": other.pop("bytes", 1000.0),
                "per_task": {},
            }
        ]
    else:
        results_of_trial = [] if "results" in other else results(params, TASKS, rng)
    return {
        "number": number,
        "phase": "",
        "params": params,
        "status": status,
        "message": "",
        "results": results_of_trial,
        "stages": {"run": 8, "reused": 8},
        "device_s": 340.0,
        "wall_s": 350.0,
        "started": "2026-01-02T03:04:05+0000",
        "ended": "2026-01-02T03:10:05+0000",
        "graph": None,
        **other,
    }


def trials(count: int, scheduler: str = "asha") -> list[dict[str, Any]]:
    """A search over the stream: poor trials stopped early, some failed, the last one running."""
    records = []
    for number in range(count):
        t = trial(
            number,
            stages={
                "run": 12 if number == 0 else 8,
                "reused": 0 if number == 0 else 4 + number % 5,
            },
            device_s=200.0 + 7 * (number % 11),
        )
        if number % 13 == 6:
            t |= {"status": "failed", "message": ERROR, "results": t["results"][: number % 2]}
        elif scheduler == "asha" and t["results"][1]["accuracy"] < 0.78:
            t |= {
                "status": "stopped",
                "results": t["results"][: 2 if t["results"][1]["accuracy"] < 0.74 else 3],
            }
        records.append(t)
    if count > 4:
        records[-1] |= {"status": "running", "results": records[-1]["results"][:2], "ended": None}
    return records


def per_task(count: int, tasks: list[str] | None = None) -> list[dict[str, Any]]:
    """A greedy search: `count` trials for each task after the first one's best, and so on; each is
    judged after its last task alone."""
    records: list[dict[str, Any]] = []
    before: dict[str, float] = {}
    for position, task in enumerate(tasks or TASKS[:4]):
        for _ in range(count):
            rng = random.Random(1000 + len(records))
            t = trial(len(records), draw(rng), phase=task)
            result = results(t["params"], [task], rng, position)[0]
            result["per_task"] |= before
            result["accuracy"] = sum(result["per_task"].values()) / (position + 1)
            records.append(
                t | {"results": [result], "stages": {"run": 2, "reused": 2 * position + 2}}
            )
        before = max(
            (f for f in records if f["phase"] == task), key=lambda f: f["results"][-1]["accuracy"]
        )["results"][0]["per_task"]
    return records


def record(name: str = "meat-real", **settings: Any) -> dict[str, Any]:
    return {
        "name": name,
        "created": "2026-01-02T03:04:05+0000",
        "base": "configs/methods/meat-real7.yaml",
        "config": {
            "name": "meat-real7",
            "seed": 3,
            "stream": {"tasks": [{"card": t} for t in TASKS], "scenario": "task"},
            "methods": {"meat": {"method": "meat", "lambda": 0.8}},
        },
        "space": SPACE,
        "tasks": TASKS,
        "settings": {
            "protocol": "end_of_stream",
            "algorithm": "tpe",
            "scheduler": "asha",
            "objectives": ["accuracy", "bytes"],
            "tolerance": 0.005,
            "budget": {"trials": 40, "hours": 4},
            "seed": 3,
            "seeds": 3,
        }
        | settings,
        "provenance": {"git_commit": "0123456789abcdef", "packages": {"torch": "2.14.1"}},
        "sessions": [
            {"started": "2026-01-02T03:04:05+0000", "wall_s": 5400.0},
            {"started": "2026-01-03T03:04:05+0000", "wall_s": 1260.0},
        ],
    }


def winner(trial: dict[str, Any], tests: int = 3) -> dict[str, Any]:
    last = trial["results"][-1]
    return {
        "trial": trial["number"],
        "params": trial["params"],
        "accuracy": last["accuracy"],
        "bytes": last["bytes"],
        "config": "winner.yaml",
        "pareto": [],
        "tests": [
            {
                "seed": s,
                "run": f"meat-real-winner-{s}",
                "average_accuracy": last["accuracy"] - 0.011 + 0.004 * s,
                "forgetting": 0.0,
                "bytes_per_task": last["bytes"],
            }
            for s in range(tests)
        ],
    }


def write(
    storage: Any,
    body: dict[str, Any],
    some: list[dict[str, Any]],
    won: dict[str, Any] | None = None,
) -> str:
    """Writes the records of a search; returns its name."""
    folder = Path(storage) / "searches" / body["name"]
    (folder / "trials").mkdir(parents=True)
    (folder / "search.json").write_text(json.dumps(body))
    for t in some:
        (folder / "trials" / f"{t['number']:04d}.json").write_text(json.dumps(t))
    if won is not None:
        (folder / "winner.json").write_text(json.dumps(won))
    return str(body["name"])
