"""Measure attention and robustness of finished runs, and add the results to a report and MLflow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.app.prepared import PreparedRun, find_or_make_record
from pipeline.app.reports import WrittenReport, export, read_or_build_report
from pipeline.app.runs import bring
from pipeline.app.screen import OpenScreen
from pipeline.graph import diagram
from pipeline.graph.run_record import RunRecord
from pipeline.results.data_frame import data_frame
from pipeline.shell.console import at_work
from workers.errors import UserError
from workers.job import Task
from workers.storage.artifact import join, write_bytes

if TYPE_CHECKING:
    import pandas as pd

    from pipeline.report.analyse import Analysis, FinishedRun

MAX_MAP_IMAGES = 32  # maximum number of test images per task with attention maps


@dataclass(frozen=True)
class AnalysisResult:
    """Results of `analyse`.

    Attributes:
        analysis: The measured values and the drawn pictures.
        pictures: Path or URI of the first picture of each part of the analysis.
        report: Report of the first run.
    """

    analysis: Analysis = field(repr=False)
    pictures: dict[str, str]
    report: WrittenReport

    @property
    def attention(self) -> pd.DataFrame:
        """A row per method, task, layer and head: entropy and distance of the attention.

        `workers.model.attention` defines both.
        """
        return data_frame(self.analysis.attention)

    @property
    def robustness(self) -> pd.DataFrame:
        """A row per method, task, kind of disturbance and its level; empty if not requested."""
        return data_frame(self.analysis.robustness)

    @property
    def notes(self) -> list[str]:
        """Notes about impossible measurements."""
        return self.analysis.notes


def analyse(
    finished_runs: Iterable[PreparedRun],
    open_screen: OpenScreen,
    command: str,
    images: int = 256,
    map_images: int = 4,
    robustness: bool = False,
    other_cards: Sequence[str] = (),
) -> AnalysisResult:
    """Measure the attention of finished runs, and add the results to a report and MLflow.

    The tables and pictures are stored in the folder of the first run, and only its report shows
    them. The numbers of each method are added to the MLflow record of the method's run.

    Args:
        finished_runs: The runs. A generator can prepare them lazily: it is advanced only after the
            previous run was checked.
        open_screen: Creates the screen.
        command: Command that repeats the analysis, for messages.
        images: Maximum number of test images per task.
        map_images: Maximum number of test images per task for attention maps. 0: no maps.
        robustness: Also measure the accuracy on occluded and adversarial images.
        other_cards: Cards with further test images of the same classes.

    Raises:
        UserError: If a run is not finished, two runs have the same name, or nothing can be
            measured.
    """
    # imported here to keep the start-up fast: they import torch and matplotlib
    from pipeline.graph.tasks import build_cards_graph
    from pipeline.report import analyse as analysis
    from pipeline.report import analysis_section

    check_image_count("images", images, 1, math.inf)
    check_image_count("maps", map_images, 0, MAX_MAP_IMAGES)
    prepared: list[PreparedRun] = []
    runs: list[FinishedRun] = []
    other_tasks: list[Task] = []
    for run in finished_runs:
        if run.config.name in {other.config.name for other in prepared}:
            raise UserError(
                f"analyse: two of these configs are runs called {run.config.name!r}, "
                "so that their numbers could not be told apart; name each config once, "
                "and give each a `name` of its own (--set changes all of them)"
            )
        run.store.check_writable()
        prepared.append(run)
        runs.append(
            analysis.FinishedRun(run.config, run.graph, run.store, find_or_make_record(run))
        )
        analysis.check_finished(runs[-1])
        card_graph, other_tasks = build_cards_graph(run.config, run.store, other_cards)
        analysis.check_covered(runs[-1:], other_tasks)
        bring(card_graph, run.config, run.store, open_screen, command)
    with at_work(lambda: "measuring attention"):
        measured = analysis.analyse_runs(runs, images, map_images, robustness, other_tasks)
    first = prepared[0]
    records = [run.record for run in runs]
    files = analysis_section.build_files(measured.parts, records, first.store)
    folder = join(first.store.storage, "runs", first.config.name)
    for file, data in files.items():
        write_bytes(join(folder, file), data)
    pages = []
    warnings: list[str] = []
    links: list[str] = []
    for run, analysed_run in zip(prepared, runs, strict=True):
        run_files = files if run is first else {}
        with at_work(lambda: "recording in MLflow"):
            written = _record_analysis(run, analysed_run.record, measured, run_files, images)
        pages.append(written.page)
        warnings += written.warnings
        links += written.links if run is first else []
    pictures = {name: f"{folder}/{part.pictures[0].name}" for name, part in measured.parts.items()}
    return AnalysisResult(measured, pictures, WrittenReport(pages[0], warnings, links))


def check_image_count(option: str, count: int, least: int, most: float) -> None:
    """Raise `UserError` if a number of test images is out of bounds.

    Args:
        option: Name of the command-line option, without dashes, for the message.
        count: The number.
        least: Smallest allowed number.
        most: Largest allowed number, or infinity.
    """
    if not least <= count <= most:
        bounds = f"at least {least}" if most == math.inf else f"{least} to {most}"
        raise UserError(
            f"--{option} is {count}; give the number of test images of a task, {bounds}"
        )


def _record_analysis(
    run: PreparedRun,
    record: RunRecord,
    analysis: Analysis,
    analysis_files: Mapping[str, bytes],
    images: int,
) -> WrittenReport:
    """Write the report of one run again, and add the analysis to its record in MLflow.

    Only the report of the first run gets a section with this analysis.

    Args:
        run: The run.
        record: The run's record in the storage.
        analysis: The measurements of all analysed runs.
        analysis_files: Tables and pictures to log. Empty for all runs but the first.
        images: Maximum number of test images per task.
    """
    # imported here to keep the start-up fast: they import torch and matplotlib
    from pipeline.report import analysis_section
    from pipeline.tracking import points
    from pipeline.tracking.recorder import Recorder

    picture = diagram.to_svg(run.graph, {})
    files = read_or_build_report(run, record)
    files = analysis_section.add_section(files, record, run.store)
    recorder = Recorder(run.config.tracking, run.store.storage, remedy="the same command")
    recorder.start(record, picture)
    recorder.analysed(
        analysis_files,
        points.analysis_points(run.config.name, analysis.attention, analysis.robustness, images),
    )
    recorder.finish(files)
    page_path = export(run.store, run.config.name, files)
    return WrittenReport(page_path, recorder.warnings, recorder.links())
