"""Remarks on user settings outside the rules or outside the plan's purpose; the settings stay."""

from __future__ import annotations

from collections.abc import Iterator

from steadytrain.components.shared.decision import power
from steadytrain.components.sizing.fit import Choice
from steadytrain.components.sizing.learned import learned_otherwise
from steadytrain.components.sizing.machine import Workload
from steadytrain.components.sizing.recipe import rates


def remarks(job: Workload, choice: Choice) -> Iterator[str]:
    """Yield the remarks, one sentence each."""
    if job.config.compute.device == "cpu" and job.machine.gpu.cuda:
        yield "compute.device = cpu is unchanged; this plan shows what a GPU would do"
    known = learned_otherwise(job, choice)
    if known is not None:
        yield (
            f"learned: on {job.machine.gpu.name} a run of the configuration as written, without "
            "the plan's precision, adapters and optimizer, starts with a micro-batch of at "
            f"most {known.limit.micro_batch_size}"
        )
    rate = job.config.training.learning_rate
    low, high, _ = rates(choice.setting.adapter, job.shape.parameters)
    if rate is not None and not low <= rate <= high and not job.from_scratch:
        yield (
            f"training.learning_rate = {power(rate)} is outside the rule's {power(low)} to "
            f"{power(high)} for fine-tuning this model; it is unchanged"
        )
    share = job.config.training.warmup_steps
    if job.given("training.warmup_steps") and share < 1 and not 0.05 <= share <= 0.1:
        yield (
            f"training.warmup_steps = {share:g} is outside the rule's 5 to 10 % of the steps; "
            "it is unchanged"
        )
