"""The summary of a profile: where the time of steps goes, and what to change first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Final

from pydantic import BaseModel

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import TrainingStep
from steadytrain.components.shared.quantities import duration, size
from steadytrain.components.shared.workspace import Workspace

CHANGES: Final = 3
_OPERATORS: Final = 3
_WORTH: Final = 0.02
"""Changes with a smaller gain are left out."""


class Operator(BaseModel):
    """An operator of a profile. seconds: its own time, without what it calls."""

    name: str
    seconds: float
    calls: int


class RankProfile(BaseModel):
    """The recorded steps of a rank.

    seconds: how long they took.
    busy_seconds: time in operators, or on a GPU in its kernels.
    memory_peak: most bytes allocated on the GPU so far; 0 on a CPU.
    operators: those with the most time of their own, in that order.
    """

    rank: int
    first: int
    last: int
    device: str
    seconds: float
    busy_seconds: float
    memory_peak: int
    operators: list[Operator]


@dataclass(frozen=True)
class Change:
    """A change to try.

    gain: share of the time of a step that it saves at most.
    """

    gain: float
    text: str

    def __str__(self) -> str:
        """Return the change with its gain."""
        return f"{self.text}: up to {self.gain:.0%} less time"


@dataclass(frozen=True)
class Profile:
    """The profiles of all ranks, and the reports of the recorded steps."""

    config: RunConfig
    folder: Path
    ranks: Sequence[RankProfile]
    steps: Sequence[TrainingStep]

    @classmethod
    def of(cls, config: RunConfig) -> Profile:
        """Read the profile of a run.

        Raises:
            BadInput: the run has no profile, or its steps were not reported.
        """
        workspace = Workspace.of(config)
        folder = workspace.folder / "profile"
        paths = sorted(folder.glob("rank-*.json"), key=lambda path: int(path.stem[5:]))
        ranks = [RankProfile.model_validate_json(path.read_bytes()) for path in paths]
        told = [event for event in read_events(workspace.events) if isinstance(event, TrainingStep)]
        # The first report after a recorded step also covers that step.
        steps = [step for step in told if ranks and ranks[0].first <= step.step <= ranks[0].last]
        steps = steps or [step for step in told if ranks and step.step > ranks[0].last][:1]
        if not steps:
            raise BadInput(
                f"{folder} has no profile of steps that were reported",
                remedy="set training.profile.steps to steps before the last one",
            )
        return cls(config, folder, ranks, steps)

    def lines(self) -> list[str]:
        """Return the summary, at most ten lines."""
        first = self.ranks[0]
        count = first.last - first.first + 1
        seconds = mean(rank.seconds for rank in self.ranks) / count
        speed = mean(step.tokens_per_second for step in self.steps)
        many = "rank" if len(self.ranks) == 1 else "ranks"
        memory = (
            f"at most {size(max(rank.memory_peak for rank in self.ranks))} allocated on a GPU"
            if first.memory_peak
            else "no snapshot on a CPU"
        )
        lines = [
            f"steps {first.first} to {first.last} of {len(self.ranks)} {many} on {first.device}: "
            f"{duration(seconds)} a step, {speed:,.0f} tokens per second, "
            f"{first.busy_seconds / first.seconds:.0%} busy",
            f"time: {', '.join(f'{name} {share:.0%}' for name, share in self.shares().items())}",
            *(
                f"operator: {item.name} {item.seconds / first.busy_seconds:.0%}, "
                f"{item.calls // count} times a step"
                for item in first.operators[:_OPERATORS]
            ),
            f"memory: {memory}",
        ]
        changes = self.changes()
        lines += [f"try: {change}" for change in changes]
        if not changes:
            lines.append(f"try: nothing; no change would save more than {_WORTH:.0%}")
        return [*lines, f"traces for ui.perfetto.dev: {self.folder}"]

    def shares(self) -> dict[str, float]:
        """Return the shares of the steps' time by phase, the rest as "other"."""
        result = {
            "data": self._mean("data_wait"),
            "forward": self._mean("forward"),
            "backward": self._mean("backward"),
            "communication": self._mean("communication_wait"),
            "optimizer": self._mean("optimizer"),
        }
        return {**result, "other": max(0.0, 1 - sum(result.values()))}

    def changes(self) -> list[Change]:
        """Return the changes with the largest gains, the largest first."""
        result = sorted(self._possible(), key=lambda change: -change.gain)
        return [change for change in result if change.gain >= _WORTH][:CHANGES]

    def _possible(self) -> Iterator[Change]:
        shares, training = self.shares(), self.config.training
        computing = shares["forward"] + shares["backward"]
        first = self.ranks[0]
        yield Change(shares["data"], "make the input faster: more CPU cores or a faster disk")
        slow = shares["communication"] - self._mean("slowest_rank_wait")
        if len(self.ranks) > 1:
            yield Change(slow, f"find out why rank {self.steps[-1].slowest_rank} is slower")
            yield Change(
                shares["communication"] - slow,
                "exchange gradients less often: a larger training.global_batch_size, which "
                "changes what the model learns, or a faster network",
            )
        yield Change(
            self._mean("padding") * computing,
            "pad less: a smaller training.micro_batch_size or data.sequence_length",
        )
        yield Change(
            shares["optimizer"] / 2,
            "update less often: twice the training.global_batch_size, which changes what the "
            "model learns",
        )
        if training.gradient_checkpointing:
            # The backward pass repeats the forward pass.
            yield Change(
                shares["forward"], "set training.gradient_checkpointing to false, if memory allows"
            )
        if first.device != "cpu":
            idle = max(0.0, 1 - first.busy_seconds / first.seconds)
            waits = shares["data"] + shares["communication"]
            yield Change(idle - waits, "keep the GPU busy: a larger training.micro_batch_size")
        # On CPUs, benchmarks measured no gain.
        if first.device != "cpu" and not training.torch_compile:
            rest = 1 - self._share(_MATRIX)
            yield Change(rest * computing / 2, "set training.torch_compile to true to fuse kernels")
        if not (training.bf16 or training.fp16):
            yield Change(
                self._share(_MATRIX) * computing / 2,
                "set training.bf16 to true, if the device has instructions for it",
            )

    def _share(self, names: Sequence[str]) -> float:
        """Return the share of the busy time of operators with one of some words in their names."""
        first = self.ranks[0]
        seconds = sum(
            item.seconds
            for item in first.operators
            if any(name in item.name.lower() for name in names)
        )
        return seconds / first.busy_seconds

    def _mean(self, field: str) -> float:
        values: list[Any] = [getattr(step, field) for step in self.steps]
        return mean(value or 0.0 for value in values)


_MATRIX: Final = ("gemm", "aten::mm", "addmm", "bmm", "matmul", "cutlass", "sm90_")
"""Words in the names of matrix multiplications, as operators and as kernels."""
