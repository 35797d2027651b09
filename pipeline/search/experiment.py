"""The Python interface to a search: `SearchExperiment`, created by `pipeline.load_search`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.app import reports
from pipeline.app import runs as app
from pipeline.app.experiment import choose_stream, in_folder, make_printer
from pipeline.config.yaml_files import parse_yaml
from pipeline.results import trials
from pipeline.results.data_frame import data_frame
from pipeline.results.metrics import metrics_for
from pipeline.search import run as searches
from pipeline.search import spec
from pipeline.search.screen import SearchScreen
from pipeline.search.trial import folder as folder_of
from workers.errors import UserError
from workers.storage.artifact import join, read_bytes

if TYPE_CHECKING:
    import pandas as pd

MAX_CONFIG_BYTES = 1 << 24  # maximum size of the file with the winner's config


@dataclass(frozen=True)
class SearchResults:
    """The trials and the winner of a search so far.

    Attributes:
        name: Name of the search.
        records: Stored records of the search and its trials.
        storage: Folder or URI of the storage.
        report: Path or URI of the report's HTML page.
    """

    name: str
    records: trials.SearchRecord = field(repr=False)
    storage: str
    report: str

    @property
    def trials(self) -> pd.DataFrame:
        """Table with a row for each trial: settings, validation accuracy, bytes, status, cost."""
        from pipeline.report import search_page  # slow: imports matplotlib

        columns = search_page.trial_columns(self.records)
        rows = search_page.trial_rows(self.records)
        return data_frame(rows, columns).reindex(columns=columns)

    @property
    def importance(self) -> pd.DataFrame:
        """Table with a row for each setting: its `share` of the variance of accuracy over trials.

        Raises:
            UserError: If the importance cannot be computed yet. The message contains the reason.
        """
        from pipeline.report.parameters import measure_importance, search_parameters

        shares, reason = measure_importance(self.records, search_parameters(self.records))
        if reason:
            raise UserError(reason)
        return data_frame([{"setting": key, "share": share} for key, share in shares.items()])

    @property
    def winner(self) -> dict[str, Any]:
        """Config of the winner as a dict, which `pipeline.load` accepts.

        Raises:
            UserError: If the search has no winner yet.
        """
        path = join(folder_of(self.storage, self.name), searches.WINNER_CONFIG)
        if self.records.winner is None:
            raise UserError(f"search {self.name!r} has no winner yet; run it to its end")
        body: dict[str, Any] = parse_yaml(read_bytes(path, MAX_CONFIG_BYTES).decode(), path)
        return body

    @property
    def tests(self) -> pd.DataFrame:
        """Table with the metrics of the winner on test data, with a row for each seed."""
        columns = ["seed", "run", *(metric.name for metric in metrics_for("search_tests"))]
        winner = self.records.winner
        if winner is None:
            return data_frame([], columns)
        return data_frame([{**test} for test in winner["tests"]], columns)


@dataclass(frozen=True)
class SearchExperiment:
    """A search that can be run and inspected any number of times.

    Attributes:
        source: Path of the search file.
        overrides: Overrides in the form of `--set`: `KEY=VALUE`.
        settings: Settings of the search file.
        folder: Folder that relative paths refer to: the current folder at the time of loading. Each
            method changes to this folder while it runs.
    """

    source: str
    overrides: tuple[str, ...]
    settings: spec.SearchSettings
    folder: str = field(default_factory=os.getcwd)

    def __repr__(self) -> str:
        words = [f"{self.name}:", self.source, *self.overrides]
        return f"<{type(self).__name__} {' '.join(words)}>"

    @property
    def name(self) -> str:
        """Name of the search in its storage."""
        return self.settings.name

    def run(self, quiet: bool = False) -> SearchResults:
        """Run the trials that the budget or grid allows, and measure the winner on test data.

        Trials run on Ray. The search is recorded in its report and in MLflow. An interrupted
        search is resumed.

        Args:
            quiet: Whether to print nothing. Otherwise, a line is printed for each finished trial
                and for each run of the winner.

        Raises:
            UserError: If the search has no winner, or another process runs it.
        """
        stream = choose_stream(quiet)
        with in_folder(self.folder, self) as cd_prefix:
            search = self._prepare(make_printer(stream))
            searches.execute(
                search,
                SearchScreen(search, stream),
                cd_prefix + app.format_command("search", self.source, self.overrides),
                cd_prefix + app.format_command("report", self.source, self.overrides),
            )
        return read_search_results(search)

    def results(self) -> SearchResults:
        """Return the stored trials. This also works while another process runs the search.

        Raises:
            UserError: If the search has not been started.
        """
        with in_folder(self.folder, self):
            return read_search_results(self._prepare())

    def report(self) -> reports.WrittenReport:
        """Write the report and the MLflow record again. The search does not need to be finished."""
        with in_folder(self.folder, self):
            return searches.report(self._prepare())

    def _prepare(self, say: Callable[[str], None] = print) -> spec.Search:
        return spec.prepare_search(self.source, list(self.overrides), say)


def read_search_results(search: spec.Search) -> SearchResults:
    """Read the stored results of a search."""
    records = trials.load_search_record(search.storage, search.name)
    return SearchResults(search.name, records, search.storage, searches.get_page_path(search))
