"""How a run splits its global batch: as configured, but no larger than what fit before."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from steadytrain.components.shared.batch import REPLICATED
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.data_sections import SERIES, TABLES
from steadytrain.components.shared.config.fields import Decision, differs, set_by_user
from steadytrain.components.shared.events.types import DecisionMade
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.sizing.batch import BatchPlan, plan_batch
from steadytrain.components.sizing.checkpoints import by_default
from steadytrain.components.sizing.decisions import Start, estimated_memory, planned_start
from steadytrain.components.sizing.learned import Learned, learned_path
from steadytrain.components.train.failures import FailureClass
from steadytrain.components.train.recovery.history import History

_DERIVED = "the default, since there is no formula for this device and model"


@dataclass(frozen=True)
class Sizing:
    """The batch plans of one run on one kind of device.

    host_memory: bytes per node; None if unknown.
    """

    config: RunConfig
    data: DataRecord
    device: str
    world_size: int
    host_memory: int | None = None

    def plan(self, history: History) -> BatchPlan:
        """Return the plan of the next attempt."""
        plan, limit = self._configured(self.nodes(history)), history.limit
        return plan.limited_to(limit.batch) if limit and limit.batch else plan

    def decisions(self, history: History) -> list[Decision]:
        """Return the fields that the next attempt's plan sets, each with its reason."""
        nodes = self.nodes(history)
        start, limit, began = self._start(nodes), history.limit, self._configured(nodes).fields
        reasons = {item.field: item for item in start.decisions} if start else {}
        result = []
        for field, value in self.plan(history).fields.items():
            if limit is not None and value != began.get(field):
                item = Decision(field, value, f"{limit.action.replace('_', ' ')}: {limit.reason}")
            elif field in reasons:
                item = reasons[field]
            elif differs(self.config, field):
                item = set_by_user(self.config, field)
            else:
                item = Decision(field, value, _DERIVED)
            result.append(item)
        return [*result, self._checkpoints()]

    def planned(self) -> DecisionMade | None:
        """Return the planner's decision, if it knows the device and the model."""
        start = self._start(self.config.compute.nodes)
        if start is None:
            return None
        return DecisionMade(attempt=0, failure_class="", action="planned", reason=start.reason)

    def estimate(self, plan: BatchPlan) -> int | None:
        """Return the bytes that a rank needs with a plan; None if no formula covers it."""
        nodes = plan.world_size // self.config.compute.nproc_per_node
        length = plan.settings.sequence_length or self.data.sequence_length
        return estimated_memory(self.config, self.device, nodes, length, plan)

    def nodes(self, history: History) -> int:
        """Return the number of nodes of the next attempt."""
        return history.nodes or self.config.compute.nodes

    def learned(self) -> DecisionMade | None:
        """Return what earlier runs learned, if it changes the plan."""
        if not self._path.is_file():
            return None
        plan = self._configured(self.config.compute.nodes)
        within = plan.limited_to(Learned.load(self._path).limit)
        if within == plan:
            return None
        configured = self.config.training.micro_batch_size
        bound = f" (training.micro_batch_size = {configured} is an upper bound)"
        return DecisionMade(
            attempt=0,
            failure_class=FailureClass.GPU_OOM,
            action="learned",
            reason=f"an earlier run ran out of memory on {self.device} with more than micro-batch "
            f"x accumulation {within}; this one starts there instead of {plan}"
            f"{bound if configured else ''}. Remove {self._path} to forget that",
            batch=within.settings,
        )

    def remember(self, history: History) -> None:
        """Save a smaller plan that has trained, for later runs.

        Whether a snapshot fit in host memory is not saved: it says nothing about the device.
        Neither are shorter sequences, which change what a model learns.
        """
        learned = self.plan(history).changed(snapshot=True, sequence_length=0)
        if learned != self._configured(self.nodes(history)):
            Learned(limit=learned.settings).save(self._path)

    def _checkpoints(self) -> Decision:
        for field in ("training.save_strategy", "training.save_steps"):
            if differs(self.config, field):
                return set_by_user(self.config, field)
        documents, task = self.data.sides["train"].documents, self.config.data.task
        # A step of a table is an epoch, and so is one of series, but for a network's.
        learns_all = task in TABLES or (task in SERIES and self.config.model.framework != "pytorch")
        return by_default(math.inf if learns_all else documents, f"{documents:,} training examples")

    def _start(self, nodes: int) -> Start | None:
        return planned_start(
            self.config, self.device, nodes, self.data.sequence_length, self.host_memory
        )

    def _configured(self, nodes: int) -> BatchPlan:
        """Return the planner's batch plan, or the configured one if there is none."""
        start = self._start(nodes)
        return start.batch if start else self._derived(nodes)

    def _derived(self, nodes: int) -> BatchPlan:
        training, all_nodes = self.config.training, self.config.compute.nodes
        ranks = self.world_size * nodes // all_nodes
        micro = training.micro_batch
        if micro is not None and nodes < all_nodes:
            # It may not divide the new shares, so treat it as an upper bound.
            plan = plan_batch(training.global_batch_size, ranks, limit=micro)
        else:
            plan = plan_batch(training.global_batch_size, ranks, micro)
        compute = self.config.compute
        replicated = compute.strategy in ("auto", "single")
        return plan.changed(
            gradient_checkpointing=training.gradient_checkpointing,
            strategy=REPLICATED if replicated else compute.strategy,
            offload=compute.offload,
        )

    @property
    def _path(self) -> Path:
        return learned_path(
            self.config,
            length=self.data.sequence_length,
            device=self.device,
            world_size=self.world_size,
        )
