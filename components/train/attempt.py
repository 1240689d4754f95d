"""Where supervisor, agent and ranks meet: an attempt's folder, and nothing else.

attempts/<n>/
  spec.json           what to run, written by the supervisor
  stop                a request to the ranks to stop: its content is the outcome to report
  leave               a request to the agent to take the ranks down: SIGTERM, and SIGKILL
                      after as many seconds as it says
  result.json         written by rank 0 when the attempt ends by itself
  rank-<r>.heartbeat  signs of life of the thread that trains
  rank-<r>.error.json why a rank failed (class of exception, message, traceback)
  rank-<r>.stacks     where the threads of a rank stood when it hung
  rank-<r>.log        standard output and error of a rank
  node-<n>/           of the agent, one a node:
    heartbeat         its signs of life
    exits.json        written when all ranks of the node are down: how each ended
    error.json        why a rank failed, where the rank itself cannot tell
    log               the agent's standard output and error
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from steadytrain.components.shared.decision import Decision
from steadytrain.components.shared.events.types import AttemptOutcome
from steadytrain.components.shared.records import Record
from steadytrain.components.train.plan.batch import REPLICATED

PREEMPTED_EXIT = 143
"""Exit status of a rank that left on SIGTERM, as a container runtime reports it."""


class AttemptSpec(Record):
    """What the ranks of one attempt do.

    config, data: absolute paths of the run's config.yaml and of the DataRecord.
    nodes: that the ranks are divided among.
    on_demand: whether it does without nodes that may be taken away.
    resume_from: a checkpoint's folder, or "" to begin at step 0.
    skipped_batches: global batches that are left out, by their place in the order.
    learning_rate_scale: factor on all rates of the schedule.
    recipe: what decides what is learned, as an earlier attempt had it; empty: not decided yet,
        since it goes by the size of the model, which the ranks know.
    seconds_between_failures: to expect on average; decides how often a checkpoint is saved.
    checkpoint_seconds: that the run's newest checkpoint cost, blocking and writing; None before
        there is one.
    gradient_checkpointing: whether activations are recomputed; what the configuration says, or
        more than that where memory ran out.
    snapshot: whether checkpoints are copied to host memory, to be written beside the training.
    strategy, offload: how the ranks share the state, and what of it the host keeps.
    generation: of the supervisor's lease; where a higher one is found, its word is void.
    checkpoints: labels of those that there were when it took the run over; None: not told.
    """

    attempt: int
    run_id: str
    config: str
    data: str
    micro_batch_size: int
    gradient_accumulation_steps: int
    nodes: int = 1
    on_demand: bool = False
    resume_from: str = ""
    gradient_checkpointing: bool = False
    snapshot: bool = True
    strategy: str = REPLICATED
    offload: str = "none"
    skipped_batches: tuple[int, ...] = ()
    learning_rate_scale: float = 1.0
    recipe: tuple[Decision, ...] = ()
    seconds_between_failures: float = 14_400.0
    checkpoint_seconds: tuple[float, float] | None = None
    generation: int = 0
    checkpoints: list[str] | None = None


class AttemptResult(Record):
    """How an attempt ended, as rank 0 tells it.

    model: folder of the exported model; "" where the attempt did not finish.
    """

    outcome: AttemptOutcome
    step: int
    max_steps: int
    best_step: int
    best_score: float
    metric: str
    parameters: int
    model: str = ""


class Exits(Record):
    """How the ranks of a node ended.

    time: when all of them were down.
    statuses: exit status by rank (negative: a signal), the earliest failure first.
    """

    time: float
    statuses: dict[int, int]


class RankError(Record):
    """Why a rank failed.

    memory_needed: bytes that its training needs at the least, by a formula; 0 where unknown.
    still_since: the last sign of progress of a rank that hangs; 0 otherwise.
    """

    rank: int
    time: float
    kind: str
    message: str
    traceback: str
    step: int
    memory_needed: int = 0
    still_since: float = 0.0


@dataclass(frozen=True)
class NodeFolder:
    """The files of an attempt's agent on one node."""

    path: Path

    @property
    def heartbeat(self) -> Path:
        return self.path / "heartbeat"

    @property
    def exits(self) -> Path:
        return self.path / "exits.json"

    @property
    def error(self) -> Path:
        return self.path / "error.json"

    @property
    def log(self) -> Path:
        return self.path / "log"


@dataclass(frozen=True)
class AttemptFolder:
    """The files of one attempt."""

    path: Path

    @property
    def spec(self) -> Path:
        return self.path / "spec.json"

    @property
    def stop(self) -> Path:
        return self.path / "stop"

    @property
    def leave(self) -> Path:
        return self.path / "leave"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    def node(self, number: int) -> NodeFolder:
        return NodeFolder(self.path / f"node-{number}")

    def heartbeat(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.heartbeat"

    def stacks(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.stacks"

    def error(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.error.json"

    def log(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.log"

    def errors(self) -> list[RankError]:
        """What the ranks reported, the earliest first: the others are often its echoes."""
        told = [*self.path.glob("rank-*.error.json"), *self.path.glob("node-*/error.json")]
        found = [RankError.load(path) for path in told]
        return sorted(found, key=lambda error: error.time)
