"""NCM: the nearest class mean, by Euclidean distance of frozen features. Nothing is trained.

Mensink, Verbeek, Perronnin, Csurka: Distance-Based Image Classification: Generalizing to New
Classes at Near-Zero Cost, TPAMI 2013.
"""

from __future__ import annotations

from workers.data.features import FeatureBatch
from workers.job import Task
from workers.methods.base import MethodSettings
from workers.methods.bases.statistics import ClassStatistics, class_means


class Ncm(ClassStatistics[MethodSettings]):
    """Tasks are independent (a star). The logit of class c is <f, mu_c> - |mu_c|^2 / 2.

    mu_c is the mean feature of the class. The logit is -|f - mu_c|^2 / 2 without the term
    -|f|^2 / 2, which is the same for all classes.
    """

    name = "ncm"
    keeps = "class means"
    paper = (
        "Distance-Based Image Classification: Generalizing to New Classes at Near-Zero Cost, "
        "TPAMI 2013"
    )

    def collect(self, task: Task, batch: FeatureBatch) -> None:
        means = class_means(batch.features, batch.labels, task.num_classes)
        head = self.heads[task.name]
        head.weight.copy_(means)
        head.bias.copy_(-means.square().sum(1) / 2)
