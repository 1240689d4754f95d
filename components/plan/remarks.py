"""Remarks on user settings outside the rules or outside the plan's purpose; the settings stay."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

from steadytrain.components.memory.setting import FP32
from steadytrain.components.memory.states import trained_parameters
from steadytrain.components.plan.answers import answering_remark
from steadytrain.components.shared.decision import power
from steadytrain.components.shared.left_out import in_one_line
from steadytrain.components.shared.quantities import duration
from steadytrain.components.sizing.fit import Choice
from steadytrain.components.sizing.learned import learned_otherwise
from steadytrain.components.sizing.length import prepared
from steadytrain.components.sizing.machine import Workload
from steadytrain.components.sizing.recipe import rates
from steadytrain.components.sizing.scoring import scoring_of
from steadytrain.components.sizing.time_cost import by_table, hours

_ETHERNET: Final = 10e9 / 8
"""Bytes per second of a slow network between nodes: 10 Gbit/s. The real one is not known."""


def remarks(job: Workload, choice: Choice) -> Iterator[str]:
    """Yield the remarks, one sentence each."""
    if job.config.compute.device == "cpu" and job.machine.gpu.cuda:
        yield "compute.device = cpu is unchanged; this plan shows what a GPU would do"
    yield from _prepared(job)
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
    yield from _scoring(job, choice)
    yield from _slow_network(job, choice)
    landscape = job.config.evaluation.landscape
    if landscape.on:
        passes = landscape.scorings * -(-landscape.records // job.config.evaluation.batch_size)
        yield (
            f"evaluation.landscape: the evaluate step scores {landscape.records} test records "
            f"{landscape.scorings} times: {passes:,} forward passes of evaluation.batch_size "
            f"{job.config.evaluation.batch_size}, more if texts are longer than the model reads, "
            "and one more copy of the weights in memory"
        )
    yield from answering_remark(job, choice)
    share = job.config.training.warmup_steps
    if job.given("training.warmup_steps") and share < 1 and not 0.05 <= share <= 0.1:
        yield (
            f"training.warmup_steps = {share:g} is outside the rule's 5 to 10 % of the steps; "
            "it is unchanged"
        )


def _prepared(job: Workload) -> Iterator[str]:
    """Say what became of the records, if the data are prepared."""
    record = prepared(job.config)
    if record is None or not record.path("card.json").is_file():
        return
    card = json.loads(record.path("card.json").read_text(encoding="utf-8"))
    yield f"the prepared data: {in_one_line(record, card)}"


def _scoring(job: Workload, choice: Choice) -> Iterator[str]:
    """Say how long a curriculum's reference model takes."""
    scoring = scoring_of(job, choice)
    if scoring is None:
        return
    need = f"needs {scoring.memory / 1e9:.1f} GB, and is gone before the first step"
    if scoring.tokens is None:
        yield f"training.curriculum.model {need}; the hours leave out its pass over the rows"
        return
    span = hours(by_table(job, choice).tokens_per_second, scoring.tokens)
    yield (
        f"training.curriculum.model {need}; its pass over the rows takes "
        f"{duration(span.low * 3600)} to {duration(span.high * 3600)} of the hours, once for all "
        "runs with this model and these data"
    )


def _slow_network(job: Workload, choice: Choice) -> Iterator[str]:
    """Suggest compression if exchanging gradients between nodes may take longer than computing.

    A ring sends all gradients twice, less one rank's part (Patarasu and Yuan 2009).
    """
    setting, ranks = choice.setting, choice.setting.ranks
    compressed = job.config.training.gradient_compression.on
    if job.machine.nodes == 1 or not setting.exchanges or compressed:
        return
    sent = 2 * FP32 * trained_parameters(job.shape, setting) * (ranks - 1) / ranks
    tokens = job.global_batch * setting.length
    computing = tokens / by_table(job, choice).tokens_per_second.high
    if sent / _ETHERNET > computing:
        yield (
            f"the nodes exchange {sent / 1e9:.1f} GB of gradients per step: "
            f"{duration(sent / _ETHERNET)} on Ethernet of 10 Gbit/s, and computing takes "
            f"{duration(computing)}; on such a network, training.gradient_compression.kind=bf16 "
            "halves that, and powersgd sends a few percent"
        )
