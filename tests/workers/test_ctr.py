"""CTR: what is locked and what is forgotten, masks and sizes; and the knowledge-sharing module against its equations, written out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workers.data.draw import Draw
from workers.errors import UserError
from workers.job import BackboneSettings, DataSettings, Task, TrainSettings
from workers.methods.base import Batch, Progress, Rates
from workers.methods.ctr import CtrSettings, CtrTsm, masked_bottleneck
from workers.methods.ctr_full import KERNELS, Capsules, CtrFull, CtrFullSettings, capsule_bottleneck, capsules, knowledge, squash, strongest
from workers.model.masks import annealed
from workers.model.protect import Protector
from workers.model.vit import build, digest_of
from workers.taskstate import Carried, TaskState

TINY = BackboneSettings(img_size=16, options={"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2})
ONE = Task("one", "card", "", ("a", "b"))
TWO = Task("two", "card", "", ("c", "d", "e"))  # more classes than before
THREE = Task("three", "card", "", ("f", "g"))
RATES = Rates(lr=1e-2, weight_decay=0.05, batch_size=8, mean_rate_steps=8.0)
IMAGES = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(5))
STEPS = 4  # of an epoch
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.05),
    "adam": lambda groups: torch.optim.Adam([g | {"weight_decay": 0.0} for g in groups], lr=1e-2),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2)}
SMALL: dict[type[CtrTsm], dict[str, Any]] = {CtrTsm: {"width": 8}, CtrFull: {"width": 8, "max_tasks": 3, "filters": 5}}


def vit() -> Any:
    torch.manual_seed(0)
    model = build(TINY)
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    return model


def ctr(cls: type[CtrTsm] = CtrTsm, **settings: Any) -> Any:
    return cls(vit(), cls.Settings(**(SMALL[cls] | settings)), seed=1)


def batch(step: int = 0, classes: int = 2, epoch: int = 0) -> Batch:
    rows = torch.arange(8)
    return Batch(IMAGES + step, rows % classes, torch.zeros(8, dtype=torch.long), Draw(7, epoch, step, rows, 8, torch.device("cpu")))


def started(method: CtrTsm, task: Task, carried: Carried | None = None, optimizer: str = "adamw") -> torch.optim.Optimizer:
    groups = method.begin(task, "train", carried, RATES, (task,))
    trained = {id(p) for g in groups for p in g["params"]}
    for p in method.parameters():
        p.requires_grad_(id(p) in trained)
    method.train()
    return OPTIMIZERS[optimizer](groups)


def stepped(method: CtrTsm, optimizer: torch.optim.Optimizer, epochs: int = 2) -> None:
    assert method.task is not None
    for epoch in range(epochs):
        for step in range(STEPS):
            progress = Progress(epoch, step, epochs, STEPS)
            optimizer.zero_grad()
            method.loss(batch(step, method.task.num_classes, epoch), progress)[0].backward()
            method.after_backward()
            optimizer.step()
            method.after_step(progress)


def stream(cls: type[CtrTsm] = CtrTsm, optimizer: str = "adamw", tasks: tuple[Task, ...] = (ONE, TWO)) -> list[tuple[TaskState, Carried]]:
    """Each task on a backbone of its own, as stages are; what is handed on goes through bytes."""
    done: list[tuple[TaskState, Carried]] = []
    for task in tasks:
        method = ctr(cls, mask_lr=0.05)
        stepped(method, started(method, task, Carried.from_bytes(done[-1][1].to_bytes()) if done else None, optimizer))
        done.append(method.finish())
    return done


def served(done: list[tuple[TaskState, Carried]], cls: type[CtrTsm] = CtrTsm) -> Any:
    """The method as it stands after the last of `done`."""
    method = ctr(cls)
    for state, _ in done:
        method.load(TaskState.from_bytes(state.to_bytes()))
    method.attach(Carried.from_bytes(done[-1][1].to_bytes()))
    return method.eval()


@torch.no_grad()
def answers(method: CtrTsm, task: Task = ONE) -> Tensor:
    return method.logits(IMAGES, task.name)


# ---- forgetting ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_answers_stay_bit_for_bit_through_later_tasks(optimizer: str):
    done = stream(optimizer=optimizer, tasks=(ONE, TWO, THREE))
    first, second = answers(served(done[:1])), answers(served(done[:2]), TWO)
    assert torch.equal(answers(served(done[:2])), first)
    assert torch.equal(answers(served(done)), first)
    assert torch.equal(answers(served(done), TWO), second)
    assert second.shape == (8, 3)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_without_putting_locked_entries_back_decay_changes_the_answers(optimizer: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Protector, "restore", lambda self: None)
    done = stream(optimizer=optimizer)
    assert not torch.equal(answers(served(done)), answers(served(done[:1])))


def test_without_gate_and_restore_the_first_task_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Protector, "restore", lambda self: None)
    monkeypatch.setattr(Protector, "gate", lambda self: None)
    done = stream(optimizer="adam")
    assert (answers(served(done)) - answers(served(done[:1]))).abs().max() > 1e-3


def test_locked_entries_get_no_gradient_and_stay_while_others_move():
    """And the other way round: what no earlier task uses is free to learn."""
    carried, method = stream(tasks=(ONE,))[0][1], ctr(mask_lr=0.05)
    optimizer = started(method, TWO, carried)
    locks = method.locks()
    assert {name: (n, n < p.numel()) for name, (p, lock) in locks.items() if (n := int(lock.expand_as(p).sum()))}.keys() == locks.keys()
    method.loss(batch(1, 3), Progress(0, 1, 1, STEPS))[0].backward()
    assert all((p.grad[lock.expand_as(p)] != 0).any() for p, lock in locks.values()), "else there is nothing to hold back"
    method.after_backward()
    assert all((p.grad[lock.expand_as(p)] == 0).all() for p, lock in locks.values())
    stepped(method, optimizer)
    for name, (p, lock) in locks.items():
        before, wide = carried.tensors[f"adapters.{name}"], lock.expand_as(p)
        assert torch.equal(p[wide], before[wide])
        assert (p[~wide] != before[~wide]).any()


def test_an_entry_is_locked_where_both_its_ends_are_used():
    """HAT's rule, 1 - min(out, in): out = (1, 0), in = (1, 0, 1)."""
    method = ctr(width=3)
    method.used = torch.zeros(4, 3 + 32, dtype=torch.bool)
    method.used[1, :3], method.used[1, 3] = torch.tensor([True, False, True]), True
    locks = {name: lock.expand_as(p) for name, (p, lock) in method.locks().items()}
    assert locks["up"][1, :2].tolist() == [[True, False, True], [False, False, False]]
    assert locks["down"][1].all(1).tolist() == [True, False, True] == locks["down"][1].any(1).tolist()
    assert locks["down_bias"][1].tolist() == [True, False, True]
    assert locks["up_bias"][1].tolist() == [True] + [False] * 31
    assert not any(lock[[0, 2, 3]].any() for lock in locks.values()), "other sites"


def test_used_units_are_those_of_all_stored_masks():
    done, union = stream(tasks=(ONE, TWO, THREE)), torch.zeros(4, 8 + 32, dtype=torch.bool)
    for position, (state, carried) in enumerate(done):
        union |= torch.cat([state.masks["inner"], state.masks["outer"]], 1)
        assert torch.equal(carried.tensors["used"], union)
        assert carried.meta == {"tasks": position + 1}


@pytest.mark.parametrize("cls", [CtrTsm, CtrFull])
def test_the_backbone_is_not_touched(cls: type[CtrTsm]):
    method = ctr(cls)
    stepped(method, started(method, ONE))
    assert digest_of(method.backbone) == method.backbone_digest == digest_of(vit())


# ---- masks ---------------------------------------------------------------------------------------------------------------
def test_without_output_units_the_adapters_are_the_identity():
    method = ctr()
    started(method, ONE)
    with torch.no_grad():
        method.split(method.mask.embedding)[1].fill_(-1.0)
    expected = vit().eval()(IMAGES) @ method.heads["one"].weight.T
    assert torch.equal(answers(method.eval()), expected)
    with torch.no_grad():
        method.split(method.mask.embedding)[1].fill_(1.0)
    assert not torch.allclose(answers(method), expected, atol=1e-3)


def test_masks_in_the_weights_are_masks_on_the_units():
    """Same features, and the gradient of an embedding is the published one, s_max sigmoid(e) sigmoid(-e) dL/dm."""
    method = ctr(s_max=10.0, width=3)
    started(method, ONE)
    a, x = method.adapters, torch.randn(2, 5, 32)
    inner, outer = (torch.rand(4, n, requires_grad=True) for n in (3, 32))
    masked = method.masked(inner, outer)
    found = masked_bottleneck(x, **{name: t[1] for name, t in masked.items()})
    hidden = (x @ a.down[1].T + a.down_bias[1]).relu() * inner[1]
    expected = x + (hidden @ a.up[1].T + a.up_bias[1]).relu() * outer[1]
    assert torch.allclose(found, expected, atol=1e-5)
    for own, other in zip(*(torch.autograd.grad(y.square().sum(), (inner, outer)) for y in (found, expected)), strict=True):
        assert torch.allclose(own, other, rtol=1e-4, atol=1e-4)
    scale = annealed(2, 4, 10.0)
    soft, worth, e = method.mask.sample(scale), torch.randn(4, 35), method.mask.embedding
    assert torch.allclose(soft, torch.sigmoid(scale * e))
    soft.backward(worth)
    assert torch.allclose(e.grad, 10.0 * torch.sigmoid(e) * torch.sigmoid(-e) * worth, rtol=1e-4)


def test_masks_harden_in_every_epoch():
    method = ctr()
    started(method, ONE)
    for epoch in (0, 1):
        spread = []
        for step in range(STEPS):
            method.training_weights(batch(step), Progress(epoch, step, 2, STEPS))
            spread.append(float((method.soft - 0.5).abs().mean().detach()))
        assert spread[0] < 0.01
        assert spread == sorted(spread)
        assert spread[-1] > 0.48


@pytest.mark.parametrize("cls", [CtrTsm, CtrFull])
def test_the_loss_is_cross_entropy_plus_c_times_what_the_task_in_training_takes_anew(cls: type[CtrTsm]):
    """R of the first task is the mean of its masks; of a later one, that over units that are free. Never that of another task."""
    method, progress = ctr(cls, c=0.5), Progress(0, 1, 1, STEPS)
    started(method, ONE)
    loss, terms = method.loss(batch(), progress)
    assert torch.isclose(terms["newly_used"], method.soft.mean())
    assert torch.isclose(loss, terms["ce"] + 0.5 * terms["newly_used"])
    later = ctr(cls)
    started(later, TWO, stream(cls, tasks=(ONE,))[0][1])
    assert later.used.any()
    assert torch.isclose(later.loss(batch(1, 3), progress)[1]["newly_used"], later.soft[~later.used].mean())


def test_embeddings_can_cross_zero_within_the_schedule():
    """However many steps there are, and N(0, 1) starts nearly all of them within reach."""
    for steps in (12.0, 3000.0):
        method = ctr()
        groups = method.begin(ONE, "train", None, Rates(1e-3, 0.05, 32, steps), (ONE,))
        rate = next(g["lr"] for g in groups if g["name"] == "masks")
        assert rate * steps == pytest.approx(4)
        assert float((method.mask.embedding.abs() < rate * steps).float().mean()) > 0.999


def test_embeddings_stay_within_six():
    method = ctr()
    started(method, ONE)
    with torch.no_grad():
        method.mask.embedding.mul_(100)
    method.after_step(Progress(0, 0, 1, STEPS))
    assert method.mask.embedding.abs().max() == 6


def test_the_stored_size_is_the_formula():
    """(A + d) 2 L bits: 768 bytes for a ViT-Ti with 64 units."""
    torch.manual_seed(0)
    method = CtrTsm(build(BackboneSettings()), CtrSettings(), seed=1)
    method.begin(TWO, "train", None, RATES, (TWO,))
    sizes = method.finish()[0].sizes()
    assert sizes == {"masks": (64 + 192) * 2 * 12 // 8, "tokens": 0, "copies": 0, "head": 4 * 3 * 193}
    assert sizes["masks"] == 768


@pytest.mark.parametrize("cls", [CtrTsm, CtrFull])
def test_a_base_task_is_served_by_the_backbone(cls: type[CtrTsm]):
    method, head = served(stream(cls, tasks=(ONE,)), cls), {"weight": torch.ones(2, 32), "bias": torch.zeros(2)}
    method.load(TaskState("base", ("x", "y"), "base", method.backbone_digest, head=head))
    assert torch.equal(answers(method, Task("base", "card", "", ("x", "y"))), vit().eval()(IMAGES) @ head["weight"].T)


def test_settings_and_states_that_cannot_work_are_refused():
    with pytest.raises(UserError, match=r"mask_lr is 'auto' with train.optimizer 'sgd'"):
        CtrTsm.check(CtrSettings(), TrainSettings(optimizer="sgd"), DataSettings(), "task")
    CtrTsm.check(CtrSettings(mask_lr=0.1), TrainSettings(optimizer="sgd"), DataSettings(), "task")
    with pytest.raises(UserError, match=r"inner masks of shape \(4, 8\), these settings have \(4, 9\)"):
        ctr(width=9).load(stream(tasks=(ONE,))[0][0])
    method = ctr()
    started(method, ONE)
    with pytest.raises(UserError, match="one step per epoch"):
        method.loss(batch(), Progress(0, 0, 3, 1))


def test_it_says_when_units_run_out():
    method = ctr()
    started(method, ONE)
    assert not method.warnings()
    method.used[:] = True
    assert "only 0.00% of the adapters' units were free" in method.warnings()[0]
    method.used[:] = False
    with torch.no_grad():
        method.mask.embedding.fill_(1.0)
    assert "0.00% of the adapters' units are left" in method.warnings()[0]


# ---- the knowledge-sharing module ----------------------------------------------------------------------------------------
def module(tasks: int = 3, filters: int = 4) -> dict[str, Tensor]:
    torch.manual_seed(6)
    return {name: t[0].detach().clone() for name, t in Capsules(1, 6, tasks, 3, filters).tensors(tasks).items()}


def by_equations(x: Tensor, m: dict[str, Tensor], noise: Tensor | None) -> Tensor:
    """The published module with its intended order of indices: loops over images, tasks and tokens."""
    def pooled(u: Tensor, kind: str, added: Tensor | float = 0.0) -> Tensor:  # u: (N, 9)
        found = []
        for k in KERNELS:
            signal = F.conv1d(u.T[None], m[f"{kind}{k}"].transpose(1, 2), m[f"{kind}{k}_bias"])[0]
            found.append(F.relu(signal + (added[:, None] if isinstance(added, Tensor) else added)).amax(1))
        return torch.cat(found)

    out = []
    for b, image in enumerate(x):
        u = []
        for c in range(len(m["p"])):
            z = image @ m["p"][c].T + m["p_bias"][c]
            length = z.norm(dim=1, keepdim=True)
            votes = length**2 / (1 + length**2) * z / length
            u.append(torch.cat([votes @ m["transfer"][c, 3 * j : 3 * j + 3].T for j in range(3)], 1))
        asked = m["mix"] @ pooled(u[-1], "query") + m["mix_bias"]
        v = torch.zeros(len(image), 9)
        for c in range(len(u)):
            route = pooled(u[c], "key", asked)
            logit = (m["gate"] @ route + m["gate_bias"]).item()
            drawn = 0.0 if noise is None else math.log(noise[b, c] / (1 - noise[b, c]))
            if logit + drawn > 0:
                v = v + (m["similar"] @ route + m["similar_bias"]) * u[c]
        out.append(image + v @ m["spread"].T + m["spread_bias"])
    return torch.stack(out)


@pytest.mark.parametrize("noisy", [False, True])
def test_knowledge_is_shared_as_the_equations_say(noisy: bool):
    m, x = module(), torch.randn(6, 8, 6, generator=torch.Generator().manual_seed(1)) * 2
    noise = torch.rand(6, 3, generator=torch.Generator().manual_seed(2)) if noisy else None
    found = knowledge(x, **m, noise=noise)
    assert torch.allclose(found, by_equations(x, m, noise), atol=1e-5)
    assert not torch.allclose(found, by_equations(x, m, torch.full((6, 3), 1e-9)), atol=1e-3), "some gate is open"
    assert not torch.allclose(found, by_equations(x, m, torch.full((6, 3), 1 - 1e-6)), atol=1e-3), "and some is closed"


def test_the_bottleneck_sees_what_is_known_and_adds_to_what_came_in():
    m, x = module(), torch.randn(2, 8, 6)
    down, down_bias, up, up_bias = torch.randn(4, 6), torch.randn(4), torch.randn(6, 4), torch.randn(6)
    h = knowledge(x, **m)
    expected = x + ((h @ down.T + down_bias).relu() @ up.T + up_bias).relu()
    assert torch.allclose(capsule_bottleneck(x, down, down_bias, up, up_bias, **m), expected, atol=1e-5)


def test_squash_shrinks_a_capsule_and_keeps_its_direction():
    z = torch.tensor([[3.0, 4.0], [0.0, 0.0]], requires_grad=True)
    assert torch.allclose(squash(z), torch.tensor([[0.6, 0.8], [0.0, 0.0]]) * 25 / 26)
    squash(z).sum().backward()
    assert z.grad is not None
    assert z.grad.isfinite().all()


def test_a_capsule_sees_its_own_task_and_its_own_token():
    """Later tasks do not change what earlier capsules say, nor does one token another."""
    m, x = module(), torch.randn(2, 8, 6)
    u = capsules(x, m["p"], m["p_bias"], m["transfer"])  # (B, T, N, 9)
    later = {name: m[name].index_fill(0, torch.tensor(2), 5.0) for name in ("p", "p_bias", "transfer")}
    other = capsules(x, **later)
    assert torch.equal(u[:, :2], other[:, :2])
    assert not torch.allclose(u[:, 2], other[:, 2])
    assert torch.allclose(capsules(x, m["p"][:2], m["p_bias"][:2], m["transfer"][:2]), u[:, :2], atol=1e-6), "nor whether there are any"
    changed = capsules(x.index_fill(1, torch.tensor(3), 9.0), m["p"], m["p_bias"], m["transfer"])
    assert [not torch.equal(changed[:, :, n], u[:, :, n]) for n in range(8)] == [n == 3 for n in range(8)]


@pytest.mark.parametrize("size", KERNELS)
def test_the_strongest_window_is_a_pooled_convolution_with_its_gradient(size: int):
    u, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((4, 9, 6), (5, size, 6), (5,)))
    found, expected = strongest(u, weight, bias), F.conv1d(u.transpose(1, 2), weight.transpose(1, 2), bias).amax(2)
    assert torch.allclose(found, expected, atol=1e-5)
    worth = torch.randn(4, 5)
    for own, other in zip(*(torch.autograd.grad((y * worth).sum(), (u, weight, bias)) for y in (found, expected)), strict=True):
        assert torch.allclose(own, other, atol=1e-5)


# ---- the whole of CTR ----------------------------------------------------------------------------------------------------
def test_capsules_of_later_tasks_get_no_gradient_and_wait_unchanged():
    method = ctr(CtrFull, mask_lr=0.05)
    optimizer = started(method, TWO, stream(CtrFull, tasks=(ONE,))[0][1])
    start = {name: t.detach().clone() for name, t in method.capsules.named_parameters()}
    method.loss(batch(1, 3), Progress(0, 1, 1, STEPS))[0].backward()
    own = [dict(method.capsules.named_parameters())[name] for name in ("p", "p_bias", "transfer")]
    assert all((p.grad[:, 2:] == 0).all() for p in own)
    assert all((p.grad[:, c] != 0).any() for p in own for c in (0, 1)), "earlier ones go on learning"
    stepped(method, optimizer)
    for name, tensor in method.capsules.named_parameters():
        moved = tensor != start[name]
        assert moved.any(), name
        if name in ("p", "p_bias", "transfer"):
            assert moved[:, 0].any()
            assert moved[:, 1].any()
            assert not moved[:, 2:].any()


def test_without_their_lock_decay_moves_the_capsules_of_later_tasks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Protector, "restore", lambda self: None)
    method = ctr(CtrFull)
    optimizer, start = started(method, ONE), method.capsules.p.detach().clone()
    stepped(method, optimizer)
    assert (method.capsules.p != start)[:, 1:].any()


def test_what_the_task_specific_module_locks_stays_and_the_routing_does_not():
    """Documented: CTR with knowledge sharing can change earlier answers, by what is shared alone."""
    done = stream(CtrFull)
    before, after = served(done[:1], CtrFull), served(done, CtrFull)
    own = [method.serving_weights("one") for method in (before, after)]
    inner, outer = (done[0][0].masks[name] for name in ("inner", "outer"))
    for name, where in (("down", inner[:, :, None]), ("down_bias", inner), ("up", outer[:, :, None] & inner[:, None]), ("up_bias", outer)):
        assert torch.equal(own[0][name] * where, own[1][name] * where)
    assert own[0]["p"].shape[1] == own[1]["p"].shape[1] == 1, "a task asks the capsules that there were"
    assert not torch.equal(own[0]["similar"], own[1]["similar"])
    assert CtrFull.forgets


def test_gates_draw_noise_in_training_only():
    done = stream(CtrFull)
    method = served(done, CtrFull)
    torch.manual_seed(1)
    first, state = answers(method, TWO), torch.get_rng_state()
    assert torch.equal(answers(method, TWO), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(answers(served(done, CtrFull), TWO), first)
    training = ctr(CtrFull)
    started(training, THREE, done[-1][1])

    def features(step: int) -> Tensor:
        training.effective = training.training_weights(batch(step), Progress(0, 1, 1, STEPS))
        return training.features(IMAGES).detach()

    assert torch.equal(features(1), features(1))
    assert not torch.equal(features(1), features(2))


def test_the_noise_of_a_sample_does_not_depend_on_who_holds_it():
    method, progress = ctr(CtrFull), Progress(0, 1, 1, STEPS)
    started(method, ONE)
    whole, part = batch(1), batch(1)
    part.draw = Draw(7, 0, 1, torch.tensor([5, 2]), 8, torch.device("cpu"))
    noise = [method.training_weights(b, progress)["noise"] for b in (whole, part)]
    assert noise[0].shape == (4, 8, 1), "site, sample, task"
    assert torch.equal(noise[0][:, [5, 2]], noise[1])


def test_the_work_per_image_counts_adapters_and_routing():
    """Units that a task does not use are cut; each task has one more capsule to ask."""
    (state, _), tsm, (second, _) = stream(tasks=(ONE,))[0], ctr(), stream(CtrFull)[1]
    tokens, inner, outer = 17, state.masks["inner"].sum(1), state.masks["outer"].sum(1)
    full = 1 - ctr(CtrFull).flops_share(TaskState("x", (), "ctr_full", "", {n: m & False for n, m in second.masks.items()}, meta={"position": 1}))
    plain = tokens * int((inner * 32 + inner * outer).sum()) / (tsm.flops_share(state) - 1)
    assert -full * plain == pytest.approx(4 * tokens * (2 * (32 * 3 + 9 * 3) + 3 * 5 * 12 * 9 + 9 * 32))


def test_a_stream_longer_than_its_capsules_is_refused():
    settings = CtrFullSettings(max_tasks=2)
    assert [s.name for s in CtrFull.planned(settings, 1)] == ["train"]
    with pytest.raises(UserError, match=r"capsules for max_tasks=2 tasks, and the stream has more; raise max_tasks"):
        CtrFull.planned(settings, 2)
    with pytest.raises(UserError, match="max_tasks=3"):
        ctr(CtrFull).begin(ONE, "train", Carried(stream(CtrFull, tasks=(ONE,))[0][1].tensors, {"tasks": 3}), RATES, (ONE,))


def test_fewer_tokens_than_a_filter_sees_are_refused():
    few = build(TINY.model_copy(update={"options": TINY.options | {"patch_size": 16}}))
    with pytest.raises(UserError, match=r"sees 2 tokens, and ctr_full routes by windows of up to 5"):
        CtrFull(few, CtrFullSettings(), seed=1)
