"""A language model's head that computes the loss itself, and how callers request it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch.nn import functional

from steadytrain.components.tasks.criterion import Criterion
from steadytrain.components.tasks.frozen_parts import FrozenHead
from steadytrain.components.tasks.fused_likelihood import (
    Comparison,
    likelihood_loss,
    likelihoods,
    summed_by_document,
)
from steadytrain.components.tasks.fused_loss import summed_loss
from steadytrain.components.tasks.quantized import QuantizedMatrix
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


class LossRequest:
    """A request for a loss.

    targets: (rows, length), int64. smoothing: share of each target that is spread over all classes.
    teaching: what a teacher says about these rows; None without a teacher.
    contrast: what to add; None without a contrastive loss.
    criterion: another loss of the logits; None for cross-entropy.
    loss: the head's answer. None means that the model has no such head.
    """

    def __init__(
        self,
        targets: torch.Tensor,
        smoothing: float,
        teaching: Teaching | None = None,
        contrast: Contrast | None = None,
        criterion: Criterion | None = None,
    ) -> None:
        self.targets, self.smoothing = targets, smoothing
        self.teaching, self.contrast, self.criterion = teaching, contrast, criterion
        self.loss: torch.Tensor | None = None

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


class LikelihoodRequest:
    """A request for the log-likelihood of each document, or for a loss that compares them.

    targets: (rows, length), int64. counts: number of targets of each document.
    comparison: returns the loss; None asks for the likelihoods themselves.
    found: the head's answer. None means that the model has no such head.
    """

    def __init__(
        self, targets: torch.Tensor, counts: Sequence[int], comparison: Comparison | None
    ) -> None:
        self.targets, self.counts, self.comparison = targets, counts, comparison
        self.found: torch.Tensor | None = None

    def answer(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor | QuantizedMatrix,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        given = (hidden, weight, bias, self.targets, self.counts)
        if self.comparison is None:
            self.found = likelihoods(*given)
        else:
            self.found = likelihood_loss(*given, self.comparison)
        return self.found


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


_request: ContextVar[HeadRequest | None] = ContextVar("_request", default=None)


@contextlib.contextmanager
def request_loss(
    targets: torch.Tensor,
    smoothing: float = 0.0,
    teaching: Teaching | None = None,
    contrast: Contrast | None = None,
    criterion: Criterion | None = None,
) -> Iterator[LossRequest]:
    """Within this context, a fused head returns the summed loss instead of logits."""
    request = LossRequest(targets, smoothing, teaching, contrast, criterion)
    with _requested(request):
        yield request


@contextlib.contextmanager
def request_likelihoods(
    targets: torch.Tensor, counts: Sequence[int], comparison: Comparison | None = None
) -> Iterator[LikelihoodRequest]:
    """Within this context, a fused head returns likelihoods, or their loss, instead of logits."""
    request = LikelihoodRequest(targets, counts, comparison)
    with _requested(request):
        yield request


@contextlib.contextmanager
def request_states() -> Iterator[StatesRequest]:
    """Within this context, a fused head returns its input instead of logits."""
    request = StatesRequest()
    with _requested(request):
        yield request


@contextlib.contextmanager
def _requested(request: HeadRequest) -> Iterator[None]:
    token = _request.set(request)
    try:
        yield
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
        with eval_mode(model), request_loss(ids) as request:
            given = model(input_ids=ids, use_cache=False).logits
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        return f"the model uses its head's output for more than logits ({error})"
    if request.loss is None:
        return "the model does not call its head"
    return "" if given is request.loss else "the model changes its head's output"


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
    with request_likelihoods(targets, counts, comparison) as request:
        logits = forward()
    if request.found is not None:
        # The model's wrappers attached their backward work to this output, not to `request.found`.
        return request.found if comparison is None else logits
    targets = targets.flatten()
    kept = (targets != IGNORED).nonzero().squeeze(1)
    chosen = logits.flatten(0, 1)[kept].float()
    nats = -functional.cross_entropy(chosen, targets[kept], reduction="none")
    sums = summed_by_document(nats, counts)
    return sums if comparison is None else comparison(sums).float()
