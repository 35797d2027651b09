"""Tests of served models: answers as evaluated, mixed batches, and adding and removing tasks."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from serving import Finished, exact, finished

from tests import small_run
from workers.data.decoding import resize_square
from workers.errors import UserError
from workers.job import Neutral
from workers.methods import METHODS
from workers.methods.meat import MeatSettings
from workers.serving import model_file, single_tasks, versions
from workers.serving.bundle import Bundle
from workers.serving.images import Limits
from workers.serving.server import LruCache, Predictor
from workers.storage.taskstate import load_tensors

TOLD = {
    "meat": ("meat", ""),
    "packnet": ("packnet", ""),
    "toast": ("toast", ""),
    "linear": ("linear", ""),
    "supsup_nn": ("supsup_nn", ""),
    "lwf": ("lwf", ""),
}
SUMS = {"slda": ("slda", "task"), "ranpac": ("ranpac", "task"), "aper": ("aper", "task")}
ALIGNED = {"slca": ("slca", "class")}
FOUND_OUT = {"icarl": ("icarl", "class"), "supsup": ("supsup", "class")}
OUTPUTS = {"supsup": {"outputs": 5}, "supsup_nn": {"outputs": 5}}
CHAINS = ["packnet", "lwf"]
SHARING = ["supsup_nn", *SUMS, *ALIGNED]  # all tasks use the carried state


@pytest.fixture(scope="module")
def runs(lab: Any) -> Any:
    made: dict[str, Finished] = {}

    def run(name: str) -> Finished:
        if name not in made:
            method, scenario = (TOLD | FOUND_OUT | SUMS | ALIGNED)[name]
            made[name] = finished(lab, method, scenario, OUTPUTS.get(name), epochs=1)
        return made[name]

    return run


def mixed(run: Finished, count: int = 5) -> tuple[list[bytes], list[str]]:
    """Return images of both tasks in random order, and their tasks."""
    both = [(data, name) for name in run.names for data in run.images(name)[0][:count]]
    order = [
        both[i]
        for i in torch.randperm(len(both), generator=torch.Generator().manual_seed(3)).tolist()
    ]
    return [data for data, _ in order], [name for _, name in order]


# ---- answers -------------------------------------------------------------------------------------
@pytest.mark.few(4)
@pytest.mark.parametrize("name", [*TOLD, *FOUND_OUT])
def test_served_correct_counts_equal_recorded_evaluation(runs: Any, name: Any) -> None:
    run, right = runs(name), {}
    for task in run.names:
        images, classes = run.images(task)
        answers = run.served.predict(images, None if name in FOUND_OUT else task)
        right[task] = sum(
            (a.task, a.class_) == (task, c) for a, c in zip(answers, classes, strict=True)
        )
    assert right == run.recorded()


@pytest.mark.parametrize("name", [*TOLD, *FOUND_OUT])
def test_a_mixed_batch_is_answered_like_single_images(runs: Any, name: Any) -> None:
    run = runs(name)
    images, tasks = mixed(run)
    task_names = [None] * len(tasks) if name in FOUND_OUT else tasks
    together = run.served.predict(images, task_names)
    alone = [
        run.served.predict([image], [task])[0]
        for image, task in zip(images, task_names, strict=True)
    ]
    assert [(a.task, a.class_) for a in together] == [(a.task, a.class_) for a in alone]
    for a, b in zip(together, alone, strict=True):
        assert [*a.probabilities] == [*b.probabilities]
        assert a.probability == pytest.approx(b.probability, abs=1e-5)
        assert a.confidence == pytest.approx(b.confidence, abs=1e-4)
    if name not in FOUND_OUT:
        assert [a.task for a in together] == tasks
    assert [a.probability for a in together] == [
        next(iter(a.probabilities.values())) for a in together
    ]
    assert all(sum(a.probabilities.values()) == pytest.approx(1) for a in together)


def test_each_task_group_takes_one_forward_pass(runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runs("packnet")
    images, tasks = mixed(run)
    batch_sizes: list[int] = []
    forward: Callable[[torch.Tensor], torch.Tensor] = run.served.method.features

    def features(images: torch.Tensor) -> torch.Tensor:
        batch_sizes.append(len(images))
        return forward(images)

    monkeypatch.setattr(run.served.method, "features", features)
    run.served.predict(images, tasks)
    assert sorted(batch_sizes) == [5, 5]


def test_shared_computation_of_tasks_runs_once(runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, owner, function in (
        ("linear", "method", "features"),
        ("toast", "top_down", "first_pass"),
    ):
        run = runs(name)
        images, tasks = mixed(run)
        seen: list[int] = []
        whose = run.served.method if owner == "method" else run.served.method.top_down
        forward = getattr(whose, function)
        monkeypatch.setattr(
            whose,
            function,
            lambda images, forward=forward, seen=seen: seen.append(len(images)) or forward(images),
        )
        run.served.predict(images, tasks)
        assert seen == [10]


def test_masked_tasks_are_served_compact(runs: Any) -> None:
    run = runs("meat")
    images, tasks = mixed(run)
    run.served.predict(images, tasks)
    assert {type(made).__name__ for made, _ in run.served.cache.items.values()} == {"CompactVit"}


@pytest.mark.parametrize("name", ["packnet", "meat"])
def test_folded_weight_cache_limit_does_not_change_answers(runs: Any, name: str) -> None:
    run = runs(name)
    images, tasks = mixed(run)
    expected = exact(run.served, images, tasks)
    size = max(bytes_ for _, bytes_ in run.served.cache.items.values())
    assert size > 0
    small, none = (Predictor(run.bundle, limit) for limit in (size, 0))
    assert (
        exact(small, images, tasks)
        == expected
        == exact(none, images, tasks)
        == exact(small, images, tasks)
    )
    assert none.cache.nbytes == 0
    assert 0 < small.cache.nbytes <= size


def test_cache_evicts_least_recently_used_task() -> None:
    computed: list[str] = []

    def compute(task: str) -> dict[str, torch.Tensor]:
        computed.append(task)
        return {"w": torch.zeros(1)}

    cache = LruCache(8, set())
    for task in ("a", "b", "a", "c", "a", "b"):
        cache.get(task, compute)
    assert computed == ["a", "b", "c", "b"]


def test_all_image_input_types_give_the_same_answer(runs: Any, tmp_path: Path) -> None:
    run = runs("meat")
    data = run.images("two")[0][0]
    picture = Image.open(io.BytesIO(data))
    (tmp_path / "a.png").write_bytes(data)
    kinds = [
        data,
        bytearray(data),
        str(tmp_path / "a.png"),
        tmp_path / "a.png",
        picture,
        np.asarray(picture.convert("RGB")),
    ]
    assert len({a.probability for a in run.served.predict(kinds, "two")}) == 1


def test_image_without_task_is_refused_or_gets_most_confident_head(runs: Any) -> None:
    run = runs("meat")
    images, _ = mixed(run)
    with pytest.raises(
        UserError,
        match=r"'meat' needs to be told the task of each image; there are two, three; or set "
        r"rule=confident",
    ):
        run.served.predict(images)
    answers = run.served.predict(images, rule="confident")
    heads = [run.served.predict(images, task) for task in run.names]
    for row, answer in enumerate(answers):
        best = max((head[row] for head in heads), key=lambda a: a.probability)
        assert (answer.task, answer.class_) == (best.task, best.class_)
        assert answer.confidence == answer.probability == pytest.approx(best.probability, abs=1e-5)


def test_request_may_mix_images_with_and_without_task(runs: Any) -> None:
    run = runs("icarl")
    images, tasks = mixed(run)
    some = [task if row % 2 else None for row, task in enumerate(tasks)]
    answers = run.served.predict(images, some)
    assert all(
        a.task == task and a.confidence == 1 for a, task in zip(answers, some, strict=True) if task
    )
    assert {
        len(a.probabilities) for a, task in zip(answers, some, strict=True) if task is None
    } == {5}


def test_top_limits_number_of_returned_probabilities(runs: Any) -> None:
    answer = runs("meat").served.predict(runs("meat").images("three")[0][:1], "three", top=2)[0]
    assert len(answer.probabilities) == 2
    assert answer.class_ == next(iter(answer.probabilities))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tasks": "tow"}, "task 'tow' is not served; did you mean two"),
        ({"tasks": ["two", "two"]}, "there are 1 images and 2 tasks"),
        ({"tasks": "two", "rule": "best"}, "rule is 'best'; give one of refuse, confident"),
        ({"tasks": "two", "top": -1}, "top is -1"),
    ],
)
def test_invalid_prediction_request_raises_user_error(
    runs: Any, arguments: Any, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        runs("meat").served.predict([np.zeros((4, 4, 3), np.uint8)], **arguments)


# ---- folders -------------------------------------------------------------------------------------
@pytest.fixture
def folder(runs: Any, tmp_path: Path) -> Any:
    def write(name: str) -> str:
        runs(name).bundle.write(str(tmp_path / name))
        return str(tmp_path / name)

    return write


def test_images_are_resized_as_in_training(folder: Any) -> None:
    path = Path(folder("linear")) / "model.json"
    body = json.loads(path.read_text())
    assert body["preprocessing"]["interpolation"] == "bicubic"
    predictor = Predictor.open(str(path.parent))
    image = np.random.default_rng(0).integers(0, 256, (50, 70, 3), np.uint8)
    for interpolation in ("bicubic", "bilinear"):
        predictor.augment.interpolation = interpolation
        square = resize_square(
            Image.fromarray(image), predictor.augment.size_in, predictor.augment.interpolation
        )
        pixels = predictor.read_pixels([image], Limits())
        assert np.array_equal(pixels[0], square.transpose(2, 0, 1))


def test_model_folder_answers_like_the_store(runs: Any, folder: Any) -> None:
    for name in ("meat", "packnet"):
        images, tasks = mixed(runs(name))
        assert exact(Predictor.open(f"file://{folder(name)}"), images, tasks) == exact(
            runs(name).served, images, tasks
        )


def test_folder_contains_no_pickle_and_no_store_path(runs: Any, folder: Any) -> None:
    model_folder = Path(folder("packnet"))
    names = {str(p.relative_to(model_folder)) for p in model_folder.rglob("*") if p.is_file()}
    assert names == {
        "model.json",
        "backbone.safetensors",
        "tasks/two.safetensors",
        "tasks/three.safetensors",
        "carried/retrain.safetensors",
    }
    assert runs("packnet").run.lab.store.storage not in (model_folder / "model.json").read_text()


@pytest.mark.parametrize(
    "file",
    ["backbone.safetensors", "tasks/two.safetensors", "carried/retrain.safetensors", "model.json"],
)
@pytest.mark.parametrize("damage", ["changed", "cut", "gone"])
def test_damaged_model_folder_file_is_named_in_error(folder: Any, file: str, damage: str) -> None:
    model_folder = Path(folder("packnet"), file)
    data = model_folder.read_bytes()
    model_folder.unlink() if damage == "gone" else model_folder.write_bytes(
        data[:-1] if damage == "cut" else data.replace(b"0", b"1", 1)
    )
    with pytest.raises(UserError, match=file):
        Predictor.open(str(model_folder.parents["/" in file]))


def test_bundle_is_not_written_into_existing_nonempty_folder(folder: Any, runs: Any) -> None:
    with pytest.raises(UserError, match="exists already and is not an empty folder"):
        runs("meat").bundle.write(folder("meat"))


class Retuned(MeatSettings):
    """Settings of a later version, with a changed default and a new setting."""

    alpha: float = 77.0
    fresh: Annotated[int, Neutral(0)] = 5


def test_folder_is_served_with_its_written_settings(
    folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_folder = folder("meat")
    before = Bundle.open(model_folder).method().settings
    assert (
        json.loads(Path(model_folder, "model.json").read_text())["settings"]["alpha"]
        == before.alpha
    )
    monkeypatch.setattr(METHODS["meat"], "Settings", Retuned)
    after = Bundle.open(model_folder).method().settings
    assert (after.alpha, after.fresh) == (before.alpha, 0)


def test_task_with_partially_written_settings_is_equal(folder: Any) -> None:
    """An older version wrote only the settings in the config."""
    model_folder = folder("meat")
    bundle = Bundle.open(model_folder)
    older = replace(bundle, body={**bundle.body, "settings": {}})
    data = single_tasks.export_task(older, "two")
    single_tasks.remove_task(model_folder, "two")
    assert single_tasks.import_task(model_folder, data, "two.task").name == "two"


# ---- adding and removing tasks -------------------------------------------------------------------
@pytest.mark.parametrize("name", ["meat", "toast", "linear", "supsup", *SHARING, *CHAINS])
def test_removed_task_is_gone_and_others_answer_as_before(
    runs: Any, folder: Any, name: Any
) -> None:
    model_folder, images = folder(name), runs(name).images("three")[0]
    before = exact(Predictor.open(model_folder), images, "three")
    message = single_tasks.remove_task(model_folder, "two")
    left = Predictor.open(model_folder)
    assert exact(left, images, "three") == before
    with pytest.raises(UserError, match="task 'two' is not served"):
        left.predict(images, "two")
    assert not Path(model_folder, "tasks/two.safetensors").exists()
    assert ("stay, because later tasks depend on them" in message) == (name in [*CHAINS, *SHARING])
    carried = [
        t for p in Path(model_folder).glob("carried/*") for t in load_tensors(p.read_bytes(), "")[0]
    ]
    assert not [name for name in carried if name.startswith("heads/two/")]


def test_task_that_other_tasks_need_cannot_be_removed(runs: Any, folder: Any) -> None:
    with pytest.raises(UserError, match="task 'two' cannot be removed, because other tasks"):
        single_tasks.remove_task(folder("icarl"), "two")


@pytest.mark.parametrize("name", ["meat", "toast", "linear", "supsup"])
def test_exported_and_reimported_task_gives_same_answers(runs: Any, folder: Any, name: str) -> None:
    model_folder = folder(name)
    images, tasks = mixed(runs(name))
    before = exact(Predictor.open(model_folder), images, tasks)
    bytes_before = Path(model_folder, "tasks/two.safetensors").read_bytes()
    data = single_tasks.export_task(Bundle.open(model_folder), "two")
    single_tasks.remove_task(model_folder, "two")
    assert single_tasks.import_task(model_folder, data, "two.task").classes == ("0", "1")
    assert Path(model_folder, "tasks/two.safetensors").read_bytes() == bytes_before
    assert [t.name for t in Bundle.open(model_folder).tasks] == ["three", "two"]
    assert exact(Predictor.open(model_folder), images, tasks) == before
    with pytest.raises(UserError, match="serves a task 'two' already"):
        single_tasks.import_task(model_folder, data, "two.task")


def test_incompatible_task_or_invalid_file_is_not_imported(
    runs: Any, folder: Any, lab: Any
) -> None:
    data = single_tasks.export_task(Bundle.open(folder("meat")), "two")
    for name in CHAINS:
        with pytest.raises(UserError, match="trains weights that its tasks share"):
            single_tasks.import_task(folder(name), data, "f")
    with pytest.raises(
        UserError, match=r"exported from a model whose method is meat, but in .* it is linear"
    ):
        single_tasks.import_task(folder("linear"), data, "f")
    with pytest.raises(UserError, match="is not an exported task"):
        single_tasks.import_task(str(Path(folder("toast"))), b"nonsense", "f")


def test_a_task_of_an_unknown_method_is_not_imported(
    folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = folder("meat")
    data = single_tasks.export_task(Bundle.open(model), "two")
    monkeypatch.setattr(single_tasks, "METHODS", {})
    with pytest.raises(UserError, match="this version of Accrete has no method 'meat'"):
        single_tasks.import_task(model, data, "f")


def forged(data: bytes, tensors: dict[str, Any] | None = None, **changes: Any) -> bytes:
    """Return an exported task with changed tensors, or with changed fields in its two headers."""
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    header, needs = json.loads(metadata["accrete"]), json.loads(metadata["accrete.needs"])
    for fields in (header, needs):
        fields |= {name: value for name, value in changes.items() if name in fields}
    stored = {**load_tensors(data, "")[0], **(tensors or {})}
    plain = safetensors.torch.save(stored, {"accrete": json.dumps(header, sort_keys=True)})
    needs["state"] = hashlib.sha256(plain).hexdigest()
    texts = {"accrete": header, "accrete.needs": needs}
    return safetensors.torch.save(
        stored, {name: json.dumps(body, sort_keys=True) for name, body in texts.items()}
    )


HEAD = torch.zeros(2, 16)
FORGERIES: dict[str, dict[str, Any]] = {
    "a class that steers the terminal": {"classes": ["\x1b[31m", "y"]},
    "no classes": {"classes": []},
    "numbers as classes": {"classes": [0, 1]},
    "one class twice": {"classes": ["0", "0"]},
    "an unknown role": {"role": "evil"},
    "a list as name": {"task": ["two"]},
    "a name that leads out": {"task": "../two"},
    "a card that is not a text": {"card": ["x"]},
    "a head of three rows": {
        "tensors": {"head/weight": torch.zeros(3, 16), "head/bias": torch.zeros(3)}
    },
    "a head without rows": {"tensors": {"head/weight": HEAD[:0], "head/bias": HEAD[:0, 0]}},
    "a head of numbers": {"tensors": {"head/weight": HEAD[0, 0]}},
    "NaN": {"tensors": {"head/weight": HEAD * float("nan")}},
    "infinity": {"tensors": {"head/bias": HEAD[:, 0] + float("inf")}},
    "numbers that overflow": {"tensors": {"head/weight": HEAD + 3e38}},
    "numbers that vanish": {"tensors": {"head/weight": HEAD.double() + 1e-320}},
    "whole numbers": {"tensors": {"head/weight": HEAD.long()}},
}


@pytest.mark.parametrize("case", FORGERIES)
def test_a_forged_task_changes_nothing(folder: Any, case: str) -> None:
    model_folder = folder("linear")
    data = single_tasks.export_task(Bundle.open(model_folder), "two")
    single_tasks.remove_task(model_folder, "two")
    before = {path: path.read_bytes() for path in Path(model_folder).rglob("*") if path.is_file()}
    with pytest.raises(UserError):
        single_tasks.import_task(model_folder, forged(data, **FORGERIES[case]), "two.task")
    after = {path: path.read_bytes() for path in Path(model_folder).rglob("*") if path.is_file()}
    assert after == before
    assert single_tasks.import_task(model_folder, forged(data), "two.task").name == "two"


@pytest.mark.parametrize("case", ["a head of three rows", "NaN", "numbers that vanish"])
def test_a_forged_folder_is_not_served(folder: Any, case: str) -> None:
    model_folder = folder("linear")
    bundle = Bundle.open(model_folder)
    state = bundle.state("two")
    tensors = {**state.head}
    for name, tensor in FORGERIES[case]["tensors"].items():
        tensors[name.removeprefix("head/")] = tensor
    data = replace(state, head=tensors).to_bytes()
    changed = bundle.with_tasks(bundle.tasks, {model_file.state_file("two"): data})
    Path(model_folder, model_file.state_file("two")).write_bytes(data)
    model_file.write_model(model_folder, changed.body)
    with pytest.raises(UserError, match=r"task 'two'"):
        Bundle.open(model_folder).method()


def test_existing_task_is_replaced_only_with_replace_option(folder: Any) -> None:
    model_folder = folder("linear")
    names = [task.name for task in Bundle.open(model_folder).tasks]
    data = single_tasks.export_task(Bundle.open(model_folder), "two")
    other = forged(data, {"head/bias": torch.ones(2)})
    with pytest.raises(UserError, match="add `--replace` to replace it"):
        single_tasks.import_task(model_folder, other, "two.task")
    single_tasks.import_task(model_folder, other, "two.task", replace=True)
    changed = Bundle.open(model_folder)
    assert [task.name for task in changed.tasks] == names
    assert changed.state("two").head["bias"].tolist() == [1, 1]


def import_as(model_folder: str, data: bytes, name: str) -> str:
    """Import a task in a separate process."""
    return single_tasks.import_task(model_folder, forged(data, task=name), name).name


@pytest.mark.slow
def test_concurrent_task_imports_and_removals_all_take_effect(folder: Any) -> None:
    model_folder = folder("linear")
    data = single_tasks.export_task(Bundle.open(model_folder), "two")
    with ProcessPoolExecutor(4, small_run.processes()) as pool:
        new = [f"new{number}" for number in range(8)]
        imported = list(pool.map(import_as, [model_folder] * 8, [data] * 8, new))
        removed = list(pool.map(single_tasks.remove_task, [model_folder] * 4, new[:4]))
    assert imported == new
    assert {note.split(" (")[0] for note in removed} <= {
        "",
        "earlier versions with it were deleted",
    }
    served = {task.name for task in Bundle.open(model_folder).tasks}
    assert served >= {"two", *new[4:]}
    assert not served & {*new[:4]}
    assert not Path(model_folder, versions.LOCK).exists()


def test_request_with_too_many_images_is_refused(runs: Any) -> None:
    image = np.zeros((4, 4, 3), np.uint8)
    with pytest.raises(UserError, match="3 images in one request are more than 2"):
        runs("meat").served.predict([image] * 3, "two", limits=Limits(images=2))


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"../../precious.txt": {"bytes": 1, "sha256": "0"}}},
        {"files": {"/etc/passwd": {"bytes": 1, "sha256": "0"}}},
        {"carried": {"retrain": "../other.safetensors"}},
        {"tasks": None},
        {"tasks": [{"name": "two"}]},
        {"method": ["packnet"]},
        {"files": []},
        {"tasks": [{"name": "../two", "classes": ["x"], "card": "c", "data": "d", "role": "task"}]},
    ],
)
def test_untrusted_model_folder_is_confined_and_complete(folder: Any, change: Any) -> None:
    model_folder = Path(folder("packnet"))
    precious = model_folder.parent.parent / "precious.txt"
    precious.write_text("mine")
    body = json.loads((model_folder / "model.json").read_text())
    merged = {
        **body,
        **{k: {**body[k], **v} if isinstance(v, dict) else v for k, v in change.items()},
    }
    model_file.write_model(str(model_folder), model_file.sealed(merged))
    with pytest.raises(UserError, match=r"model\.json"):
        single_tasks.remove_task(str(model_folder), "two")
    with pytest.raises(UserError, match=r"model\.json"):
        Bundle.open(str(model_folder)).write(str(model_folder.parent / "copy"))
    assert precious.read_text() == "mine"
    precious.unlink()


def test_state_of_another_task_is_refused(folder: Any) -> None:
    model_folder = Path(folder("meat"))
    body = json.loads((model_folder / "model.json").read_text())
    body["tasks"][0]["classes"] = body["tasks"][0]["classes"][:1]
    model_file.write_model(str(model_folder), model_file.sealed(body))
    with pytest.raises(UserError, match="other classes"):
        Predictor.open(str(model_folder))
