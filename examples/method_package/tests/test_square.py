"""Check the promises of every method for `square`, on tiny tasks."""

import pytest
from pipeline.testing import PROMISES, Lab, list_cases


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"))


@pytest.mark.parametrize(("promise", "optimizer"), list_cases("square"))
def test_square_keeps(lab, promise, optimizer):
    PROMISES[promise].check(lab, "square", optimizer)
