"""Rules about memory and data."""

from __future__ import annotations

import math
from statistics import correlation, linear_regression
from typing import Final

from steadytrain.components.observe.diagnosis.course import Course, Rule
from steadytrain.components.shared.events.types import TrainingStep
from steadytrain.components.shared.left_out import much_left_out
from steadytrain.components.shared.quantities import size

_REPORTS: Final = 20
_GROWTH: Final = 0.1
"""Growth over the reports that are looked at, relative to their first."""
_STEADY: Final = 0.95
"""Correlation of memory and steps above which it grows steadily."""


def memory_leak(course: Course) -> str:
    """The memory of rank 0 grows steadily with the steps."""
    own = course.own
    # Memory grows by itself until caches and the allocator have settled.
    settled = own[len(own) // 3 :]
    if len(settled) < _REPORTS:
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


def duplicate_data(course: Course) -> str:
    """Much of the source was left out because of other records."""
    data = course.data
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
