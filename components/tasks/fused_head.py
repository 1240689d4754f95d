"""A language model's head that computes the loss itself, and how callers request it.

A loss of whole documents' log-likelihoods needs no logits of a full micro-batch. What a token's
gradient is multiplied by depends on all tokens of its document, so the head runs twice over the
chunks: first for the likelihoods, then for the gradients. Both happen in the forward pass, where
FSDP and ZeRO-3 have gathered the head's weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import torch
from torch.nn import functional

from steadytrain.components.shared.chunks import chunk_rows, comparison_rows
from steadytrain.components.tasks.criterion import Criterion
from steadytrain.components.tasks.frozen_parts import FrozenHead
from steadytrain.components.tasks.fused_loss import (
    ForwardGradients,
    LossAndGradients,
    add_gradients,
    head_logits,
    rows_with_target,
    summed_loss,
)
from steadytrain.components.tasks.loaded_weights import QuantizedMatrix, product_type
from steadytrain.components.techniques.base import IGNORED
from steadytrain.components.techniques.contrastive_tokens import ContrastiveConfig
from steadytrain.components.techniques.contrastive_tokens.loss import Span, similarity_loss
from steadytrain.components.techniques.distillation.loss import Teaching
from steadytrain.components.techniques.modules import eval_mode


class HeadRequest(Protocol):
    """What a fused head computes instead of logits."""

    def answer(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor | QuantizedMatrix,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return what the head returns.

        Args:
            hidden: (rows, length, width), the head's input.
            weight: (vocabulary, width).
        """


@dataclass(frozen=True)
class Contrast:
    """A contrastive loss to add: the documents of the micro-batch, and how to compute it."""

    spans: Sequence[Span]
    settings: ContrastiveConfig


@dataclass(eq=False)
class LossRequest:
    """A request for a loss.

    targets: (rows, length), int64. smoothing: share of each target that is spread over all classes.
    teaching: what a teacher says about these rows; None without a teacher.
    contrast: what to add; None without a contrastive loss.
    criterion: another loss of the logits; None for cross-entropy.
    loss: the head's answer. None means that the model has no such head.
    """

    targets: torch.Tensor
    smoothing: float = 0.0
    teaching: Teaching | None = None
    contrast: Contrast | None = None
    criterion: Criterion | None = None
    loss: torch.Tensor | None = None

    def answer(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor | QuantizedMatrix,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        how = (self.smoothing, self.teaching, self.criterion)
        self.loss = summed_loss(hidden, weight, bias, self.targets, *how)
        if self.contrast is not None:
            settings = self.contrast.settings
            added = similarity_loss(hidden, self.contrast.spans, settings)
            self.loss = self.loss + settings.weight * added
        return self.loss


@dataclass(eq=False)
class LikelihoodRequest:
    """A request for the log-likelihood of each document, or for a loss that compares them.

    targets: (rows, length), int64. counts: number of targets of each document.
    comparison: returns the loss; None asks for the likelihoods themselves.
    result: the head's answer. None means that the model has no such head.
    """

    targets: torch.Tensor
    counts: Sequence[int]
    comparison: Comparison | None
    result: torch.Tensor | None = None

    def answer(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor | QuantizedMatrix,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        inputs = (hidden, weight, bias, self.targets, self.counts)
        if self.comparison is None:
            self.result = likelihoods(*inputs)
        else:
            self.result = likelihood_loss(*inputs, self.comparison)
        return self.result


class StatesRequest:
    """A request for the head's input and its own tensors.

    hidden: (rows, length, width). None means that the model has no such head.
    """

    def __init__(self) -> None:
        self.hidden: torch.Tensor | None = None
        self.weight: torch.Tensor
        self.bias: torch.Tensor | None

    def answer(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor | QuantizedMatrix,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        assert isinstance(weight, torch.Tensor), "only a trained model's head is quantized"
        self.hidden, self.weight, self.bias = hidden, weight, bias
        return hidden

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits of some of the rows, (chosen, vocabulary)."""
        assert self.hidden is not None, "the head has answered"
        with torch.no_grad(), torch.autocast(rows.device.type, enabled=False):
            hidden = self.hidden.flatten(0, -2)[rows]
            return torch.nn.functional.linear(hidden, self.weight, self.bias)


Request = TypeVar("Request", bound=HeadRequest)
_request: ContextVar[HeadRequest | None] = ContextVar("_request", default=None)


@contextlib.contextmanager
def requested(request: Request) -> Iterator[Request]:
    """Within this context, a fused head returns what the request asks for instead of logits."""
    token = _request.set(request)
    try:
        yield request
    finally:
        _request.reset(token)


def head_request() -> HeadRequest | None:
    """Return the current request to the head. None means that logits are wanted."""
    return _request.get()


# A language model's head that computes the loss itself, within the model's forward pass.
#
# It works there, rather than after the model, because FSDP and ZeRO-3 gather the full weights only
# in the forward pass. To everything else the head stays the same: same parameters, same names,
# tied or not. Without targets, it returns logits.


class FusedHead(torch.nn.Linear):
    """A linear layer that returns the loss, or its input, when that is requested."""

    # In a compiled graph, the targets would be a constant.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  as its base has it
        request = head_request()
        if request is None:
            return super().forward(input)
        return request.answer(input, self.weight, self.bias)


class FusedFrozenHead(FrozenHead):
    """The same for a quantized head."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  as its base has it
        request = head_request()
        if request is None:
            return super().forward(input)
        return request.answer(input, self.matrix, self.bias)


_FUSED: Final = {torch.nn.Linear: FusedHead, FrozenHead: FusedFrozenHead}


def fuse_head(model: Any) -> str:
    """Make the model's head compute the loss, if the model does nothing else with the logits.

    Attach adapters first: they may wrap the head.

    Returns:
        The reason why it cannot. Empty means that it does.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        return "the model does not name its head"
    kind: Any = type(head)
    if kind not in _FUSED:
        return f"the head is not a plain linear layer but {kind.__module__}.{kind.__name__}"
    head.__class__ = _FUSED[kind]
    why = _refusal(model)
    if why:
        head.__class__ = kind
    return why


def _refusal(model: torch.nn.Module) -> str:
    """Test the model itself: a model that scales or caps logits changes its head's output."""
    device = next(model.parameters()).device
    ids = torch.zeros((1, 4), dtype=torch.int64, device=device)
    try:
        with eval_mode(model), requested(LossRequest(ids)) as request:
            output = model(input_ids=ids, use_cache=False).logits
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        return f"the model uses its head's output for more than logits ({error})"
    if request.loss is None:
        return "the model does not call its head"
    return "" if output is request.loss else "the model changes its head's output"


def likelihoods_of(
    forward: Callable[[], torch.Tensor],
    targets: torch.Tensor,
    counts: Sequence[int],
    comparison: Comparison | None = None,
) -> torch.Tensor:
    """Return the log-likelihood of each part's targets, (parts,), or the loss of comparing them.

    Only the loss is differentiable, and once.

    Args:
        forward: runs the model; returns its logits, or what its head is requested to return.
        targets: (rows, length), int64.
        counts: number of targets of each part, in the order of the tokens.
    """
    with requested(LikelihoodRequest(targets, counts, comparison)) as request:
        logits = forward()
    if request.result is not None:
        # The model's wrappers attached their backward work to this output, not to `request.result`.
        return request.result if comparison is None else logits
    targets = targets.flatten()
    kept = (targets != IGNORED).nonzero().squeeze(1)
    chosen = logits.flatten(0, 1)[kept].float()
    nats = -functional.cross_entropy(chosen, targets[kept], reduction="none")
    sums = summed_by_document(nats, counts)
    return sums if comparison is None else comparison(sums).float()


Comparison = Callable[[torch.Tensor], torch.Tensor]
"""Returns a loss, a scalar, from the log-likelihood of each document, (documents,) in float64."""


def likelihood_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor | QuantizedMatrix,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    counts: Sequence[int],
    comparison: Comparison,
) -> torch.Tensor:
    """Return the loss that a comparison of documents gives.

    Args:
        hidden, weight, bias, targets: as for `fused_loss.summed_loss`.
        counts: number of targets of each document, in the order of the rows.

    Returns:
        A scalar, float32, differentiable once.
    """
    if not torch.is_grad_enabled():
        return comparison(likelihoods(hidden, weight, bias, targets, counts)).float()
    loss: torch.Tensor = _LikelihoodLoss.apply(hidden, weight, bias, targets, counts, comparison)
    return loss


def likelihoods(
    hidden: torch.Tensor,
    weight: torch.Tensor | QuantizedMatrix,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    counts: Sequence[int],
) -> torch.Tensor:
    """Return the log-likelihood of each document's targets, (documents,) in float64, in nats.

    Args: as for `likelihood_loss`. The result is not differentiable.
    """
    with torch.no_grad():
        return summed_by_document(_Rows(hidden, weight, bias, targets).nats(), counts)


def summed_by_document(nats: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Return the sums of consecutive values, in float64.

    A sum for each document, because adding by index has no fixed order on a GPU.

    Args:
        nats: (targets).
        counts: number of targets of each document.
    """
    parts = torch.split(nats, list(counts))
    return torch.stack([part.sum(dtype=torch.float64) for part in parts])


class _LikelihoodLoss(ForwardGradients):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor | QuantizedMatrix,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        counts: Sequence[int],
        comparison: Comparison,
    ) -> torch.Tensor:
        rows = _Rows(hidden, weight, bias, targets)
        with torch.enable_grad():
            sums = summed_by_document(rows.nats(), counts).requires_grad_()
            loss = comparison(sums)
            (slopes,) = torch.autograd.grad(loss, sums)
        each = torch.cat([slope.expand(count) for slope, count in zip(slopes, counts, strict=True)])
        gradients = rows.gradients(each.float().unsqueeze(1), ctx.needs_input_grad)
        ctx.gradients = (gradients.hidden, gradients.weight, gradients.bias)
        return loss.detach().float()


@dataclass
class _Rows:
    """The rows that have a target, and the head.

    hidden: (..., width). weight: (vocabulary, width). targets: (...), int64.
    """

    hidden: torch.Tensor
    weight: torch.Tensor | QuantizedMatrix
    bias: torch.Tensor | None
    targets: torch.Tensor

    def __post_init__(self) -> None:
        self.dtype = product_type(self.hidden.device, self.weight.dtype)
        self.kept = rows_with_target(self.targets.flatten())
        self.rows = self.hidden.detach().flatten(0, -2).index_select(0, self.kept).to(self.dtype)
        self.wanted = self.targets.flatten().index_select(0, self.kept).unsqueeze(1)
        self.head = (
            self.weight
            if isinstance(self.weight, QuantizedMatrix)
            else self.weight.detach().to(self.dtype)
        )

    def nats(self) -> torch.Tensor:
        """Return each target's log-likelihood, (rows,) in float32."""
        logs = torch.empty(len(self.rows), device=self.rows.device)
        for logits, start in self._chunks():
            for block, whole in _blocks(logits, start):
                values = logits[block].float()
                values -= values.amax(1, keepdim=True)
                hit = values.gather(1, self.wanted[whole])
                logs[whole] = (hit - values.exp_().sum(1, keepdim=True).log()).squeeze(1)
        return logs

    def gradients(self, slopes: torch.Tensor, needed: Sequence[bool]) -> LossAndGradients:
        """Return the gradients of the sum of slope times log-likelihood.

        Args:
            slopes: (rows, 1), float32.
            needed: whether those of the hidden states, the weight and the bias are.
        """
        gradients = LossAndGradients.empty(self.rows, self.weight, self.bias, needed)
        for logits, start in self._chunks():
            for block, whole in _blocks(logits, start):
                values = logits[block].float()
                values -= values.amax(1, keepdim=True)
                values.exp_()
                values *= -slopes[whole] / values.sum(1, keepdim=True)
                values.scatter_add_(1, self.wanted[whole], slopes[whole])
                if gradients.bias is not None:
                    gradients.bias += values.sum(0)
                logits[block] = values
            add_gradients(
                gradients, logits, self.rows, self.head, slice(start, start + len(logits))
            )
        gradients.finish(self.hidden.flatten(0, -2), self.weight.dtype, self.kept)
        if gradients.hidden is not None:
            gradients.hidden = gradients.hidden.view_as(self.hidden)
        return gradients

    def _chunks(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield the logits (rows, vocabulary) of consecutive rows, and the first row's index."""
        size = chunk_rows(self.weight.shape[0])
        for start in range(0, len(self.rows), size):
            logits = head_logits(self.rows[start : start + size], self.head)
            if self.bias is not None:
                logits += self.bias.to(self.dtype)
            yield logits, start


def _blocks(logits: torch.Tensor, start: int) -> Iterator[tuple[slice, slice]]:
    """Yield consecutive rows of a chunk that fit in memory in 32 bits: in the chunk, and in all."""
    size = comparison_rows(logits.shape[1])
    for first in range(0, len(logits), size):
        end = min(first + size, len(logits))
        yield slice(first, end), slice(start + first, start + end)
