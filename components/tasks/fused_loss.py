"""Cross-entropy of a language model's head without the logits of a full micro-batch.

It computes one chunk of rows at a time: logits, loss, and immediately the gradients, which backward
only scales. The idea comes from Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language
Models", and Hsu et al. 2024, "Liger Kernel: Efficient Triton Kernels for LLM Training". Liger's
kernel turns logits into gradients in one pass over the GPU's memory; PyTorch's own operators do it
elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from steadytrain.components.shared.chunks import block_rows, chunk_rows, product_rows
from steadytrain.components.tasks.criterion import Criterion
from steadytrain.components.tasks.loaded_weights import QuantizedMatrix, product_type
from steadytrain.components.techniques.base import IGNORED
from steadytrain.components.techniques.distillation.loss import Teaching, turn_into_gradient
from steadytrain.components.techniques.r_drop.passes import in_pairs


def summed_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor | QuantizedMatrix,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    smoothing: float = 0.0,
    teaching: Teaching | None = None,
    criterion: Criterion | None = None,
) -> torch.Tensor:
    """Return the cross-entropy of `hidden @ weight.T + bias`, summed over the targets, in nats.

    Products are in autocast's dtype if autocast is on. Everything else is in float32.

    Args:
        hidden: (..., width).
        weight: (vocabulary, width).
        bias: (vocabulary).
        targets: (...), int64. Rows whose target is IGNORED don't count.
        smoothing: share of each target that is spread evenly over the vocabulary (label smoothing
            as in `torch.nn.functional.cross_entropy`; Szegedy et al. 2016).
        teaching: what a teacher says about each row; the loss is then `distillation.taught_loss`.
        criterion: another loss of the logits. If it compares two passes, the rows are those of the
            first pass and then those of the second, and their targets are the same.

    Returns:
        A scalar, float32, differentiable once.

    Raises:
        ValueError: the numbers of rows and targets differ.
    """
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(f"{tuple(hidden.shape)} has no row for each of {tuple(targets.shape)}")
    dtype = product_type(hidden.device, weight.dtype)
    rows, wanted = hidden.flatten(0, -2), targets.flatten()
    if not torch.is_grad_enabled():
        options = _Options(dtype, smoothing, teaching, criterion)
        return _pass(rows, weight, bias, wanted, options).loss
    how = (dtype, smoothing, teaching, criterion)
    loss: torch.Tensor = _SummedLoss.apply(rows, weight, bias, wanted, *how)
    return loss


@dataclass(frozen=True)
class _Options:
    """How to compute a loss, and which gradients to compute with it.

    dtype: dtype of the matrix products.
    """

    dtype: torch.dtype
    smoothing: float
    teaching: Teaching | None = None
    criterion: Criterion | None = None
    for_hidden: bool = False
    for_weight: bool = False
    for_bias: bool = False

    @property
    def paired(self) -> bool:
        """Whether the rows are two passes, which are compared."""
        return self.criterion is not None and self.criterion.r_drop > 0

    @property
    def differentiate(self) -> bool:
        return self.for_hidden or self.for_weight or self.for_bias


@dataclass
class LossAndGradients:
    """The loss, and the requested gradients."""

    loss: torch.Tensor
    hidden: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @classmethod
    def empty(
        cls,
        rows: torch.Tensor,
        weight: torch.Tensor | QuantizedMatrix,
        bias: torch.Tensor | None,
        needed: Sequence[bool],
    ) -> LossAndGradients:
        """Return a loss of 0, and room for the gradients.

        Args:
            rows: those that have a target.
            needed: whether the gradients of the hidden states, the weight and the bias are.
        """
        result = cls(torch.zeros((), device=rows.device))
        if needed[0]:
            result.hidden = torch.empty_like(rows)
        if needed[1] and not isinstance(weight, QuantizedMatrix):
            result.weight = torch.zeros_like(weight, dtype=torch.float32)
        if needed[2] and bias is not None:
            result.bias = torch.zeros_like(bias, dtype=torch.float32)
        return result

    def finish(self, hidden: torch.Tensor, dtype: torch.dtype, kept: torch.Tensor) -> None:
        """Bring the gradients into the shape of the inputs.

        Args:
            hidden: (all rows, width). dtype: of the weight. kept: the rows that have a target.
        """
        if self.hidden is not None:
            self.hidden = spread(self.hidden, hidden, kept)
        # It is kept until backward in the parameter's own dtype.
        self.weight = None if self.weight is None else self.weight.to(dtype)


class ForwardGradients(torch.autograd.Function):
    """A loss of a head whose forward pass also computes the gradients and keeps nothing else.

    `forward` leaves those of its first three arguments in `ctx.gradients`.
    """

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Scale in place, because the head's gradient is large. A second backward would scale twice.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the fused loss has been differentiated already")
        scaled = [None if item is None else item.mul_(outputs[0]) for item in gradients]
        return (*scaled, *[None] * (len(ctx.needs_input_grad) - len(scaled)))


class _SummedLoss(ForwardGradients):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor | QuantizedMatrix,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        dtype: torch.dtype,
        smoothing: float,
        teaching: Teaching | None,
        criterion: Criterion | None,
    ) -> torch.Tensor:
        options = _Options(dtype, smoothing, teaching, criterion, *ctx.needs_input_grad[:3])
        sums = _pass(hidden, weight, bias, targets, options)
        ctx.gradients = (sums.hidden, sums.weight, sums.bias)
        return sums.loss


def _pass(
    hidden: torch.Tensor,
    weight: torch.Tensor | QuantizedMatrix,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    options: _Options,
) -> LossAndGradients:
    """Compute the loss and gradients, chunk by chunk.

    Args:
        hidden: (rows, width).
        targets: (rows).
    """
    dtype = options.dtype
    kept = in_pairs(rows_with_target(targets)) if options.paired else rows_with_target(targets)
    rows = hidden.index_select(0, kept).to(dtype)
    wanted = targets.index_select(0, kept).unsqueeze(1)
    head = weight if isinstance(weight, QuantizedMatrix) else weight.to(dtype)
    needed = (options.for_hidden, options.for_weight, options.for_bias)
    result = LossAndGradients.empty(rows, weight, bias, needed)
    size = chunk_rows(weight.shape[0])
    if options.paired:
        size -= size % 2
    for start in _starts(rows, size):
        block = slice(start, start + size)
        logits = head_logits(rows[block], head)
        if bias is not None:
            logits += bias.to(dtype)
        errors = _loss_and_errors(logits, wanted[block], kept[block], result, options)
        if options.differentiate:
            add_gradients(result, errors, rows, head, block)
        del logits, errors
    result.finish(hidden, weight.dtype, kept)
    return result


def head_logits(rows: torch.Tensor, head: torch.Tensor | QuantizedMatrix) -> torch.Tensor:
    """Return the logits (rows, vocabulary), without bias."""
    return head.product(rows) if isinstance(head, QuantizedMatrix) else rows @ head.T


def rows_with_target(targets: torch.Tensor) -> torch.Tensor:
    """Return the rows that have a target. For fake and meta tensors, return all rows."""
    if targets.is_meta or isinstance(targets, FakeTensor):
        return torch.arange(len(targets), device=targets.device)
    return (targets != IGNORED).nonzero().squeeze(1)


def _starts(rows: torch.Tensor, size: int) -> range:
    """Return where each block of rows starts. Of fake tensors, the first block stands for all."""
    return range(0, size if isinstance(rows, FakeTensor) else rows.shape[0], size)


def _loss_and_errors(
    logits: torch.Tensor,
    targets: torch.Tensor,
    kept: torch.Tensor,
    found: LossAndGradients,
    options: _Options,
) -> torch.Tensor:
    """Turn a chunk's logits into their gradient, and accumulate the loss and the bias's gradient.

    Without Liger's kernel, a CPU works on one block of rows at a time, so every pass over a block
    but the first reads from cache.

    Args:
        logits: (rows, vocabulary), overwritten.
        targets: (rows, 1).
        kept: (rows), their indices in the micro-batch.

    Returns:
        (rows, vocabulary), in the dtype and memory of `logits`.
    """
    loss = _at_once(logits, targets, kept, options)
    if loss is not None:
        found.loss += loss
        if found.bias is not None:
            found.bias += logits.sum(0, dtype=torch.float32)
        return logits
    size = block_rows(logits.shape[1]) if logits.device.type == "cpu" else logits.shape[0]
    for start in _starts(logits, size):
        block = slice(start, start + size)
        _block(logits[block], targets[block], found, options)
    return logits


def _at_once(
    logits: torch.Tensor, targets: torch.Tensor, kept: torch.Tensor, options: _Options
) -> torch.Tensor | None:
    """Turn a chunk into its gradient and return its loss; None if it goes block by block."""
    if options.teaching is not None:
        return turn_into_gradient(logits, targets, kept, options.teaching, options.smoothing)
    if options.criterion is not None:
        return options.criterion.turn_into_gradient(logits, targets.squeeze(1))
    if has_kernel_for(logits):
        return liger_loss(logits, targets, options.smoothing, differentiate=options.differentiate)
    return None


def _block(
    logits: torch.Tensor, targets: torch.Tensor, found: LossAndGradients, options: _Options
) -> None:
    """Do the work of `_loss_and_errors` for one block at once."""
    # Use maximum, exponential and sum: on a CPU, `logsumexp` takes ten times as long.
    values = logits.float()
    values -= values.amax(1, keepdim=True)
    hit = values.gather(1, targets)
    if options.smoothing:
        hit = torch.lerp(hit, values.mean(1, keepdim=True), options.smoothing)
    sums = values.exp_().sum(1, keepdim=True)
    found.loss += (sums.log() - hit).sum()
    if not options.differentiate:
        return
    # Probabilities minus the target's. Both still have the factor `sums`, until the division.
    if options.smoothing:
        values -= sums * (options.smoothing / values.shape[1])
    values.scatter_add_(1, targets, sums * (options.smoothing - 1))
    if found.bias is None:
        torch.div(values, sums, out=logits)
        return
    values /= sums
    found.bias += values.sum(0)
    logits.copy_(values)


def add_gradients(
    found: LossAndGradients,
    errors: torch.Tensor,
    rows: torch.Tensor,
    head: torch.Tensor | QuantizedMatrix,
    block: slice,
) -> None:
    """Add a chunk's gradients of the hidden states and the head, from the gradient of its logits.

    Args:
        errors: (chunk, vocabulary).
        rows: (rows, width).
        block: the chunk's rows.
    """
    if found.hidden is not None:
        if isinstance(head, QuantizedMatrix):
            found.hidden[block] = head.transposed_product(errors)
        else:
            torch.mm(errors, head, out=found.hidden[block])
    if found.weight is not None:
        _add_product(found.weight, errors.T, rows[block])


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add `left @ right` to `total`, which is float32.

    16-bit products are added a few rows at a time. The full product would be half as large as the
    sum.
    """
    if left.dtype == total.dtype:
        total.addmm_(left, right)
        return
    size = product_rows(total.shape[1])
    for start in _starts(total, size):
        total[start : start + size] += left[start : start + size] @ right


def spread(gradient: torch.Tensor, hidden: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Expand the gradient of the kept rows to all rows."""
    full = torch.zeros_like(hidden)
    return full.index_copy_(0, kept, gradient.to(hidden.dtype))


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
    tried = liger_loss(logits, targets.unsqueeze(1), 0.0, differentiate=True)
    for mine, theirs in ((tried, expected.detach()), (logits, gradient)):
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
