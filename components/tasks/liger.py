"""Liger's Triton kernel: compute the loss and gradient of logits in one pass over the GPU's memory.

From Hsu et al. 2024, "Liger Kernel: Efficient Triton Kernels for LLM Training".
"""

from __future__ import annotations

import functools
from importlib.util import find_spec

import torch
from torch._subclasses.fake_tensor import FakeTensor

from steadytrain.components.techniques.base import IGNORED

_used = True


def use(works: bool) -> None:
    """Set whether this process uses the kernel where it can."""
    global _used
    _used = works


def has_kernel_for(logits: torch.Tensor) -> bool:
    """Return whether the kernel runs on these logits. It never runs on fake tensors."""
    return logits.is_cuda and not isinstance(logits, FakeTensor) and _used and _installed()


def try_kernel(device: torch.device) -> None:
    """Compute a small loss and its gradient, and compare them with PyTorch's.

    Raises:
        RuntimeError: they differ.
        Exception: the kernel cannot be compiled or started.
    """
    logits = torch.linspace(-2, 2, 3 * 40, device=device).view(3, 40)
    targets = torch.tensor([1, 7, 39], device=device)
    wanted = logits.clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(wanted, targets, reduction="sum")
    (gradient,) = torch.autograd.grad(expected, wanted)
    found = liger_loss(logits, targets.unsqueeze(1), 0.0, differentiate=True)
    for mine, theirs in ((found, expected.detach()), (logits, gradient)):
        if not torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5):
            off = float((mine - theirs).abs().max())
            raise RuntimeError(f"its result differs from PyTorch's by {off:.2g}")


@functools.cache
def _installed() -> bool:
    return find_spec("liger_kernel") is not None and find_spec("triton") is not None


def liger_loss(
    logits: torch.Tensor, targets: torch.Tensor, smoothing: float, *, differentiate: bool
) -> torch.Tensor:
    """Return the summed cross-entropy, in nats.

    With `differentiate`, the gradient overwrites the logits.

    Args:
        logits: (rows, vocabulary), contiguous.
        targets: (rows, 1), int64.
        smoothing: share of each target that is spread evenly over the vocabulary.

    Returns:
        A scalar, float32.
    """
    from liger_kernel.ops.cross_entropy import MAX_FUSED_SIZE, liger_cross_entropy_kernel
    from triton import next_power_of_2

    rows, vocabulary = logits.shape
    losses = torch.zeros(rows, dtype=torch.float32, device=logits.device)
    liger_cross_entropy_kernel[(rows,)](
        X_ptr=logits,
        X_stride=logits.stride(0),
        Y_ptr=targets,
        Y_stride=targets.stride(0),
        loss_ptr=losses,
        loss_stride=losses.stride(0),
        n_cols=vocabulary,
        label_smoothing=smoothing,
        reduction="sum",
        ignore_index=IGNORED,
        HAS_GRADIENTS=differentiate,
        BLOCK_SIZE=min(MAX_FUSED_SIZE, next_power_of_2(vocabulary)),
        # AMD's wavefronts have 64 threads, NVIDIA's warps 32.
        num_warps=16 if torch.version.hip else 32,
        # Options of the kernel that are not used.
        weight_ptr=None,
        HAS_WEIGHT=False,
        sum_non_ignore_weight=rows,
        weight_sum=0.0,
        n_non_ignore=rows,
        z_loss_ptr=None,
        RETURN_Z_LOSS=False,
        lse_square_scale=0.0,
        softcap=None,
        HAS_SOFTCAPPING=False,
        token_accuracy_ptr=None,
        token_accuracy_stride=0,
        RETURN_TOKEN_ACCURACY=False,
        predicted_tokens_ptr=None,
        predicted_tokens_stride=0,
        RETURN_PREDICTED_TOKENS=False,
    )
    return losses.sum()
