"""How much there is to train on, as far as is known, and settings that do not fit it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from steadytrain.components.shared.config import RunConfig, TrainingConfig
from steadytrain.components.shared.config.schedules import schedule_spec, validations_to_act
from steadytrain.components.shared.errors import BadInput, DataError
from steadytrain.components.shared.records import DataRecord, SideRecord
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tasks.base import load_task

if TYPE_CHECKING:
    from steadytrain.components.techniques.mixture.plan import MixturePlan


@dataclass(frozen=True)
class Sampled:
    """What is known of the training side before the data are prepared.

    rows: training sequences; None if unknown.
    tokens: of a row, on average; None if unknown.
    source: how it was counted, or why not.
    documents: that the rows come from; 0 if rows are None.
    """

    rows: int | None
    tokens: float | None
    source: str
    documents: int = 0


@dataclass(frozen=True)
class Length:
    """The length of the complete training run.

    rows: training sequences; None if the data are neither prepared nor sampled.
    steps: optimizer steps; None if unknown.
    tokens: of all steps, without padding if the data report it; None if unknown.
    source: where this comes from, or how to find out.
    recommended: by the rule; None if the data are not known, or if there is no rule.
    """

    rows: int | None
    steps: int | None
    tokens: float | None
    source: str
    recommended: Recommended | None = None


@dataclass(frozen=True)
class Recommended:
    """How long to train, by the amount of data.

    epochs, steps: the least and the most.
    reason: the rule.
    """

    epochs: tuple[int, int]
    steps: tuple[int, int]
    reason: str


_PRETRAINING: Final = ("causal_lm", "masked_lm", "denoising")
_EPOCHS: Final = (
    (10_000, (3, 5), "below 10,000 examples"),
    (100_000, (2, 4), "from 10,000 to 100,000 examples"),
    (1_000_000, (1, 2), "from 100,000 to 1 million examples"),
    (math.inf, (1, 1), "above 1 million examples"),
)
"""Devlin et al. 2019, "BERT", appendix A.3, fine-tune for 2 to 4 epochs."""


def recommended(
    config: RunConfig, documents: int, rows: int, global_batch: int
) -> Recommended | None:
    """Return how long to train on documents in so many rows; None for other models from scratch."""
    if config.data.task in _PRETRAINING:
        # Muennighoff et al. 2023, "Scaling Data-Constrained Language Models".
        epochs, which = (1, 4), "on plain text, up to 4 epochs are almost as good as new text"
    elif config.model.base is None:
        return None
    else:
        epochs, which = next((span, which) for most, span, which in _EPOCHS if documents < most)
    low, high = (math.ceil(count * rows / global_batch) for count in epochs)
    return Recommended(epochs, (low, high), f"{which} (rule: epochs by data size)")


def total_steps(training: TrainingConfig, rows: int, batch: int | None = None) -> int:
    """Return the number of optimizer steps of the full training run.

    Args:
        batch: rows of a step; None means `training.global_batch_size`.
    """
    if training.max_steps > 0:
        return training.max_steps
    return math.ceil(training.num_train_epochs * rows / (batch or training.global_batch_size))


def mixture_of(training: TrainingConfig, side: SideRecord) -> MixturePlan | None:
    """Return the mixture of a training side; None if it has one data set.

    Raises:
        BadInput, DataError: a data set has no rows, or too small a share.
    """
    for source in side.sources:
        if not source.rows:
            raise DataError(
                f"data.parts.{source.name}: the training side has no row of this part "
                f"({source.documents:,} documents)",
                remedy="give it more data, or leave it out",
            )
    if not side.sources:
        return None
    # It imports numpy, which authoring a pipeline must not need.
    from steadytrain.components.techniques.mixture.plan import MixturePlan

    return MixturePlan(side.sources, training.mixture)


def steps_of(training: TrainingConfig, side: SideRecord, batch: int | None = None) -> int:
    """Return the number of optimizer steps of the full training run on prepared data.

    Args:
        batch: as for `total_steps`.

    Raises:
        BadInput, DataError: as for `mixture_of`, or a data set is used up before the first step.
    """
    mixture = mixture_of(training, side)
    if mixture is None:
        return total_steps(training, side.rows, batch)
    steps, size = total_steps(training, mixture.epoch(), batch), batch or training.global_batch_size
    if training.mixture.exhausted == "repeat":
        return steps
    rows, name = mixture.limit()
    if rows < size:
        raise BadInput(
            f"training.mixture.exhausted = 'stop': the part {name!r} is used up after {rows:,} "
            f"rows, and a step takes {size:,}",
            remedy="give that part more data or a smaller share, lower "
            "training.global_batch_size, or set exhausted to repeat",
        )
    return min(steps, rows // size)


def of_mixture(training: TrainingConfig, side: SideRecord, steps: int) -> Iterator[str]:
    """Yield a sentence for each data set that training uses up, and for an early end."""
    mixture = mixture_of(training, side)
    if mixture is None:
        return
    yield from mixture.repeated(steps * training.global_batch_size)
    meant = total_steps(training, mixture.epoch())
    if steps < meant:
        rows, name = mixture.limit()
        yield (
            f"training.mixture.exhausted is stop: the part {name!r} is used up after {rows:,} "
            f"rows, so training ends after {steps:,} of {meant:,} steps"
        )


def length_of(config: RunConfig, global_batch: int, sampled: Sampled | None = None) -> Length:
    """Return the length from a sample or the prepared data, else from `training.max_steps`.

    Args:
        sampled: what a sample of the data says; None if there is none.

    Raises:
        BadInput: the record of the data has another version.
    """
    training, data = config.training, None if sampled is not None else prepared(config)
    full = global_batch * config.data.sequence_length * load_task(config.data.task).sequences
    if data is not None:
        side = data.sides["train"]
        steps = steps_of(training, side, global_batch)
        each = side.tokens / side.rows if side.tokens and side.rows else full / global_batch
        if (mixture := mixture_of(training, side)) is not None:
            each = float(mixture.row_shares @ mixture.means)
        source = f"the prepared data: {side.rows:,} sequences of {each:,.0f} tokens on average"
        advice = recommended(config, side.documents, side.rows, global_batch)
        return Length(side.rows, steps, steps * global_batch * each, source, advice)
    if sampled is not None and sampled.rows is not None and sampled.tokens is not None:
        steps = total_steps(training, sampled.rows, global_batch)
        tokens = steps * global_batch * sampled.tokens
        fixed = "training.max_steps; tokens are " if training.max_steps > 0 else ""
        advice = recommended(config, sampled.documents, sampled.rows, global_batch)
        return Length(sampled.rows, steps, tokens, fixed + sampled.source, advice)
    if training.max_steps > 0:
        tokens = float(training.max_steps * full)
        source = "training.max_steps, with full sequences"
        source += f"; {sampled.source}" if sampled is not None else ""
        return Length(None, training.max_steps, tokens, source)
    remedy = "run `steadytrain step preprocess FILE` first, or set training.max_steps"
    why = f"{sampled.source}; {remedy}" if sampled is not None else remedy
    return Length(None, None, None, why)


def prepared(config: RunConfig) -> DataRecord | None:
    """Return the prepared data of a run; None if there are none yet.

    Raises:
        BadInput: their record has another version.
    """
    path = Workspace.of(config).record("preprocess")
    return DataRecord.load(path) if path.is_file() else None


def without_effect(training: TrainingConfig, rows: int | None, steps: int) -> Iterator[str]:
    """Yield a sentence for each setting that does not do what it says in that many steps.

    Args:
        rows: number of rows of the training side; None if it is not known yet.
        steps: optimizer steps of the full training run.
    """
    batch = training.global_batch_size
    if rows is not None and batch > rows:
        yield (
            f"training.global_batch_size = {batch}: the training side has {rows:,} rows, so each "
            f"step repeats rows; use {rows:,} or fewer"
        )
    warmup = training.warmup_steps
    if schedule_spec(training.lr_scheduler_type).warms_up and warmup >= max(1, steps):
        yield (
            f"training.warmup_steps = {warmup:g}: training has {steps:,} steps, so only the last "
            "one has the full learning rate; use fewer steps, or a share below 1"
        )
    if training.never_stops_early(steps):
        yield (
            f"training.early_stopping_patience = {training.early_stopping_patience}: with "
            f"training.eval_steps {training.eval_steps}, training ends after {steps:,} steps, "
            "before it can act; lower one of the two"
        )
    monitor = training.monitor
    if monitor.on and monitor.every_steps > steps:
        yield (
            f"training.monitor.every_steps = {monitor.every_steps}: training ends after {steps:,} "
            "steps, before it measures anything; lower it"
        )
    needed = validations_to_act(training)
    if needed and needed * training.eval_steps >= steps:
        yield (
            f"training.lr_scheduler_type = {training.lr_scheduler_type}: it first changes the rate "
            f"after {needed} validations, and training ends after {steps:,} steps with "
            f"training.eval_steps {training.eval_steps}; lower its patience or training.eval_steps"
        )
