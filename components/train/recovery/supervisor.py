"""Owns the attempts of a run: starts them, follows them, concludes, decides.

What it knows of the past it reads from the ledger; what it learns from the
ranks it reads from their events and from the attempt's folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events import Event, Follower, Sink
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptOutcome,
    AttemptStarted,
    CheckpointSaved,
    DecisionMade,
    TrainingStep,
    Validated,
    Warned,
)
from steadytrain.components.shared.lock import run_lock
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.attempt import AttemptFolder, AttemptSpec
from steadytrain.components.train.launch.base import Launcher, RunningAttempt
from steadytrain.components.train.launch.process import end_processes
from steadytrain.components.train.plan.batch import BatchPlan, plan_batch
from steadytrain.components.train.recovery.failures import Failure, FailureClass
from steadytrain.components.train.recovery.ledger import History, Ledger
from steadytrain.components.train.recovery.outcome import Ending, Outcome, conclude
from steadytrain.components.train.recovery.policy import Decision, decide
from steadytrain.components.train.recovery.signals import StopRequest, stop_requests

POLL_SECONDS = 0.1

OnValidation = Callable[[Validated], bool]
Decide = Callable[[History, Failure], Decision]

# How the work is cut and what is told of it; none of it decides what is learned.
_NEUTRAL = (
    "micro_batch_size",
    "gradient_checkpointing",
    "logging_steps",
    "eval_steps",
    "save_steps",
    "save_total_limit",
)


@dataclass
class Supervisor:
    """Trains one run to its end.

    on_validation: called with each validation; False ends the training as "pruned".
    sinks: get every event of the run from now on; the caller closes them.
    decide: the policy.
    """

    config: RunConfig
    data: DataRecord
    launcher: Launcher
    on_validation: OnValidation | None = None
    sinks: Sequence[Sink] = ()
    decide: Decide = decide
    workspace: Workspace = field(init=False)
    ledger: Ledger = field(init=False)

    def __post_init__(self) -> None:
        self.workspace = Workspace.of(self.config)
        self.ledger = Ledger(LocalStorage(self.workspace.ledger), run_id=self.workspace.run_id)

    def run(self) -> Outcome:
        """Attempt after attempt, until one ends well or the policy says stop.

        SIGTERM and SIGINT stop the ranks within the grace; a second signal ends them at once.

        Raises:
            RunBusy: another process trains this run.
            BadInput: the run was begun with other data, model or training.
            StorageError: the ledger cannot be written.
        """
        with run_lock(self.workspace, "train"), stop_requests() as request:
            self._prepare()
            batch = self._plan(self.config.training.micro_batch_size)
            while True:
                ending, step = self._attempt(batch, request)
                if ending.failure is None:
                    break
                decision = self._decide(ending.failure)
                if decision.action == "stop" or request.wait(decision.delay_seconds):
                    break
                batch = self._plan(decision.micro_batch_size or batch.micro_batch_size)
            history = self.ledger.history()
            return Outcome(
                outcome=ending.outcome,
                step=step,
                attempts=len(history.attempts),
                seconds=history.seconds,
                result=ending.result,
                failure=ending.failure,
            )

    def _prepare(self) -> None:
        """Takes over from earlier supervisors, and puts down what the ranks will read."""
        history = self.ledger.history()
        self._refuse_other_inputs(history)
        self._end_lost_attempts(history)
        self.workspace.create()
        LocalStorage(self.workspace.folder).write(
            self.workspace.config.name, self.config.to_yaml().encode()
        )
        self.data.save(self.workspace.record("preprocess"))

    def _refuse_other_inputs(self, history: History) -> None:
        begun = history.attempts[-1].started.inputs if history.attempts else None
        if begun not in (None, inputs_digest(self.config, self.data)):
            raise BadInput(
                f"run {self.workspace.run_id!r} in {self.workspace.output} was begun with other "
                "data, model or training, and cannot be continued with these",
                remedy="give this run another name (run: ...), or take the configuration that it "
                f"was begun with; or remove {self.workspace.folder}",
            )

    def _end_lost_attempts(self, history: History) -> None:
        """An attempt without an end: its supervisor died. Its ranks die with it; see to that."""
        end_processes(self.workspace.attempts)
        for attempt in history.attempts:
            if attempt.ended is None:
                self.ledger.record(
                    AttemptEnded(
                        attempt=attempt.started.attempt,
                        outcome="failed",
                        step=attempt.last_step,
                        failure_class=FailureClass.NODE_LOST,
                        message="the program that supervised this attempt died",
                    )
                )

    def _plan(self, micro_batch_size: int | None) -> BatchPlan:
        return plan_batch(
            self.config.training.global_batch_size, self.launcher.world_size, micro_batch_size
        )

    def _attempt(self, batch: BatchPlan, request: StopRequest) -> tuple[Ending, int]:
        """One attempt, from the newest checkpoint to the end of its ranks."""
        number = self.ledger.history().next_attempt
        folder = AttemptFolder(self.workspace.attempts / f"{number:04d}")
        resume_from, resumed_step = _newest_checkpoint(self.workspace)
        AttemptSpec(
            attempt=number,
            run_id=self.workspace.run_id,
            config=str(self.workspace.config),
            data=str(self.workspace.record("preprocess")),
            micro_batch_size=batch.micro_batch_size,
            gradient_accumulation_steps=batch.gradient_accumulation_steps,
            resume_from=resume_from,
        ).save(folder.spec)
        watch = _Watch(self, folder, request, step=resumed_step or 0)
        watch.tell(
            AttemptStarted(
                attempt=number,
                world_size=batch.world_size,
                micro_batch_size=batch.micro_batch_size,
                gradient_accumulation_steps=batch.gradient_accumulation_steps,
                resumed_from_step=resumed_step,
                inputs=inputs_digest(self.config, self.data),
            )
        )
        ending = Ending("stopped", None, None)
        try:
            with self.launcher.start(folder) as ranks:
                watch.follow(ranks)
            ending = conclude(folder, ranks.exits(), watch.requested)
        finally:
            step = ending.result.step if ending.result else watch.step
            watch.tell(_ended(number, step, ending))
            watch.close()
        return ending, step

    def _decide(self, failure: Failure) -> Decision:
        history = self.ledger.history()
        decision = self.decide(history, failure)
        self.ledger.record(
            DecisionMade(
                attempt=history.attempts[-1].started.attempt,
                failure_class=failure.failure_class,
                action=decision.action,
                reason=decision.reason,
            )
        )
        return decision


class _Watch:
    """Follows one attempt: its events to ledger and sinks, requests to its ranks."""

    def __init__(
        self, supervisor: Supervisor, folder: AttemptFolder, request: StopRequest, *, step: int
    ) -> None:
        self.supervisor, self.folder, self.request = supervisor, folder, request
        self.step = step
        self.pruned = False
        self.sinks = list(supervisor.sinks)
        self.follower = Follower(supervisor.workspace.events)
        self.follower.skip_to_end()
        self.stream = supervisor.workspace.stream("supervisor")

    @property
    def requested(self) -> AttemptOutcome | None:
        """The outcome that the ranks were asked for, or None."""
        return self.request.outcome or ("pruned" if self.pruned else None)

    def tell(self, event: Event) -> None:
        """Records an event of the supervisor's own."""
        self.supervisor.ledger.record(event)
        self.stream.emit(event)
        self._relay()

    def follow(self, ranks: RunningAttempt) -> None:
        """Returns when all ranks are down."""
        grace = self.supervisor.config.recovery.stop_grace_seconds
        stopping = urgent = False
        while not ranks.poll():
            self._relay()
            if self.request.outcome and not stopping:
                ranks.stop(grace)
                stopping = True
            if self.request.urgent and not urgent:
                ranks.stop(0)
                urgent = True
            time.sleep(POLL_SECONDS)
        self._relay()

    def close(self) -> None:
        self.stream.close()

    def _relay(self) -> None:
        for event in self.follower.new():
            if isinstance(event, CheckpointSaved):
                self.supervisor.ledger.record(event)
            if isinstance(event, CheckpointSaved | TrainingStep | Validated):
                self.step = max(self.step, event.step)
            for sink in list(self.sinks):
                self._hand(sink, event)
            if isinstance(event, Validated):
                self._judge(event)

    def _hand(self, sink: Sink, event: Event) -> None:
        """A sink that fails is left out from then on; training goes on."""
        try:
            sink.emit(event)
        except Exception as error:
            self.sinks.remove(sink)
            self.stream.emit(
                Warned(
                    stage="train",
                    message=f"{type(sink).__name__} failed and gets no more events: {error}",
                )
            )

    def _judge(self, event: Validated) -> None:
        judge = self.supervisor.on_validation
        if judge is not None and not self.pruned and not judge(event):
            self.pruned = True
            LocalStorage(self.folder.path).write(self.folder.stop.name, b"pruned")


def inputs_digest(config: RunConfig, data: DataRecord) -> str:
    """Digest of all that decides the weights that training ends with."""
    training = config.training.model_dump(mode="json", exclude=set(_NEUTRAL))
    return value_digest([data.fingerprint, config.model.model_dump(mode="json"), training])


def _newest_checkpoint(workspace: Workspace) -> tuple[str, int | None]:
    from steadytrain.components.train.checkpoint import newest
    from steadytrain.components.train.checkpoint.manifest import read_manifest

    found: Path | None = newest(workspace.checkpoints)
    return (str(found), read_manifest(found).step) if found else ("", None)


def _ended(number: int, step: int, ending: Ending) -> AttemptEnded:
    failure = ending.failure
    if failure is None:
        return AttemptEnded(attempt=number, outcome=ending.outcome, step=step)
    return AttemptEnded(
        attempt=number,
        outcome=ending.outcome,
        step=step,
        failure_class=failure.failure_class,
        message=failure.message,
        remedy=failure.remedy,
    )
