"""Tests of `Model.attention`: attention maps of the model of a finished run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from serving import finished

from pipeline.results.model import Model
from workers.errors import UserError


def test_attention_maps_depend_on_the_masks_of_the_task(lab: Any) -> None:
    run = finished(lab, "meat", epochs=1)
    model = Model(run.bundle)
    images, _ = run.images("two")
    looks = model.attention(images, "two")
    assert all(name.startswith("block ") for name in looks)
    for look in looks.values():
        assert look.shape[0] == len(images)
        assert np.isfinite(look).all()
        assert (look >= 0).all()
    single = model.attention(images[:1], "two")
    other = model.attention(images, "three")
    for name, look in looks.items():
        np.testing.assert_allclose(single[name][0], look[0], rtol=1e-4, atol=1e-5)
    assert any(np.abs(look - other[name]).max() > 1e-4 for name, look in looks.items())
    answers = model.predict(images, task="two")  # `attention` must leave no masks or hooks
    assert len(answers) == len(images)


def test_attention_of_an_unknown_task_is_refused(lab: Any) -> None:
    run = finished(lab, "meat", epochs=1)
    with pytest.raises(UserError, match="task 'nowhere' is not in"):
        Model(run.bundle).attention([], "nowhere")
