"""The losses of a student that learns from a teacher's probabilities and hidden states.

Probabilities are from Hinton et al. 2015, "Distilling the Knowledge in a Neural Network": softened,
and with the factor temperature squared, which keeps the gradient's size independent of the
temperature. The reverse divergence is from Gu et al. 2023, "MiniLLM".

Hidden states are compared by cosine: Sanh et al. 2019, "DistilBERT, a distilled version of BERT".
Or by mean squared error, and with a learned projection where the widths differ: Jiao et al. 2020,
"TinyBERT", equation 8.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import torch
from torch.nn import functional

from steadytrain.components.shared.chunks import comparison_rows
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.foreign import foreign
from steadytrain.components.shared.model_source import resolve_model
from steadytrain.components.techniques.base import Batch, Row
from steadytrain.components.techniques.distillation import DistillationConfig
from steadytrain.components.techniques.modules import Auxiliary, attach_auxiliary

_NAME: Final = "hidden_states"


def state_loss(
    student: torch.Tensor, teacher: torch.Tensor, kind: Literal["cosine", "mse"]
) -> torch.Tensor:
    """Return the loss of each token, (tokens), float32.

    Args:
        student, teacher: (tokens, width).
    """
    states, other = student.float(), teacher.float()
    if kind == "cosine":
        return 1 - functional.cosine_similarity(states, other, dim=1)
    return (states - other).square().mean(1)


class HiddenStates(Auxiliary):
    """A part of the student that compares its states within its forward pass.

    Outside `comparing`, it does nothing.

    Args:
        pairs: the compared layers, of the student and of the teacher, in order.
        widths: of the student's and the teacher's states. If they differ, one projection without
            bias, shared by all layers, maps the student's to the teacher's.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[int, int]],
        widths: tuple[int, int],
        kind: Literal["cosine", "mse"],
    ) -> None:
        super().__init__()
        student, other = widths
        self.pairs, self.kind = tuple(pairs), kind
        self.projection = None if student == other else torch.nn.Linear(student, other, bias=False)
        self.expected: tuple[Sequence[torch.Tensor], torch.Tensor] | None = None

    def forward(
        self,
        states: Sequence[torch.Tensor],
        teacher: Sequence[torch.Tensor],
        shares: torch.Tensor,
    ) -> torch.Tensor:
        """Return the loss, summed over layers and tokens, float32.

        Args:
            states: of the student, (rows, length, width): of the embeddings and of each layer.
            teacher: of each compared layer.
            shares: (rows, length), float32, by which the loss of each token is multiplied. Tokens
                with 0 are not compared.
        """
        kept = shares > 0
        shares = shares[kept]
        loss = torch.zeros((), device=shares.device)
        with torch.autocast(shares.device.type, enabled=False):
            for (layer, _), other in zip(self.pairs, teacher, strict=True):
                projected = states[layer][kept]
                if self.projection is not None:
                    projected = self.projection(projected.to(self.projection.weight.dtype))
                loss = loss + (state_loss(projected, other[kept], self.kind) * shares).sum()
        return loss

    def answer(self, model: torch.nn.Module, inputs: object, output: Any) -> Any:
        """Replace the returned states by their loss and the last one."""
        del model, inputs
        if self.expected is not None:
            states = output.hidden_states
            output.hidden_states = (self(states, *self.expected), states[-1])
        return output


@dataclass(frozen=True)
class Comparison:
    """A loss to add: the student's part that computes it, and the teacher's states.

    states: (rows, length, width) of each compared layer.
    """

    part: HiddenStates
    states: Sequence[torch.Tensor]
    weight: float

    def loss(self, output: Any) -> torch.Tensor:
        """Return the weighted loss from what the student returned within `comparing`."""
        states: torch.Tensor = output.hidden_states[0]
        return self.weight * states


@contextlib.contextmanager
def comparing(comparison: Comparison | None, shares: torch.Tensor) -> Iterator[None]:
    """Within this context, the student's `hidden_states` are the summed loss and the last state.

    It must be called with `output_hidden_states=True`. None changes nothing.

    Args:
        shares: as in `HiddenStates.forward`.
    """
    if comparison is None:
        yield
        return
    comparison.part.expected = (comparison.states, shares)
    try:
        yield
    finally:
        comparison.part.expected = None


def attach_comparison(student: Any, config: RunConfig) -> None:
    """Add `HiddenStates` to a student.

    Raises:
        BadInput: the teacher's layers do not fit the student's.
    """
    from transformers import AutoConfig

    settings = config.training.distillation
    with foreign(
        f"training.distillation.teacher = {settings.teacher!r}: its config.json cannot be read",
        "use a model that Transformers has built in",
    ):
        folder = resolve_model(str(settings.teacher), config)
        teacher = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    sizes = (student.config.num_hidden_layers, teacher.num_hidden_layers)
    pairs = settings.hidden.pairs(*sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.training.seed)
        part = HiddenStates(
            pairs,
            (student.config.hidden_size, teacher.hidden_size),
            settings.hidden.loss,
        )
    attach_auxiliary(student, _NAME, part)


def comparing_part(student: torch.nn.Module) -> HiddenStates | None:
    """Return what `attach_comparison` added; None if it added nothing."""
    return next((part for part in student.modules() if isinstance(part, HiddenStates)), None)


# What a teacher says about rows, short enough to be stored: its most likely classes.
#
# The teacher's other classes count as one, "rest": their total probability is known, and how it is
# spread over them is left to the student. So the stored answer says nothing that the teacher did
# not say. Scaling the most likely classes up to a sum of 1 would: it teaches too high
# probabilities (Anshumann et al. 2025, "Sparse Logit Sampling"). The divergence of the joined
# classes is at most that of all classes (the log sum inequality), and equals it if all are stored.

CLASSES, LIKELY, REST = "teacher_classes", "teacher_likely", "teacher_rest"
"""Columns of stored rows, and entries of a micro-batch."""
COLUMNS: Final = (CLASSES, LIKELY, REST)
_IMPOSSIBLE: Final = -1e4
"""Logarithm of a probability that is 0 in 32 bits."""


@dataclass(frozen=True)
class TopAnswers:
    """The most likely classes (or tokens) of a teacher, for each target.

    classes: (targets, K), integers. likely: (targets, K), float32, the logarithms of their softened
        probabilities. rest: (targets), float32, that of all other classes together; minus infinity
        if there are none.
    """

    classes: torch.Tensor
    likely: torch.Tensor
    rest: torch.Tensor

    def __getitem__(self, rows: torch.Tensor) -> TopAnswers:
        return TopAnswers(self.classes[rows].long(), self.likely[rows], self.rest[rows])

    def completed(self, own: torch.Tensor) -> torch.Tensor:
        """Return the logarithms of the probabilities of all classes, (targets, classes).

        The rest is spread as the student spreads it, which makes the divergence of all classes that
        of the joined ones; its gradient too, because the student's shares of the rest cancel out.

        Args:
            own: the student's.
        """
        others = own.scatter(1, self.classes, -math.inf).logsumexp(1)
        # A class without any probability would make the divergence infinite.
        shift = self.rest.clamp(min=_IMPOSSIBLE) - others
        return (own + shift.unsqueeze(1)).scatter(1, self.classes, self.likely)


def top_answers(logits: torch.Tensor, top_k: int, temperature: float) -> TopAnswers:
    """Return the most likely classes.

    Args:
        logits: (targets, classes).
    """
    answers = (logits.float() / temperature).log_softmax(1)
    likely, classes = answers.topk(top_k, dim=1)
    remainder = answers.scatter(1, classes, -math.inf).logsumexp(1)
    return TopAnswers(classes, likely, remainder)


def collate_answers(rows: Sequence[Row]) -> Batch:
    """Return the stored answers of rows as entries of a micro-batch; none if there are none."""
    if REST not in rows[0]:
        return {}
    classes, likely, remainder = (
        torch.from_numpy(np.concatenate([np.asarray(row[name]) for row in rows]))
        for name in COLUMNS
    )
    shape = (len(remainder), len(classes) // max(len(remainder), 1))
    return {CLASSES: classes.view(shape), LIKELY: likely.view(shape), REST: remainder}


def answers_in(batch: Batch, ignored: int) -> Callable[[torch.Tensor], TopAnswers] | None:
    """Return what gives the answers for places in "targets"; None if none are stored."""
    if REST not in batch:
        return None
    stored = TopAnswers(*(batch[name] for name in COLUMNS))
    numbers = (batch["targets"].flatten() != ignored).cumsum(0) - 1
    return lambda places: stored[numbers[places]]


@dataclass(frozen=True)
class Teaching:
    """What a teacher says about a micro-batch.

    logits: returns its logits (chosen, vocabulary) for some of the rows, given their indices; or
        what is stored of them.
    comparison: of hidden states; None without one.
    """

    logits: Callable[[torch.Tensor], torch.Tensor | TopAnswers]
    settings: DistillationConfig
    comparison: Comparison | None = None


def taught_loss(
    logits: torch.Tensor, targets: torch.Tensor, teaching: Teaching, smoothing: float = 0.0
) -> torch.Tensor:
    """Return the loss of complete logits, summed over the rows, in nats.

    Args:
        logits: (rows, vocabulary), float32.
        targets: (rows), int64, each a token.
        smoothing: of the targets, as in `fused_loss.summed_loss`.

    Returns:
        A scalar, float32, differentiable once.
    """
    loss: torch.Tensor = _TaughtLoss.apply(logits, targets, teaching, smoothing)
    return loss


class _TaughtLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        teaching: Teaching,
        smoothing: float,
    ) -> torch.Tensor:
        rows = torch.arange(len(targets), device=targets.device)
        gradient = logits.clone()
        loss = turn_into_gradient(gradient, targets.unsqueeze(1), rows, teaching, smoothing)
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * outputs[0], None, None, None


def turn_into_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    rows: torch.Tensor,
    teaching: Teaching,
    smoothing: float,
) -> torch.Tensor:
    """Replace a student's logits by the gradient of their loss. Return the summed loss.

    Args:
        logits: (rows, vocabulary), overwritten.
        targets: (rows, 1), int64.
        rows: their indices for `Teaching.logits`.
    """
    loss = torch.zeros((), device=logits.device)
    size = comparison_rows(logits.shape[1])
    for start in range(0, logits.shape[0], size):
        block = slice(start, start + size)
        teacher = teaching.logits(rows[block])
        value, gradient = _compared(
            logits[block].float(), targets[block], teacher, teaching.settings, smoothing
        )
        loss += value
        logits[block] = gradient.to(logits.dtype)
    return loss


def _compared(
    student: torch.Tensor,
    targets: torch.Tensor,
    teacher: torch.Tensor | TopAnswers,
    settings: DistillationConfig,
    smoothing: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss of a block of rows and its gradient, (rows, vocabulary)."""
    heat, share = settings.temperature, settings.weight
    logs = (student / heat).log_softmax(1)
    if isinstance(teacher, TopAnswers):
        other = teacher.completed(logs)
    else:
        other = (teacher.float() / heat).log_softmax(1)
    if settings.divergence == "forward":
        given = other.exp()
        loss = (given * (other - logs)).sum()
        gradient = logs.exp().sub_(given)
    else:
        chances, difference = logs.exp(), logs - other
        each = (chances * difference).sum(1, keepdim=True)
        loss, gradient = each.sum(), chances.mul_(difference.sub_(each))
    loss, gradient = loss * (share * heat**2), gradient.mul_(share * heat)
    if share < 1:
        plain = student.log_softmax(1)
        hit = torch.lerp(plain.gather(1, targets), plain.mean(1, keepdim=True), smoothing)
        loss -= (1 - share) * hit.sum()
        errors = plain.exp_().sub_(smoothing / plain.shape[1])
        errors.scatter_add_(1, targets, errors.new_full(targets.shape, smoothing - 1))
        gradient.add_(errors, alpha=1 - share)
    return loss, gradient
