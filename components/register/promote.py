"""Promotion: move the alias `champion` to the run's version, if the gate's decision still holds.

MLflow has no compare-and-swap: it sets an alias whatever its value was before. So promotion takes a
lock and reads the alias again while it holds the lock. If another model has become champion since
the gate decided, the gate decides again, against that one. Promotion releases the lock meanwhile,
so it never holds the lock for more than a moment. After it writes the alias, it reads the alias
back under the lock.

One gap remains: whoever does not take the lock can move the alias between our last read and our
write. That can be a person who edits it by hand, another program, or a run with a different lock
address. Runs that share a registry but not an output folder must share `registry.lock`.
"""

from __future__ import annotations

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import GateRecord, RegistrationRecord
from steadytrain.components.shared.registry import RUN, WEIGHTS, Registry, Version, decision
from steadytrain.components.shared.stage import Stage, stage


def promote(config: RunConfig) -> RegistrationRecord:
    """Make the registered version champion if the gate allows it, and record the gate's reason.

    Write the record "promote", and "gate" if the gate decided again.

    Raises:
        BadInput: the steps before this one have not run, or ran with another model or
            configuration.
        RunBusy: another process holds the lock for too long.
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
        registry.tag_decision(ours, gate)
        record = registered.model_copy(update={"champion": gate.promoted, "reason": gate.reason})
        record.save(workspace.record("promote"))
        current.summary = gate.reason
        return record


def _registered(registry: Registry, record: RegistrationRecord) -> Version:
    """Return the version that this run registered, as stored in the registry.

    Raises:
        BadInput: the version does not exist, or this run did not register it.
    """
    version = registry.numbered(record.version) if record.model_name == registry.name else None
    if version is None or version.tags.get(RUN) != registry.run_id or WEIGHTS not in version.tags:
        raise BadInput(
            f"version {record.version} of {record.model_name} is not one that this run has "
            f"registered as {registry.name}",
            remedy="run the register step again, with this configuration",
        )
    return version


def _take_alias(registry: Registry, ours: Version, gate: GateRecord, current: Stage) -> bool:
    """Take the alias if the champion that the candidate beat still has it.

    Returns:
        Whether the alias names our version now.
    """
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
    # Imported here because it imports torch and is rarely needed.
    from steadytrain.components.evaluate.step import decide, load_candidate, reporting_splits

    candidate = load_candidate(config, current.workspace)
    with reporting_splits(current):
        gate = decide(candidate, registry.champion(), registry, current)
    gate.save(current.workspace.record("gate"))
    return gate
