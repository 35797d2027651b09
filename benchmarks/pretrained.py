"""Compare methods on pretrained backbones with the minimum work that they need.

Command: `python -m benchmarks.pretrained`. It takes some minutes, with ViT-Ti, fp32, one rank and
one thread. Weights are random, which does not change the amount of work.

- Class statistics at 224 px: the stages of a task, against one forward pass over its decoded images
  and, for RanPAC, the solution of the ridge regression.
- Prompts at 96 px: a training step, against a hand-written query pass and prompted pass.
- Rehearsal at 96 px: a step with a replayed batch, against fine-tuning on as many images.
- Adapters at 96 px: a prediction of EASE and MOS after ten tasks, in forward passes of the
  backbone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import stream
from benchmarks.harness import Report, interleave, start
from benchmarks.methods import BACKBONE, BATCH, CLASSES, Conditions, Training
from pipeline.graph.stage import IngestJob
from workers import dist, feature_stage, loop, restore
from workers.data.feed import Feed
from workers.methods.ranpac import PENALTIES, solve_ridge

STATISTICS_DEMAND = 1.10  # the stages of a task / a forward pass (and the solution)
# a training step / a query pass and a prompted pass; with kept queries / a prompted pass
PROMPT_DEMAND = 1.05
REPLAY_DEMAND = 1.03  # a step with a replayed batch / fine-tuning on as many images
SIDE, IMAGES, ROUNDS = 224, 40, 7  # IMAGES is per class
GROUP = dist.Group()
STATISTICS = ("simplecil", "ncm", "slda", "fecam", "ranpac")
REPLAYING = ("er", "er_ace", "dark_replay")


def ignore(event: Any) -> None:
    """Ignore a progress event."""


# ---- class statistics ----------------------------------------------------------------------------
def compare_statistics(report: Report, folder: Path) -> None:
    """Compare the stages of a task with class statistics and a forward pass over its images."""
    card = stream.draw_images(folder, 4, train=IMAGES, test=1, sides=(SIDE,))
    backbone = {"name": "vit_tiny_patch16_224", "img_size": SIDE, "crop_pct": 1.0}
    store, graph, _ = stream.plan(
        folder, card, 1, backbone=backbone, methods={name: {} for name in STATISTICS}
    )
    stream.ingest(store, graph)
    loop.run_stage(stream.find_job(graph, "backbone"), GROUP, ignore)
    features_job = stream.find_job(graph, "features/t-0")
    loop.run_stage(features_job, GROUP, ignore)
    assert features_job.task is not None
    network = restore.load_backbone(features_job).eval()
    feed = Feed(features_job, (features_job.task,), "train", GROUP, training=False)

    @torch.no_grad()
    def forward() -> Tensor:
        return torch.cat([network(batch.images) for batch in feed.evaluate()])

    labels = torch.cat([batch.labels for batch in feed.evaluate()])
    targets = F.one_hot(labels).double()
    width = 192  # of ViT-Ti
    projection = torch.randn(width, 2000)

    @torch.no_grad()
    def forward_and_solve() -> None:
        """Solve with each penalty on all rows but the last fifth, and once on all rows."""
        hidden = F.relu(forward() @ projection).double()
        for penalty in (*PENALTIES, 1.0):
            part = slice(0, len(hidden) - len(hidden) // 5 * (penalty != 1.0))
            rows = hidden[part]
            solve_ridge(rows.T @ rows, rows.T @ targets[part], penalty)

    def run(name: str) -> None:
        feature_stage.compute_features(features_job, GROUP, ignore)
        loop.train_task(stream.find_job(graph, f"{name}/t-0/statistics"), GROUP, ignore)

    variants: dict[str, Callable[[], object]] = {name: partial(run, name) for name in STATISTICS}
    variants |= {"forward": forward, "forward and solve": forward_and_solve}
    timing = interleave(variants, rounds=5)
    for name in STATISTICS:
        limit = "forward and solve" if name == "ranpac" else "forward"
        what = f"{name}, features and statistics of a task against {limit}"
        report.at_most(what, timing.ratio(name, limit), STATISTICS_DEMAND)


# ---- prompts -------------------------------------------------------------------------------------
class PromptedPass:
    """A query pass and a training step of a prompted ViT, written by hand.

    Args:
        images: Images of the batch.
        labels: Labels of the batch.
        tokens: Number of prompt tokens before the patches. The head reads their mean output.
        rows: Number of prefix rows per block, beginning with the first block.
    """

    def __init__(self, images: Tensor, labels: Tensor, tokens: int = 0, rows: tuple[int, ...] = ()):
        self.images, self.labels = images, labels
        self.vit: Any = BACKBONE
        width: int = vars(BACKBONE)["embed_dim"]
        self.prompts = nn.Parameter(torch.rand(tokens, width))
        self.prefixes = nn.ParameterList(torch.rand(2, count, width) for count in rows)
        self.head = nn.Linear(width, CLASSES)
        parameters = [self.prompts, *self.prefixes, *self.head.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, fused=True)
        self.vit.requires_grad_(False)

    def step(self) -> Tensor:
        """Run a query pass and a training step; return the loss."""
        with torch.no_grad():
            self.vit(self.images)
        return self.prompted_step()

    def prompted_step(self) -> Tensor:
        """Run a training step without a query pass; return the loss."""
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.head(self.features()), self.labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def features(self) -> Tensor:
        """Return the features of the images under the prompts."""
        vit = self.vit
        x = vit._pos_embed(vit.patch_embed(self.images))
        count = len(self.prompts)
        if count:
            prompts = self.prompts.expand(len(x), -1, -1)
            x = torch.cat([x[:, :1], prompts, x[:, 1:]], 1)
        for index, block in enumerate(vit.blocks):
            prefix = self.prefixes[index] if index < len(self.prefixes) else None
            x = x + block.ls1(self.attend(block.attn, block.norm1(x), prefix))
            x = x + block.ls2(block.mlp(block.norm2(x)))
        x = vit.norm(x)
        features: Tensor = x[:, 1 : 1 + count].mean(1) if count else x[:, 0]
        return features

    def attend(self, attn: Any, x: Tensor, prefix: Tensor | None) -> Tensor:
        """Return the output of attention; the prefix is prepended to the keys and values."""
        batch, count, width = x.shape
        qkv = attn.qkv(x).reshape(batch, count, 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        if prefix is not None:
            split = prefix.unflatten(-1, (attn.num_heads, -1)).transpose(1, 2)[:, None]
            k = torch.cat([split[0].expand(batch, -1, -1, -1), k], 2)
            v = torch.cat([split[1].expand(batch, -1, -1, -1), v], 2)
        mixed = F.scaled_dot_product_attention(q, k, v)
        projected: Tensor = attn.proj(mixed.transpose(1, 2).reshape(batch, count, width))
        return projected


def compare_prompts(report: Report) -> None:
    """Compare a training step of each method with prompts with hand-written passes."""
    for name in ("l2p", "dualprompt", "coda"):
        training = Training(name, BACKBONE, "class", Conditions())
        settings: Any = training.method.settings
        images, labels = training.images, training.labels
        if name == "l2p":
            by_hand = PromptedPass(images, labels, tokens=settings.top * settings.length)
        else:
            rows = (settings.length,) * settings.blocks
            if name == "dualprompt":
                rows = (settings.general_length,) * settings.general_blocks + rows
            by_hand = PromptedPass(images, labels, rows=rows)
        timing = interleave({"hand": by_hand.step, name: training.step}, 2 * ROUNDS)
        what = f"{name}, a training step against a query pass and a prompted pass"
        report.at_most(what, timing.ratio(name, "hand"), PROMPT_DEMAND)
        method: Any = training.method
        training.features = method.query(images)
        timing = interleave({"hand": by_hand.prompted_step, name: training.step}, 2 * ROUNDS)
        what = f"{name}, a step with kept queries against a prompted pass"
        report.at_most(what, timing.ratio(name, "hand"), PROMPT_DEMAND)


# ---- rehearsal -----------------------------------------------------------------------------------
def compare_replay(report: Report) -> None:
    """Compare a step with a replayed batch with fine-tuning on as many images."""
    for name in REPLAYING:
        training = Training(name, BACKBONE, "class")
        plain = Training(
            "finetune", BACKBONE, "class", Conditions(batch=BATCH + training.num_replayed)
        )
        timing = interleave({"plain": plain.step, name: training.step}, 2 * ROUNDS)
        what = f"{name}, a step on {BATCH} + {training.num_replayed} images against fine-tuning"
        report.at_most(what, timing.ratio(name, "plain"), REPLAY_DEMAND)


# ---- adapters ------------------------------------------------------------------------------------
def compare_inference(report: Report, folder: Path, tasks: int = 10) -> None:
    """Compare a prediction without the task after `tasks` tasks with a forward pass."""
    card = stream.draw_images(folder, 2 * tasks, train=4, test=1, sides=(96,))
    store, graph, _ = stream.plan(
        folder,
        card,
        tasks,
        stream={
            "scenario": "class",
            "tasks": [{"card": card, "name": "t", "split": tasks}],
        },
        backbone={"name": "vit_tiny_patch16_224", "img_size": 96, "crop_pct": 1.0},
        train={"epochs": 1},
        methods={"ease": {}, "mos": {}},
    )
    stream.ingest(store, graph)
    last = {}
    for stage in graph:
        if isinstance(stage.job, IngestJob) or stage.step == "report":
            continue
        if stage.step == "evaluate":
            last[stage.method] = stream.find_job(graph, stage.id)
        else:
            loop.run_stage(stream.find_job(graph, stage.id), GROUP, ignore)
    images = torch.randn(BATCH, 3, 96, 96)
    for name in ("ease", "mos"):
        method: Any = restore.restore_finished_method(last[name], GROUP)

        @torch.no_grad()
        def predict(method: Any = method) -> Tensor:
            logits: Tensor = method.logits(images, None)
            return logits

        @torch.no_grad()
        def forward(method: Any = method) -> Tensor:
            features: Tensor = method.backbone(images)
            return features

        timing = interleave({"forward": forward, name: predict}, ROUNDS)
        ratio = timing.ratio(name, "forward")
        what = f"{name}, a prediction without the task after {tasks} tasks"
        report.note(what, f"{ratio:.2f} forward passes")


def main() -> None:
    """Run all comparisons."""
    start()
    report = Report()
    compare_prompts(report)
    compare_replay(report)
    with tempfile.TemporaryDirectory() as temporary:
        compare_statistics(report, Path(temporary))
        compare_inference(report, Path(temporary) / "adapters")
    report.exit()


if __name__ == "__main__":
    main()
