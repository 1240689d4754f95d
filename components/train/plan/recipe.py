"""What of the recipe the user left open: learning rate, warm-up, adapters, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from steadytrain.components.shared.config import AdapterConfig, TrainingConfig
from steadytrain.components.train.plan.decisions import Decision, as_given, power
from steadytrain.components.train.plan.fit import Choice
from steadytrain.components.train.plan.length import Length
from steadytrain.components.train.plan.machine import Job
from steadytrain.components.train.plan.time_cost import Span, preemptions

_RATES: Final = (
    (500e6, 5e-5, 1e-4, "below 500 million parameters"),
    (3e9, 1e-5, 5e-5, "from 500 million to 3 billion parameters"),
    (float("inf"), 5e-6, 1e-5, "above 3 billion parameters"),
)
_ADAPTER_RATES: Final = (1e-4, 5e-4)
_ADAPTER_RATE: Final = 2e-4
"""Within the rule's range; Dettmers et al. 2023, "QLoRA", appendix B.2, has it for 7B and 13B."""
_EACH_EPOCH: Final = 100_000
"""Examples, up to which the rule saves after each epoch."""


def recipe(job: Job, choice: Choice, length: Length, speed: Span) -> list[Decision]:
    """The rules' values for what is open."""
    found = [
        Decision("training.learning_rate", *_rate(job, choice)),
        Decision(
            "training.warmup_steps",
            TrainingConfig().warmup_steps,
            "5 to 10 % of the steps (rule: warm-up)",
        ),
        Decision(
            "training.lr_scheduler_type",
            TrainingConfig().lr_scheduler_type,
            "the first of the rule's schedules",
        ),
        *_adapters(choice),
        _checkpoints(job, choice, length, speed),
    ]
    return [as_given(job, decision) for decision in found]


def remarks(job: Job, choice: Choice) -> Iterator[str]:
    """Where the user's own values are outside the rules, or what the plan is for; they stay."""
    if job.config.compute.device == "cpu" and job.machine.gpu.cuda:
        yield "compute.device = cpu stays; this plan is what a GPU would do"
    rate = job.config.training.learning_rate
    low, high, _ = _range(job, choice)
    if job.given("training.learning_rate") and not low <= rate <= high and not job.from_scratch:
        yield (
            f"training.learning_rate = {power(rate)} is outside the rule's {power(low)} to "
            f"{power(high)} for "
            "fine-tuning this model; it stays"
        )
    share = job.config.training.warmup_steps
    if job.given("training.warmup_steps") and share < 1 and not 0.05 <= share <= 0.1:
        yield (
            f"training.warmup_steps = {share:g} is outside the rule's 5 to 10 % of the steps; "
            "it stays"
        )


def _range(job: Job, choice: Choice) -> tuple[float, float, str]:
    if choice.way.adapter != "none":
        return (*_ADAPTER_RATES, "with adapters")
    return next(
        (low, high, size) for most, low, high, size in _RATES if job.shape.parameters < most
    )


def _rate(job: Job, choice: Choice) -> tuple[float, str]:
    low, high, size = _range(job, choice)
    value = _ADAPTER_RATE if choice.way.adapter != "none" else high
    return value, f"{power(low)} to {power(high)} {size} (rule: learning rate by size)"


def _adapters(choice: Choice) -> Iterator[Decision]:
    if choice.way.adapter == "none":
        return
    usual = AdapterConfig()
    yield Decision("model.adapter.rank", usual.rank, "16 to 32 (rule: LoRA)")
    yield Decision(
        "model.adapter.alpha", choice.setting.adapter.scale, "twice the rank (rule: LoRA)"
    )
    yield Decision("model.adapter.dropout", usual.dropout, "0.05 to 0.1 (rule: LoRA)")
    yield Decision("model.adapter.targets", None, "all linear layers but the head (rule: LoRA)")


def _checkpoints(job: Job, choice: Choice, length: Length, speed: Span) -> Decision:
    """By epochs for small data, else by what a checkpoint costs."""
    field = "training.save_steps"
    if length.rows is not None and length.rows < _EACH_EPOCH:
        steps = max(1, length.rows // job.global_batch)
        reason = "each epoch, of fewer than 100,000 examples (rule: checkpoints)"
        return Decision(field, steps, reason)
    interval = preemptions(job, choice).interval_seconds
    tokens = interval * speed.middle
    steps = max(1, round(tokens / (job.global_batch * choice.setting.length)))
    return Decision(
        field,
        None,
        f"as often as pays: about each {interval:.0f} s here (steps: {steps}), by Young's interval",
    )
