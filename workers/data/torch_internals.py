"""All private names of PyTorch that this project uses.

PyTorch can rename or remove private names in any release. tests/workers/test_torch_internals.py has
one contract test for each name, so that after an upgrade the test of a missing name fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import Tensor, distributed
from torch._C._nn import _upsample_bilinear2d_aa
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

BatchNormBase = _BatchNorm  # base class of BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm
DispatchMode = TorchDispatchMode  # base class of contexts that see each dispatched operator


def shapes_only() -> FakeTensorMode:
    """Return a context in which operations compute only shapes, and no values.

    Operations take almost no time and memory. Tensors from outside the context, such as parameters,
    can be used.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Make ordinary tensors inside `shapes_only` and `torch.inference_mode` too.

    They have values and can be used in training. A function that caches tensors needs this context.
    """
    with unset_fake_temporarily(), torch.inference_mode(False):
        yield


def has_no_values(tensor: object) -> bool:
    """Return whether an object is a tensor that was computed in `shapes_only`."""
    return isinstance(tensor, FakeTensor)


def keep_gradient_above(gradient: Tensor, values: Tensor, threshold: float) -> Tensor:
    """Set `gradient` to 0 where values <= threshold, in place: the gradient of relu. Return it."""
    operator = torch.ops.aten.threshold_backward.grad_input
    operator(gradient, values, threshold, grad_input=gradient)
    return gradient


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
    """Set how often `torch.compile` compiles the code of one block. The setting is global.

    Args:
        max_variants: Maximum number of compiled variants of a block, for different shapes or modes.
            Above the limit, the block runs uncompiled.
    """
    from torch._dynamo import config  # takes a second to import

    # Otherwise code compiled for a block without hooks would be used for blocks with hooks, and
    # would skip their hooks.
    config.skip_nnmodule_hook_guards = False
    config.recompile_limit = max_variants


def limit_host_waits(seconds: float) -> None:
    """Set the timeout of collectives on host tensors in the default process group.

    Collectives on device tensors keep their timeout.
    """
    group = distributed.group.WORLD
    assert group is not None, "there is no process group"
    group._get_backend(torch.device("cpu")).set_timeout(timedelta(seconds=seconds))


def attend_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return `F.scaled_dot_product_attention` and the logarithms of its softmax denominators.

    The public function does not return the logarithms.

    Args:
        q: Queries on the CPU, (B, H, N, D).
        k: Keys, (B, H, N, D).
        v: Values, (B, H, N, D).
        mask: Added to the scores, of the dtype of `q`, broadcastable to (B, H, N, N).
        scale: Factor of the scores.

    Returns:
        The mixed values (B, H, N, D), and log sum_j exp(score_ij) in fp32 (fp64 for q of this
        dtype), (B, H, N, 1).
    """
    output, log_total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, attn_mask=mask, scale=scale
    )
    return output, log_total[..., None]
