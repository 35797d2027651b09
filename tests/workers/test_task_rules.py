"""Tests of the rules that choose the task of an image, and of the recommended rule."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from serving import Finished, finished

from pipeline.testing import Lab
from workers.data.rows import select
from workers.errors import UserError
from workers.methods.ranpac import PENALTIES, is_validated, solve_ridge
from workers.serving.bundle import Bundle
from workers.serving.images import Limits
from workers.serving.measuring import choose_train_rows, with_measurements
from workers.serving.model_file import REFERENCE, ChoosingRule, sealed
from workers.serving.reference import compute_nearest_distances, load_reference
from workers.serving.router import Router
from workers.serving.server import Predictor
from workers.serving.single_tasks import remove_task
from workers.serving.task_rules import (
    CHOOSING,
    RULES,
    find_recommended,
    recommend,
    score_by_logits,
)
from workers.storage.artifact import file_info


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return finished(Lab(tmp_path_factory.mktemp("rules")), "linear", "task", epochs=1)


@pytest.fixture(scope="module")
def model(run: Finished) -> Bundle:
    return with_measurements(run.bundle)


def images_of(run: Finished) -> list[Any]:
    return [image for name in run.names for image in run.images(name)[0][:8]]


def held_out_images(run: Finished, name: str) -> tuple[list[bytes], list[str]]:
    """Return the validation images of a task, and the names of their classes."""
    task = run.bundle.task(name)
    rows = select(run.run.lab.store.root, (task,), "val", 0.1)
    data = [rows.read_bytes(row) for row in range(len(rows))]
    return data, [task.classes[label] for label in rows.labels.tolist()]


# ---- scores --------------------------------------------------------------------------------------
def test_confidence_is_the_largest_probability() -> None:
    logits = torch.tensor([[0.0, math.log(3)]])
    assert score_by_logits("confident", logits).tolist() == pytest.approx([0.75])


def test_entropy_is_normalised_by_its_maximum() -> None:
    """Tasks of different sizes can therefore be compared."""
    for classes in (2, 5):
        assert score_by_logits("entropy", torch.zeros(1, classes)).tolist() == pytest.approx([-1])
    half = torch.tensor([[0.0, math.log(3)]])
    expected = (0.25 * math.log(0.25) + 0.75 * math.log(0.75)) / math.log(2)
    assert score_by_logits("entropy", half).tolist() == pytest.approx([expected])
    assert score_by_logits("entropy", torch.tensor([[3.0]])).tolist() == [0]


def test_first_of_equally_good_rules_is_recommended() -> None:
    rates: dict[ChoosingRule, float] = {
        "confident": 0.5,
        "entropy": 0.7,
        "nearest": 0.7,
        "ranpac": 0.1,
    }
    assert recommend(rates) == "entropy"
    rates["entropy"] = 0.2
    assert recommend(rates) == "nearest"


# ---- answers -------------------------------------------------------------------------------------
def test_nearest_rule_picks_the_task_with_nearest_class_mean(run: Finished, model: Bundle) -> None:
    predictor = Predictor(model)
    images = images_of(run)
    pixels = predictor.read_pixels(images, Limits())
    reference = load_reference(model)
    answers = predictor.predict(images, rule="nearest")
    for row, answer in enumerate(answers):
        distances = {}
        for name, task in reference.tasks.items():
            features = predictor.features(pixels[row : row + 1], name)
            distances[name] = compute_nearest_distances(features, task.means) / task.levels[9]
        assert answer.task == min(distances, key=lambda name: float(distances[name]))
        (told,) = predictor.predict(images[row : row + 1], answer.task)
        assert (answer.class_, answer.task) == (told.class_, told.task)


def test_the_router_is_ridge_regression_on_the_frozen_backbone(
    run: Finished, model: Bundle
) -> None:
    """It is fitted on the images that the model measured, and picks the task of the best class."""
    backbone = model.backbone().eval()
    router = Router(model, torch.device("cpu"))
    width = router.method.heads.width
    predictor = Predictor(model)
    rows: list[torch.Tensor] = []
    columns: list[int] = []
    keys: list[str] = []
    offset = 0
    names: list[str] = []  # the task of each column
    for name in run.names:
        task = run.bundle.task(name)
        train = select(run.run.lab.store.root, (task,), "train", 0.1)
        chosen = [row for rows in choose_train_rows(task, train) for row in rows]
        data = [train.read_bytes(row) for row in chosen]
        images = predictor.network_input(predictor.read_pixels(data, Limits()))
        with torch.no_grad():
            rows.append(router.method.project(backbone(images)))
        columns += [offset + int(label) for label in train.labels[chosen]]
        keys += train.keys(np.array(chosen))
        offset += task.num_classes
        names += [name] * task.num_classes
    hidden = torch.cat(rows).double()
    one_hot = torch.nn.functional.one_hot(torch.tensor(columns)).double()
    reference = load_reference(model)
    stored = torch.cat([reference.tasks[name].router for name in run.names])  # type: ignore[misc]
    assert stored.shape == (offset, width)
    fits = torch.tensor([not is_validated(key) for key in keys])
    errors = {}
    for penalty in PENALTIES:
        weights = solve_ridge(
            hidden[fits].T @ hidden[fits], hidden[fits].T @ one_hot[fits], penalty
        )
        error = float(((hidden[~fits] @ weights - one_hot[~fits]) ** 2).mean())
        errors[penalty] = error if math.isfinite(error) else math.inf
    best = min(errors, key=lambda penalty: errors[penalty])
    expected = solve_ridge(hidden.T @ hidden, hidden.T @ one_hot, best)
    torch.testing.assert_close(stored.T.double(), expected, rtol=1e-3, atol=1e-4)
    images_and_answers = images_of(run)
    pixels = predictor.read_pixels(images_and_answers, Limits())
    with torch.no_grad():
        hidden = router.method.project(backbone(predictor.network_input(pixels)))
    scores = predictor.router.scores(predictor.network_input(pixels))
    for name in run.names:
        weights_of_task = reference.tasks[name].router
        assert weights_of_task is not None
        torch.testing.assert_close(scores[name], (hidden @ weights_of_task.T).amax(1))
    winners = (hidden @ stored.T).argmax(1).tolist()
    answers = predictor.predict(images_and_answers, rule="ranpac")
    assert [answer.task for answer in answers] == [names[winner] for winner in winners]
    for row, answer in enumerate(answers):
        (told,) = predictor.predict(images_and_answers[row : row + 1], answer.task)
        assert (answer.class_, answer.task) == (told.class_, told.task)


def test_entropy_rule_picks_the_task_with_least_entropy(run: Finished, model: Bundle) -> None:
    predictor = Predictor(model)
    images = images_of(run)
    told = {name: predictor.predict(images, name, top=0) for name in run.names}
    for row, answer in enumerate(predictor.predict(images, rule="entropy")):
        entropies = {}
        for name, answers in told.items():
            values = torch.tensor([*answers[row].probabilities.values()])
            entropies[name] = float(torch.special.entr(values).sum()) / math.log(len(values))
        assert answer.task == min(entropies, key=lambda name: entropies[name])


# ---- records of a model --------------------------------------------------------------------------
def test_model_records_the_accuracy_of_each_rule(run: Finished, model: Bundle) -> None:
    rules = model.body["rules"]
    assert rules["tasks"] == list(run.names)
    job = run.bundle.job
    assert job is not None
    held_out = {name: held_out_images(run, name) for name in run.names}
    count = sum(len(images) for images, _ in held_out.values())
    assert (rules["split"], rules["images"]) == ("val", count)
    assert rules["accuracy"].keys() == rules["task_accuracy"].keys() == {*CHOOSING}
    predictor = Predictor(model)
    for rule in CHOOSING:
        right = named = given = 0
        for name, (images, labels) in held_out.items():
            for answer, label in zip(predictor.predict(images, rule=rule), labels, strict=True):
                named += answer.task == name
                right += (answer.task, answer.class_) == (name, label)
            told = predictor.predict(images, name)
            given += sum(a.class_ == label for a, label in zip(told, labels, strict=True))
        assert rules["accuracy"][rule] == pytest.approx(right / count)
        assert rules["task_accuracy"][rule] == pytest.approx(named / count)
        assert rules["with_task"] == pytest.approx(given / count)
    best = max(rules["accuracy"].values())
    assert rules["accuracy"][rules["recommended"]] == best


def test_without_held_out_images_rules_are_measured_on_test_images(run: Finished) -> None:
    job = run.bundle.job
    assert job is not None
    data = job.data.model_copy(update={"val_fraction": 0.0})
    rules = with_measurements(replace(run.bundle, job=replace(job, data=data))).body["rules"]
    assert (rules["split"], rules["images"]) == ("test", 100)


def test_rule_recommended_equals_the_rule_it_names(run: Finished, model: Bundle) -> None:
    predictor = Predictor(model)
    images = images_of(run)
    by_name = predictor.predict(images, rule=model.body["rules"]["recommended"])
    assert predictor.predict(images, rule="recommended") == by_name
    with pytest.raises(UserError, match="needs to be told the task of each image"):
        predictor.predict(images)


def test_a_model_of_an_earlier_version_has_no_recommendation(run: Finished, model: Bundle) -> None:
    body = {key: value for key, value in model.body.items() if key != "rules"}
    old = Predictor(replace(model, body=sealed(body)))
    images = images_of(run)
    with pytest.raises(UserError, match=r"none was measured .*the model has none.*accrete bundle"):
        old.predict(images, rule="recommended")
    old.predict(images, rule="nearest")
    with pytest.raises(UserError, match=r"'nearest' needs class means of each task, and 'two'"):
        Predictor(run.bundle).predict(images, rule="nearest")
    with pytest.raises(UserError, match=r"'ranpac' needs router weights of each task, and 'two'"):
        Predictor(run.bundle).predict(images, rule="ranpac")


def test_ranpac_rule_without_router_weights_is_refused(run: Finished, model: Bundle) -> None:
    """Such a model was written before this rule existed."""
    predictor = Predictor(model)
    tasks = {n: replace(task, router=None) for n, task in predictor.reference.tasks.items()}
    vars(predictor)["reference"] = replace(predictor.reference, tasks=tasks)
    with pytest.raises(UserError, match=r"'ranpac' needs router .*'two' has none.*accrete bundle"):
        predictor.predict(images_of(run), rule="ranpac")


def test_a_damaged_reference_stops_only_the_rule_that_needs_it(
    run: Finished, model: Bundle
) -> None:
    def fetch(name: str) -> bytes:
        if name == REFERENCE:
            raise UserError("the file is damaged")
        return model.fetch(name)

    predictor = Predictor(replace(model, fetch=fetch))
    images = images_of(run)
    assert predictor.predict(images, rule="confident")
    assert predictor.predict(images, rule="entropy")
    with pytest.raises(UserError, match="damaged"):
        predictor.predict(images, rule="nearest")


def test_removing_a_task_drops_the_recommendation(
    run: Finished, model: Bundle, tmp_path: Path
) -> None:
    folder = str(tmp_path / "model")
    model.write(folder)
    images = images_of(run)
    assert Predictor.open(folder).predict(images, rule="recommended")
    remove_task(folder, "three")
    rest = Bundle.open(folder)
    with pytest.raises(UserError, match="its tasks have changed since"):
        find_recommended(rest.body)
    reference = load_reference(rest)
    assert reference.tasks.keys() == {"two"}
    assert reference.tasks["two"].router is None, "it depends on the images of the removed task"
    assert not any("three" in name for name in safetensors.torch.load(rest.read(REFERENCE)))
    for rule in RULES:
        if rule != "refuse":  # there is only one task to choose
            answers = Predictor(rest).predict(images, rule=rule)  # type: ignore[arg-type]
            assert {answer.task for answer in answers} == {"two"}


def test_a_method_that_infers_the_task_has_no_rules(lab: Lab) -> None:
    bundle = with_measurements(finished(lab, "ncm", "class", epochs=1).bundle)
    assert "rules" not in bundle.body


@pytest.mark.parametrize("shape", [(3, 1000), (2, 999), (2, 20_000), (2, 0), (2000,)])
def test_router_weights_that_do_not_fit_are_refused(model: Bundle, shape: tuple[int, ...]) -> None:
    """A model folder from an untrusted source may have them; task `two` has two classes."""
    data = model.read(REFERENCE)
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    tensors = safetensors.torch.load(data)
    tensors["router/two"] = torch.zeros(shape)
    changed = safetensors.torch.save(tensors, metadata)
    files = {**model.body["files"], REFERENCE: file_info(changed)}

    def fetch(name: str) -> bytes:
        return changed if name == REFERENCE else model.fetch(name)

    with pytest.raises(UserError, match=r"reference.safetensors cannot be used .*router"):
        load_reference(replace(model, body=sealed({**model.body, "files": files}), fetch=fetch))
