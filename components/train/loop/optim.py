"""The optimizer and learning-rate schedule of a run, from the specs that it names."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from steadytrain.components.memory.groups import Treatment, layers_of, treatments
from steadytrain.components.shared.config import TrainingConfig
from steadytrain.components.shared.config.optimizers import DEFAULT, OptimizerSpec, optimizer_spec
from steadytrain.components.shared.config.schedules import (
    Adaptive,
    rate_factor,
    schedule_settings,
    schedule_spec,
)
from steadytrain.components.shared.effects import whole_steps
from steadytrain.components.shared.errors import BadInput


@dataclass(frozen=True)
class OptimizerBuilder:
    """Builds the configured optimizer for a model in its final form on a rank.

    scaled: whether a loss scaler skips steps that overflow. A fused update would hide that.
    """

    training: TrainingConfig
    scaled: bool = False

    @property
    def spec(self) -> OptimizerSpec:
        return optimizer_spec(self.training.optim)

    def __call__(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = self.spec.build(
            self.groups(model), self.training, scaled=self.scaled
        )
        return made

    def groups(self, model: torch.nn.Module) -> list[dict[str, Any]]:
        """Return the model's parameter groups, as the optimizer takes them."""
        matrices = layer_matrices(model) if self.spec.separates_matrices else None
        return parameter_groups(model, self.training, matrices)


def parameter_groups(
    model: torch.nn.Module,
    training: TrainingConfig,
    matrices: Collection[torch.Tensor] | None = None,
) -> list[dict[str, Any]]:
    """Return the trained parameters in groups with their learning rate and weight decay.

    Each group also has `lr_scale`, its factor on the learning rate, `decays`, whether
    `training.weight_decay` applies to it, and `unfreeze_at` if its
    parameters are frozen at first.

    Args:
        matrices: parameters to keep in groups of their own. Each group then says in `matrices`
            whether it has them.
    """
    groups: dict[tuple[bool, bool, Treatment], list[torch.nn.Parameter]] = {}
    named = dict(model.named_parameters())
    for name, treatment in treatments(model, training).items():
        orthogonal = matrices is not None and named[name] in matrices
        groups.setdefault((not treatment.decays, orthogonal, treatment), []).append(named[name])
    return [
        {
            "params": items,
            "weight_decay": treatment.weight_decay,
            "lr_scale": treatment.lr_scale,
            "decays": treatment.decays,
            **_group_rate(training, treatment),
            **({} if matrices is None else {"matrices": orthogonal}),
        }
        for (_, orthogonal, treatment), items in sorted(
            groups.items(), key=lambda item: item[0][:2]
        )
    ]


def _group_rate(training: TrainingConfig, treatment: Treatment) -> dict[str, float]:
    result = {}
    if treatment.lr_scale != 1 and training.learning_rate is not None:
        result["lr"] = training.learning_rate * treatment.lr_scale
    if treatment.unfreeze_at:
        result["unfreeze_at"] = treatment.unfreeze_at
    return result


def layer_matrices(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    """Return the trained matrices within a model's layers: no embeddings, and no head.

    Raises:
        BadInput: there are none.
    """
    try:
        layers = layers_of(model)
    except ValueError:
        layers = ()
    result = {
        item
        for layer in layers
        for part in layer.modules()
        if not isinstance(part, torch.nn.Embedding)
        for item in part.parameters(recurse=False)
        if item.requires_grad and item.dim() == 2
    }
    if not result:
        raise BadInput(
            "training.optim: it updates the matrices of a model's layers, and "
            f"{type(model).__name__} has no list of layers with matrices to train",
            remedy=f"use {DEFAULT}",
        )
    return result


def build_scheduler(
    optimizer: torch.optim.Optimizer, training: TrainingConfig, steps: int
) -> LRScheduler:
    """Build the schedule over `steps` optimizer steps. A warm-up below 1 is a fraction of them.

    Raises:
        BadInput: the peak rate is not above the schedule's last one, or the schedule rejects its
            options.
    """
    kind, peak = training.lr_scheduler_type, float(optimizer.defaults["lr"])
    last = schedule_spec(kind).last_rate
    if peak <= last:
        raise BadInput(
            f"training.learning_rate = {peak}: training.lr_scheduler_type {kind} ends with {last}",
            remedy="use a higher one, or another training.lr_scheduler_type",
        )
    settings = schedule_settings(training, steps, peak)
    factor = partial(rate_factor, kind=kind, settings=settings)
    adapts = schedule_spec(kind).adapts
    return (
        LambdaLR(optimizer, factor)
        if adapts is None
        else AdaptiveLR(optimizer, factor, adapts(settings))
    )


class AdaptiveLR(LambdaLR):
    """A schedule with a factor that follows the validation scores.

    Args:
        factor: of a step, as for LambdaLR.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        factor: Callable[[int], float],
        adaptive: Adaptive,
    ) -> None:
        self.adaptive = adaptive
        super().__init__(optimizer, lambda step: factor(step) * adaptive.scale)

    def note(self, score: float, *, greater_is_better: bool) -> None:
        """Take the score of a validation. The next update has the rate that follows from it."""
        self.adaptive.note(score, greater_is_better=greater_is_better)
        self._last_lr = [
            base * factor(self.last_epoch)
            for base, factor in zip(self.base_lrs, self.lr_lambdas, strict=True)
        ]
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "adaptive": dict(self.adaptive.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        remaining = dict(state_dict)
        self.adaptive.load_state_dict(remaining.pop("adaptive"))
        super().load_state_dict(remaining)


def set_rate(scheduler: LRScheduler, rate: float) -> None:
    """Make `rate` the schedule's peak, without changing its current step.

    Each parameter group keeps its own factor on it.
    """
    groups = scheduler.optimizer.param_groups
    bases = [rate * group["lr_scale"] for group in groups]
    for group, old, new in zip(groups, scheduler.base_lrs, bases, strict=True):
        group["lr"] = float(group["lr"]) * (new / old)
        group["initial_lr"] = new
    scheduler.base_lrs = bases
    scheduler._last_lr = [group["lr"] for group in groups]


def set_weight_decay(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Set the weight decay of the parameters to which `training.weight_decay` applies."""
    for group in optimizer.param_groups:
        if group["decays"]:
            group["weight_decay"] = decay


def current_rate(scheduler: LRScheduler) -> float:
    """Return the learning rate of the next update, for parameters with a factor of 1."""
    group = scheduler.optimizer.param_groups[0]
    return float(scheduler.get_last_lr()[0]) / float(group["lr_scale"])


class Freezing:
    """Decides at each step which parameters have gradients.

    A frozen parameter has no gradient, so no optimizer updates it or keeps anything for it. DDP
    knows it from the start and treats it as unused.

    Args:
        optimizer: its groups with `unfreeze_at` are frozen until that step.
        steps: optimizer steps of the full training run.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self._starts = [
            (whole_steps(group["unfreeze_at"], steps), group["params"])
            for group in optimizer.param_groups
            if group.get("unfreeze_at")
        ]

    def before_step(self, step: int) -> None:
        """Freeze or unfreeze all groups for a step, which counts from 1."""
        for start, parameters in self._starts:
            for parameter in parameters:
                parameter.requires_grad_(step > start)
