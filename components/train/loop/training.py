"""The training of one rank with PyTorch: steps, reports, validation and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Final

import torch

from steadytrain.components.shared.config import TrainingConfig
from steadytrain.components.shared.config.strategies import DISK
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events.types import AttemptOutcome, DecisionMade
from steadytrain.components.tasks.base import Batch
from steadytrain.components.techniques.base import Update
from steadytrain.components.train.attempt import Change, changed
from steadytrain.components.train.checkpoint import (
    Checkpoint,
    CheckpointDamaged,
    CheckpointStore,
)
from steadytrain.components.train.checkpoint.cadence import Cadence, check_scores
from steadytrain.components.train.checkpoint.saver import Saver, State
from steadytrain.components.train.failures import Diverged
from steadytrain.components.train.loop.batches import Prefetch, RankBatches
from steadytrain.components.train.loop.components import Components
from steadytrain.components.train.loop.control import StopRequests
from steadytrain.components.train.loop.exchange import gather_objects
from steadytrain.components.train.loop.export import export_model, merged
from steadytrain.components.train.loop.halving import Halving
from steadytrain.components.train.loop.optim import AdaptiveLR, Freezing, set_rate, set_weight_decay
from steadytrain.components.train.loop.progress import ExportedChoice, Progress
from steadytrain.components.train.loop.reporter import Reporter
from steadytrain.components.train.loop.setup import (
    TrainingSetup,
    build_module,
    random_state,
    restore_random_state,
)
from steadytrain.components.train.loop.steps import Agreement, StepResult, agree, take_step
from steadytrain.components.train.loop.training_loop import TrainingLoop
from steadytrain.components.train.loop.validation import (
    best_by,
    evaluated_weights,
    exported_weights,
    saved_state,
    validate,
)

_AVERAGED: Final = "averaged_"
"""Prefix of the metrics of averaged weights."""
_DECAY: Final = "training.weight_decay"


class Training(TrainingLoop):
    """The loop of a rank that trains with PyTorch.

    Args:
        peak: returns the schedule's peak after so many finished steps. None leaves it as it is.
        changes: what a person changed, as in `AttemptSpec`.
    """

    reporter: Reporter

    def __init__(
        self,
        parts: TrainingSetup,
        store: CheckpointStore,
        reporter: Reporter,
        requests: StopRequests,
        cadence: Cadence | None = None,
        *,
        peak: Callable[[int], float] | None = None,
        changes: Sequence[Change] = (),
    ) -> None:
        self.config = self.configured = parts.config
        self.parts, self.store, self.reporter, self.requests = parts, store, reporter, requests
        self.beat, self.cadence, self.peak, self.changes = parts.beat, cadence, peak, changes
        self.steps, self.epoch_rows = parts.steps, len(parts.train)
        self.step_rows, self.progress = parts.config.training.global_batch_size, Progress()
        check_scores(parts.config.training, len(parts.validation))
        # Set after the state is loaded, which has its own rates.
        self._rate: float | None = None
        self.metric, self.greater_is_better = best_by(parts)
        if isinstance(parts.scheduler, AdaptiveLR) and not len(parts.validation):
            raise BadInput(
                f"training.lr_scheduler_type = {parts.config.training.lr_scheduler_type!r}: it "
                "follows the validation score, and there are no validation data",
                remedy="raise data.validation_share, or use another schedule",
            )
        self.components = Components(parts, reporter)
        self.freezing = Freezing(parts.strategy.optimizer, parts.steps)
        self.halving = Halving(parts)
        self.saver = Saver(
            store,
            rank=parts.rank,
            world_size=parts.world_size,
            gather=partial(gather_objects, beat=parts.meet),
            on_saved=self._saved,
            on_wait=partial(parts.beat, "save"),
            on_warning=reporter.warn,
            # A state on disk would not fit into host memory, so it is saved from its files.
            snapshot=parts.batch.snapshot and parts.batch.offload != DISK,
        )

    def _train(self) -> AttemptOutcome:
        with closing(Prefetch(self.parts)) as self._data:
            self.reporter.started(self.parts, self.progress)
            for remark in self.parts.remarks:
                self.reporter.warn(remark)
            outcome = super()._train()
        # It has rows of the next steps.
        del self._data
        return outcome

    def _settings(self) -> TrainingConfig:
        """Set the rate of the next step, and make a person's changes. Return its settings."""
        rate = None if self.peak is None else self.peak(self.progress.step)
        if rate is not None and rate != self._rate:
            set_rate(self.parts.scheduler, rate)
        self._rate = rate
        parts, step = self.parts, self.progress.step
        counting = [field for start, field, _ in self.changes if start <= step]
        if counting:
            training = changed(self.configured.training, self.changes, step)
            self.config = parts.config = self.configured.model_copy(update={"training": training})
        if _DECAY in counting:
            # The checkpoint that training continues from may have another value.
            set_weight_decay(parts.strategy.optimizer, parts.config.training.weight_decay)
        return self.config.training

    def _step(self) -> tuple[AttemptOutcome | None, bool]:
        data = self._data
        self.freezing.before_step(self.progress.step + 1)
        self.components.before_step(self.progress.step + 1)
        while True:
            work, began = data.take(self.progress.step), time.monotonic()
            agreed = agree(
                self.parts,
                work,
                self.requests.flags(self.progress.step),
                unsaved=self.saver.failed,
                due=self._is_due(),
            )
            if agreed.unsaved:
                self.saver.settle()
            if agreed.stop is not None:
                return agreed.stop, agreed.due
            result = self._update(work.batches, agreed.weight)
            if isinstance(result, StepResult):
                self._count(result, work, agreed, began)
                return None, agreed.due
            del work
            data.forget()
            self.halving.repeat(result)
            self.reporter.emit(result)

    def _update(self, batches: list[Batch], weight: int) -> StepResult | DecisionMade:
        """Return the result of a step, or the decision to repeat it with other micro-batches."""
        self.halving.begin(len(batches))
        try:
            return take_step(
                self.parts,
                self.progress.step,
                batches,
                weight,
                limit=self._limit(),
                after_backward=self._passed,
                before_update=self.components.before_update,
            )
        except Diverged as error:
            self.reporter.diverged(error)
            raise
        except Exception as error:
            decision = self.halving.decide(error, self.reporter.attempt, self.progress.step)
            if decision is None:
                raise
            return decision

    def _passed(self, batch: Batch) -> None:
        self.components.after_backward(batch)
        self.halving.passed()

    def _count(self, result: StepResult, own: RankBatches, agreed: Agreement, began: float) -> None:
        parts, progress = self.parts, self.progress
        progress.step += 1
        mean = result.loss / agreed.weight
        if not result.overflow:
            self.components.after_update(
                Update(progress.step, mean, result.grad_norm, result.learning_rate)
            )
        self.components.after_step(progress.step)
        keep = parts.config.recovery.spike_window
        progress.note_loss(mean, keep=keep)
        progress.window_loss += result.loss
        progress.window_weight += agreed.weight
        seconds = own.waited + time.monotonic() - began
        self.reporter.count(agreed.tokens, agreed.places, seconds, own.waited, result)
        self.reporter.gradients(parts, progress, result)
        every = parts.config.training.logging_steps
        if progress.step % every == 0 or progress.step == parts.steps:
            self.reporter.step(parts, progress, result)
            progress.window_loss = progress.window_weight = 0.0

    def _validate(self) -> bool:
        parts, progress = self.parts, self.progress
        if not len(parts.validation):
            return False
        began = time.monotonic()
        self.components.before_validation()
        with (
            self.components.replaced_weights(),
            evaluated_weights(parts.strategy, parts.config.training),
        ):
            metrics = validate(parts)
        if self.components.averages:
            with self.components.averaged_weights():
                averaged = validate(parts)
            metrics |= {f"{_AVERAGED}{name}": value for name, value in averaged.items()}
        self.components.after_validation(metrics)
        metric = self._scored(metrics)
        better = progress.note(
            metrics[metric],
            parts.config.training,
            greater_is_better=self.greater_is_better,
            averaged=metric != self.metric,
        )
        if isinstance(parts.scheduler, AdaptiveLR):
            parts.scheduler.note(metrics[metric], greater_is_better=self.greater_is_better)
        seconds = time.monotonic() - began
        self.reporter.validated(parts, progress, metrics, best=better, seconds=seconds)
        return better

    def _scored(self, metrics: Mapping[str, float]) -> str:
        """Return the metric that scores this step: of the weights or of their average."""
        averaged, export = f"{_AVERAGED}{self.metric}", self.parts.config.training.averaging.export
        if averaged not in metrics or export == "raw":
            return self.metric
        gain = metrics[averaged] - metrics[self.metric]
        better = gain > 0 if self.greater_is_better else gain < 0
        return averaged if better or export == "averaged" else self.metric

    def _state(self) -> State:
        parts = self.parts
        return State(
            parts={**parts.strategy.pieces(), **self.components.pieces()},
            shared={
                "progress": self.progress.as_state(),
                **parts.strategy.settings(),
                "scheduler": parts.scheduler.state_dict(),
                "components": self.components.state(),
                "watching": self.components.watched(),
            },
            own=random_state(),
        )

    def resume(self, checkpoint: Checkpoint) -> None:
        """Restore everything to the state right after the checkpoint's step.

        Raises:
            CheckpointDamaged: the checkpoint differs from what was written, or is of another model.
            BadInput: the checkpoint has the state of other training components.
        """
        parts, state = self.parts, checkpoint.state()
        # Checkpoints of earlier versions have no components.
        self.components.restore(checkpoint, state.get("components", {}))
        self.components.restore_watched(state.get("watching", {}))
        parts.strategy.restore(checkpoint, state)
        parts.scheduler.load_state_dict(state["scheduler"])
        self.progress = Progress(**state["progress"])
        # In a larger world, the additional ranks keep the generators from their seeding.
        generators = checkpoint.rank_state(parts.rank)
        if generators is not None:
            restore_random_state(generators)

    def export(self, target: Path) -> ExportedChoice:
        """Export the best validated model, or the last one. Return which one it is.

        If the best model's checkpoint is lost, export the last model and report a warning.
        """
        chosen = self.best()
        try:
            module = self._whole(chosen)
        except CheckpointDamaged as error:
            self.reporter.warn(f"{error.message}; the last model is kept instead of the best")
            chosen = self.progress.last(self.metric)
            module = self._whole(chosen)
        adapter, packager = self.parts.config.model.adapter, self.parts.packager
        if adapter.freezes and adapter.merge:
            module = merged(packager, module, target)
        export_model(packager, module, target, self.store.fence)
        return chosen

    def _whole(self, chosen: ExportedChoice) -> torch.nn.Module:
        """Return the complete model to export for a step, in this rank's memory.

        Raises:
            CheckpointDamaged: the weights must come from a checkpoint, and it is damaged.
        """
        replaced = dict(self.components.exported(self.store, chosen.step, averaged=chosen.averaged))
        spec, training = self.parts.strategy.optimizer_spec, self.parts.config.training
        # Before the model changes, so that damage leaves it as it is.
        state = saved_state(spec, self.store, chosen.step)
        module = self._with_weights_of(chosen)
        replaced |= exported_weights(spec, training, module, state)
        with torch.no_grad():
            for name, weight in module.named_parameters():
                if name in replaced:
                    # Tensors from DeepSpeed's flat shards have lost their shape.
                    weight.copy_(replaced[name].view(weight.shape))
        return module

    def _with_weights_of(self, chosen: ExportedChoice) -> torch.nn.Module:
        parts = self.parts
        module = parts.strategy.full_model()
        if module is not None:
            if chosen.step != self.progress.step:
                self.store.load_into(chosen.step, module)
            return module
        # Read the other ranks' shards from the checkpoint; gathering them would involve all ranks.
        module = build_module(parts.config, parts.task)
        self.store.load_into(chosen.step, module)
        return module
