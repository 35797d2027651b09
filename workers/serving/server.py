"""One model that serves every task of a finished run: images of many tasks in one call, grouped by
task, one backbone in memory."""

from __future__ import annotations

import difflib
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from workers.data.augment import Augment
from workers.data.feed import EVAL_BATCH
from workers.errors import UserError
from workers.job import BackboneSettings, DataSettings
from workers.methods.bases.class_incremental import ClassIncremental
from workers.methods.protocols import InfersTask, candidates_of, grouped_logits
from workers.rng import StepRng
from workers.serving.bundle import Bundle
from workers.serving.images import Limits, pixels_of

Rule = Literal["refuse", "confident"]
RULES = ("refuse", "confident")
CACHE_BYTES = 1 << 30


@dataclass(frozen=True)
class Answer:
    """class_: its name on the card. probability: of it. task: whose class it is, "" where a
    discovered mask belongs to none. confidence: how sure it is of the task, in [0, 1]: 1 where the
    task was told, what the method says where it finds out, the share of that task's classes where
    all compete, the winning probability under the rule `confident`. probabilities: by class, the
    largest first."""

    class_: str
    probability: float
    task: str
    confidence: float
    probabilities: dict[str, float]

    def row(self) -> dict[str, Any]:
        """As it goes into a table or JSON."""
        return {
            "class": self.class_,
            "probability": self.probability,
            "task": self.task,
            "confidence": self.confidence,
            "probabilities": self.probabilities,
        }


class LruCache:
    """What was folded for each task, as long as all of it takes no more than `limit` bytes; what
    was used longest ago goes first. own: storages that do not count, because the backbone holds
    them anyway."""

    def __init__(self, limit: int, own: set[int]):
        self.limit, self.own = limit, own
        self.items: OrderedDict[str, tuple[Any, int]] = OrderedDict()

    @property
    def nbytes(self) -> int:
        return sum(size for _, size in self.items.values())

    def get(self, task: str, make: Callable[[str], Any]) -> Any:
        if task not in self.items:
            made = make(task)
            self.items[task] = made, self.size(made)
        self.items.move_to_end(task)
        found = self.items[task][0]
        while self.items and self.nbytes > self.limit:
            self.items.popitem(last=False)
        return found

    def size(self, made: Any) -> int:
        tensors = (
            [*made.parameters(), *made.buffers()]
            if isinstance(made, nn.Module)
            else [*made.values()]
        )
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(size for place, size in storages.items() if place not in self.own)


@dataclass(frozen=True)
class Group:
    """Answers of some images that share an output space. classes: a (task, class) for each
    column."""

    rows: Tensor
    logits: Tensor
    classes: list[tuple[str, str]]
    confidence: Tensor | None = None  # (b,); None: the probability of the class
    by_task: bool = False  # confidence is the share of the winning task's classes


@dataclass
class Predictor:
    """A loaded bundle. Safe to call from several threads: decoding goes side by side, the network
    serves one call after the other."""

    bundle: Bundle
    cache_bytes: int = CACHE_BYTES
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        self.method = self.bundle.method(self.device)
        self.tasks = self.bundle.tasks
        self.classes = {t.name: [(t.name, c) for c in t.classes] for t in self.tasks}
        self.augment = Augment(
            DataSettings(),
            BackboneSettings.model_validate(self.bundle.body["backbone"]),
            training=False,
        )
        self.kept = LruCache(
            self.cache_bytes,
            {
                t.untyped_storage().data_ptr()
                for t in (*self.method.parameters(), *self.method.buffers())
            },
        )
        self.compact: Callable[[str], nn.Module] | None = getattr(self.method, "compact", None)
        if self.compact is None:
            self.method.override_cache = lambda task: self.kept.get(
                task, self.method.serving_weights
            )
        self.lock = threading.Lock()

    @classmethod
    def open(cls, uri: str, cache_bytes: int = CACHE_BYTES, device: str = "cpu") -> Predictor:
        """Loads the bundle at `uri` (a folder, or a URI that pyarrow knows) and checks every
        digest. Raises UserError."""
        return cls(Bundle.open(uri), cache_bytes, torch.device(device))

    @property
    def infers(self) -> bool:
        """Whether images need no task."""
        return bool(candidates_of(self.method)) or self.method.scenario == "class"

    @property
    def mixes(self) -> bool:
        """Whether an image's answer is its own, whatever images come with it; else those that
        follow each other are judged together."""
        return getattr(self.method.settings, "infer_images", 1) == 1

    # ---- requests --------------------------------------------------------------------------------
    def predict(
        self,
        images: Sequence[Any],
        tasks: Sequence[str | None] | str | None = None,
        rule: Rule = "refuse",
        top: int = 0,
        limits: Limits | None = None,
    ) -> list[Answer]:
        """images: paths, bytes of JPEG, PNG or WebP files, base64, uint8 arrays (H, W, 3), or
        Pillow's, mixed as you like. tasks: one for all, or one for each image; None where it is to
        be found out. rule: what happens where the method cannot: `refuse`, or `confident`: the task
        whose head answers with the highest probability. top: how many probabilities are given; 0:
        all. Raises UserError."""
        wanted = self.checked(len(images), tasks, rule, top)
        limits = limits or Limits(self.bundle.body["max_pixels"], paths=True)
        return self.answers(
            pixels_of(images, self.augment.size_in, limits), wanted, rule, self.bounded(top)
        )

    def bounded(self, top: int) -> int:
        """As many probabilities as there can be: those of all classes of all tasks."""
        return min(top, sum(len(task.classes) for task in self.tasks))

    def checked(
        self,
        count: int,
        tasks: Sequence[str | None] | str | None,
        rule: str = "refuse",
        top: int = 0,
    ) -> list[str | None]:
        """A task or None for each of `count` images. Raises UserError where a task is not served,
        or is missing and needed."""
        if rule not in RULES:
            raise UserError(f"rule is {rule!r:.80}; give one of {', '.join(RULES)}")
        if isinstance(top, bool) or not isinstance(top, int) or top < 0:
            raise UserError(f"top is {top!r:.80}; give how many probabilities you want, 0 for all")
        wanted = [tasks] * count if tasks is None or isinstance(tasks, str) else list(tasks)
        if len(wanted) != count:
            raise UserError(
                f"there are {count} images and {len(wanted)} tasks; give a task, or none, for "
                "each image"
            )
        for name in dict.fromkeys(wanted):
            if name is not None and name not in self.classes:
                close = (
                    difflib.get_close_matches(str(name), self.classes, 3, 0.5)
                    or [*self.classes][:12]
                )
                raise UserError(
                    f"task {str(name)[:80]!r} is not served; "
                    + ("did you mean " if len(close) < len(self.classes) else "there are ")
                    + ", ".join(close)
                )
        if None in wanted and not self.infers and rule == "refuse":
            raise UserError(
                f"method {self.method.name!r} needs to be told the task of each image; there "
                f"are {', '.join(self.classes)}; or set rule=confident, "
                "which takes the task that answers with the highest probability"
            )
        return wanted

    # ---- answers ---------------------------------------------------------------------------------
    @torch.no_grad()
    def answers(
        self, pixels: NDArray[Any], tasks: Sequence[str | None], rule: Rule = "refuse", top: int = 0
    ) -> list[Answer]:
        """pixels: uint8 (n, 3, S, S) as evaluation decodes them. tasks: as `checked` gives them."""
        found: list[Answer | None] = [None] * len(tasks)
        for start in range(0, len(tasks), EVAL_BATCH):
            part = slice(start, start + EVAL_BATCH)
            with self.lock:
                groups = self.groups(self.images_of(pixels[part]), tasks[part], rule)
            for group in groups:
                for row, answer in zip(
                    (group.rows + start).tolist(), self.worded(group, top), strict=True
                ):
                    found[row] = answer
        return [answer for answer in found if answer is not None]

    def images_of(self, pixels: NDArray[Any]) -> Tensor:
        """What the network gets: as the feed gives it to evaluation."""
        here = torch.from_numpy(pixels).to(self.device)
        rows = torch.arange(len(here))
        return self.augment(here, rows, None, StepRng(0, 0, 0, rows, len(here), self.device))[0]

    def groups(self, images: Tensor, tasks: Sequence[str | None], rule: Rule) -> list[Group]:
        """Images of one task together, each group one forward."""
        rows: dict[str | None, list[int]] = {}
        for row, task in enumerate(tasks):
            rows.setdefault(task, []).append(row)
        places = {task: torch.tensor(mine) for task, mine in rows.items()}
        unknown = places.pop(None, None)
        told = {task: mine for task, mine in places.items() if task is not None}
        found = (
            [] if unknown is None else self.untold(unknown, images[unknown.to(self.device)], rule)
        )
        return found + [
            Group(told[task], logits, self.classes[task], torch.ones(len(told[task])))
            for task, logits in self.told(images, told).items()
        ]

    def told(self, images: Tensor, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Logits over the classes of each task for its rows of images, by what its masks leave
        where the method can cut the rest."""
        here = {task: mine.to(self.device) for task, mine in rows.items()}
        if self.compact is not None:
            return {
                task: self.kept.get(task, self.compact)(images[mine]) for task, mine in here.items()
            }
        return grouped_logits(self.method, images, here) if here else {}

    def untold(self, rows: Tensor, images: Tensor, rule: Rule) -> list[Group]:
        """Images whose task is not told. rows: their places in the batch."""
        candidates = candidates_of(self.method)
        if candidates:
            return self.inferred(rows, images, [*candidates.values()])
        if isinstance(self.method, ClassIncremental) and self.method.scenario == "class":
            classes = [pair for name in self.method.class_slices() for pair in self.classes[name]]
            return [Group(rows, self.method.logits(images, None), classes, by_task=True)]
        every = self.told(images, dict.fromkeys(self.classes, torch.arange(len(rows))))
        best = (
            torch.stack([logits.float().softmax(1).amax(1) for logits in every.values()])
            .argmax(0)
            .cpu()
        )
        names = [*every]
        return [
            Group(
                rows[best == place],
                every[names[place]][(best == place).to(self.device)],
                self.classes[names[place]],
            )
            for place in best.unique().tolist()
        ]

    def inferred(self, rows: Tensor, images: Tensor, owners: list[tuple[str, ...]]) -> list[Group]:
        """By the method's own choice among candidates; what several tasks share answers with the
        classes of the last of them."""
        assert isinstance(self.method, InfersTask)
        places, sure = (t.cpu() for t in self.method.infer(images))
        found, wide = [], self.method.scenario == "class"
        logits = self.method.answer(images, places.to(self.device), None)
        for place in places.unique().tolist():
            mine, name = places == place, owners[place][-1] if owners[place] else ""
            own = (
                self.method.class_slices()[name]
                if wide and isinstance(self.method, ClassIncremental)
                else slice(len(self.classes.get(name, [])) or None)
            )
            cut = logits[mine.to(self.device), own]
            classes = self.classes.get(name) or [("", f"output {i}") for i in range(cut.shape[1])]
            found.append(Group(rows[mine], cut, classes, sure[mine].float()))
        return found

    def worded(self, group: Group, top: int) -> list[Answer]:
        """Numbers become names. A class name that several tasks have is given as TASK/CLASS where
        they compete."""
        probabilities = group.logits.float().softmax(1).cpu()
        counts = Counter(name for _, name in group.classes)
        labels = [name if counts[name] == 1 else f"{task}/{name}" for task, name in group.classes]
        best = probabilities.max(1)
        sure = group.confidence if group.confidence is not None else best.values
        if group.by_task:
            names = [*dict.fromkeys(task for task, _ in group.classes)]
            owner = torch.tensor([names.index(task) for task, _ in group.classes])
            shares = torch.zeros(len(probabilities), len(names)).index_add_(1, owner, probabilities)
            sure = shares.gather(1, owner[best.indices][:, None])[:, 0].clamp(max=1)
        shown = probabilities.sort(dim=1, descending=True, stable=True)
        values, places = (t[:, : top or None].tolist() for t in (shown.values, shown.indices))
        rows = zip(
            best.indices.tolist(), best.values.tolist(), sure.tolist(), places, values, strict=True
        )
        return [
            Answer(
                group.classes[winner][1],
                probability,
                group.classes[winner][0],
                confidence,
                {labels[i]: p for i, p in zip(where, what, strict=True)},
            )
            for winner, probability, confidence, where, what in rows
        ]
