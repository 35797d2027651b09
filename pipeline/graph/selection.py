"""Which stages of a graph a person asks for: `run --only`, `--from`, `--until` and `--force`.

A stage is named by its id, by the beginning of ids up to a slash (`meat`, `meat/45`), by a step
(`evaluate`), or by a pattern with `*`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from pipeline.graph.run import stages_to_run
from pipeline.graph.stage import Graph
from pipeline.graph.store import Lookup
from workers.errors import UserError, did_you_mean

FORCED = "it is run again because --force names it"
MOST_NAMES = 8  # stages that an error names


@dataclass(frozen=True)
class Selection:
    """What of a graph is to run; without any names, all that is missing.

    only: these stages alone. start: these and what follows from them. until: these and what they
    need. force: stages that run even if they have a result.
    """

    only: Sequence[str] = ()
    start: Sequence[str] = ()
    until: Sequence[str] = ()
    force: Sequence[str] = ()

    @property
    def options(self) -> list[tuple[str, Sequence[str]]]:
        """The names of each option."""
        return [
            ("--only", self.only),
            ("--from", self.start),
            ("--until", self.until),
            ("--force", self.force),
        ]

    @property
    def resume_options(self) -> list[str]:
        """What a person adds to `run` to go on with this selection where a run was cut short."""
        words = []
        for option, names in self.options:
            for stage in names:
                # A forced stage whose run was cut short has no result: it runs again anyway.
                if option != "--force":
                    words += [option, stage]
        return words

    @property
    def is_part(self) -> bool:
        """Whether a part of the graph may be left out."""
        return bool(self.only or self.start or self.until)


EVERYTHING = Selection()


def force(graph: Graph, lookups: Mapping[str, Lookup], selection: Selection) -> dict[str, Lookup]:
    """Return look-ups in which the results of the forced stages no longer count."""
    forced = dict(lookups)
    for stage_id in stages_named(graph, selection.force, "--force"):
        if lookups[stage_id].hit:
            forced[stage_id] = Lookup(False, FORCED, lookups[stage_id].manifest, True)
    return forced


def selected_to_run(graph: Graph, lookups: dict[str, Lookup], selection: Selection) -> set[str]:
    """Return the ids of the stages to run: of those that are missing, the selected ones.

    Raise `UserError` for a name that is no stage, and when a selected stage needs the result of one
    that is missing and not selected.
    """
    forced = stages_named(graph, selection.force, "--force")
    if not selection.is_part:
        return stages_to_run(graph, lookups) | forced
    selected = set(graph.stages)
    if selection.only:
        selected &= stages_named(graph, selection.only, "--only")
    if selection.start:
        selected &= descendants(graph, stages_named(graph, selection.start, "--from"))
    if selection.until:
        selected &= graph.with_ancestors(stages_named(graph, selection.until, "--until"))
    _check_forced(graph, selection, selected)
    chosen = {stage_id for stage_id in selected if not lookups[stage_id].hit}
    if selection.until and not selection.only and not selection.start:
        part = Graph.of(graph.name, [stage for stage in graph if stage.id in selected])
        chosen = stages_to_run(part, lookups) | forced  # no data that nothing waits for
    for stage in graph:
        if stage.id not in chosen:
            continue
        for parent in stage.parents:
            if not lookups[parent].hit and parent not in chosen:
                raise UserError(
                    f"stage {stage.id} needs {parent}, which has no result and is not selected; "
                    f"--until {stage.id} runs what it needs too"
                )
    return chosen


def _check_forced(graph: Graph, selection: Selection, selected: set[str]) -> None:
    for stage_id in stages_named(graph, selection.force, "--force"):
        if stage_id not in selected:
            raise UserError(
                f"--force names {stage_id}, which --only, --from or --until leaves out; "
                "name it there too, or leave one of them out"
            )


def stages_named(graph: Graph, names: Iterable[str], option: str) -> set[str]:
    """Return the ids that names stand for. Raise `UserError` for a name that is no stage."""
    ids: set[str] = set()
    for name in names:
        matches = {stage.id for stage in graph if _is_named(stage.id, stage.step, name)}
        if not matches:
            raise _unknown_stage(graph, name, option)
        ids |= matches
    return ids


def _is_named(stage_id: str, step: str, name: str) -> bool:
    if "*" in name or "?" in name:
        return fnmatchcase(stage_id, name)
    return name in (stage_id, step) or stage_id.startswith(name.rstrip("/") + "/")


def _unknown_stage(graph: Graph, name: str, option: str) -> UserError:
    steps = dict.fromkeys(stage.step for stage in graph)
    known = [*graph.stages, *steps]
    more = ", ..." if len(graph) > MOST_NAMES else ""
    names = (
        f"there are: {', '.join([*graph.stages][:MOST_NAMES])}{more}; "
        f"a step ({', '.join(steps)}) names all its stages"
    )
    hint = did_you_mean(name, known, names)
    return UserError(f"{option} {name!r:.80} is no stage of run {graph.name!r}; {hint}")


def descendants(graph: Graph, stage_ids: set[str]) -> set[str]:
    """Return stages and all that follows from them."""
    ids = set(stage_ids)
    for stage in graph:  # in topological order
        if ids.intersection(stage.parents):
            ids.add(stage.id)
    return ids
