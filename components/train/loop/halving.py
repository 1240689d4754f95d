"""Halve the micro-batch within the attempt when memory runs out in the passes of a step.

A rank alone repeats the step in its process, so no work since the last checkpoint is lost. The
repeated step computes what it would after a restart from a checkpoint right before it, to the bit.
The supervisor records the decision, and later attempts start with the smaller micro-batch.

Everything else fails the attempt, and the supervisor takes the next fallback: memory that runs out
in clipping or in the update, which may be half done, in validation, in a checkpoint or in the
export; a micro-batch of 1; and a run in which the failed passes leave something behind.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from steadytrain.components.memory.model import ONE_OUTPUT
from steadytrain.components.memory.peak import peak_memory
from steadytrain.components.memory.setting import Setting
from steadytrain.components.memory.shape import shape_of
from steadytrain.components.memory.techniques import with_techniques
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events.types import DecisionMade
from steadytrain.components.sizing.batch import BatchPlan
from steadytrain.components.sizing.decisions import estimated_memory
from steadytrain.components.sizing.hardware import CPU
from steadytrain.components.tasks.base import load_task
from steadytrain.components.tasks.fitting import release_memory
from steadytrain.components.techniques.settings import SMALLER_MICRO_BATCH
from steadytrain.components.train.attempt import RankError
from steadytrain.components.train.failures import FailureClass, classify
from steadytrain.components.train.fallbacks import fallbacks_for, lower
from steadytrain.components.train.loop.setup import (
    TrainingSetup,
    random_state,
    restore_random_state,
)
from steadytrain.components.train.strategy.replicated import learns_in_buffers


class Halving:
    """Decides about the passes of one step after another."""

    def __init__(self, parts: TrainingSetup) -> None:
        self.parts = parts
        training = parts.config.training
        # The counts of a package's component or of the noise scale cannot be undone, and
        # neither can what the model has learned in buffers, such as batch normalization.
        self._repeatable = (
            parts.strategy.repeats
            and not training.components
            and not training.monitor.noise_scale
            and not learns_in_buffers(parts.module)
        )
        self._left = 0
        self._generators: dict[str, Any] | None = None

    def begin(self, micro_batches: int) -> None:
        """Remember what the passes of a step consume.

        Args:
            micro_batches: number of the step's micro-batches.
        """
        self._left = micro_batches
        halves = self._repeatable and self.parts.batch.micro_batch_size > 1
        self._generators = random_state() if halves else None

    def passed(self) -> None:
        """Count a micro-batch whose passes are done. The update follows the last one."""
        self._left -= 1

    def decide(self, error: Exception, attempt: int, step: int) -> DecisionMade | None:
        """Decide what to do after an error in a step.

        Args:
            step: number of steps done.

        Returns:
            The decision to repeat the step, which `repeat` carries out. None if the attempt fails.
        """
        parts = self.parts
        if not self._left or self._generators is None:
            return None
        failure = classify([RankError.of(error, parts.rank, step=step)], {}, {})
        kind = failure.failure_class
        if kind is not FailureClass.GPU_OOM:
            return None
        size, ranks = parts.batch.micro_batch_size, parts.world_size
        share = parts.config.training.global_batch_size // ranks
        device = parts.accelerator.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else CPU
        fallbacks = fallbacks_for(
            kind, name, [parts.batch.strategy], conflict_with=parts.config.conflict_with
        )

        def estimate(plan: BatchPlan) -> int | None:
            return estimated_memory(parts.config, name, 1, parts.sequence_length, plan)

        fallback = lower(BatchPlan(parts.batch, share // size, ranks), kind, fallbacks, estimate)
        if fallback is None or fallback.fallback != SMALLER_MICRO_BATCH:
            return None
        cause = failure.message.partition("\n")[0]
        reason = f"{fallback.reason}; step {step + 1} is repeated after {cause}"
        return DecisionMade.after(
            attempt, failure, replace(fallback, action="repeat_step", reason=reason)
        )

    def repeat(self, decision: DecisionMade) -> None:
        """Make ready to repeat the step. Nothing may hold the error any more, nor its tensors."""
        assert decision.batch is not None
        assert self._generators is not None
        parts = self.parts
        parts.batch = decision.batch
        parts.strategy.optimizer.zero_grad()
        parts.phases.take(0.0)
        restore_random_state(self._generators)
        release_memory()
        if parts.accelerator.device.type == "cuda":
            # Otherwise, the predicted memory would be compared with what did not fit.
            torch.cuda.reset_peak_memory_stats()


def least_memory(parts: TrainingSetup) -> int:
    """Return a rank's bytes with micro-batch 1 and activation checkpointing, by the formula.

    Return 0 if the formula does not know the model.
    """
    config: Any = getattr(parts.module, "config", None)
    if config is None:
        return 0
    task = load_task(parts.config.data.task)
    classes = type(parts.module).__name__.endswith("ForSequenceClassification")
    labels = ONE_OUTPUT if task.contrasts else config.num_labels if classes else 0
    share = parts.config.training.global_batch_size // parts.world_size
    try:
        shape = shape_of(config.to_dict(), labels=labels)
        frozen = sum(group.parameters for group in parts.groups if group.unfreeze_at is None)
        shape = replace(shape, frozen=frozen)
        setting = Setting(
            length=parts.sequence_length or shape.positions,
            precision=parts.config.training.precision,
            recompute=True,
            accumulates=share > 1,
            strategy="ddp" if parts.world_size > 1 else "single",
            ranks=parts.world_size,
            adapter=parts.config.model.adapter,
            optim=parts.config.training.optim,
            cuda=parts.accelerator.device.type == "cuda",
        )
        setting = with_techniques(setting, parts.config, shape, sequences=share)
    except BadInput:
        return 0
    return peak_memory(shape, setting).total
