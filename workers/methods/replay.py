"""Replay: fine-tuning on new images and a few old images, the simplest use of a memory.

Chaudhry et al.: On Tiny Episodic Memories in Continual Learning, 2019 (the paper uses a ring
buffer, and sees each image once).
"""

from __future__ import annotations

from workers.methods.bases.rehearsal import Rehearsal, RehearsalSettings
from workers.methods.train_defaults import TrainDefaults


class Replay(Rehearsal[RehearsalSettings]):
    """L = CE over all classes so far. An epoch has each new image and each exemplar once."""

    name = "replay"
    has_constant_step = True
    family = "rehearsal"
    keeps = "a head"
    shares_head = True
    paper = "On Tiny Episodic Memories in Continual Learning, 2019"
    train_defaults = TrainDefaults(
        lr=1e-4,
        scratch_lr=1e-3,
        source="measured on 25 classes of CIFAR-100 at 64 px: configs/RESULTS.md",
    )
