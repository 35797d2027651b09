"""Fake records of a search, in the form that the command `search` writes; nothing is trained."""

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
    """Draw the settings of one trial; `keep` only if `token_mask_blocks` lists blocks."""
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
    """Return a trial's results after each task, as a known function of the settings.

    The learning rate changes accuracy most, then alpha; lambda sets the size. `rng` adds noise.
    offset: the position of the first task in the stream.
    """
    mask_lr = params["methods.meat.mask_lr"]
    size_factor = params["methods.meat.lambda"]
    level = (
        0.86
        - 0.16 * (math.log10(mask_lr) + 2.0) ** 2 / 0.25
        - 0.012 * abs(params["methods.meat.alpha"] - 2)
    )
    level -= 0.05 * (params.get("methods.meat.keep", 0.5) - 0.5) ** 2 + 0.03 * (1 - size_factor)
    keep_factor = params.get("methods.meat.keep", 1) ** 0.5
    num_bytes = round(452_000 * size_factor**3 * keep_factor + 20_000, 0)
    per_task: dict[str, float] = {}
    results_so_far = []
    for position, task in enumerate(tasks, offset):
        per_task[task] = round(max(level - 0.02 * position + rng.gauss(0, 0.006), 0.05), 4)
        result = {
            "task": task,
            "position": position,
            "accuracy": sum(per_task.values()) / len(per_task),
            "bytes": num_bytes,
            "per_task": dict(per_task),
        }
        results_so_far.append(result)
    return results_so_far


def trial(
    number: int, params: dict[str, Any] | None = None, status: str = "finished", **other: Any
) -> dict[str, Any]:
    """Return the record of one trial.

    params: its settings; by default, drawn with `number` as seed. other: fields of the record;
    `accuracy` and `bytes` make a trial with one result.
    """
    rng = random.Random(number)
    if params is None:
        params = draw(rng)
    results_of_trial: list[dict[str, Any]] = []
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
    elif "results" not in other:
        results_of_trial = results(params, TASKS, rng)
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
    """Return the records of a search over the stream.

    Some trials failed, `asha` stopped the worst ones early, and the last one is running.
    """
    records = []
    for number in range(count):
        stages = {"run": 8, "reused": 4 + number % 5}
        if number == 0:
            stages = {"run": 12, "reused": 0}
        record = trial(number, stages=stages, device_s=200.0 + 7 * (number % 11))
        all_results = record["results"]
        second_accuracy = all_results[1]["accuracy"]
        if number % 13 == 6:
            record |= {"status": "failed", "message": ERROR, "results": all_results[: number % 2]}
        elif scheduler == "asha" and second_accuracy < 0.74:
            record |= {"status": "stopped", "results": all_results[:2]}
        elif scheduler == "asha" and second_accuracy < 0.78:
            record |= {"status": "stopped", "results": all_results[:3]}
        records.append(record)
    if count > 4:
        records[-1] |= {"status": "running", "results": records[-1]["results"][:2], "ended": None}
    return records


def per_task(count: int, tasks: list[str] | None = None) -> list[dict[str, Any]]:
    """Return the records of a greedy search: `count` trials for each task in turn.

    Each task starts from the best trial of the previous task. A trial has one result.
    """
    records: list[dict[str, Any]] = []
    best_so_far: dict[str, float] = {}  # task -> accuracy
    for position, task in enumerate(tasks or TASKS[:4]):
        records_of_task = []
        for _ in range(count):
            number = len(records)
            rng = random.Random(1000 + number)
            record = trial(number, draw(rng), phase=task)
            result = results(record["params"], [task], rng, position)[0]
            result["per_task"] |= best_so_far
            result["accuracy"] = sum(result["per_task"].values()) / (position + 1)
            record |= {"results": [result], "stages": {"run": 2, "reused": 2 * position + 2}}
            records.append(record)
            records_of_task.append(record)
        best = max(records_of_task, key=lambda record: record["results"][-1]["accuracy"])
        best_so_far = best["results"][0]["per_task"]
    return records


def record(name: str = "meat-real", **settings: Any) -> dict[str, Any]:
    """Return the record of a search. settings: values that replace the defaults."""
    return {
        "name": name,
        "created": "2026-01-02T03:04:05+0000",
        "base": "configs/real7-vit-tiny.yaml",
        "config": {
            "name": "real7-vit-tiny",
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
    """Return a winner record for a trial, with one test run for each of `tests` seeds."""
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
    """Write the records of a search, its trials and any winner; return the search's name."""
    folder = Path(storage) / "searches" / body["name"]
    (folder / "trials").mkdir(parents=True)
    (folder / "search.json").write_text(json.dumps(body))
    for trial_record in some:
        path = folder / "trials" / f"{trial_record['number']:04d}.json"
        path.write_text(json.dumps(trial_record))
    if won is not None:
        (folder / "winner.json").write_text(json.dumps(won))
    return str(body["name"])
