"""All private names of PyTorch that this project uses.

PyTorch can rename or remove them in any release. tests/workers/test_torch_internals.py has one
contract test for each, so that an upgrade fails there with the missing name.
"""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import Tensor, distributed
from torch._C._nn import _upsample_bilinear2d_aa
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm

BatchNormBase = _BatchNorm  # of batch norms of 1 to 3 dimensions and of synchronised ones


def shapes_only() -> FakeTensorMode:
    """Return a context in which operations have results with shapes and no values.

    They take neither time nor memory. Parameters from outside the context may be used.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


def resize_into(image: Tensor, out: Tensor, size: list[int]) -> None:
    """Write `F.interpolate(image, size, mode="bilinear", antialias=True)` into `out`.

    The public function has no `out`, and takes 50 % longer for small images.

    Args:
        image: Image (1, C, h, w).
        out: Output (1, C, *size) of the same type and memory format.
        size: Height and width.
    """
    _upsample_bilinear2d_aa(image, size, False, None, out=out)  # type: ignore[call-arg]


def set_compile_options(max_variants: int) -> None:
    """Set how often `torch.compile` compiles the code of one block; the setting is global.

    Args:
        max_variants: Maximum number of variants for other shapes or modes. Beyond it the block runs
            uncompiled.
    """
    from torch._dynamo import config  # takes a second to import

    # Otherwise the code of a block without hooks would serve blocks with hooks, and skip these.
    config.skip_nnmodule_hook_guards = False
    config.recompile_limit = max_variants


def limit_host_waits(seconds: float) -> None:
    """Set the time limit of the collectives on host tensors in the default process group.

    Those on device tensors keep theirs.
    """
    group = distributed.group.WORLD
    assert group is not None, "there is no process group"
    group._get_backend(torch.device("cpu")).set_timeout(timedelta(seconds=seconds))
