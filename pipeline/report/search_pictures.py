"""The figures of a search that its report shows, with file name, title and caption.

To add a figure, write a function and add a line to SEARCH_FIGURES.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.report import plots, search_plots
from pipeline.report.figures import CaptionedFigure, FigureFile
from pipeline.report.parameters import MAX_TRIALS, Parameter
from pipeline.results.trials import SearchRecord

# maximum number of parameters in a picture; of more, the most important are drawn, or the first if
# importance was not measured
MAX_DRAWN = 12
MAX_LINES = 500  # maximum number of lines of trials; of more, the most accurate trials are drawn


@dataclass(frozen=True)
class Drawn:
    """The data for the figures of a search.

    Attributes:
        search: The search.
        parameters: The parameters to draw.
        num_varied: Number of all parameters.
        shares: Key of a parameter -> importance, largest first.
    """

    search: SearchRecord
    parameters: list[Parameter]
    num_varied: int
    shares: Mapping[str, float]

    def count(self, status: str) -> int:
        """Return the number of trials with this status."""
        return len([trial for trial in self.search.trials if trial["status"] == status])

    @property
    def has_unfinished(self) -> bool:
        """Whether a trial has not finished: it was stopped, failed, or still runs."""
        return self.count("finished") < len(self.search.trials)

    @property
    def has_absent(self) -> bool:
        """Whether a trial does not have one of the drawn parameters."""
        for trial in self.search.trials:
            if any(parameter.key not in trial["params"] for parameter in self.parameters):
                return True
        return False

    @property
    def chosen_text(self) -> str:
        """The words for the highlighted trials in captions."""
        if len(self.search.phases) > 1:
            return "trial that was chosen for each task"
        return "winner" if self.search.winner else "leading trial"

    def with_few_trials(self) -> Drawn:
        """Return the same data with only the MAX_LINES best trials and the chosen trials."""
        if len(self.search.trials) <= MAX_LINES:
            return self
        standing = self.search.standing()
        numbers = sorted(standing, key=lambda number: -standing[number])[:MAX_LINES]
        drawn_numbers = {*numbers, *self.search.chosen().values()}
        trials = [trial for trial in self.search.trials if trial["number"] in drawn_numbers]
        return replace(self, search=replace(self.search, trials=trials))

    @property
    def left_out_trials_text(self) -> str:
        """A sentence about the trials that `with_few_trials` omits, or ""."""
        count = len(self.search.trials)
        if count <= MAX_LINES:
            return ""
        return f" Only the {MAX_LINES} most accurate of {count:,} trials are drawn."

    @property
    def left_out_text(self) -> str:
        """A sentence about the parameters that are not drawn, or ""."""
        if len(self.parameters) == self.num_varied:
            return ""
        which = "most important" if self.shares else "first"
        return f" Only the {len(self.parameters)} {which} settings of {self.num_varied} are drawn."


def history_figure(drawn: Drawn) -> CaptionedFigure | None:
    """Return the figure of the accuracy of all trials; None without trials."""
    if not drawn.search.trials:
        return None
    caption = (
        "Every trial by its number. The line is the highest accuracy of the trials finished "
        "so far. Where it stays flat for long, more trials would hardly help."
    )
    if drawn.count("failed"):
        caption += " Crosses at the bottom are failed trials."
    if len(drawn.search.phases) > 1:
        caption += " Each task starts again, on its own band, in the order of the stream."
    figure = search_plots.draw_history(drawn.search)
    return CaptionedFigure("Accuracy of all trials", caption, figure)


def parallel_figure(drawn: Drawn) -> CaptionedFigure | None:
    """Return the figure of trials as lines through their settings; None without two scores."""
    if len(drawn.search.standing()) < 2 or not drawn.parameters:
        return None
    caption = (
        "Each line is a trial, from left to right through its settings to its accuracy. "
        "Dark lines have high accuracy. Where they run close together on an axis, "
        f"that setting matters. The thick line is the {drawn.chosen_text}."
    )
    if drawn.has_unfinished:
        caption += " Trials that did not learn all tasks are dashed, failed ones dotted."
    if drawn.has_absent:
        caption += " A trial without a setting passes through the '-' below its axis."
    caption += drawn.left_out_text + drawn.left_out_trials_text
    figure = search_plots.draw_parallel(drawn.with_few_trials().search, drawn.parameters)
    return CaptionedFigure("Trials and their settings", caption, figure)


def importance_figure(drawn: Drawn) -> CaptionedFigure | None:
    """Return the figure of the importance of settings; None if importance was not measured."""
    if not drawn.shares:
        return None
    count = drawn.count("finished")
    which = f"{count}"
    if count > MAX_TRIALS:
        which = f"last {MAX_TRIALS:,}"
    caption = (
        f"Variance in accuracy between the {which} finished trials that each setting explains on "
        "its own, relative to the sum over all settings (main effects of fANOVA, from Optuna). "
        "A setting near 0 % can be left as it is. With few trials this is only a hint."
    )
    if drawn.count("stopped"):
        caption += (
            " A setting whose bad values were all stopped "
            "early looks less important here than it is."
        )
    shares = dict(list(drawn.shares.items())[:MAX_DRAWN])
    names = {parameter.key: parameter.name for parameter in drawn.parameters}
    figure = search_plots.draw_importance(shares, names)
    return CaptionedFigure("Which settings matter", caption, figure)


def slices_figure(drawn: Drawn) -> CaptionedFigure | None:
    """Return the figure of accuracy against each setting; None if no trial has an accuracy."""
    if not drawn.search.standing() or not drawn.parameters:
        return None
    caption = (
        "The same trials, one setting per panel. Points that rise or fall together show "
        "which way to change a setting. A best point at the edge of its panel means "
        f"that a wider range may be better.{drawn.left_out_text}"
    )
    figure = search_plots.draw_slices(drawn.search, drawn.parameters)
    return CaptionedFigure("Accuracy against each setting", caption, figure)


def curves_figure(drawn: Drawn) -> CaptionedFigure | None:
    """Return the figure of accuracy after each task; None if no trial has results for two tasks."""
    if not any(len(trial["results"]) > 1 for trial in drawn.search.trials):
        return None
    caption = "Average validation accuracy over the tasks so far, after each task."
    if drawn.has_unfinished:
        caption += (
            " A line that ends early is a trial that was stopped to save its further cost, "
            "that failed, or that still runs."
        )
    caption += drawn.left_out_trials_text
    figure = search_plots.draw_trial_curves(drawn.with_few_trials().search)
    return CaptionedFigure("Trials along the stream", caption, figure)


def pareto_figure(drawn: Drawn) -> CaptionedFigure | None:
    """Return the figure of accuracy against size; None if all finished trials have equal sizes."""
    if not search_plots.sizes_differ(drawn.search):
        return None
    caption = (
        "Finished trials by the bytes they store per task. The front, with trial numbers, "
        "joins the trials that no other trial beats in both accuracy and size. "
        f"The star is the {drawn.chosen_text}. Best is top left."
    )
    return CaptionedFigure("Accuracy against size", caption, search_plots.draw_front(drawn.search))


SearchFigure = Callable[[Drawn], CaptionedFigure | None]
SEARCH_FIGURES: dict[str, SearchFigure] = {  # in the order of the page
    "history.png": history_figure,
    "parallel.png": parallel_figure,
    "importance.png": importance_figure,
    "slices.png": slices_figure,
    "curves.png": curves_figure,
    "pareto.png": pareto_figure,
}


def search_pictures(
    search: SearchRecord, varied: Sequence[Parameter], shares: Mapping[str, float]
) -> list[FigureFile]:
    """Return the pictures that can be drawn from the trials so far.

    Args:
        search: The search.
        varied: Parameters of the search.
        shares: Key of a parameter -> importance, largest first.
    """
    parameters = list(varied)
    if len(parameters) > MAX_DRAWN:
        keys = list(dict.fromkeys([*shares, *(parameter.key for parameter in varied)]))
        parameters = [parameter for parameter in varied if parameter.key in keys[:MAX_DRAWN]]
    drawn = Drawn(search, parameters, len(varied), shares)
    pictures = []
    for name, make_figure in SEARCH_FIGURES.items():
        captioned = make_figure(drawn)
        if captioned is not None:
            png = plots.to_png(captioned.figure)
            pictures.append(FigureFile(name, captioned.title, captioned.caption, png))
    return pictures
