"""Rules about memory, data and time, and the diagnosis by all rules."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import correlation, linear_regression, mean
from typing import Final

from steadytrain.components.observe.background import Background
from steadytrain.components.observe.diagnosis.learning import LEARNING
from steadytrain.components.observe.diagnosis.rule import ObservedRun, Rule
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.events import Cursor, Event
from steadytrain.components.shared.events.types import ProblemFound, TrainingStep
from steadytrain.components.shared.left_out import much_left_out
from steadytrain.components.shared.log import (
    GPU_UTIL_LOW,
    LOW_UTILIZATION,
    LOW_UTILIZATION_SECONDS,
)
from steadytrain.components.shared.quantities import duration, size
from steadytrain.components.shared.workspace import Workspace

_MEMORY_REPORTS: Final = 20
_GROWTH: Final = 0.1
"""Growth over the reports that are looked at, relative to their first."""
_STEADY: Final = 0.95
"""Correlation of memory and steps above which it grows steadily."""


def memory_leak(run: ObservedRun) -> str:
    """The memory of rank 0 grows steadily with the steps."""
    newest = run.newest_attempt
    # Memory grows by itself until caches and the allocator have settled.
    settled = newest[len(newest) // 3 :]
    if len(settled) < _MEMORY_REPORTS:
        return ""
    return _growth("host", settled, [step.memory_used for step in settled]) or _growth(
        "GPU", settled, [step.gpu_memory_used for step in settled]
    )


def _growth(kind: str, steps: list[TrainingStep], used: list[int]) -> str:
    if max(used) - used[0] <= _GROWTH * used[0] or used[-1] < max(used) * (1 - _GROWTH / 2):
        return ""
    at = [step.step for step in steps]
    if correlation(at, used) < _STEADY:
        return ""
    slope = linear_regression(at, used).slope
    more = size(math.floor(1000 * slope))
    return f"the {kind} memory of rank 0 is {size(used[-1])} and grows by {more} in 1,000 steps"


def duplicate_data(run: ObservedRun) -> str:
    """Much of the source was left out because of other records."""
    data = run.data
    if data is None:
        return ""
    return much_left_out(data.duplicates, data.near_duplicate_threshold, data.records)


RESOURCES: Final = (
    Rule(
        "memory_leak",
        memory_leak,
        "The memory of rank 0 grows with every step, and the run will end without memory.",
        "Look for what your task or training components keep from each step: losses with their "
        "graphs, batches, lists. Keep numbers (`loss.item()`) instead.",
        "PyTorch documentation, FAQ: My model reports out of memory",
    ),
    Rule(
        "duplicate_data",
        duplicate_data,
        "Preprocessing left out many records because they resemble other records, or have the same "
        "content with another label. The model sees less data than the source has.",
        "Look at some of them in the quarantine file: `duplicate_of` names the record that each "
        "one resembles. If they are different records, raise data.near_duplicate_threshold, or "
        "set it to null.",
        "Lee et al. 2022, Deduplicating Training Data Makes Language Models Better",
    ),
)


_TIME_REPORTS: Final = 5
"""Reports of an attempt before a rule judges."""
_DATA, _COMMUNICATION, _CHECKPOINT = 0.2, 0.25, 0.1
_UNEVEN: Final = 0.1
"""How much less the slowest rank waits than the mean, as a share of the time."""
_SAME: Final = 0.8
"""Share of the reports in which the slowest rank must be the same one."""
_CHECKPOINTS: Final = 3
_CHECKPOINT_SECONDS: Final = 1.0
"""Less than this is not worth a change."""
_UTILIZED_SECONDS: Final = 60.0
_PADDING: Final = 0.3


def data_bound(run: ObservedRun) -> str:
    """Steps wait for their data."""
    share = _mean(run, lambda step: step.data_wait)
    return f"steps wait for data {share:.0%} of the time" if share > _DATA else ""


def communication_bound(run: ObservedRun) -> str:
    """Even the rank that waits least waits for the others' gradients."""
    share = _mean(run, lambda step: step.slowest_rank_wait)
    return f"every rank waits {share:.0%} of the time or more" if share > _COMMUNICATION else ""


def stragglers(run: ObservedRun) -> str:
    """One rank keeps the others waiting."""
    slowest = [step.slowest_rank for step in run.recent if step.slowest_rank is not None]
    if len(slowest) < _TIME_REPORTS:
        return ""
    (rank, times), *_ = Counter(slowest).most_common(1)
    least = _mean(run, lambda step: step.slowest_rank_wait)
    average = _mean(run, lambda step: step.communication_wait)
    if times < _SAME * len(slowest) or average - least <= _UNEVEN:
        return ""
    return (
        f"the ranks wait {average:.0%} of the time on average, and rank {rank} only {least:.0%}: "
        "the others wait for it"
    )


def checkpoint_bound(run: ObservedRun) -> str:
    """Training stops for checkpoints for much of the time."""
    saved, ready = run.checkpoints, run.ready
    if ready is None or len(saved) < _CHECKPOINTS:
        return ""
    passed = saved[-1].time - ready.time
    seconds = sum(item.seconds for item in saved)
    if seconds < _CHECKPOINT_SECONDS or seconds <= _CHECKPOINT * passed:
        return ""
    return f"checkpoints stopped training for {duration(seconds)} of {duration(passed)}"


def gpu_idle(run: ObservedRun) -> str:
    """The GPU is busy for less than half of the time."""
    known = [
        (step.time, step.gpu_utilization)
        for step in run.newest_attempt
        if step.gpu_utilization is not None
        and step.time > run.steps[-1].time - LOW_UTILIZATION_SECONDS
    ]
    if len(known) < _TIME_REPORTS or known[-1][0] - known[0][0] < _UTILIZED_SECONDS:
        return ""
    share = mean(share for _, share in known)
    return f"rank 0's GPU is busy {share:.0%} of the time" if share < LOW_UTILIZATION else ""


def padding(run: ObservedRun) -> str:
    """Much of what is computed is padding."""
    share = _mean(run, lambda step: step.padding)
    return f"{share:.0%} of the token positions are padding" if share > _PADDING else ""


def _mean(run: ObservedRun, of: Callable[[TrainingStep], float | None]) -> float:
    """Return the mean over the newest reports; 0 if there are too few."""
    values = [value for value in map(of, run.recent) if value is not None]
    return mean(values) if len(values) >= _TIME_REPORTS else 0.0


SPEED: Final = (
    Rule(
        "data_bound",
        data_bound,
        "The input is slower than the training.",
        "Put output on a faster disk, or give each rank more CPU cores. An expensive collate of "
        "your own task belongs into its encoder.",
        "PyTorch documentation, Performance Tuning Guide",
    ),
    Rule(
        "communication_bound",
        communication_bound,
        "Exchanging gradients takes a large part of each step.",
        "Use a larger training.global_batch_size, so that steps have more work, fewer "
        "compute.nodes, or a faster network between them.",
        "Li et al. 2020, PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
    ),
    Rule(
        "stragglers",
        stragglers,
        "One rank is slower than the others, and every step takes as long as it does.",
        "Check that rank's machine: clock rate, temperature, other processes, its network. If "
        "rows differ much in length, the order of the rows is the cause.",
        "Lin et al. 2025, Understanding Stragglers in Large Model Training Using What-if Analysis",
    ),
    Rule(
        "checkpoint_bound",
        checkpoint_bound,
        "Training stops for checkpoints too often or for too long.",
        "Leave out training.save_steps, so that the interval follows from the cost of a "
        "checkpoint, or put recovery.checkpoints on faster storage.",
        "Daly 2006, A higher order estimate of the optimum checkpoint interval",
    ),
    Rule(
        "gpu_idle",
        gpu_idle,
        "The GPU is idle for more than half of the time.",
        GPU_UTIL_LOW.remedy,
        "NVIDIA Management Library, nvmlDeviceGetUtilizationRates",
    ),
    Rule(
        "padding_waste",
        padding,
        "Padding takes a large part of the computation.",
        "Use a smaller training.micro_batch_size, which pads to shorter rows, or lower "
        "data.sequence_length.",
        "Krell et al. 2021, Efficient Sequence Packing without Cross-contamination",
    ),
)


RULES: Final[Mapping[str, Rule]] = {rule.name: rule for rule in (*LEARNING, *SPEED, *RESOURCES)}
"""By name, in display order."""


@dataclass(frozen=True)
class Finding:
    """A problem of a run.

    rule: name of the rule that found it.
    step: the newest step when it was found; 0 before training.
    meaning: what is wrong.
    evidence: what was measured.
    remedy: what to do.
    source: paper or documentation that the rule follows.
    """

    rule: str
    step: int
    meaning: str
    evidence: str
    remedy: str
    source: str

    def __str__(self) -> str:
        """Return the finding in one line."""
        return f"{self.rule.replace('_', ' ')}: {self.evidence}; {self.remedy}"


def findings(events: Iterable[Event], name: str = "") -> list[Finding]:
    """Return the problems of a run: those reported in its events, and those it has now.

    Args:
        name: as for `ObservedRun`.
    """
    run = ObservedRun.of(events, name)
    result = {**run.found, **{event.rule: event for event in new_problems(run)}}
    return [
        Finding(
            rule.name,
            result[name].step,
            rule.meaning,
            result[name].evidence,
            result[name].remedy,
            rule.source,
        )
        for name, rule in RULES.items()
        if name in result
    ]


def new_problems(run: ObservedRun) -> list[ProblemFound]:
    """Return the problems in a run that were not reported before."""
    last = run.steps[-1] if run.steps else None
    attempt, step = (last.attempt, last.step) if last else (0, 0)
    checked = ((rule, rule.check(run)) for rule in RULES.values() if rule.name not in run.found)
    return [
        ProblemFound(
            attempt=attempt, step=step, rule=rule.name, evidence=evidence, remedy=rule.advice(run)
        )
        for rule, evidence in checked
        if evidence
    ]


EVERY_SECONDS = 5.0


class DiagnosisSink(Background):
    """Looks for problems every few seconds while a run trains.

    It reads the run's events from their start, with the problems that are reported already. So the
    next supervisor reports none of them again.
    """

    def __init__(
        self, config: RunConfig, workspace: Workspace, *, every: float = EVERY_SECONDS
    ) -> None:
        del config
        self._run, self._cursor = ObservedRun(workspace.arguments), Cursor(workspace.events)
        super().__init__("diagnosis", workspace, every=every)

    def work(self) -> None:
        """Read the new events, and report the problems that are new."""
        for item in self._cursor.read():
            self._run.add(item.event)
        if self._cursor.ack() and (problems := new_problems(self._run)):
            for problem in problems:
                # Its own file is read in the next round.
                self._run.add(problem)
            self.add_events(*problems)
