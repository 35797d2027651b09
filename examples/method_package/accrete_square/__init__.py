"""The continual-learning method square."""

from pipeline import Batch, Method, MethodSettings, Progress, TrainDefaults
from pydantic import Field
from torch import Tensor


class SquareSettings(MethodSettings):
    """Settings of `square`."""

    weight: float = Field(0.01, ge=0, description="weight of the penalty on large features")


class Square(Method[SquareSettings]):
    """A head for each task on a frozen backbone, with a penalty on large features.

    Replace it by your method. The docstrings of `workers.methods.base` describe the life cycle of a
    method and all that a class can declare; `workers.methods.bases` has classes to start from.
    """

    name = "square"
    Settings = SquareSettings
    train_defaults = TrainDefaults(lr=1e-3, source="a guess")

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, dict[str, Tensor]]:
        features = self.features(batch.images)
        ce = self.classification_loss(features, batch)
        penalty = self.settings.weight * features.square().mean()
        return ce + penalty, {"ce": ce.detach(), "penalty": penalty.detach()}
