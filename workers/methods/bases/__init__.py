"""Base classes that several methods share.

Methods outside of this project import the classes listed here. Methods of this project import them,
and the other base classes, from their modules.
"""

from workers.data.features import FeatureBatch
from workers.methods.bases.class_incremental import ClassIncremental
from workers.methods.bases.cosine import CosineRehearsal, CosineSettings
from workers.methods.bases.first_session import FirstSession, FirstSessionSettings
from workers.methods.bases.prompt_bank import PromptBank
from workers.methods.bases.rehearsal import Rehearsal, RehearsalSettings
from workers.methods.bases.statistics import ClassStatistics
from workers.methods.bases.weight_masks import (
    ThresholdMasks,
    ThresholdSettings,
    WeightMasks,
    WeightMaskSettings,
)

__all__ = [
    "ClassIncremental",
    "ClassStatistics",
    "CosineRehearsal",
    "CosineSettings",
    "FeatureBatch",
    "FirstSession",
    "FirstSessionSettings",
    "PromptBank",
    "Rehearsal",
    "RehearsalSettings",
    "ThresholdMasks",
    "ThresholdSettings",
    "WeightMaskSettings",
    "WeightMasks",
]
