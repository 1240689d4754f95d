"""Promotion: the alias `champion` moves to the run's version, if that is still right.

MLflow sets an alias whatever it was before: it has no compare-and-swap. So a
promotion holds a lock, under which it reads the alias again. Where another model
has become champion since the gate decided, the gate decides again, against that
one; the lock is let go meanwhile, so that it is held for moments only. What was
written is read back under the lock.

What remains open: whoever does not take the lock can move the alias between our
last reading and our writing. That is a person who edits it by hand, another
program, or a run with another lock address: runs that share a registry but not
an output folder must share `registry.lock`.
"""

from __future__ import annotations

from steadytrain.components.register.verdict import decision
from steadytrain.components.register.versions import RUN, WEIGHTS, Registry, Version
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import GateRecord, RegistrationRecord
from steadytrain.components.shared.stage import Stage, stage


def promote(config: RunConfig) -> RegistrationRecord:
    """Makes the registered version champion, or tells why not, as the last gate decided.

    Leaves the record "promote", and "gate" where it was decided again.

    Raises:
        BadInput: the steps before this one have not run, or on another model or configuration.
        RunBusy: the lock is held by others for too long.
        TrackingError: the registry cannot be used.
        SteadytrainError: somebody else moved the alias while it was being written.
    """
    with stage(config, "promote") as current:
        workspace = current.workspace
        registered = RegistrationRecord.load(workspace.record("register"))
        registry = Registry(config, workspace)
        ours = _registered(registry, registered)
        gate = decision(config, workspace, ours.tags[WEIGHTS])
        while gate.promoted and not _take_alias(registry, ours, gate, current):
            gate = _decide_again(registry, config, current)
        record = registered.model_copy(update={"champion": gate.promoted, "reason": gate.reason})
        record.save(workspace.record("promote"))
        current.summary = gate.reason
        return record


def _registered(registry: Registry, record: RegistrationRecord) -> Version:
    """The version that this run has registered, as the registry knows it."""
    version = registry.numbered(record.version) if record.model_name == registry.name else None
    if version is None or version.tags.get(RUN) != registry.run_id or WEIGHTS not in version.tags:
        raise BadInput(
            f"version {record.version} of {record.model_name} is not one that this run has "
            f"registered as {registry.name}",
            remedy="run the step register again, with this configuration",
        )
    return version


def _take_alias(registry: Registry, ours: Version, gate: GateRecord, current: Stage) -> bool:
    """Takes the alias if the model that was beaten still has it; whether it is ours now."""
    with registry.locked() as check:
        holder = registry.champion()
        if holder is not None and holder.number == ours.number:
            return True
        found = (holder.number, holder.tags.get(WEIGHTS, "")) if holder else (None, "")
        if found != (gate.champion_version, gate.champion_weights):
            return False
        current.check()
        registry.name_champion(ours, gate, check)
    return True


def _decide_again(registry: Registry, config: RunConfig, current: Stage) -> GateRecord:
    # Late: it imports torch, and is seldom needed.
    from steadytrain.components.evaluate.step import load_candidate, scoring_progress

    candidate = load_candidate(config, current.workspace)
    progress = scoring_progress(current, "champion", candidate.records)
    gate = candidate.against(registry.champion(), progress)
    gate.save(current.workspace.record("gate"))
    return gate
