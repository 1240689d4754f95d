"""A run as its ledger records it, for tests of the policy."""

from __future__ import annotations

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.config import RecoveryConfig
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    DecisionMade,
    SupervisorStarted,
)
from steadytrain.components.sizing.batch import plan_batch
from steadytrain.components.train.failures import Failure, FailureClass
from steadytrain.components.train.recovery.history import AttemptHistory, History
from steadytrain.components.train.recovery.policy import decide

EXACT = RecoveryConfig(jitter=False)
BUDGETED = [
    kind
    for kind in FailureClass
    if kind.retryable
    and kind not in (FailureClass.GPU_OOM, FailureClass.DIVERGENCE, FailureClass.CRASH)
]


def halved(*, size, attempt=1, **about):
    """Return the decision of a rank to repeat a step with a smaller micro-batch."""
    return DecisionMade(
        attempt=attempt,
        failure_class=FailureClass.GPU_OOM,
        action="repeat_step",
        reason=f"smaller micro-batch: {size}",
        batch=BatchSettings(size),
        fallback="smaller micro-batch",
        **about,
    )


class Run:
    """A run as its ledger records it, which fails on request."""

    def __init__(
        self, settings=EXACT, *, batch=8, ranks=1, nodes=1, device="GPU", prefer=None, length=0
    ):
        self.settings, self.device, self.nodes = settings, device, nodes
        self.prefer, self.length = prefer, length
        self.plan, self.history, self.step = plan_batch(batch, ranks, batch // ranks), History(), 0
        compute = {"compute": {"nodes": nodes}}
        self.history.supervisor = SupervisorStarted(generation=1, pid=1, host="h", settings=compute)

    def fail(self, kind, *, saves=False, unexplained=False, memory_needed=0, at=None, halves=()):
        """Run an attempt that fails, after it has halved its micro-batch to these sizes."""
        number, plan = self.history.next_attempt, self.plan
        attempt = AttemptHistory(
            AttemptStarted(
                attempt=number,
                world_size=plan.world_size,
                batch=plan.settings,
                gradient_accumulation_steps=plan.gradient_accumulation_steps,
                resumed_from_step=self.step or None,
                device=self.device,
                nodes=self.nodes,
            )
        )
        if saves:
            self.step += 10
            attempt.checkpoints.append(
                CheckpointSaved(
                    attempt=number, step=self.step, checkpoint="c", bytes=1, seconds=0.1
                )
            )
        for size in halves:
            decision = halved(attempt=number, size=size)
            attempt.add(decision)
            self.history.decisions.append(decision)
            self.plan = plan = attempt.plan
        attempt.ended = AttemptEnded(
            attempt=number,
            outcome="failed",
            step=self.step if at is None else at,
            failure_class=kind,
        )
        self.history.attempts.append(attempt)
        self.failure = Failure(
            failure_class=kind,
            message="told",
            remedy="do this",
            unexplained=unexplained,
            memory_needed=memory_needed,
        )
        decision = decide(
            self.history,
            self.failure,
            self.settings,
            "run",
            prefer=self.prefer,
            length=self.length,
        )
        self.history.decisions.append(DecisionMade.after(number, self.failure, decision))
        if decision.nodes:
            self.plan = plan_batch(
                plan.global_batch_size, plan.world_size // self.nodes * decision.nodes
            )
            self.nodes = decision.nodes
        if decision.batch is not None:
            self.plan = plan.limited_to(decision.batch)
        return decision


def replace_settings(**fields):
    return EXACT.model_copy(update=fields)
