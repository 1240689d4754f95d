"""Owns a run's attempts: starts them, follows them, and decides what comes next.

It reads the past from the ledger. It learns about the ranks from their events and from the
attempt's folder.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from typing import Any

from steadytrain.components.shared import retry
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.environment import code_origin
from steadytrain.components.shared.errors import StorageError, Unkillable
from steadytrain.components.shared.events import Event, Reader
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSkipped,
    DecisionMade,
    RecoveryDecision,
    SupervisorStarted,
    Validated,
    Warned,
)
from steadytrain.components.shared.lease import Lease
from steadytrain.components.shared.quantities import duration
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.shared.stopping import StopRequest, stop_requests
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.tracking.notes import attempt_traceparent
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.sizing.batch import BatchPlan
from steadytrain.components.train.attempt import AttemptFolder, AttemptSpec
from steadytrain.components.train.failures import Failure, FailureClass, cause_of
from steadytrain.components.train.launch.launcher import Launcher
from steadytrain.components.train.recovery.adjust import adjustment, discard, pending, take
from steadytrain.components.train.recovery.history import History, account
from steadytrain.components.train.recovery.ledger import Ledger
from steadytrain.components.train.recovery.outcome import (
    SUCCESSES,
    Ending,
    Outcome,
    conclude,
    repeated,
)
from steadytrain.components.train.recovery.policy import decide
from steadytrain.components.train.recovery.sizing import Sizing
from steadytrain.components.train.recovery.takeover import (
    accepted,
    end_lost_attempts,
    hold_run,
    inputs_digest,
    last_folder,
    left_to_wait,
    other_inputs,
    other_strategy_code,
    refused,
    settings,
    undecided,
)
from steadytrain.components.train.recovery.watch import Watch

GROWTH_SECONDS = 300.0
"""How long an attempt waits for nodes that the run can do without."""
_CONTINUED = RecoveryDecision("retry", "the ranks ended to be given another setting")
OnValidation = Callable[[Validated], bool]
Decide = Callable[[History, Failure], RecoveryDecision]


@dataclass
class Supervisor:
    """Trains one run to its end.

    on_validation: called with each validation; False ends training as "pruned".
    sinks: receive every event of the run from now on; the caller closes them.
    decide: the policy; None means the built-in one with the configured settings.
    until: optimizer steps after which training ends as "pruned"; a multiple of
        `training.eval_steps`. The cut is no part of the run: a later call continues to the weights
        of a run that was never cut. None means there is none.
    held: the run's lease, if this process holds it already.
    """

    config: RunConfig
    data: DataRecord
    launcher: Launcher
    on_validation: OnValidation | None = None
    sinks: Sequence[Reader] = ()
    decide: Decide | None = None
    until: int | None = None
    held: Lease | None = None
    device: str = field(init=False)
    workspace: Workspace = field(init=False)
    ledger: Ledger = field(init=False)
    lease: Lease = field(init=False)
    sizing: Sizing = field(init=False)
    _changed: str = field(init=False, default="")

    def __post_init__(self) -> None:
        self.workspace = Workspace.of(self.config)
        self.ledger = Ledger(self.workspace)
        self.device = self.launcher.device
        self.sizing = Sizing(
            self.config,
            self.data,
            self.device,
            self.launcher.world_size,
            self.launcher.host_memory,
        )

    def run(self) -> Outcome:
        """Run attempts until one succeeds or the policy says stop.

        SIGTERM and SIGINT stop the ranks within the grace period; a second signal ends them at
        once.

        Raises:
            RunBusy: another process is training this run, or has taken it over.
            BadInput: the run was started with different data, model or training settings.
            StorageError: the ledger cannot be written.
            Unkillable: a rank on this machine, maybe of an earlier supervisor, does not end.
        """
        self.workspace.create()
        lease = contextlib.nullcontext(self.held) if self.held else hold_run(self.config)
        with lease as self.lease, stop_requests() as request:
            self.ledger.lease = self.lease
            self._prepare()
            ending, step = Ending("stopped", None, None), self.ledger.history().last_step
            delay = left_to_wait(self.ledger.history(), self._now())
            while not request.wait(delay):
                ending, step, decision = self._attempt(request)
                if decision is None or decision.action == "stop":
                    break
                delay = decision.delay_seconds
            else:
                # The request came while no rank was running.
                ending = Ending(request.outcome or "stopped", ending.result, None)
            if ending.outcome in SUCCESSES:
                self._refuse_late_request()
            history = self.ledger.history()
            return Outcome(
                outcome=ending.outcome,
                step=step,
                attempts=len(history.attempts),
                seconds=history.seconds,
                result=ending.result,
                failure=ending.failure,
                account=account(history),
                decisions=history.decided,
            )

    def _prepare(self) -> None:
        """Take over from earlier supervisors, and write the files that the ranks will read."""
        from steadytrain.components.train.checkpoint import (
            Lineage,
            checkpoints_of,
            refuse_foreign,
            survey,
        )

        self.ledger.check(last_folder(self.workspace))
        history, now = self.ledger.history(), settings(self.config, self.data)
        self._refuse_other_inputs(history, now)
        refuse_foreign(checkpoints_of(self.config), self.config.run_id, history.known_checkpoints)
        if history.supervisor and history.attempts:
            self._changed = accepted(history.supervisor.settings, now)
        self._emit(
            SupervisorStarted(
                generation=self.lease.generation,
                pid=self.lease.holder.pid,
                host=self.lease.holder.host,
                checkpoints=survey(checkpoints_of(self.config), Lineage.of(history.supervisor)),
                settings=now,
            )
        )
        for what in self.ledger.restored:
            self._emit(Warned(stage="train", message=f"{what}; check the disk"))
        end_lost_attempts(self.ledger, self.workspace)
        if failed := undecided(history):
            decision = self._policy(history, Failure.of(failed))
            # To stop is not recorded: whoever restarted the run wants another try.
            if decision.action != "stop":
                self._emit(DecisionMade.after(failed.attempt, failed, decision))
        folder = LocalStorage(self.workspace.folder)
        text = self.config.to_saved()
        retry.retry_storage(lambda: folder.write(self.workspace.config.name, text))
        retry.retry_storage(lambda: self.data.save(self.workspace.record("preprocess")))

    @cached_property
    def _inputs(self) -> str:
        """Cached, because a remote base model needs a request."""
        return inputs_digest(self.config, self.data)

    def _emit(self, event: Event) -> None:
        """Record an event while no attempt is running."""
        with contextlib.closing(self.workspace.lines("supervisor")) as stream:
            self.ledger.emit(stream.by_run_clock(event), stream)

    def _now(self) -> float:
        with contextlib.closing(self.workspace.lines("supervisor")) as stream:
            return stream.now()

    def _refuse_other_inputs(self, history: History, now: Mapping[str, Any]) -> None:
        inputs = history.attempts[-1].started.inputs if history.attempts else None
        before = history.supervisor.settings if history.supervisor else {}
        same = inputs == self._inputs and not other_strategy_code(before, now)
        if inputs is None or same:
            return
        raise other_inputs(self.workspace, refused(before, now))

    def _attempt(self, request: StopRequest) -> tuple[Ending, int, RecoveryDecision | None]:
        """Run one attempt, from the newest checkpoint to the decision about what follows."""
        history = self.ledger.history()
        # A folder that the ledger doesn't know belongs to an attempt whose loss was accepted.
        number, taken = (
            max(history.next_attempt, last_folder(self.workspace) + 1),
            history.supervisor,
        )
        folder = AttemptFolder(self.workspace.attempts / f"{number:04d}")
        resume_from, resumed_step, skipped = retry.retry_storage(
            lambda: _newest_checkpoint(self.config, history),
            retry.AWAY_SECONDS,
            report=self._warn_of_wait,
        )
        watch, began = Watch(self, folder, request, step=resumed_step or 0), time.monotonic()
        with contextlib.closing(watch):
            for step, reason in skipped.items():
                watch.record(
                    CheckpointSkipped(
                        attempt=number,
                        step=step,
                        resumed_from_step=resumed_step or 0,
                        reason=reason,
                    )
                )
            if self._changed:
                watch.record(Warned(stage="train", message=self._changed))
                self._changed = ""
            plan = self._plan(watch)
            spec = AttemptSpec(
                attempt=number,
                run_id=self.workspace.run_id,
                config=str(self.workspace.config),
                data=str(self.workspace.record("preprocess")),
                batch=plan.settings,
                gradient_accumulation_steps=plan.gradient_accumulation_steps,
                nodes=self.sizing.nodes(history),
                pending_seconds=GROWTH_SECONDS if history.grows(number) else None,
                on_demand=history.on_demand,
                resume_from=resume_from,
                skipped_batches=history.skipped_batches,
                learning_rate_scale=history.learning_rate_scale,
                recipe=tuple(history.recipe),
                seconds_between_failures=self._between_failures(history),
                checkpoint_seconds=history.checkpoint_seconds,
                generation=self.lease.generation,
                checkpoints=taken.checkpoints if taken else None,
                until=self.until,
                traceparent=attempt_traceparent(
                    self.workspace, number, self.config.observability.traceparent
                ),
            )
            # Do this first: it claims the attempt number, even if another supervisor exists.
            started = AttemptStarted(
                attempt=number,
                world_size=plan.world_size,
                nodes=spec.nodes,
                batch=plan.settings,
                gradient_accumulation_steps=plan.gradient_accumulation_steps,
                resumed_from_step=resumed_step,
                inputs=self._inputs,
                device=self.device,
                decisions=[asdict(item) for item in self.sizing.decisions(history)],
                code=code_origin(),
            )
            watch.record(started)
            self._adjust(watch, number, resumed_step or 0)
            history = self.ledger.history()
            spec = spec.model_copy(update={"changes": history.changes})
            retry.retry_storage(lambda: spec.save(folder.spec))
            ending = Ending("stopped", None, None)
            try:
                with self.launcher.start(folder) as ranks:
                    watch.follow(ranks)
                exits, asked = ranks.exits(), watch.requested
                if watch.adjusts and not any(exits.values()):
                    asked = asked or "stopped"
                ending = conclude(folder, exits, asked)
                ending = repeated(ending, history, saved=watch.saved)
                for error in ending.survived:
                    message = f"{error}; but training went on, and succeeded"
                    watch.record(Warned(stage="train", message=message))
            except Unkillable as error:
                # Nothing else starts here: the process still holds its device.
                lost = Failure(
                    failure_class=FailureClass.NODE_LOST,
                    message=error.message,
                    remedy=error.remedy,
                )
                ending = Ending("failed", None, lost)
                raise
            finally:
                step = _last_step(ending, watch)
                waited = watch.waited(started)
                took = time.monotonic() - began
                watch.record(
                    AttemptEnded(
                        attempt=number,
                        outcome=ending.outcome,
                        step=step,
                        seconds=took,
                        waited_seconds=waited,
                        **(cause_of(ending.failure) if ending.failure else {}),
                    )
                )
            self._remember(ending, watch)
            if ending.failure:
                return ending, step, self._decide(ending.failure, watch)
            if watch.adjusts and ending.outcome == "stopped":
                if pending(self.workspace) == (None, ""):
                    message = "training continues unchanged: what it stopped for was taken back"
                    self._emit(Warned(stage="train", message=message))
                return ending, step, _CONTINUED
            return ending, step, None

    def _adjust(self, watch: Watch, attempt: int, step: int) -> None:
        """Record the change that a person requested. It applies from this step on."""
        request, problem = take(self.workspace, self.config)
        if problem:
            watch.record(Warned(stage="train", message=problem))
        if request is None:
            return
        history = self.ledger.history()
        made = adjustment(request, self.config, history, attempt=attempt, step=step)
        if made is not None:
            watch.record(made)
        # Only now: whoever takes over in between finds the request or its entry in the ledger.
        discard(self.workspace)

    def _refuse_late_request(self) -> None:
        """Report a request that came while the last step was taken."""
        request, _ = pending(self.workspace)
        if request is not None and request.request not in {
            item.request for item in self.ledger.history().adjusted
        }:
            message = f"{request} came too late: training had finished"
            self._emit(Warned(stage="train", message=message))
        discard(self.workspace)

    def _warn_of_wait(self, why: str) -> None:
        wait = duration(retry.AWAY_SECONDS)
        message = f"waiting up to {wait} for the storage of the checkpoints: {why}"
        self.workspace.add_events("supervisor", Warned(stage="train", message=message))

    def _plan(self, watch: Watch) -> BatchPlan:
        if not self.ledger.history().attempts:
            planned = self.sizing.planned()
            if planned is not None:
                watch.record(planned)
            learned = self.sizing.learned()
            if learned is not None:
                watch.record(learned)
                watch.record(Warned(stage="train", message=learned.reason))
        return self.sizing.plan(self.ledger.history())

    def _between_failures(self, history: History) -> float:
        from steadytrain.components.train.checkpoint.cadence import expected_between_failures

        failures = sum(bool(item.ended and item.ended.failure_class) for item in history.attempts)
        prior = self.config.recovery.seconds_between_failures
        return expected_between_failures(prior, history.seconds, failures)

    def _remember(self, ending: Ending, watch: Watch) -> None:
        history = self.ledger.history()
        if history.attempts[-1].checkpoints or ending.outcome in SUCCESSES:
            try:
                self.sizing.remember(history)
            except StorageError as error:
                watch.record(Warned(stage="train", message=f"not kept for later runs: {error}"))

    def _decide(self, failure: Failure, watch: Watch) -> RecoveryDecision:
        history = self.ledger.history()
        decision = self._policy(history, failure)
        attempt = history.attempts[-1].started.attempt
        watch.record(DecisionMade.after(attempt, failure, decision))
        return decision

    def _policy(self, history: History, failure: Failure) -> RecoveryDecision:
        policy = self.decide or partial(
            decide,
            settings=self.config.recovery,
            run_id=self.workspace.run_id,
            conflict_with=self.config.conflict_with,
            prefer=self.config.compute.prefer,
            length=self.data.sequence_length,
            estimate=self.sizing.estimate,
        )
        return policy(history, failure)


def _newest_checkpoint(
    config: RunConfig, history: History
) -> tuple[str, int | None, dict[int, str]]:
    """Return the checkpoint where an attempt starts, and what is wrong with newer ones, by step.

    Its ranks compare digests in parallel. This function reads complete checkpoints only if the
    ranks found damage.
    """
    from steadytrain.components.train.checkpoint import Lineage, checkpoints_of, newest

    ended = history.attempts[-1].ended if history.attempts else None
    damaged = ended is not None and ended.failure_class == FailureClass.CHECKPOINT_CORRUPT
    skipped = dict[int, str]()
    latest = newest(
        checkpoints_of(config),
        Lineage.of(history.supervisor),
        read=damaged,
        skipped=lambda checkpoint, why: skipped.setdefault(checkpoint.step, why.message),
    )
    if (latest.step if latest else 0) < history.last_step:
        skipped.setdefault(history.last_step, f"it is not in {checkpoints_of(config)} any more")
    return (str(latest), latest.step, skipped) if latest else ("", None, skipped)


def _last_step(ending: Ending, watch: Watch) -> int:
    """Return the last known step: a rank may have finished more steps than it reported."""
    if ending.result:
        return ending.result.step
    return max(watch.step, ending.failure.failed_step if ending.failure else 0)
