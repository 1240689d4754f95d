"""The recipe: rules fill in open settings that affect what the model learns; for plan and run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from steadytrain.components.shared.config import AdapterConfig, RunConfig, TrainingConfig
from steadytrain.components.shared.config.fields import Decision, differs, power, set_by_user

RATE: Final = "training.learning_rate"
MEDIUM: Final = (8, 32)
"""The rule's medium global batch, in sequences."""
MEDIUM_BATCH: Final = "medium, 8 to 32 sequences, is the default (rule: batch)"
_RATES: Final = (
    (500e6, 5e-5, 1e-4, "below 500 million parameters"),
    (3e9, 1e-5, 5e-5, "from 500 million to 3 billion parameters"),
    (float("inf"), 5e-6, 1e-5, "above 3 billion parameters"),
)
_ADAPTER_RATES: Final = (1e-4, 5e-4)
_ADAPTER_RATE: Final = 2e-4
"""Within the rule's range; Dettmers et al. 2023, "QLoRA", appendix B.2, use it for 7B and 13B."""
_FROM_SCRATCH: Final = 1e-4


def recipe(
    config: RunConfig,
    adapter: AdapterConfig,
    parameters: int,
    given: Callable[[str], bool],
) -> list[Decision]:
    """Return the rules' values for open fields, and the user's values for the rest.

    Args:
        adapter: the adapters used for training.
        parameters: of the model, with or without its adapters: with adapters, its size doesn't
            matter.
        given: whether the user has set a field.
    """
    usual = TrainingConfig()
    decisions = [
        Decision(
            "training.warmup_steps",
            usual.warmup_steps,
            "5 to 10 % of the steps (rule: warm-up)",
        ),
        Decision(
            "training.lr_scheduler_type",
            usual.lr_scheduler_type,
            "the first of the rule's schedules",
        ),
        *_adapters(adapter),
    ]
    rate = Decision(RATE, *_rate(config, adapter, parameters))
    rate, *others = (
        set_by_user(config, item.field) if given(item.field) else item
        for item in (rate, *decisions)
    )
    return [scaled(config.training, rate), *others]


def scaled(training: TrainingConfig, rate: Decision) -> Decision:
    """Return the learning rate of a run by `training.lr_scaling`."""
    if training.lr_scaling == "none":
        return rate
    value = float(rate.value) * training.rate_scale
    return replace(
        rate,
        value=value,
        reason=f"{rate.text} x {training.rate_scale:.3g} by training.lr_scaling "
        f"{training.lr_scaling}: {training.global_batch_size} sequences per step, and "
        f"{training.base_global_batch_size} are its base; {rate.text}: {rate.reason}",
    )


def recipe_of_run(config: RunConfig, parameters: int) -> list[Decision]:
    """Return the recipe for a run, with its global batch and its configured adapters."""
    given = partial(differs, config)
    field = "training.global_batch_size"
    batch = Decision(field, config.training.global_batch_size, MEDIUM_BATCH)
    return [
        set_by_user(config, field) if given(field) else batch,
        *recipe(config, config.model.adapter, parameters, given),
    ]


def learning_rate(decided: Sequence[Decision]) -> float:
    """Return the learning rate of a recipe."""
    return next(float(item.value) for item in decided if item.field == RATE)


def rates(adapter: AdapterConfig, parameters: int) -> tuple[float, float, str]:
    """Return the rule's lower and upper learning rate for fine-tuning, and what they apply to."""
    if adapter.freezes:
        return (*_ADAPTER_RATES, "with adapters")
    return next((low, high, size) for most, low, high, size in _RATES if parameters < most)


def _rate(config: RunConfig, adapter: AdapterConfig, parameters: int) -> tuple[float, str]:
    if config.model.base is None:
        return _FROM_SCRATCH, "the default from scratch, since the rule is for fine-tuning"
    low, high, size = rates(adapter, parameters)
    value = _ADAPTER_RATE if adapter.freezes else high
    return value, f"{power(low)} to {power(high)} {size} (rule: learning rate by size)"


def _adapters(adapter: AdapterConfig) -> Iterator[Decision]:
    if not adapter.freezes:
        return
    usual = AdapterConfig()
    yield Decision("model.adapter.rank", usual.rank, "16 to 32 (rule: LoRA)")
    yield Decision("model.adapter.alpha", adapter.scale, "twice the rank (rule: LoRA)")
    yield Decision("model.adapter.dropout", usual.dropout, "0.05 to 0.1 (rule: LoRA)")
    yield Decision("model.adapter.targets", None, "all linear layers but the head (rule: LoRA)")
