"""Tests of the train loop: interruptions, ranks and earlier tasks do not change the results."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from rank_runs import Steps, on_ranks, small_batches

from pipeline.testing.lab import OPTIMIZERS, TINY, Lab, Run, again, history
from pipeline.testing.promises import CARRIED, STATE, Interrupted, interrupted_after
from workers import loop, preemption
from workers.dist import GradientSum, Group
from workers.errors import UserError
from workers.job import StageJob
from workers.methods.base import Progress
from workers.storage import checkpoint
from workers.storage.artifact import Artifact
from workers.storage.lock import stage_lock

AUGMENTED = {
    "val_fraction": 0.125,
    "crop": "pad",
    "flip": 0.5,
    "mixup": 0.2,
    "randaugment": 2,
    "erase": 0.5,
    "smoothing": 0.1,
}
# three full batches and one more sample: in the last step, one of two ranks has no row
SAMPLES, BATCH = (
    70,
    23,
)
PER_EPOCH = 4


def augmented(lab: Lab, method: str, optimizer: str = "adamw", **train: Any) -> Run:
    """Return a run with all random operations and `keep: best`. Its first task has been trained
    without interruption."""
    settings = {**OPTIMIZERS[optimizer], "batch_size": BATCH, "keep": "best", **train}
    run = lab.run_of(method, settings, data=AUGMENTED, backbone={**TINY, "drop_path": 0.3})
    run.trained(0)
    return run


def results(artifact: Artifact) -> tuple[Any, ...]:
    return artifact.read(STATE), artifact.read(CARRIED), history(artifact)


def folder_of(job: StageJob) -> Path:
    return Path(checkpoint.get_folder(job.root, job.key))


def interrupt(lab: Lab, job: StageJob, steps: int) -> None:
    with pytest.raises(Interrupted), interrupted_after(steps):
        lab.stage(job)


# ---- threads -----------------------------------------------------------------------------------
def test_equal_thread_counts_give_equal_bytes(
    lab: Lab,
) -> None:
    """README states this for `cluster.cpus_per_worker`. The test trains few steps with SGD: more
    steps amplify rounding differences, and Adam amplifies them even more."""
    run = lab.run("finetune", "sgd", epochs=1)
    (job,), artifact_files = run.stages(0), []
    run.prepare(job)
    try:
        for threads in (1, 1, 2):
            torch.set_num_threads(threads)
            artifact_files.append(loop.train_task(job, Group(), lambda event: None)[0])
    finally:
        torch.set_num_threads(1)
    one, same, two = (safetensors.torch.load(files[CARRIED]) for files in artifact_files)
    assert one.keys() == same.keys() == two.keys()
    assert len(one) > 10
    for name, tensor in one.items():
        assert torch.equal(tensor, same[name]), name
        if tensor.is_floating_point():
            limit = 1e-4 * float(tensor.abs().max())
            assert torch.allclose(tensor, two[name], rtol=0, atol=limit), name


# ---- interruptions -------------------------------------------------------------------------------
@pytest.mark.few(3)
@pytest.mark.parametrize("method", ["finetune", "meat"])
@pytest.mark.parametrize(
    ("steps", "position"),
    [(2, (0, 2)), (PER_EPOCH, (1, 0)), (PER_EPOCH + 3, (1, 3)), (2 * PER_EPOCH, (2, 0))],
)
def test_stage_resumes_at_its_step_with_equal_bytes(
    lab: Lab, method: str, steps: int, position: tuple[int, int]
) -> None:
    run = augmented(lab, method)
    job = again(run.stages(0)[0], f"at-{steps}", checkpoint_s=1e-9)
    interrupt(lab, job, steps)
    mark = checkpoint.load_checkpoint(job.root, job.key)
    assert mark is not None
    assert (mark.epoch, mark.step) == position
    with interrupted_after(1000) as done:
        resumed = lab.stage(job)
    assert len(done) == 3 * PER_EPOCH - steps
    assert results(resumed) == results(run.trained(0))


def test_repeatedly_interrupted_stage_gives_equal_results(lab: Lab) -> None:
    run = augmented(lab, "finetune")
    job = again(run.stages(0)[0], "often", checkpoint_s=1e-9)
    for _ in range(3 * PER_EPOCH - 1):
        interrupt(lab, job, 1)
    with interrupted_after(1) as done:
        resumed = lab.stage(job)
    assert len(done) == 1
    assert results(resumed) == results(run.trained(0))


@pytest.mark.parametrize(("steps", "position"), [(2, (0, 2)), (PER_EPOCH, (1, 0))])
def test_preempted_stage_checkpoints_and_resumes(
    lab: Lab, steps: int, position: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preemption notice causes a checkpoint even if checkpoints are turned off."""
    run = augmented(lab, "meat")
    job = again(run.stages(0)[0], f"left-at-{steps}", checkpoint_s=0.0)
    step, made = loop.train_step, list[int]()

    def interrupted_step(*args: Any) -> Any:
        made.append(1)
        if len(made) == steps:
            preemption.requested.set()
        return step(*args)

    monkeypatch.setattr(loop, "train_step", interrupted_step)
    with pytest.raises(preemption.Preempted, match=job.id):
        lab.stage(job)
    preemption.requested.clear()
    assert len(made) == steps, "the stage must stop after the current step"
    mark = checkpoint.load_checkpoint(job.root, job.key)
    assert mark is not None
    assert (mark.epoch, mark.step) == position
    resumed = lab.stage(job)
    assert len(made) == 3 * PER_EPOCH
    assert results(resumed) == results(run.trained(0))


def flip_a_bit(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 4
    path.write_bytes(data)


DAMAGES: dict[str, Any] = {
    "a flipped bit in the tensors": ("*.safetensors", lambda path: flip_a_bit(path, 0.9)),
    "a flipped bit in the header": ("*.safetensors", lambda path: flip_a_bit(path, 0.02)),
    "a truncated file": ("*.safetensors", lambda path: path.write_bytes(path.read_bytes()[:-100])),
    "a missing file": ("*.safetensors", Path.unlink),
    "a flipped bit in the pointer": ("latest.json", lambda path: flip_a_bit(path, 0.5)),
    "an empty pointer": ("latest.json", lambda path: path.write_bytes(b"")),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_restarts_stage_with_equal_bytes(lab: Lab, damage: str) -> None:
    run = augmented(lab, "linear")
    job = again(run.stages(0)[0], damage.replace(" ", "-"), checkpoint_s=1e-9)
    interrupt(lab, job, 6)
    pattern, harm = DAMAGES[damage]
    (path,) = folder_of(job).glob(pattern)
    harm(path)
    with interrupted_after(1000) as done:
        stored = lab.stage(job)
    assert len(done) == 3 * PER_EPOCH
    assert results(stored) == results(run.trained(0))


def test_finished_stage_deletes_checkpoint_and_does_not_rerun(lab: Lab) -> None:
    job = again(augmented(lab, "linear").stages(0)[0], "clean", checkpoint_s=1e-9)
    interrupt(lab, job, 2)
    assert folder_of(job).exists()
    lab.stage(job)
    assert not folder_of(job).exists()
    with interrupted_after(0):
        lab.stage(job)


def test_checkpoints_are_written_no_more_often_than_asked_for(lab: Lab) -> None:
    for seconds in (0.0, 3600.0):
        job = again(augmented(lab, "linear").stages(0)[0], f"every-{seconds}", checkpoint_s=seconds)
        interrupt(lab, job, PER_EPOCH + 2)
        assert not folder_of(job).exists()


def test_checkpoint_reports_are_rate_limited(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def reported(name: str) -> list[dict[str, int]]:
        job = again(augmented(lab, "linear").stages(0)[0], name, checkpoint_s=1e-9)
        bodies: list[dict[str, Any]] = []
        loop.run_stage(job, Group(), bodies.append)
        return [body["checkpoint"] for body in bodies if "checkpoint" in body]

    assert reported("few") == [{"epoch": 0, "step": 1}]
    monkeypatch.setattr(loop, "CHECKPOINT_REPORT_S", 0.0)
    each = reported("each")
    assert each[0] == {"epoch": 0, "step": 1}
    assert {"epoch": 1, "step": 0} in each
    assert len(each) > PER_EPOCH


def test_stage_computed_by_another_process_is_reported_as_waiting(lab: Lab) -> None:
    job = again(augmented(lab, "linear").stages(0)[0], "waiting")
    bodies: list[dict[str, Any]] = []
    waits = threading.Event()

    def report(body: dict[str, Any]) -> None:
        bodies.append(body)
        waits.set()

    with ThreadPoolExecutor(1) as threads:
        with stage_lock(job.root, job.key):
            second = threads.submit(loop.run_stage, job, Group(), report)
            assert waits.wait(60)
        second.result(60)
    assert bodies[0] == {"waiting_for": "another process, which computes this stage"}


# ---- one task after another ----------------------------------------------------------------------
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_momentum_never_crosses_tasks(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    run, states, step = augmented(lab, "finetune", optimizer, epochs=1), [], loop.train_step

    def noted(method: Any, optimizer: Any, *rest: Any) -> Any:
        states.append(len(optimizer.state))
        return step(method, optimizer, *rest)

    monkeypatch.setattr(loop, "train_step", noted)
    run.trained(1)
    assert states[0] == 0
    assert all(states[1:])


def test_keep_best_stores_the_epoch_with_best_validation_accuracy(lab: Lab) -> None:
    """With this learning rate, epochs after the best one are worse; the best one is kept."""
    run = augmented(lab, "linear", "sgd", keep="best", epochs=4, lr=0.03)
    right = [row["val_correct"] for row in history(run.trained(0))]
    best = right.index(max(right))
    shorter = again(run.stages(0)[0], "until-best", checkpoint_s=1e-9)
    interrupt(lab, shorter, (best + 1) * PER_EPOCH)
    mark = checkpoint.load_checkpoint(shorter.root, shorter.key)
    assert mark is not None
    best_head = {
        name.removeprefix("model/heads.layers.0."): t
        for name, t in mark.tensors.items()
        if name.startswith("model/")
    }
    head = run.state(0).head
    assert best < len(right) - 1, "the test needs a best epoch that is not the last"
    assert all(torch.equal(head[name], best_head[name]) for name in head)


def test_non_finite_loss_stores_no_result(lab: Lab) -> None:
    with pytest.raises(
        UserError,
        match=r"^stage finetune/two/train: the loss became (nan|inf), .*lower methods\.\S+\.lr",
    ) as caught:
        augmented(lab, "finetune", "sgd", lr=1e30)
    assert "\n" not in str(caught.value)
    job = next(reversed(lab.runs.values())).jobs["finetune/two/train"]
    assert job.train.lr == 1e30
    assert Artifact.open(job.root, job.key) is None


# ---- ranks ---------------------------------------------------------------------------------------
RANKED = {
    "finetune": ("finetune", "sgd", {}),
    "finetune accumulated": ("finetune", "sgd", {"accumulate": 2}),
    "meat": ("meat", "sgd", {}),
    "finetune on adamw": ("finetune", "adamw", {"epochs": 1}),
    "meat on adamw": ("meat", "adamw", {"epochs": 1}),
}


@pytest.fixture(scope="module")
def ranked(lab: Lab) -> dict[str, tuple[Run, StageJob, list[Steps]]]:
    """Run all two-rank stages in one start of two processes.

    Returns label -> (one-rank run, two-rank stage, steps of each rank).
    """
    runs = {
        label: augmented(lab, method, optimizer, keep="last", **train)
        for label, (method, optimizer, train) in RANKED.items()
    }
    jobs = {label: again(run.stages(0)[0], "two-ranks") for label, run in runs.items()}
    for label in ("finetune", "meat"):
        with small_batches():
            runs[label].evaluated(1)
        runs[f"evaluate {label}"], jobs[f"evaluate {label}"] = (
            runs[label],
            again(runs[label].evaluate_job(1), "two-ranks"),
        )
    runs["elastic"], jobs["elastic"] = (
        runs["finetune"],
        again(runs["finetune"].stages(0)[0], "elastic", checkpoint_s=1e-9),
    )
    done = on_ranks(
        list(jobs.values()), 2, lab.folder / "ranks", {jobs["elastic"].key: PER_EPOCH + 2}
    )
    return {
        label: (runs[label], jobs[label], [rank[i] for rank in done])
        for i, label in enumerate(jobs)
    }


@pytest.mark.few(4)
@pytest.mark.parametrize("label", RANKED)
def test_two_ranks_give_the_results_of_one_rank(ranked: dict[str, Any], label: str) -> None:
    """The results are equal up to the order of summation, because all random draws are the same:
    augmentation, mixing, drop path and Gumbel noise."""
    run, job, _ = ranked[label]
    close(history(run.trained(0)), history(Artifact.need(job.root, job.key)), 1e-3)
    for one, two in zip(
        tensors_of(run.trained(0)), tensors_of(Artifact.need(job.root, job.key)), strict=True
    ):
        if one.dtype == torch.uint8 or one.dtype == torch.bool:
            assert (one != two).float().mean() < 1e-3
        elif (
            job.train.optimizer == "sgd"
        ):  # Adam turns the rounding of vanishing gradients into full steps
            assert torch.allclose(one, two, atol=1e-4)


def tensors_of(artifact: Artifact) -> list[torch.Tensor]:
    from workers.storage.taskstate import load_tensors

    return [
        t
        for name in (STATE, CARRIED)
        for _, t in sorted(load_tensors(artifact.read(name), name)[0].items())
    ]


def close(one: list[dict[str, Any]], two: list[dict[str, Any]], tolerance: float) -> None:
    for a, b in zip(one, two, strict=True):
        counted = a.pop("val_correct"), b.pop("val_correct")
        assert abs(counted[0] - counted[1]) <= 1
        assert a == pytest.approx(b, abs=tolerance)


@pytest.mark.parametrize("label", RANKED)
def test_ranks_take_equally_many_steps_and_share_each_batch(
    ranked: dict[str, Any], label: str
) -> None:
    _, job, (first, second) = ranked[label]
    assert len(first.rows) == len(second.rows) == job.train.epochs * PER_EPOCH
    for step, (first_rows, second_rows) in enumerate(zip(first.rows, second.rows, strict=True)):
        size = SAMPLES % BATCH if step % PER_EPOCH == PER_EPOCH - 1 else BATCH
        assert sorted(first_rows + second_rows) == list(range(size))
        assert first.weights[step] + second.weights[step] == pytest.approx(1)
    assert second.rows[PER_EPOCH - 1] == [], "the second rank has no row of the last batch"


@pytest.mark.parametrize("label", RANKED)
def test_step_synchronises_only_trained_parameters(ranked: dict[str, Any], label: str) -> None:
    _, job, ranks = ranked[label]
    manifest = Artifact.need(job.root, job.key).manifest
    for steps in ranks:
        assert steps.synchronised == [4 * steps.trainable] * len(steps.rows)
        assert steps.trainable == manifest["trained_parameters"]


@pytest.mark.parametrize("method", ["finetune", "meat"])
def test_evaluation_on_two_ranks_is_bit_identical_to_one(
    ranked: dict[str, Any], method: str
) -> None:
    run, job, _ = ranked[f"evaluate {method}"]
    measured = Artifact.need(job.root, job.key)
    assert measured.manifest["result"] == run.evaluated(1)
    assert measured.read("predictions.parquet") == run.artifact(run.evaluate_job(1)).read(
        "predictions.parquet"
    )


def test_one_rank_resumes_an_interrupted_stage_of_two_ranks(
    lab: Lab, ranked: dict[str, Any]
) -> None:
    run, job, (first, _) = ranked["elastic"]
    assert len(first.rows) == PER_EPOCH + 2
    with interrupted_after(1000) as done:
        resumed = lab.stage(job)
    # two ranks agree to stop only at the end of an epoch, or every AGREE_STEPS steps
    assert len(done) == 2 * PER_EPOCH
    for one, two in zip(tensors_of(run.trained(0)), tensors_of(resumed), strict=True):
        assert torch.allclose(one, two, atol=1e-4)


def test_reported_loss_of_two_ranks_counts_restored_sums_once() -> None:
    """Before an interruption, 20 images had a mean loss of 3. Then 10 images, half on this rank,
    have a mean loss of 1."""
    first_rank = Group(rank=0, world=2)
    losses = loop.LossMeter({"loss": 60.0, "images": 20}, first_rank)
    losses.add({"loss": torch.tensor(0.5)}, 10)
    assert losses.estimate() == pytest.approx((60 + 10) / 30)


def test_a_rank_alone_needs_no_process_group() -> None:
    assert not torch.distributed.is_initialized()
    assert GradientSum(Group(), [torch.zeros(3)]).finish() == 0
    assert Group().gather(5) == [5]


# ---- compiled blocks -----------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("method", ["hat", "dytox", "podnet"])
def test_blocks_run_compiled_for_every_way_of_calling_them(
    lab: Lab, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The methods replace weights, or call forward_features or forward_intermediates. In each case,
    the blocks are compiled and the results stay the same."""
    plain, seen = lab.run(method, epochs=1), list[str]()

    def backend(graph: Any, examples: Any) -> Any:
        seen.append(str(graph.graph))
        return graph.forward

    compiled = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda module: compiled(module, backend=backend)
    )
    torch.compiler.reset()
    run = lab.run(method, epochs=1, compile=True)
    for task in range(2):
        want, got = plain.carried(task).tensors, run.carried(task).tensors
        assert want.keys() == got.keys()
        assert all(
            torch.allclose(want[name].float(), got[name].float(), atol=1e-4) for name in want
        )
    assert any("scaled_dot_product_attention" in graph for graph in seen)


# ---- the preemption notice -----------------------------------------------------------------------
def test_sigterm_requests_preemption_and_previous_handler_is_restored() -> None:
    heard: list[int] = []
    usual = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    end = preemption.listen()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.requested.is_set()
        assert heard == []
        end()
        assert not preemption.requested.is_set(), (
            "the notice must not reach the next run in this process"
        )
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
        assert not preemption.requested.is_set()
    finally:
        preemption.requested.clear()
        signal.signal(signal.SIGTERM, usual)


def test_a_second_sigterm_ends_the_process_at_once() -> None:
    child = os.fork()
    if not child:
        preemption.listen()
        os.kill(os.getpid(), signal.SIGTERM)
        if preemption.requested.is_set():  # the first signal has not ended the process
            os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM


def test_the_first_sigterm_does_not_end_the_process() -> None:
    child = os.fork()
    if not child:
        preemption.listen()
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_listen_does_nothing_outside_the_main_thread() -> None:
    before, notes = signal.getsignal(signal.SIGTERM), []
    thread = threading.Thread(target=lambda: notes.append(preemption.listen()))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == before
    preemption.requested.set()  # as by a listener in the main thread
    try:
        notes[0]()
        assert preemption.requested.is_set()
    finally:
        preemption.requested.clear()


def test_progress_reports_share_of_time_spent_waiting_for_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    reports: list[dict[str, Any]] = []
    job: Any = SimpleNamespace(id="meat/a/train")
    meter = loop.ProgressMeter(job, job, 1, reports.append)
    losses = loop.LossMeter({}, Group())

    def batches() -> Iterator[Any]:
        for seconds in (0.3, 0.0, 0.9):  # time to make a batch
            now[0] += seconds
            yield seconds

    for step, _ in enumerate(meter.timed(batches())):
        now[0] += 0.9  # time of the step
        losses.add({"loss": torch.tensor(1.0)}, 4)
        meter.add_step(Progress(0, step, 1, 3), 4, losses)
    assert [report["data_wait"] for report in reports] == pytest.approx([0.25, 0.9 / 2.7])
