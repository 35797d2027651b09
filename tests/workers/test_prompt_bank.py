"""Tests of methods that choose prompts by a query: golden values, prefixes, and invariants."""

from __future__ import annotations

import copy
import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import method_steps
import pytest
import torch
from method_steps import BASE, ONE, PROGRESS, THREE, TWO, begun, images, vit
from serving import finished
from torch import Tensor

from pipeline.testing.lab import Lab
from workers.errors import UserError
from workers.job import BackboneSettings, DataSettings, Task, TrainSettings
from workers.methods import METHODS, base
from workers.methods.bases.prompt_bank import PromptBank
from workers.methods.coda import Coda
from workers.methods.dualprompt import DualPrompt
from workers.methods.l2p import L2p
from workers.model.prefixes import PrefixedAttention, PrefixSites
from workers.model.prompt_bank import (
    choose_largest,
    cosines,
    orthogonality,
    orthonormalize,
    weigh_components,
)
from workers.model.vit import build, compile_blocks, compute_digest
from workers.serving.server import Predictor
from workers.serving.single_tasks import remove_task
from workers.storage.taskstate import Carried, TaskState

BANKS = sorted(name for name, cls in METHODS.items() if issubclass(cls, PromptBank))
TASKS = (ONE, TWO, THREE)


def close(*expected: float, digits: float = 1e-6) -> Any:
    return pytest.approx(list(expected), abs=digits)


def drawn(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(name: str, scenario: str = "class", **settings: Any) -> Any:
    method = METHODS[name](vit(), METHODS[name].Settings(**settings), 1)
    method.scenario, method.stream = scenario, TASKS
    return method


def learn(method: Any, task: Task, carried: Carried | None = None, optimizer: str = "adam") -> Any:
    """Train a task for six steps, and return its state and carried state."""
    groups = begun(method, task, carried)
    method_steps.train(method, method_steps.OPTIMIZERS[optimizer](groups), task)
    return method.eval().finish()


def learn_all(
    name: str, tasks: tuple[Task, ...] = TASKS, scenario: str = "class", **settings: Any
) -> tuple[list[TaskState], Carried]:
    """Train a stream; return the state of each task and the last carried state."""
    states: list[TaskState] = []
    carried: Carried | None = None
    for task in tasks:
        method = make(name, scenario, **settings)
        for state in states:
            method.load_task(state)
        state, carried = learn(method, task, carried)
        states.append(state)
    assert carried is not None
    return states, carried


def serve(name: str, states: list[TaskState], carried: Carried, **settings: Any) -> Any:
    return method_steps.serving(make(name, **settings), states, carried)


# ---- prefixes ------------------------------------------------------------------------------------
def test_prefix_attention_has_the_golden_values() -> None:
    """One head of width 2 with q = (1,0), K = V = [(1,0), (0,1)], P_k = (2,0) and P_v = (5,5)."""
    attn = PrefixedAttention(2, num_heads=1)
    with torch.no_grad():
        attn.qkv.weight.copy_(torch.eye(2).repeat(3, 1))
        attn.proj.weight.copy_(torch.eye(2))
        attn.proj.bias.zero_()
    attn.prefix = (torch.tensor([[[2.0, 0.0]]]), torch.tensor([[[5.0, 5.0]]]))
    out = attn(torch.eye(2)[None])
    assert out.shape == (1, 2, 2)
    assert out[0, 0].tolist() == close(3.16387214, 3.01990597)


def test_prefixes_are_prepended_to_keys_and_values_per_image() -> None:
    model = vit()
    sites = PrefixSites(model, [1])
    plain, prefix = model(images(3)), drawn(3, 2, 4, 32)
    with sites.using([prefix]):
        prefixed = model(images(3))
        twin = copy.deepcopy(model)
    assert torch.equal(model(images(3)), plain)
    assert not torch.allclose(prefixed, plain, atol=1e-3)
    for row in range(3):
        with sites.using([prefix[row : row + 1]]):
            assert torch.allclose(model(images(3)[row : row + 1]), prefixed[row], atol=1e-5)
    block = twin.blocks[1]
    x = twin.blocks[0](twin.norm_pre(twin._pos_embed(twin.patch_embed(images(3)))))
    q, k, v = block.attn.qkv(block.norm1(x)).chunk(3, -1)
    k, v = torch.cat([prefix[:, 0], k], 1), torch.cat([prefix[:, 1], v], 1)
    q, k, v = (rows.unflatten(-1, (2, 16)).transpose(1, 2) for rows in (q, k, v))
    mixed = ((q @ k.mT) / math.sqrt(16)).softmax(-1) @ v
    x = x + block.ls1(block.attn.proj(mixed.transpose(1, 2).flatten(2)))
    x = x + block.mlp(block.norm2(x))
    assert torch.allclose(prefixed, twin.norm(x)[:, 0], atol=1e-5)


def test_backbone_without_plain_attention_is_refused() -> None:
    with torch.device("meta"):
        convit = build(BackboneSettings(name="convit_local", img_size=32))
    with pytest.raises(UserError, match="block 0 of the backbone has no plain attention"):
        PrefixSites(convit, [0])


# ---- invariants of all methods -------------------------------------------------------------------
@pytest.mark.parametrize("name", BANKS)
def test_an_answer_does_not_depend_on_the_batch(name: str) -> None:
    states, carried = learn_all(name)
    method = serve(name, states, carried)
    batch = images()
    with torch.no_grad():
        for task in (None, "one", "three"):
            whole = method.logits(batch, task)
            alone = torch.cat([method.logits(batch[row : row + 1], task) for row in range(8)])
            assert torch.allclose(alone, whole, atol=1e-5)
            assert torch.allclose(method.logits(batch.flip(0), task).flip(0), whole, atol=1e-5)


@pytest.mark.parametrize("name", BANKS)
def test_training_step_computes_the_query_once_without_gradients(name: str) -> None:
    method = make(name)
    begun(method)
    method.train()
    seen: list[tuple[int, bool]] = []
    first = method.backbone.blocks[0].norm1

    def note(module: Any, inputs: Any) -> None:
        seen.append((len(inputs[0]), torch.is_grad_enabled()))

    first.register_forward_pre_hook(note)
    method.loss(method_steps.batch(), PROGRESS)[0].backward()
    assert seen == [(8, False), (8, True)]
    assert all(p.grad is None for p in method.backbone.parameters())


@pytest.mark.parametrize("name", BANKS)
def test_only_the_head_of_the_current_task_learns(name: str) -> None:
    states, carried = learn_all(name, TASKS[:2])
    method = make(name)
    for state in states:
        method.load_task(state)
    groups = begun(method, THREE, carried)
    trained = {id(p) for group in groups for p in group["params"]}
    assert {id(p) for p in method.heads["three"].parameters()} < trained
    assert all(id(p) not in trained for p in method.heads["one"].parameters())
    assert method.competing_outputs() == 4
    loss, terms = method.loss(method_steps.batch(classes=4), PROGRESS)
    features = method.features(images())
    logits = method.heads["three"](features)
    ce = torch.nn.functional.cross_entropy(logits, method_steps.batch(classes=4).labels)
    assert float(terms["ce"]) == pytest.approx(ce.item(), abs=1e-5)
    assert torch.isfinite(loss)
    method_steps.train(method, method_steps.OPTIMIZERS["sgd"](groups), THREE)
    for state in states:
        assert torch.equal(method.heads[state.task].weight, state.head["weight"])
    assert compute_digest(method.backbone) == method.backbone_digest


@pytest.mark.parametrize("name", BANKS)
def test_answering_changes_no_tensor(name: str) -> None:
    states, carried = learn_all(name, TASKS[:2])
    method = serve(name, states, carried)
    before = {n: t.clone() for n, t in method.state_dict().items()}
    with torch.no_grad():
        first = method.logits(images(), None)
        method.logits(images(), "one")
        assert torch.equal(method.logits(images(), None), first)
    assert before.keys() == method.state_dict().keys()
    assert all(torch.equal(t, before[n]) for n, t in method.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("name", BANKS)
def test_compiled_blocks_compute_the_same(name: str) -> None:
    method = make(name)
    begun(method)
    expected = method.loss(method_steps.batch(), PROGRESS)[0]
    compile_blocks(method.backbone, backend="eager")
    for _ in range(2):
        assert torch.allclose(method.loss(method_steps.batch(), PROGRESS)[0], expected, atol=1e-5)


@pytest.mark.parametrize("name", BANKS)
def test_base_task_is_refused(name: str) -> None:
    cls = METHODS[name]
    with pytest.raises(UserError, match=r"base task 'base'.*no prompts.*role `task`"):
        cls.check_backbone(cls.Settings(), vit(), (BASE, ONE))
    cls.check_backbone(cls.Settings(), vit(), (ONE, TWO))


@pytest.mark.parametrize("name", BANKS)
def test_prompts_of_other_settings_are_refused(name: str) -> None:
    states, carried = learn_all(name, TASKS[:1])
    with pytest.raises(UserError, match=r"has prompts of shapes .* these settings have"):
        serve(name, states, carried, length=7)


@pytest.mark.parametrize("name", BANKS)
def test_a_damaged_state_is_refused(name: str) -> None:
    states, carried = learn_all(name, TASKS[:1])
    for tensors in (carried.tensors, states[0].tokens):
        for key, tensor in [*tensors.items()]:
            del tensors[key]
            with pytest.raises(UserError):
                serve(name, states, carried)
            tensors[key] = tensor[..., :1]
            with pytest.raises(UserError):
                serve(name, states, carried)
            tensors[key] = tensor
    serve(name, states, carried)


@pytest.mark.slow
@pytest.mark.parametrize("name", BANKS)
def test_removing_a_task_does_not_change_other_answers(lab: Lab, tmp_path: Path, name: str) -> None:
    """If the task is given, answers are bit-identical. Otherwise, the removed classes are not
    predicted."""
    run = finished(lab, name, "class", epochs=1)
    folder = str(tmp_path / "model")
    run.bundle.write(folder)
    pixels, _ = run.images("three")
    before = [answer.row() for answer in Predictor.open(folder).predict(pixels[:6], "three")]
    remove_task(folder, "two")
    left = Predictor.open(folder)
    assert [answer.row() for answer in left.predict(pixels[:6], "three")] == before
    assert {answer.row()["task"] for answer in left.predict(pixels[:6])} == {"three"}


# ---- CODA-Prompt ---------------------------------------------------------------------------------
def test_coda_weighs_components_as_in_its_equation() -> None:
    query = torch.tensor([[1.0, 2, 0, -1]])
    attention = torch.tensor([[[1.0, 0, 1, 0], [0.5, 0.5, 0, 1]]])
    keys = torch.tensor([[[1.0, 0, 0, 1], [0, 2, 0, -1]]])
    alpha = weigh_components(query, keys, attention)
    assert alpha.flatten().tolist() == close(0.70710678, 0.89442719)
    prompts = torch.tensor([[[1.0, 0], [0, 1]], [[2, 2], [-1, 0]]])
    prompt = (alpha[0] @ prompts.flatten(1)).flatten().tolist()
    assert prompt == close(2.49596116, 1.78885438, -0.89442719, 0.70710678)
    assert torch.allclose(weigh_components(3 * query, 0.1 * keys, 5 * attention), alpha)
    many = weigh_components(drawn(50, 8), drawn(2, 9, 8, seed=4), drawn(2, 9, 8, seed=5))
    assert many.shape == (2, 50, 9)
    assert many.abs().max() <= 1 + 1e-6


def test_coda_prefixes_are_weighted_sums_of_components() -> None:
    method = make("coda", components=3)
    begun(method, ONE)
    method.eval()
    own = dict(method.own.items())
    query = method.query(images())
    method.weight_overrides = own
    features = method.prompted(images(), query)
    alpha = weigh_components(query, own["key"], own["attention"])  # (L, B, M)
    prefixes = torch.einsum("lbm,lmkpa->lbkpa", alpha, own["prompt"])
    with method.sites.using(prefixes.unbind()):
        expected = method.backbone(images())
    with method.sites.using((-prefixes).unbind()):
        opposite = method.backbone(images())
    assert torch.allclose(features, expected, atol=1e-6)
    assert not torch.allclose(features, opposite, atol=1e-4)


def test_coda_starts_rows_orthonormal_to_all_earlier_ones() -> None:
    earlier = torch.tensor([[1.0, 0, 0, 1]]) / math.sqrt(2)
    row = orthonormalize(torch.tensor([[1.0, 2, 3, 4]]), earlier)
    assert row[0].tolist() == close(-0.35856858, 0.47809144, 0.71713717, 0.35856858)
    old, raw = drawn(5, 12), drawn(4, 12, seed=9)  # not orthonormal
    rows = orthonormalize(raw, old)
    assert torch.allclose(rows @ rows.T, torch.eye(4), atol=1e-6)
    assert torch.allclose(rows @ old.T, torch.zeros(4, 5), atol=1e-5)
    assert ((rows * raw).sum(1) > 0).all()


def test_coda_penalises_rows_that_are_not_orthonormal() -> None:
    rows = torch.tensor([[[1.0, 0], [0.6, 0.8]]])
    assert float(orthogonality(rows)) == pytest.approx(0.18)
    assert float(orthogonality(torch.cat([rows, torch.eye(2)[None]]))) == pytest.approx(0.18)
    plain, penalised = make("coda"), make("coda", mu=0.5)
    for method in (plain, penalised):
        torch.manual_seed(0)
        begun(method)
        for p in method.own.values():
            p.data.add_(drawn(*p.shape), alpha=0.1)
    loss, terms = penalised.loss(method_steps.batch(), PROGRESS)
    assert "match" not in plain.loss(method_steps.batch(), PROGRESS)[1]
    penalty = 0.0
    for p in penalised.own.values():
        for block in p.flatten(2):
            penalty += (block @ block.T - torch.eye(10)).square().mean().item()
    assert float(terms["match"]) == pytest.approx(0.5 * penalty, rel=1e-4)
    assert loss.item() == pytest.approx(float(terms["ce"] + terms["match"]), rel=1e-5)


def test_coda_components_of_earlier_tasks_stay_bit_identical() -> None:
    carried, states = None, list[TaskState]()
    seen: dict[str, Tensor] = {}
    for task in TASKS:
        method = make("coda", components=3)
        for state in states:
            method.load_task(state)
        state, carried = learn(method, task, carried, "adamw")
        states.append(state)
        assert all(torch.equal(carried.tensors[name], tensor) for name, tensor in seen.items())
        seen = carried.tensors
        assert carried.meta == {"tasks": [t.name for t in TASKS[: len(states)]]}
    assert len(seen) == 9
    assert all(state.sizes()["tokens"] == state.sizes()["copies"] == 0 for state in states)


def test_coda_starts_a_task_orthogonal_to_trained_components() -> None:
    _, carried = learn_all("coda", TASKS[:2], components=3)
    method = make("coda", components=3)
    begun(method, THREE, carried)
    for kind, rows in method.training_weights(method_steps.batch(), PROGRESS).items():
        for block in rows.detach().flatten(2):
            gram = block[6:] @ block.T
            assert torch.allclose(gram[:, 6:], torch.eye(3), atol=1e-6), kind
            assert torch.allclose(gram[:, :6], torch.zeros(3, 6), atol=1e-5), kind


def test_coda_given_the_task_forgets_nothing() -> None:
    """If the task is given, answers are bit-identical to those right after its training. Otherwise,
    they change."""
    states, carried = learn_all("coda")
    early_states, early_carried = learn_all("coda", TASKS[:1])
    late, early = serve("coda", states, carried), serve("coda", early_states, early_carried)
    with torch.no_grad():
        expected = early.logits(images(), "one")
        assert torch.equal(late.logits(images(), "one"), expected)
        assert torch.equal(early.logits(images(), None), expected)
        assert not torch.allclose(late.logits(images(), None)[:, :2], expected, atol=1e-3)


def test_coda_adds_as_many_bytes_as_published() -> None:
    """A ViT-B with ten tasks: 1.54 MB per task."""
    with torch.device("meta"), mock.patch.object(base, "compute_digest", return_value=""):
        method = Coda(build(BackboneSettings(name="vit_base_patch16_224")), Coda.Settings(), 0)
    assert 4 * sum(math.prod(shape) for shape in method.shapes().values()) == 1_536_000
    d, n = 768, 197

    def block(queries: int) -> int:
        return d * (10 * queries * d + 2 * n * d + 2 * queries * n)

    whole = 196 * d * d + 11 * block(n) + block(1)
    expected = 2 + 5 * 2 * d * n * 4 / whole
    assert method.flops_share(mock.Mock()) == pytest.approx(expected, rel=1e-9)


def test_coda_refuses_more_components_than_dimensions() -> None:
    sentence = r"33 components cannot be orthogonal in 32 dimensions; lower components"
    with pytest.raises(UserError, match=sentence):
        Coda.check_backbone(Coda.Settings(components=11), vit(), TASKS)
    Coda.check_backbone(Coda.Settings(components=10), vit(), TASKS)
    with pytest.raises(UserError, match="with this task there are 33 components"):
        learn_all("coda", components=11)


# ---- DualPrompt ----------------------------------------------------------------------------------
def test_dualprompt_gives_each_image_the_prompts_of_its_nearest_key() -> None:
    """Image i of a batch gets its own keys and values, not those of other images."""
    states, carried = learn_all("dualprompt")
    method = serve("dualprompt", states, carried)
    keys = torch.stack([state.tokens["key"] for state in states])
    batch = images() * torch.linspace(-3, 3, 8)[:, None, None, None]
    with torch.no_grad():
        query = method.backbone(batch)
        for state, towards in zip(states, query[[0, 3, 7]], strict=True):
            state.tokens["key"] = towards
        method = serve("dualprompt", states, carried)
        keys = query[[0, 3, 7]]
        chosen = torch.nn.functional.cosine_similarity(query[:, None], keys[None], dim=2).argmax(1)
        assert chosen[[0, 3, 7]].tolist() == [0, 1, 2]
        logits = method.logits(batch, None)
        general = carried.tensors["general"]
        for row, task in enumerate(chosen.tolist()):
            prefixes = [*general, *states[task].tokens["expert"]]
            with method.sites.using([prefix[None] for prefix in prefixes]):
                features = method.backbone(batch[row : row + 1])
            expected = torch.cat([method.heads[state.task](features) for state in states], 1)
            assert torch.allclose(logits[row], expected[0], atol=1e-5)


def test_dualprompt_uses_the_prompts_of_a_given_task() -> None:
    states, carried = learn_all("dualprompt")
    method = serve("dualprompt", states, carried)
    with torch.no_grad(), mock.patch.object(method, "query", side_effect=AssertionError):
        given = method.logits(images(), "two")
        with method.sites.using(
            [p[None] for p in (*carried.tensors["general"], *states[1].tokens["expert"])]
        ):
            expected = method.heads["two"](method.backbone(images()))
    assert torch.allclose(given, expected, atol=1e-6)


def test_dualprompt_draws_its_key_towards_the_queries() -> None:
    method = make("dualprompt", lambda_=0.5)
    begun(method)
    loss, terms = method.loss(method_steps.batch(), PROGRESS)
    query = method.query(images())
    key = method.own["key"].detach()
    cosine = torch.nn.functional.cosine_similarity(query, key[None]).mean()
    assert float(terms["match"]) == pytest.approx(-0.5 * float(cosine), abs=1e-6)
    assert loss.item() == pytest.approx(float(terms["ce"] + terms["match"]), abs=1e-6)
    loss.backward()
    assert all(p.grad is not None for p in (*method.own.values(), method.general))


def test_dualprompt_freezes_earlier_prompts_and_trains_general_prompts() -> None:
    states, carried = learn_all("dualprompt", TASKS[:1])
    copies = {name: tensor.clone() for name, tensor in states[0].tokens.items()}
    method = make("dualprompt")
    method.load_task(states[0])
    state, later = learn(method, TWO, carried, "adamw")
    assert all(torch.equal(method.loaded["one"][n], tensor) for n, tensor in copies.items())
    assert not torch.equal(later.tensors["general"], carried.tensors["general"])
    assert not torch.equal(state.tokens["expert"], copies["expert"])


@pytest.mark.parametrize(
    ("depth", "general", "sites"), [(1, 0, 1), (2, 1, 2), (3, 2, 3), (4, 2, 4), (8, 2, 5)]
)
def test_dualprompt_reserves_a_block_for_task_prompts(depth: int, general: int, sites: int) -> None:
    method = DualPrompt(vit(depth=depth), DualPrompt.Settings(), 0)
    assert (len(method.general), len(method.sites)) == (general, sites)


def test_dualprompt_counts_the_query_unless_the_task_is_given() -> None:
    state = TaskState("one", ("a", "b"), "dualprompt", "")
    shares = {
        name: make("dualprompt", name).flops_share(state) for name in ("task", "class", "domain")
    }
    assert shares["class"] == shares["domain"] == pytest.approx(shares["task"] + 1)


def test_dualprompt_stores_as_many_numbers_as_published() -> None:
    """A ViT-B: tasks share 15,360 numbers; each task has 23,040 numbers and a key of 768."""
    with torch.device("meta"), mock.patch.object(base, "compute_digest", return_value=""):
        backbone = build(BackboneSettings(name="vit_base_patch16_224"))
        method = DualPrompt(backbone, DualPrompt.Settings(), 0)
    assert method.general.numel() == 15_360
    assert [math.prod(shape) for shape in method.shapes.values()] == [23_040, 768]
    assert 1 < method.flops_share(mock.Mock()) < 1.001
    method.scenario = "class"
    assert 2 < method.flops_share(mock.Mock()) < 2.001


# ---- L2P -----------------------------------------------------------------------------------------
def test_l2p_chooses_the_nearest_keys_of_each_image() -> None:
    keys = torch.tensor([[1.0, 0], [0, 1], [1, 1], [-1, 0]])
    similarity = cosines(torch.tensor([[2.0, 1], [0, 3], [1, 0.9]]), keys)
    choice = choose_largest(similarity, 2)
    assert [set(row) for row in choice.tolist()] == [{2, 0}, {1, 2}, {2, 0}]
    assert float(similarity.gather(1, choice).sum(1).mean()) == pytest.approx(1.76404308)
    assert choose_largest(torch.tensor([[0.5, 1, 0.5, 1, 0.5]]), 3).tolist() == [[1, 3, 0]]


def test_l2p_features_are_mean_outputs_of_chosen_prompts() -> None:
    method = make("l2p", pool=4, length=3, top=2)
    begun(method)
    with torch.no_grad():
        features, query = method.features(images()), method.query(images())
        model = vit()
        for row, image in enumerate(images()):
            nearest = torch.nn.functional.cosine_similarity(query[row][None], method.keys)
            prompts = method.prompts[nearest.topk(2).indices].flatten(0, 1)
            x = model.norm_pre(model._pos_embed(model.patch_embed(image[None])))
            x = torch.cat([prompts[None], x], 1)
            for block in model.blocks:
                x = block(x)
            assert torch.allclose(features[row], model.norm(x)[0, :6].mean(0), atol=1e-5)


def test_l2p_gives_gradients_only_to_chosen_keys_and_prompts() -> None:
    method = make("l2p", pool=10, top=2)
    begun(method)
    loss, terms = method.loss(method_steps.batch(), PROGRESS)
    loss.backward()
    similarity = cosines(method.query(images()), method.keys.detach())
    choice = choose_largest(similarity, 2)
    chosen = sorted(set(choice.flatten().tolist()))
    assert len(chosen) < 10
    assert method.keys.grad.abs().sum(1).nonzero().flatten().tolist() == chosen
    assert method.prompts.grad.abs().sum((1, 2)).nonzero().flatten().tolist() == chosen
    expected = -0.1 * float(similarity.gather(1, choice).sum(1).mean())
    assert float(terms["match"]) == pytest.approx(expected, abs=1e-6)
    free = make("l2p", lambda_=0.0)
    names = {group["name"] for group in begun(free)}
    assert names == {"head.weight", "head.bias", "prompts"}
    loss, terms = free.loss(method_steps.batch(), PROGRESS)
    loss.backward()
    assert "match" not in terms
    assert free.keys.grad is None


def test_l2p_with_all_prompts_ignores_the_keys() -> None:
    states, carried = learn_all("l2p", pool=4, top=4)
    method = serve("l2p", states, carried, pool=4, top=4)
    keys = {**carried.tensors, "keys": carried.tensors["keys"].flip(0)}
    other = serve("l2p", states, Carried(keys), pool=4, top=4)
    with torch.no_grad():
        expected = method.logits(images(), None)
        assert torch.allclose(other.logits(images(), None), expected, atol=1e-5)


def test_l2p_carries_as_many_bytes_as_published() -> None:
    """A ViT-B with ten prompts of five tokens: 184 kB."""
    with torch.device("meta"), mock.patch.object(base, "compute_digest", return_value=""):
        backbone = build(BackboneSettings(name="vit_base_patch16_224"))
        method = L2p(backbone, L2p.Settings(), 0)
    assert 4 * (method.prompts.numel() + method.keys.numel()) == 184_320
    d, n, p = 768, 197, 25

    def block(queries: int, keys: int) -> int:
        return d * (10 * queries * d + 2 * keys * d + 2 * queries * keys)

    more = 196 * d * d + 11 * block(n + p, n + p) + block(p, n + p)
    plain = 196 * d * d + 11 * block(n, n) + block(1, n)
    assert method.flops_share(mock.Mock()) == pytest.approx(1 + more / plain)


def test_l2p_refuses_to_choose_more_prompts_than_there_are() -> None:
    with pytest.raises(UserError, match="top is 5, and the pool has 4 prompts"):
        L2p.validate(L2p.Settings(pool=4), TrainSettings(), DataSettings(), "class")


# ---- precomputed queries -------------------------------------------------------------------------
@pytest.mark.parametrize("data", [{}, {"flip": 0.5}], ids=repr)
@pytest.mark.parametrize("name", BANKS)
def test_a_stage_queries_each_image_once_without_augmentation(
    lab: Lab, name: str, data: dict[str, float]
) -> None:
    """The result is bit-identical to that with a query in each step."""
    train = {"optimizer": "adamw", "lr": 1e-2, "weight_decay": 0.05, "epochs": 3}
    run = lab.run_of(name, train, settings={}, data={"val_fraction": 0.0, **data})
    job = run.stages(0)[0]
    run.prepare(job)
    files = []
    sizes: dict[str, int] = {}
    query = PromptBank.query
    for label in ("kept", "each"):
        passes: list[int] = []

        def counted(method: Any, images: Tensor, passes: list[int] = passes) -> Tensor:
            passes.append(len(images))
            return query(method, images)

        with ExitStack() as patches:
            patches.enter_context(mock.patch.object(PromptBank, "query", counted))
            if label == "each":
                patches.enter_context(mock.patch.object(PromptBank, "precompute"))
            stage = lab.stage(replace(job, key=label + job.key[4:]))
        sizes[label] = sum(passes)
        files.append([stage.read(f"{name}.safetensors") for name in ("task", "carried")])
    assert files[0] == files[1]
    images = stage.manifest["length"]["images"]
    queries_outside_steps = sizes["each"] - 3 * images
    assert queries_outside_steps >= 0
    assert sizes["kept"] - queries_outside_steps == (3 * images if data else images)
