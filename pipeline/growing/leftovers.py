"""Find and delete the stored data of earlier states of a run, after data was removed from the run.

An earlier state is the run before its config, its cards or its data were changed; the store keeps
its record (`Store.earlier_records`). These records are deleted last, because they are needed to
find the data: after a kill, the same command continues with the remaining data.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.app.garbage import delete_garbage, find_garbage
from pipeline.app.prepared import PreparedRun
from pipeline.config.text import format_count
from pipeline.data.starter import preview_path
from pipeline.graph import graph_cache
from pipeline.graph.builder import cache_folder
from pipeline.graph.run_record import RunRecord
from pipeline.graph.store import Garbage, Store
from pipeline.report import analysis_section
from pipeline.results.trials import collect_search_keys
from pipeline.tracking.database import sqlite_path
from workers.data.cache import Cache
from workers.errors import UserError, describe_error
from workers.storage.artifact import Artifact, delete_dir, exists, join, list_files, resolve

if TYPE_CHECKING:
    from pipeline.tracking.removal import EarlierFiles

CACHED = "cached shards and decoded images"


@dataclass
class Leftovers:
    """Stored data of earlier states of a run.

    Attributes:
        run: The current run.
        garbage: All folders with results in the storage that no run and no search needs, whichever
            run made them.
        has_records: Whether there are records of earlier states.
        files: Paths of further files: outdated analyses, states of raw data, and the preview page
            next to the config.
        tracked: Files and models in MLflow. None if MLflow is not used.
        left: Notes about places that could not be checked.

    The caches (of shards, decoded images and graphs) are always deleted, too.
    """

    run: PreparedRun
    garbage: list[Garbage]
    has_records: bool
    files: list[str]
    tracked: EarlierFiles | None = None
    left: list[str] = field(default_factory=list)

    def is_empty(self) -> bool:
        """Return whether there is nothing to delete, apart from the caches."""
        return not (self.garbage or self.has_records or self.files or self._num_tracked())

    def lines(self) -> list[str]:
        """Return the lines that tell the user what `delete` deletes."""
        lines: list[str] = []
        if self.garbage:
            megabytes = sum(folder.size_bytes for folder in self.garbage) / 1e6
            number = format_count(len(self.garbage), "result")
            lines.append(f"{number} of the storage, {megabytes:.1f} MB, which no run needs")
        if self.has_records:
            lines.append(f"records of earlier states of run {self.run.config.name}")
        lines += self.files
        if self.tracked is not None and self._num_tracked():
            models = format_count(len(self.tracked.models), "model")
            runs = format_count(len(self.tracked.runs), "earlier run")
            lines.append(f"MLflow: the files of {runs}, {models}")
        lines.append(CACHED)
        return lines

    def delete(self) -> list[str]:
        """Delete everything, the records last.

        Returns:
            Notes about data that could not be deleted or checked.
        """
        left = [*self.left]
        if self.tracked is not None:
            left += self.tracked.delete()
        store = self.run.store
        folder = cache_folder(self.run.config.cluster.cache, store.storage)
        num_written = Cache(folder, 0).clear()
        if num_written:
            left.append(
                f"{format_count(num_written, 'file')} of {folder}, which a process writes now"
            )
        delete_dir(join(store.storage, graph_cache.FOLDER))
        for file in self.files:
            system, path = resolve(file)
            with suppress(FileNotFoundError):
                system.delete_file(path)
        paths = [folder.path for folder in self.garbage]
        needed, busy = delete_garbage(store, paths, [self.run.config.name])
        left += [f"{join(store.storage, path)}, which a new run needs" for path in needed]
        left += [f"{join(store.storage, path)}, which a process works on now" for path in busy]
        return left

    def _num_tracked(self) -> int:
        return 0 if self.tracked is None else len(self.tracked.runs) + len(self.tracked.models)


def find_leftovers(run: PreparedRun, config_path: str, record: RunRecord) -> Leftovers:
    """Find the stored data of earlier states of a run.

    Args:
        run: The current run.
        config_path: Path of the config.
        record: Record of the current run.

    Raises:
        UserError: If a record of the storage cannot be read.
    """
    store, name = run.store, run.config.name
    garbage = find_garbage(store, [name])
    files = [*_list_sources(store, name, garbage), *_list_analysis(store, record)]
    with suppress(UserError):  # a file of the user has the name of the preview
        preview = preview_path(config_path)
        files += [preview] if os.path.exists(preview) else []
    leftovers = Leftovers(run, garbage, bool(store.earlier_records(name)), files)
    if run.config.tracking.enabled and _has_mlflow(run):
        try:
            from pipeline.tracking.removal import find_earlier_files  # keeps the start-up fast

            leftovers.tracked = find_earlier_files(run.config.tracking, store.storage, record)
        except Exception as error:  # a tracking server can cause any kind of error
            reason = describe_error(error, only_first_line=True)
            leftovers.left.append(
                f"files of earlier states in MLflow, which does not answer ({reason}); give the "
                "command again when it does"
            )
    return leftovers


def _has_mlflow(run: PreparedRun) -> bool:
    """Return whether there can be files in MLflow.

    This is not the case if MLflow uses a local SQLite database that does not exist. The database
    must not be created just to look for files.
    """
    from pipeline.tracking.mlflow_client import tracking_uri  # keeps the start-up fast

    path = sqlite_path(tracking_uri(run.store.storage, run.config.tracking.uri))
    return path is None or os.path.exists(path)


def _list_sources(store: Store, name: str, garbage: Sequence[Garbage]) -> list[str]:
    """List the files in `<storage>/sources/` about versions of cards that only earlier states use.

    A version of a card is kept if the current record of the run or any record of another run uses
    it, or if its ingested data stays in the store.

    Args:
        store: Store of the run.
        name: Name of the run.
        garbage: Results that will be deleted.
    """
    deleted = {folder.path for folder in garbage}
    kept: set[str] = set()
    for other in store.run_names():
        records = [store.record(other)]
        records += store.earlier_records(other) if other != name else []
        for record in filter(None, records):
            kept |= {identity for identity, _ in _iterate_card_identities(record)}
    unneeded: set[str] = set()
    for record in store.earlier_records(name):
        for identity, key in _iterate_card_identities(record):
            is_standing = exists(join(store.root, key)) and f"stages/{key}" not in deleted
            if identity not in kept and not is_standing:
                unneeded.add(identity)
    folder = join(store.storage, "sources")
    files = list_files(folder) if unneeded else {}
    return [join(folder, file) for file in files if file.startswith(tuple(unneeded))]


def _iterate_card_identities(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield (`Card.identity()`, key of the ingest stage) for each card of a run."""
    for stage in record["stages"]:
        card = (stage.get("inputs") or {}).get("card")
        if stage["step"] == "ingest" and isinstance(card, str) and card:
            yield card, stage["key"]


def _list_analysis(store: Store, record: RunRecord) -> list[str]:
    """Return the paths of all analysis files of a run if any part of the analysis is outdated."""
    parts = analysis_section.load_parts(store, record["name"])
    if all(analysis_section.is_current(part, record, store) for part in parts.values()):
        return []
    folder = join(store.storage, "runs", record["name"])
    names = {file for part in parts.values() for file in part["files"]}
    present = list_files(folder)
    names = {file for file in names if file in present}
    return [join(folder, file) for file in sorted(names | {analysis_section.LIST_FILE})]


def describe_other_users(store: Store, name: str, cards: Sequence[str], command: str) -> list[str]:
    """Describe the other runs and the searches that still use earlier states of some cards.

    Args:
        store: Store of the run.
        name: Name of the run. It is not reported, and neither is data that it still uses.
        cards: Names of the cards.
        command: Command for the same removal from another config, with the placeholder CONFIG.

    Returns:
        A sentence per run, and a sentence per ingested data set that a search uses.
    """
    stages = {f"data/{card}" for card in cards}
    record = store.record(name)
    keys_now = {stage["key"] for stage in record["stages"]} if record else set()
    sentences: list[str] = []
    for other in store.run_names():
        current = store.record(other)
        records = store.earlier_records(other) + ([current] if current else [])
        keys = {
            stage["key"] for one in records for stage in one["stages"] if stage["id"] in stages
        } - keys_now
        if other != name and any(Artifact.open(store.root, key) for key in keys):
            sentences.append(f"run {other} of this storage uses these images too: {command}")
    for key in sorted(collect_search_keys(store.storage) - keys_now):
        artifact = Artifact.open(store.root, key)
        if artifact is not None and artifact.manifest.get("card") in cards:
            sentences.append(
                f"a search of this storage needs stages/{key}: delete its folder below "
                f"{join(store.storage, 'searches')}, then `accrete gc`"
            )
    return sentences
