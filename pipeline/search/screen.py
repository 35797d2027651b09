"""Terminal output of a search: one line per trial that ended, and a summary of the winner."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.results.trials import SeedTest, Trial
from pipeline.search.spec import Search


class SearchScreen:
    """What a person sees of a search: a line per trial that ended, and the end."""

    def __init__(self, search: Search):
        self.search, self.said = search, set[int]()

    def __call__(self, record: Trial) -> None:
        number = record["number"]
        if record["status"] == "running" or number in self.said:
            return
        self.said.add(number)
        last = record["results"][-1] if record["results"] else None
        score = (
            f"{100 * last['accuracy']:.2f} % after {last['position'] + 1} of "
            f"{len(self.search.tasks)} tasks"
            if last
            else "no result"
        )
        why = {"stopped": ", stopped early", "failed": f", failed: {record['message']}"}.get(
            record["status"], ""
        )
        phase = f"{record['phase']}, " if record["phase"] else ""
        stages = f"{record['stages']['run']} stages run, {record['stages']['reused']} reused"
        print(
            f"{phase}trial {number}: {point_text(record['params'])}: {score}{why}; {stages}, "
            f"{record['device_s']:.0f} s",
            flush=True,
        )

    def head(self) -> str:
        settings = self.search.settings
        bounds = ", ".join(
            f"{value:g} {name}"
            for name, value in settings.budget.model_dump().items()
            if value is not None
        )
        known = len(self.search.records())
        again = f"; {known} trial{'s' * (known > 1)} known from before" if known else ""
        return (
            f"search {self.search.name}: {settings.algorithm}"
            + (f" with {settings.scheduler}" if settings.scheduler != "none" else "")
            + f", protocol {settings.protocol}, "
            + (
                f"{len(self.search.space.grid())} points"
                if settings.algorithm == "grid"
                else f"budget {bounds}"
            )
            + f", judged on validation images of {len(self.search.tasks)} tasks{again}"
            + (f"\nnote: {self.search.note}" if self.search.note else "")
        )

    def won(self, trial: int, path: str) -> str:
        """trial: the number of the winner. path: of its config."""
        records = self.search.records()
        run, reused = (
            sum(record["stages"][kind] for record in records) for kind in ("run", "reused")
        )
        hours = sum(record["device_s"] for record in records) / 3600
        winner = next(record for record in records if record["number"] == trial)
        return (
            f"\n{len(records)} trials, {run} stages run, {reused} reused, {hours:.3f} "
            "device-hours\n"
            f"winner: trial {trial}, {point_text(winner['params'])}: "
            f"{100 * winner['results'][-1]['accuracy']:.2f} % on validation images\n"
            f"its config: {path}"
        )

    def tested(self, tests: Sequence[SeedTest]) -> str:
        if not tests:
            return "no seeds, so the winner was not measured on test data"
        rates = [100 * test["average_accuracy"] for test in tests]
        spread = f" +- {statistics.stdev(rates):.2f}" if len(rates) > 1 else ""
        return (
            "\nwinner on test data, which the search has not seen: "
            f"{statistics.mean(rates):.2f}{spread} % average accuracy with "
            f"seed{'s' * (len(rates) > 1)} {', '.join(str(test['seed']) for test in tests)} "
            f"({', '.join(f'{rate:.2f}' for rate in rates)})"
        )


def point_text(params: Mapping[str, Any]) -> str:
    """A point in a line: the last part of each key, and numbers with four digits."""
    keys = {
        key: key.removeprefix(f"methods.{key.split('.')[1]}.")
        if key.startswith("methods.")
        else key
        for key in params
    }
    return (
        ", ".join(
            f"{keys[key]}={value:.4g}" if isinstance(value, float) else f"{keys[key]}={value}"
            for key, value in params.items()
        )
        or "the base"
    )
