"""One optimizer step over one global batch, identical on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from steadytrain.components.shared.events.types import AttemptOutcome
from steadytrain.components.tasks.base import MEASURED, Batch
from steadytrain.components.techniques.adversarial_training.attack import (
    ONE_PASS,
    Pass,
    adversarial_passes,
)
from steadytrain.components.techniques.base import Update
from steadytrain.components.train.failures import Diverged
from steadytrain.components.train.loop.batches import RankBatches
from steadytrain.components.train.loop.control import OUTCOMES
from steadytrain.components.train.loop.optim import current_rate
from steadytrain.components.train.loop.setup import PhaseSeconds, TrainingSetup


@dataclass(frozen=True)
class Agreement:
    """What all ranks know before they start a step.

    weight: number of targets in the full global batch.
    tokens: cost of its rows.
    places: number of tokens, including padding.
    stop: the outcome to stop with, or None to continue.
    unsaved: a rank failed to write its part of a checkpoint.
    due: a checkpoint must be saved after the step.
    """

    weight: int
    tokens: int
    places: int
    stop: AttemptOutcome | None
    unsaved: bool = False
    due: bool = False


@dataclass(frozen=True)
class StepResult:
    """Result of a step.

    loss: sum over the global batch.
    overflow: the scaler skipped the step.
    phases: how long this rank's phases took.
    waits: seconds that each rank waited for the others; empty if unknown.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    overflow: bool
    phases: PhaseSeconds
    waits: Sequence[float]


def agree(
    parts: TrainingSetup,
    own: RankBatches,
    stop_flags: list[int],
    *,
    unsaved: bool = False,
    due: bool = False,
) -> Agreement:
    """Sum over all ranks what each must know about the others: targets, tokens, requests.

    Args:
        unsaved, due: as in Agreement, as far as this rank knows.
    """
    counts = torch.tensor(
        [own.weight, own.tokens, own.places, int(unsaved), int(due), *stop_flags],
        dtype=torch.int64,
        device=parts.accelerator.device,
    )
    with parts.phases.meeting:
        summed = parts.accelerator.reduce(counts, "sum")
    weight, tokens, places, failed, waiting, *stops = summed.tolist()
    asked = [outcome for outcome, count in zip(OUTCOMES, stops, strict=True) if count]
    return Agreement(
        max(weight, 1),
        tokens,
        places,
        asked[0] if asked else None,
        unsaved=failed > 0,
        due=waiting > 0,
    )


def take_step(
    parts: TrainingSetup,
    step: int,
    batches: list[Batch],
    weight: int,
    *,
    limit: float,
    after_backward: Callable[[Batch], None],
    before_update: Callable[[Update], None],
) -> StepResult:
    """Run forward, backward, clipping and update. The loss is divided by `weight`.

    Args:
        batches: this rank's micro-batches, on its device.
        limit: mean loss above which the step counts as a spike.
        after_backward: called with each micro-batch after its backward pass.
        before_update: called when the gradients are clipped.

    Raises:
        Diverged: on all ranks. The weights are unchanged, except if the norm is only known after
            the update.
    """
    strategy = parts.strategy
    strategy.model.train()
    loss, phases, waits = _accumulate(parts, batches, weight, after_backward)
    if not math.isfinite(loss):
        raise Diverged(step + 1, loss / weight, math.nan)
    with parts.phases.optimizer:
        norm = strategy.clip(parts.config.training.max_grad_norm or math.inf)
    if norm is not None:
        _check_norm(parts, step, loss / weight, norm)
    if loss / weight > limit:
        raise Diverged(step + 1, loss / weight, math.nan if norm is None else norm, limit=limit)
    rate = current_rate(parts.scheduler)
    before_update(Update(step + 1, loss / weight, math.nan if norm is None else norm, rate))
    with parts.phases.optimizer:
        update = strategy.update()
    if norm is None:
        norm = math.nan if update is None else update
        _check_norm(parts, step, loss / weight, norm)
    if not strategy.skipped:
        parts.scheduler.step()
    phases = replace(phases, optimizer=parts.phases.optimizer.take_finished())
    return StepResult(loss, norm, rate, overflow=strategy.skipped, phases=phases, waits=waits)


def _check_norm(parts: TrainingSetup, step: int, loss: float, norm: float) -> None:
    """Raise Diverged if the norm is not finite, unless a scaler can still lower its scale."""
    if not math.isfinite(norm) and parts.strategy.scale <= 1:
        raise Diverged(step + 1, loss, norm)


def _accumulate(
    parts: TrainingSetup,
    batches: list[Batch],
    weight: int,
    after_backward: Callable[[Batch], None],
) -> tuple[float, PhaseSeconds, list[float]]:
    """Compute the gradients of the global batch's mean loss.

    Returns:
        The loss summed over all ranks, the time of this rank's phases, and the seconds that each
        rank waited for the others: empty if the strategy does not measure them.
    """
    accelerator, strategy, last = parts.accelerator, parts.strategy, len(batches) - 1
    phases = parts.phases
    summed = torch.zeros((), dtype=torch.float64, device=accelerator.device)
    if hasattr(parts.task, "measure"):
        batches = _measured(parts, batches, weight)
    for index, batch in enumerate(batches):
        for each in _passes(parts, batch):
            with strategy.micro_batch(last=index == last and each.last):
                with phases.forward:
                    total = parts.task.compute_loss(strategy.model, batch).total * each.share
                with phases.backward:
                    # Gradients are averaged over the ranks, but we need their sum.
                    strategy.backward(total / weight * parts.world_size)
            summed += total.detach()
        after_backward(batch)
    met, exchanged, waited = phases.meeting.take(), 0.0, summed.new_zeros(0)
    if strategy.waits is not None:
        exchanged = strategy.waits.take()
        waited = summed.new_zeros(parts.world_size)
        waited[parts.rank] = met + exchanged
    sums = torch.cat((summed.view(1), waited))
    loss, *waits = accelerator.reduce(sums, "sum").tolist()
    return loss, phases.take(exchanged), waits


def _passes(parts: TrainingSetup, batch: Batch) -> Iterable[Pass]:
    """Return the forward and backward passes of a micro-batch."""
    attack = parts.config.training.adversarial
    if not attack.on:
        return ONE_PASS

    def loss() -> torch.Tensor:
        # In 16 bits, the gradient of the loss itself would underflow.
        result = parts.task.compute_loss(parts.module, batch).total
        return result * max(parts.strategy.scale, 1.0)

    return adversarial_passes(attack, parts.module, batch, loss)


@torch.no_grad()
def _measured(parts: TrainingSetup, batches: list[Batch], weight: int) -> list[Batch]:
    """Return the micro-batches with what the task measures in the global batch."""
    total = torch.zeros((), dtype=torch.float64, device=parts.accelerator.device)
    with parts.phases.forward:
        for batch in batches:
            total += parts.task.measure(parts.strategy.model, batch)
    mean = parts.accelerator.reduce(total, "sum") / weight
    return [{**batch, MEASURED: mean} for batch in batches]
