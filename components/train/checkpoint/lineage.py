"""Which committed checkpoints of a run count, by the supervisor under which they were committed.

A rank looks at the lease right before it commits. Between the look and the write it
may be stopped for long, or the request may lie about in a network, and another
supervisor have the run meanwhile. So the reader decides: a checkpoint bears the
generation of the lease that it was written under, and who takes a run over writes
into the ledger which checkpoints there are. From then on those count, and those of
the new generation. A COMMIT of an older one that appears later is never used: it is
named and set aside like a damaged checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from steadytrain.components.shared.events.types import SupervisorStarted
from steadytrain.components.train.checkpoint.checkpoint import Checkpoint, CheckpointDamaged


@dataclass(frozen=True)
class Lineage:
    """What counts now.

    generation: of the supervisor that has the run.
    found: labels of the checkpoints that there were when it took the run over; None: not
        told, and all count.
    """

    generation: int = 0
    found: Collection[str] | None = None

    @classmethod
    def of(cls, supervisor: SupervisorStarted | None) -> Lineage:
        """As the last supervisor in the ledger found it."""
        return cls(supervisor.generation, supervisor.checkpoints) if supervisor else cls()

    def check(self, checkpoint: Checkpoint) -> None:
        """Refuses a checkpoint that does not count.

        Raises:
            CheckpointDamaged: it was committed too late, or cannot be read.
        """
        if self.found is None or checkpoint.label in self.found:
            return
        generation = checkpoint.manifest.generation
        # Whoever was succeeded without knowing it must not set aside what is newer.
        if generation < self.generation:
            raise CheckpointDamaged(
                f"checkpoint {checkpoint} was committed by generation {generation} of the run's "
                f"supervisors after generation {self.generation} had taken over",
                remedy="the checkpoint before it is used",
            )
