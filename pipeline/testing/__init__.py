"""Test a method: check on tiny tasks, in this process, that it keeps its promises.

A promise is a property that a method must have, for example that it does not forget earlier tasks.
The attributes of the method's class determine which promises apply. `Lab` runs the stages, and
`PROMISES` has the checks. The example tests a method `square`:

    import pytest
    from pipeline.testing import PROMISES, Lab, list_cases

    @pytest.fixture(scope="session")
    def lab(tmp_path_factory):
        return Lab(tmp_path_factory.mktemp("lab"))

    @pytest.mark.parametrize(("promise", "optimizer"), list_cases("square"))
    def test_square_keeps(lab, promise, optimizer):
        PROMISES[promise].check(lab, "square", optimizer)

A check that fails raises `BrokenPromise`, which names the promise and a remedy.
"""

from pipeline.testing.lab import SETTINGS, Lab
from pipeline.testing.promises import PROMISES, BrokenPromise, list_cases

__all__ = ["PROMISES", "SETTINGS", "BrokenPromise", "Lab", "list_cases"]
