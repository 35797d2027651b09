"""Select stages to run: options `--only`, `--from`, `--until` and `--force` of `accrete run`.

Each option takes names. A name selects a stage by its id, all stages whose id starts with the name
and a slash (for example `meat` or `meat/45`), or all stages of a step (`evaluate`). A name with `*`
or `?` is a pattern for ids. If several of `--only`, `--from` and `--until` are given, a stage must
be selected by every option.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from pipeline.graph.run import stages_to_run
from pipeline.graph.stage import Graph
from pipeline.graph.store import Lookup
from workers.errors import UserError, did_you_mean

FORCED = "it runs again because --force names it"
MAX_NAMES = 8  # maximum number of stages that an error message lists


@dataclass(frozen=True)
class StageSelection:
    """The part of a graph to run. Without any names, all missing stages run.

    Attributes:
        only: Names for `--only`: run only these stages.
        start: Names for `--from`: run only these stages and their descendants.
        until: Names for `--until`: run only these stages and their ancestors.
        force: Names for `--force`: run these stages even if they have a result.
    """

    only: Sequence[str] = ()
    start: Sequence[str] = ()
    until: Sequence[str] = ()
    force: Sequence[str] = ()

    @property
    def options(self) -> list[tuple[str, Sequence[str]]]:
        """Pairs of a command-line option and its names."""
        return [
            ("--only", self.only),
            ("--from", self.start),
            ("--until", self.until),
            ("--force", self.force),
        ]

    @property
    def resume_options(self) -> list[str]:
        """Command-line options that resume an interrupted run with this selection."""
        words = []
        for option, names in self.options:
            for stage in names:
                # earlier results of forced stages are withdrawn at the start of the run, so an
                # unfinished forced stage runs again anyway
                if option != "--force":
                    words += [option, stage]
        return words

    @property
    def is_part(self) -> bool:
        """Whether the selection can leave out missing stages."""
        return bool(self.only or self.start or self.until)


EVERYTHING = StageSelection()


def force(
    graph: Graph, lookups: Mapping[str, Lookup], selection: StageSelection
) -> dict[str, Lookup]:
    """Return look-ups in which the results of forced stages are misses that must be withdrawn.

    Args:
        graph: The graph.
        lookups: Look-up of each stage.
        selection: The selection.

    Raises:
        UserError: If a name for `--force` matches no stage.
    """
    forced = dict(lookups)
    for stage_id in find_stages(graph, selection.force, "--force"):
        if lookups[stage_id].hit:
            forced[stage_id] = Lookup(False, FORCED, lookups[stage_id].manifest, True)
    return forced


def select_stages_to_run(
    graph: Graph, lookups: dict[str, Lookup], selection: StageSelection
) -> set[str]:
    """Return the ids of the stages to run: the selected stages without a result.

    Args:
        graph: The graph.
        lookups: Look-up of each stage; results of forced stages are misses (see `force`).
        selection: The selection.

    Raises:
        UserError: If a name matches no stage, if a forced stage is left out by another option, or
            if a selected stage needs a stage that has no result and is not selected.
    """
    forced = find_stages(graph, selection.force, "--force")
    if not selection.is_part:
        return stages_to_run(graph, lookups) | forced
    selected = set(graph.stages)
    if selection.only:
        selected &= find_stages(graph, selection.only, "--only")
    if selection.start:
        selected &= descendants(graph, find_stages(graph, selection.start, "--from"))
    if selection.until:
        selected &= graph.with_ancestors(find_stages(graph, selection.until, "--until"))
    _check_forced(graph, selection, selected)
    chosen = {stage_id for stage_id in selected if not lookups[stage_id].hit}
    if selection.until and not selection.only and not selection.start:
        part = Graph.of(graph.name, [stage for stage in graph if stage.id in selected])
        # `stages_to_run` leaves out ingest stages that no missing stage needs
        chosen = stages_to_run(part, lookups) | forced
    for stage in graph:
        if stage.id not in chosen:
            continue
        for parent in stage.parents:
            if not lookups[parent].hit and parent not in chosen:
                raise UserError(
                    f"stage {stage.id} needs {parent}, which has no result and is not selected; "
                    f"--until {stage.id} also runs its dependencies"
                )
    return chosen


def _check_forced(graph: Graph, selection: StageSelection, selected: set[str]) -> None:
    for stage_id in find_stages(graph, selection.force, "--force"):
        if stage_id not in selected:
            raise UserError(
                f"--force names {stage_id}, but --only, --from or --until leaves it out; "
                "name it there too, or drop one of these options"
            )


def find_stages(graph: Graph, names: Iterable[str], option: str) -> set[str]:
    """Return the ids of the stages that the names of an option select.

    Args:
        graph: The graph.
        names: Names from the command line; see the module docstring.
        option: The option, for the message.

    Raises:
        UserError: If a name matches no stage.
    """
    ids: set[str] = set()
    for name in names:
        matches = {stage.id for stage in graph if _matches_name(stage.id, stage.step, name)}
        if not matches:
            raise _unknown_stage(graph, name, option)
        ids |= matches
    return ids


def _matches_name(stage_id: str, step: str, name: str) -> bool:
    if "*" in name or "?" in name:
        return fnmatchcase(stage_id, name)
    return name in (stage_id, step) or stage_id.startswith(name.rstrip("/") + "/")


def _unknown_stage(graph: Graph, name: str, option: str) -> UserError:
    steps = dict.fromkeys(stage.step for stage in graph)
    known = [*graph.stages, *steps]
    more = ", ..." if len(graph) > MAX_NAMES else ""
    names = (
        f"there are: {', '.join([*graph.stages][:MAX_NAMES])}{more}; "
        f"a step ({', '.join(steps)}) names all its stages"
    )
    hint = did_you_mean(name, known, names)
    return UserError(f"{option} {name!r:.80} is not a stage of run {graph.name!r}; {hint}")


def descendants(graph: Graph, stage_ids: set[str]) -> set[str]:
    """Return the ids of stages and all their descendants."""
    ids = set(stage_ids)
    for stage in graph:  # in topological order
        if ids.intersection(stage.parents):
            ids.add(stage.id)
    return ids
