"""A program that compares Liger's kernel, interpreted on the CPU, with the plain computation."""

COMPARE = """
import sys

import torch
from torch.nn import functional

from steadytrain.components.tasks import fused_loss
from steadytrain.components.techniques.base import IGNORED

fused_loss.has_kernel_for = lambda logits: True
fused_loss.chunk_rows = lambda vocabulary: 5
torch.manual_seed(0)
hidden = torch.randn(3, 11, 8, requires_grad=True)
weight = torch.randn(23, 8, requires_grad=True)
bias = torch.randn(23, requires_grad=True)
targets = torch.randint(0, 23, (3, 11))
targets[torch.rand(3, 11) < 0.4] = IGNORED
for smoothing, dtype, bound in (
    (0.0, torch.float32, 1e-5),
    (0.1, torch.float32, 1e-5),
    (0.1, torch.bfloat16, 1e-2),
):
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        found = fused_loss.summed_loss(hidden, weight, bias, targets, smoothing)
        with torch.no_grad():
            alone = fused_loss.summed_loss(hidden, weight, bias, targets, smoothing)
    expected = functional.cross_entropy(
        functional.linear(hidden, weight, bias).flatten(0, 1),
        targets.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=smoothing,
    )
    assert found.dtype == torch.float32
    torch.testing.assert_close(alone, found, rtol=1e-6, atol=0)
    torch.testing.assert_close(found, expected, rtol=bound, atol=0)
    inputs = (hidden, weight, bias)
    for ours, theirs in zip(
        torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs), strict=True
    ):
        assert ours.dtype == torch.float32
        error = (ours - theirs).norm() / theirs.norm()
        assert error < bound, (smoothing, dtype, error)
print("equal", "liger_kernel.ops.cross_entropy" in sys.modules)
"""
