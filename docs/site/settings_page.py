"""The page of all settings: of configs, searches and cards."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import BaseModel

from docs.site.markdown import Term, from_docstring, term_list
from docs.site.setting_text import settings_list
from pipeline.config import settings as config
from pipeline.data import archives, cards
from pipeline.search import spec
from workers import job


class Part(NamedTuple):
    """The settings of one mapping. path: where it stands in its file, dotted; empty: its top."""

    path: str
    model: type[BaseModel]


FILES = {
    "A config": (
        Part("", config.Config),
        Part("stream", config.StreamSettings),
        Part("stream.tasks[]", config.TaskEntry),
        Part("backbone", config.BackboneChoice),
        Part("backbone.context", job.ContextSettings),
        Part("data", job.DataSettings),
        Part("train", job.TrainSettings),
        Part("cluster", config.ClusterSettings),
        Part("cluster.stages.KIND", config.StageLimits),
        Part("tracking", config.TrackingSettings),
    ),
    "A search": (Part("", spec.SearchSettings), Part("budget", spec.Budget)),
    "A card": (
        Part("", cards.Card),
        Part("source", cards.Source),
        Part("counts, per_class", cards.Counts),
        Part("archive", archives.Archive),
    ),
}
# `methods` holds what several models read: the method's own settings, and these.
METHOD_ENTRY = (
    Term("method", "text", "the method, where the label is another word"),
    Term("train", "mapping", "over `train` of the config, for this method"),
    Term("data", "mapping", "over `data` of the config, for this method"),
    Term("steps.STEP", "mapping", "over `train`, for one step of each task"),
    Term("tasks.TASK.train", "mapping", "over `train`, for one task"),
    Term("tasks.TASK.steps.STEP", "mapping", "over `train`, for one step of one task"),
    Term("tasks.TASK.SETTING", "as the setting", "for one task, where serving does not read it"),
    Term("SETTING", "as the method says", "a setting of the method's own"),
)
INTRODUCTION = """Every setting with its type, default, range and meaning, as the code declares it.
`accrete schema config` and `accrete schema card` print the same for editors. The settings of a
method stand on [its page](docs/methods.md), how files are read in
[configuration](docs/configuration.md), and which settings can change a result in
[storage](docs/storage.md)."""


def settings_page() -> str:
    """Return the page; its links start from the top of the repository."""
    blocks = ["# Settings", INTRODUCTION]
    for title, parts in FILES.items():
        blocks.append(f"## {title}")
        for part in parts:
            blocks.append(f"### `{part.path}`" if part.path else f"### The top of {title.lower()}")
            docstring = part.model.__dict__.get("__doc__")
            if docstring:
                blocks.append(from_docstring(docstring))
            blocks.append(settings_list(part.model))
        if title == "A config":
            blocks += ["### `methods.LABEL`", term_list(METHOD_ENTRY)]
    return "\n\n".join(blocks) + "\n"
