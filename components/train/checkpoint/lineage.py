"""Decide which committed checkpoints of a run count, by the supervisor they were committed under.

A rank checks the lease right before it commits. Between the check and the write, it may be
suspended for a long time, or the request may be delayed in the network, and another supervisor may
take over the run. So the reader decides. Each checkpoint records the generation of the lease that
it was written under. A supervisor that takes over a run writes into the ledger which checkpoints
exist. From then on, only those and the new generation's own checkpoints count. A COMMIT of an older
generation that appears later is never used: it is reported and set aside like a damaged checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from steadytrain.components.shared.events.types import SupervisorStarted
from steadytrain.components.train.checkpoint.checkpoint import Checkpoint, CheckpointDamaged


@dataclass(frozen=True)
class Lineage:
    """Which checkpoints count now.

    generation: generation of the supervisor that holds the run.
    found: labels of the checkpoints that existed when it took over the run. None means unknown, and
        all checkpoints count.
    """

    generation: int = 0
    found: Collection[str] | None = None

    @classmethod
    def of(cls, supervisor: SupervisorStarted | None) -> Lineage:
        """Return the lineage that the last supervisor in the ledger recorded."""
        return cls(supervisor.generation, supervisor.checkpoints) if supervisor else cls()

    def check(self, checkpoint: Checkpoint) -> None:
        """Reject a checkpoint that does not count.

        Raises:
            CheckpointDamaged: the checkpoint was committed too late, or cannot be read.
        """
        if self.found is None or checkpoint.label in self.found:
            return
        generation = checkpoint.manifest.generation
        # A supervisor that was replaced without noticing must not set aside newer checkpoints.
        if generation < self.generation:
            raise CheckpointDamaged(
                f"checkpoint {checkpoint} was committed by generation {generation} of the run's "
                f"supervisors after generation {self.generation} had taken over",
                remedy="the previous checkpoint is used",
            )
