"""Predict with a loaded bundle: see `Predictor`.

The images of a batch can belong to several tasks, and a request can leave out the task of an image.
Axes: S side of the decoded images in pixels, H and W sides of the network's input, which is the
central crop.
"""

from __future__ import annotations

import difflib
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from workers.data.accelerator import CPU
from workers.data.augment import Augment
from workers.data.feed import EVAL_BATCH
from workers.data.upload import to_device
from workers.errors import UserError
from workers.evaluate import merge_domains
from workers.job import BackboneSettings, DataSettings
from workers.methods.bases.class_incremental import ClassIncremental
from workers.methods.protocols import InfersTask, grouped_logits, list_candidates
from workers.rng import StepRng
from workers.serving.bundle import Bundle
from workers.serving.images import Limits, PixelBudget, read_pixels
from workers.serving.model_file import Rule
from workers.serving.reference import Reference, load_reference
from workers.serving.router import Router
from workers.serving.task_rules import RULES, check_measured, find_recommended, score_by_logits

CACHE_BYTES = 1 << 30  # of cached weights of tasks
MAX_LISTED_TASKS = 12  # tasks that an error names


@dataclass(frozen=True)
class Answer:
    """The prediction for one image.

    Attributes:
        class_: Name of the predicted class, as on the card.
        probability: Probability of this class.
        task: Task of this class; "" if the inferred mask belongs to no task, or if the task is
            neither named nor inferred (scenario `domain`, where tasks have the same classes).
        confidence: Confidence of the task, in [0, 1]: 1 if the request named the task; the
            method's confidence if the method infers the task; the total probability of the task's
            classes if all classes compete; `probability` in other cases.
        probabilities: Class name -> probability, the largest first.
    """

    class_: str
    probability: float
    task: str
    confidence: float
    probabilities: dict[str, float]

    def row(self) -> dict[str, Any]:
        """Return the answer as plain values, for a table or JSON."""
        return {
            "class": self.class_,
            "probability": self.probability,
            "task": self.task,
            "confidence": self.confidence,
            "probabilities": self.probabilities,
        }


class CacheEntry(NamedTuple):
    """A cached value of one task. `nbytes` excludes memory that the method holds anyway."""

    value: Any
    nbytes: int


class LruCache:
    """A cache of one value per task: a module, or a mapping name -> tensor.

    Args:
        limit: Maximum bytes of all entries. Above it, the least recently used entries are dropped.
            A value that alone exceeds the limit is not kept.
        excluded: Addresses of storages that do not count, because the method holds them anyway.
    """

    def __init__(self, limit: int, excluded: set[int]):
        self.limit = limit
        self.excluded = excluded
        self.items: OrderedDict[str, CacheEntry] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Total bytes of all entries."""
        return sum(entry.nbytes for entry in self.items.values())

    def get(self, task: str, make: Callable[[str], Any]) -> Any:
        """Return the value of a task.

        Args:
            task: Name of the task.
            make: Function that computes the value if it is not cached.
        """
        if task not in self.items:
            value = make(task)
            self.items[task] = CacheEntry(value, self.size(value))
        self.items.move_to_end(task)
        value = self.items[task].value
        while self.items and self.nbytes > self.limit:
            self.items.popitem(last=False)
        return value

    def size(self, value: Any) -> int:
        """Return the bytes of a module or of a mapping of tensors. Shared storage counts once."""
        if isinstance(value, nn.Module):
            tensors = [*value.parameters(), *value.buffers()]
        else:
            tensors = [*value.values()]
        bytes_by_address: dict[int, int] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.excluded:
                bytes_by_address[storage.data_ptr()] = storage.nbytes()
        return sum(bytes_by_address.values())


@dataclass(frozen=True)
class LogitGroup:
    """Logits of some images with a common output space.

    Attributes:
        rows: (b,), the positions of the images in the batch.
        logits: (b, classes).
        classes: (task, class) of each column.
        confidence: (b,); None: use the probability of the predicted class.
        is_by_task: Use the total probability of the predicted task's classes as confidence.
    """

    rows: Tensor
    logits: Tensor
    classes: list[tuple[str, str]]
    confidence: Tensor | None = None
    is_by_task: bool = False


@dataclass
class Predictor:
    """A loaded bundle that predicts classes of images. It may be called from several threads.

    Threads decode images in parallel. The network processes one call at a time.

    Args:
        bundle: The model.
        cache_bytes: Maximum bytes of cached weights of tasks.
        device: Device of the network.
    """

    bundle: Bundle
    cache_bytes: int = CACHE_BYTES
    device: torch.device = CPU

    def __post_init__(self) -> None:
        self.method = self.bundle.method(self.device)
        self.tasks = self.bundle.tasks
        self.classes: dict[str, list[tuple[str, str]]] = {}  # task -> (task, class) by column
        for task in self.tasks:
            self.classes[task.name] = [(task.name, class_) for class_ in task.classes]
        backbone_settings = BackboneSettings.model_validate(self.bundle.body["backbone"])
        self.augment = Augment(DataSettings(), backbone_settings, training=False)
        tensors = (*self.method.parameters(), *self.method.buffers())
        addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.cache = LruCache(self.cache_bytes, addresses)
        self.compact: Callable[[str], nn.Module] | None = getattr(self.method, "compact", None)
        if self.compact is None:
            self.method.override_cache = self._cached_weights
        self.lock = threading.Lock()
        self.router_lock = threading.Lock()
        # Function that each call of `answers` calls with pixels, requested tasks and answers.
        self.on_answers: Callable[[NDArray[Any], Sequence[str | None], list[Answer]], None] | None
        self.on_answers = None

    def _cached_weights(self, task: str) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = self.cache.get(task, self.method.serving_weights)
        return weights

    @classmethod
    def open(
        cls, uri: str, cache_bytes: int = CACHE_BYTES, device: torch.device = CPU
    ) -> Predictor:
        """Load a bundle.

        Args:
            uri: A folder, or a URI that pyarrow supports.
            cache_bytes: Maximum bytes of cached weights of tasks.
            device: Device of the network.

        Raises:
            UserError: If a digest differs, or the bundle cannot be used.
        """
        return cls(Bundle.open(uri), cache_bytes, device)

    @property
    def infers_task(self) -> bool:
        """Whether a request may omit the task of an image without naming a rule."""
        return bool(list_candidates(self.method)) or self.method.scenario != "task"

    @property
    def is_per_image(self) -> bool:
        """Whether each image is answered independently of other images in the batch.

        Otherwise the method infers one task from several consecutive images.
        """
        return getattr(self.method.settings, "infer_images", 1) == 1

    def warm_up(self) -> None:
        """Predict one black image per task, because the first forward pass takes longer.

        This also fills the cache with the weights of the tasks.
        """
        side = self.augment.size_in
        names = [task.name for task in self.tasks]
        self.answers(np.zeros((len(names), 3, side, side), np.uint8), names)

    # ---- requests --------------------------------------------------------------------------------
    def predict(
        self,
        images: Sequence[Any],
        tasks: Sequence[str | None] | str | None = None,
        rule: Rule = "refuse",
        top: int = 0,
        limits: Limits | None = None,
    ) -> list[Answer]:
        """Classify images.

        Args:
            images: Paths, bytes of JPEG, PNG or WebP files, base64, uint8 arrays (H, W, 3), or
                Pillow images, in any mixture.
            tasks: One task for all images, or a task or None for each image. None: infer the task.
            rule: Rule for images without a task if the method cannot infer the task: `refuse`
                raises an error, the other rules choose a task (`task_rules`).
            top: Number of probabilities per answer; 0: all.
            limits: Limits of a request; None: those of the bundle, and paths are allowed.

        Returns:
            An answer for each image.

        Raises:
            UserError: If an argument or an image is invalid.
        """
        image_tasks = self.check_request(len(images), tasks, rule, top)
        limits = limits or Limits(
            self.bundle.body["max_pixels"], value_range=self.bundle.value_range, paths=True
        )
        pixels = self.read_pixels(images, limits)
        return self.answers(pixels, image_tasks, rule, self.limit_top(top))

    def read_pixels(
        self,
        images: Sequence[Any],
        limits: Limits,
        budget: PixelBudget | None = None,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> NDArray[np.uint8]:
        """Return images as uint8 (n, 3, S, S), resized for evaluation; see `images.read_pixels`."""
        side, interpolation = self.augment.size_in, self.augment.interpolation
        return read_pixels(images, side, limits, budget, interpolation, is_cancelled)

    def limit_top(self, top: int) -> int:
        """Return `top`, but at most the number of classes of all tasks."""
        return min(top, sum(len(task.classes) for task in self.tasks))

    def check_request(
        self,
        count: int,
        tasks: Sequence[str | None] | str | None,
        rule: str = "refuse",
        top: int = 0,
    ) -> list[str | None]:
        """Check the options of a request, and return a task or None for each image.

        Args:
            count: Number of images.
            tasks: See `predict`.
            rule: See `predict`.
            top: See `predict`.

        Raises:
            UserError: If an option is invalid, a task is not served, a task is required but
                missing, or the model lacks a measurement that the rule needs.
        """
        if rule not in RULES:
            raise UserError(f"rule is {rule!r:.80}; give one of {', '.join(RULES)}")
        if isinstance(top, bool) or not isinstance(top, int) or top < 0:
            raise UserError(f"top is {top!r:.80}; give how many probabilities you want, 0 for all")
        if tasks is None or isinstance(tasks, str):
            image_tasks = [tasks] * count
        else:
            image_tasks = list(tasks)
        if len(image_tasks) != count:
            raise UserError(
                f"there are {count} images and {len(image_tasks)} tasks; give a task or None for "
                "each image"
            )
        for name in dict.fromkeys(image_tasks):
            if name is not None and name not in self.classes:
                raise self._unknown_task(name)
        if None in image_tasks and not self.infers_task and rule == "refuse":
            raise UserError(
                f"method {self.method.name!r} needs to be told the task of each image; there are "
                f"{', '.join(self.classes)}; or set rule=confident, which takes the task with the "
                "most probable class (other rules: entropy, nearest, ranpac, recommended)"
            )
        if None in image_tasks and not self.infers_task:
            self.find_rule(rule)
        return image_tasks

    def find_rule(self, rule: str) -> str:
        """Return the rule to apply: `recommended` is replaced by the rule with the best accuracy.

        With a single task, the result is `confident`, which needs no measurements. The router of
        `ranpac` is loaded now, if it is not loaded yet.

        Raises:
            UserError: If the model lacks a measurement that the rule needs.
        """
        if len(self.tasks) == 1:
            return "confident"
        if rule == "recommended":
            rule = find_recommended(self.bundle.body)
        if rule in ("nearest", "ranpac"):
            check_measured(rule, self.reference)
        if rule == "ranpac":
            with self.router_lock:  # not `self.lock`: other requests continue during the loading
                self.router  # noqa: B018
        return rule

    def _unknown_task(self, name: Any) -> UserError:
        similar = difflib.get_close_matches(str(name), self.classes, 3, 0.5)
        names = similar or [*self.classes][:MAX_LISTED_TASKS]
        is_suggestion = len(names) < len(self.classes)
        introduction = "did you mean" if is_suggestion else "there are"
        return UserError(
            f"task {str(name)[:80]!r} is not served; {introduction} {', '.join(names)}"
        )

    # ---- answers ---------------------------------------------------------------------------------
    @torch.no_grad()
    def answers(
        self, pixels: NDArray[Any], tasks: Sequence[str | None], rule: Rule = "refuse", top: int = 0
    ) -> list[Answer]:
        """Classify decoded images.

        Args:
            pixels: uint8 (n, 3, S, S), decoded as for evaluation.
            tasks: A task or None for each image; the result of `check_request`.
            rule: See `predict`.
            top: See `predict`.

        Returns:
            An answer for each image.
        """
        answers: list[Answer | None] = [None] * len(tasks)
        for start in range(0, len(tasks), EVAL_BATCH):
            batch = slice(start, start + EVAL_BATCH)
            with self.lock:
                images = self.network_input(pixels[batch])
                groups = self.group_logits(images, tasks[batch], rule)
            for group in groups:
                rows = (group.rows + start).tolist()
                for row, answer in zip(rows, self.to_answers(group, top), strict=True):
                    answers[row] = answer
        complete = [answer for answer in answers if answer is not None]
        if self.on_answers is not None:
            self.on_answers(pixels, tasks, complete)
        return complete

    @torch.no_grad()
    def features(self, pixels: NDArray[Any], task: str) -> Tensor:
        """Compute the features of images with the weights of a task, which are its head's inputs.

        Args:
            pixels: uint8 (n, 3, S, S), decoded as for evaluation.
            task: A served task.

        Returns:
            float32 (n, d), on the CPU.
        """
        parts: list[Tensor] = []
        for start in range(0, len(pixels), EVAL_BATCH):
            with self.lock:
                images = self.network_input(pixels[start : start + EVAL_BATCH])
                self.method.activate_task(task)
                parts.append(self.method.features(images).float().cpu())
        return torch.cat(parts)

    def network_input(self, pixels: NDArray[Any]) -> Tensor:
        """Convert pixels uint8 (n, 3, S, S) to images (n, 3, H, W), as in evaluation."""
        (batch,) = to_device([torch.from_numpy(pixels)], self.device)
        rows = torch.arange(len(batch))
        # `Augment` needs an rng, but draws nothing in evaluation
        rng = StepRng(0, 0, 0, rows, len(batch), self.device)
        return self.augment(batch, rows, None, rng)[0]

    def group_logits(
        self, images: Tensor, tasks: Sequence[str | None], rule: Rule
    ) -> list[LogitGroup]:
        """Compute the logits of a batch, in one group per output space.

        Args:
            images: (n, 3, H, W).
            tasks: A task or None for each image.
            rule: See `predict`.
        """
        rows_by_task: dict[str, list[int]] = {}
        unknown: list[int] = []
        for row, task in enumerate(tasks):
            if task is None:
                unknown.append(row)
            else:
                rows_by_task.setdefault(task, []).append(row)
        groups: list[LogitGroup] = []
        if unknown:
            rows = torch.tensor(unknown)
            (index,) = to_device([rows], self.device)
            groups += self.logits_without_task(rows, images[index], rule)
        task_rows = {task: torch.tensor(rows) for task, rows in rows_by_task.items()}
        for task, logits in self.logits_with_task(images, task_rows).items():
            rows = task_rows[task]
            groups.append(LogitGroup(rows, logits, self.classes[task], torch.ones(len(rows))))
        return groups

    def logits_with_task(self, images: Tensor, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Compute the logits of images with known tasks.

        If the method has `compact`, the logits are computed by a smaller network from which the
        masked parts have been removed.

        Args:
            images: (n, 3, H, W).
            rows: Task -> the positions of the images.

        Returns:
            Task -> logits (b, classes of the task).
        """
        if not rows:
            return {}
        indices = to_device([*rows.values()], self.device)
        device_rows = dict(zip(rows, indices, strict=True))
        if self.compact is None:
            return grouped_logits(self.method, images, device_rows)
        logits: dict[str, Tensor] = {}
        for task, index in device_rows.items():
            network = self.cache.get(task, self.compact)
            logits[task] = network(images[index])
        return logits

    def logits_without_task(self, rows: Tensor, images: Tensor, rule: Rule) -> list[LogitGroup]:
        """Compute the logits of images with unknown tasks.

        Args:
            rows: Positions of the images in the batch.
            images: (b, 3, H, W).
            rule: See `predict`.
        """
        candidates = list_candidates(self.method)
        if candidates:
            return self.infer_task(rows, images, [*candidates.values()])
        if isinstance(self.method, ClassIncremental) and self.method.scenario == "class":
            classes: list[tuple[str, str]] = []
            for name in self.method.class_slices():
                classes += self.classes[name]
            return [LogitGroup(rows, self.method.logits(images, None), classes, is_by_task=True)]
        if self.method.scenario == "domain":
            logits = merge_domains(self.method, self.method.logits(images, None))
            shared = [("", name) for _, name in next(iter(self.classes.values()))]
            return [LogitGroup(rows, logits, shared)]
        return self.choose_tasks(rows, images, self.find_rule(rule))

    @cached_property
    def reference(self) -> Reference:
        """The class means and router weights of the tasks, for the rules `nearest` and `ranpac`."""
        return load_reference(self.bundle)

    @cached_property
    def router(self) -> Router:
        """The router of the rule `ranpac`. It has its own copy of the backbone."""
        weights = {}
        for name, task in self.reference.tasks.items():
            assert task.router is not None, "see `check_measured`"
            weights[name] = task.router
        return Router.load(self.bundle, weights, self.device)

    def choose_tasks(self, rows: Tensor, images: Tensor, rule: str) -> list[LogitGroup]:
        """Assign each image to a task by a rule.

        Args:
            rows: Positions of the images in the batch.
            images: (b, 3, H, W).
            rule: One of `task_rules.CHOOSING`.
        """
        names = [*self.classes]
        logits: dict[str, Tensor] = {}
        if rule == "ranpac":
            scores = self.router.scores(images)
        elif rule == "nearest":
            scores = {name: self._score_by_distance(images, name) for name in names}
        else:
            all_rows = torch.arange(len(rows))
            logits = self.logits_with_task(images, dict.fromkeys(names, all_rows))
            scores = {name: score_by_logits(rule, logits[name]) for name in names}
        winners = torch.stack([scores[name].cpu() for name in names]).argmax(0)  # (b,)
        chosen = {names[i]: (winners == i).nonzero().flatten() for i in winners.unique().tolist()}
        if logits:
            logits = {name: logits[name][index.to(self.device)] for name, index in chosen.items()}
        else:
            logits = self.logits_with_task(images, chosen)
        return [
            LogitGroup(rows[index], logits[name], self.classes[name])
            for name, index in chosen.items()
        ]

    def _score_by_distance(self, images: Tensor, name: str) -> Tensor:
        self.method.activate_task(name)
        return -self.reference.tasks[name].distances(self.method.features(images))

    def infer_task(
        self, rows: Tensor, images: Tensor, candidate_tasks: list[tuple[str, ...]]
    ) -> list[LogitGroup]:
        """Compute the logits of images after the method inferred their tasks.

        Args:
            rows: Positions of the images in the batch.
            images: (b, 3, H, W).
            candidate_tasks: The tasks of each candidate, for example of each mask. If several tasks
                share a candidate, the classes of the last task are used.
        """
        assert isinstance(self.method, InfersTask)
        inferred, confidence = self.method.infer(images)
        choices = inferred.cpu()
        confidence = confidence.cpu()
        logits = self.method.answer(images, choices.to(self.device), None)
        groups = []
        for choice in choices.unique().tolist():
            tasks = candidate_tasks[choice]
            name = tasks[-1] if tasks else ""
            is_chosen = choices == choice
            task_logits = logits[is_chosen.to(self.device), self._columns(name)]
            num_outputs = task_logits.shape[1]
            classes = self.classes.get(name)
            if not classes:  # a mask of no task
                classes = [("", f"output {i}") for i in range(num_outputs)]
            group_confidence = confidence[is_chosen].float()
            groups.append(LogitGroup(rows[is_chosen], task_logits, classes, group_confidence))
        return groups

    def _columns(self, name: str) -> slice:
        """Return the columns of an inferred task; all columns if `name` is not a task."""
        if self.method.scenario == "class":
            assert isinstance(self.method, ClassIncremental)
            return self.method.class_slices()[name]
        if name not in self.classes:
            return slice(None)
        return slice(len(self.classes[name]))

    def to_answers(self, group: LogitGroup, top: int) -> list[Answer]:
        """Convert the logits of a group to an answer per row.

        In `Answer.probabilities`, a class name that several competing tasks have is listed as
        TASK/CLASS.

        Args:
            group: Logits with a common output space.
            top: Number of probabilities per answer; 0: all.
        """
        probabilities = group.logits.float().softmax(1).cpu()  # (b, classes)
        best = probabilities.max(1)
        confidence = best.values if group.confidence is None else group.confidence
        if group.is_by_task:
            confidence = task_shares(probabilities, best.indices, group.classes)
        ranked = probabilities.sort(dim=1, descending=True, stable=True)
        end = top or None
        ranked_columns = ranked.indices[:, :end].tolist()
        ranked_values = ranked.values[:, :end].tolist()
        labels = class_labels(group.classes)
        probability = best.values.tolist()
        certainty = confidence.tolist()
        answers = []
        for row, winner in enumerate(best.indices.tolist()):
            task, class_ = group.classes[winner]
            names = [labels[column] for column in ranked_columns[row]]
            listed = dict(zip(names, ranked_values[row], strict=True))
            answers.append(Answer(class_, probability[row], task, certainty[row], listed))
        return answers


def class_labels(classes: list[tuple[str, str]]) -> list[str]:
    """Return the label of each (task, class): the class name, or TASK/CLASS if it is not unique.

    Example:
        >>> class_labels([("a", "cat"), ("a", "dog"), ("b", "cat")])
        ['a/cat', 'dog', 'b/cat']
    """
    counts = Counter(name for _, name in classes)
    labels = []
    for task, name in classes:
        is_unique = counts[name] == 1
        labels.append(name if is_unique else f"{task}/{name}")
    return labels


def task_shares(probabilities: Tensor, winners: Tensor, classes: list[tuple[str, str]]) -> Tensor:
    """Compute the total probability of the predicted task's classes.

    Args:
        probabilities: (b, classes).
        winners: (b,), the column of the predicted class.
        classes: (task, class) of each column.

    Returns:
        (b,).
    """
    tasks = [*dict.fromkeys(task for task, _ in classes)]
    owner = torch.tensor([tasks.index(task) for task, _ in classes])  # (classes,)
    shares = torch.zeros(len(probabilities), len(tasks)).index_add_(1, owner, probabilities)
    return shares.gather(1, owner[winners][:, None])[:, 0].clamp(max=1)
