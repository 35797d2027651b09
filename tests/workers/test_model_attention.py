"""Where a model of a finished run looks: `Model.attention`, for notebooks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from serving import finished

from pipeline.results.model import Model
from workers.errors import UserError


def test_a_task_has_maps_of_each_block_under_its_masks(lab: Any) -> None:
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
    answers = model.predict(images, task="two")  # looking leaves nothing behind
    assert len(answers) == len(images)


def test_a_task_that_is_not_served_is_one_sentence(lab: Any) -> None:
    run = finished(lab, "meat", epochs=1)
    with pytest.raises(UserError, match="task 'nowhere' is not in"):
        Model(run.bundle).attention([], "nowhere")
