"""Promotion: the alias `champion` moves to the run's version, if that is still right.

MLflow sets an alias whatever it was before: it has no compare-and-swap. So a
promotion holds a lock, under which it reads the alias again. Where another run
has become champion since the gate decided, the gate decides again, against that
one; the lock is let go meanwhile, so that it is held for moments only. What was
written is read back under the lock.

What remains open: whoever does not take the lock can move the alias between our
last reading and our writing. That is a person who edits it by hand, another
program, or a run with another lock address: runs that share a registry but not
an output folder must share `registry.lock`.
"""

from __future__ import annotations

from steadytrain.components.register.versions import Registry, Version
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import SteadytrainError
from steadytrain.components.shared.records import GateRecord, RegistrationRecord
from steadytrain.components.shared.stage import Stage, stage


def promote(config: RunConfig) -> RegistrationRecord:
    """Makes the registered version champion, or tells why not, as the last gate decided.

    Leaves the record "promote", and "gate" where it was decided again.

    Raises:
        BadInput: the steps before this one have not run.
        RunBusy: the lock is held by others for too long.
        TrackingError: the registry cannot be used.
        SteadytrainError: somebody else moved the alias while it was being written.
    """
    with stage(config, "promote") as current:
        workspace = current.workspace
        registered = RegistrationRecord.load(workspace.record("register"))
        registry = Registry(config, workspace)
        gate = GateRecord.load(workspace.record("gate"))
        ours = Version(registered.version, {}, registered.model_uri)
        while gate.promoted and not _take_alias(registry, config, ours, gate.champion_version):
            gate = _decide_again(registry, config, current)
        record = registered.model_copy(update={"champion": gate.promoted, "reason": gate.reason})
        record.save(workspace.record("promote"))
        current.summary = gate.reason
        return record


def _take_alias(registry: Registry, config: RunConfig, ours: Version, beaten: str | None) -> bool:
    """Sets the alias if it still names the version that was beaten; whether it is ours now."""
    alias = config.registry.champion_alias
    with registry.locked() as check:
        champion = registry.by_alias(alias)
        holder = champion.number if champion else None
        if holder == ours.number:
            return True
        if holder != beaten:
            return False
        check()
        registry.set_alias(alias, ours)
        written = registry.by_alias(alias)
        if written is None or written.number != ours.number:
            raise SteadytrainError(
                f"alias {alias!r} of {registry.name} was set to version {ours.number}, but names "
                f"{'none' if written is None else f'version {written.number}'} now",
                remedy="somebody moved it by hand at the same moment: look which version is right, "
                "then run the step promote again",
            )
    return True


def _decide_again(registry: Registry, config: RunConfig, current: Stage) -> GateRecord:
    # Late: it imports torch, and is seldom needed.
    from steadytrain.components.evaluate.step import load_candidate, scoring_progress

    champion = registry.by_alias(config.registry.champion_alias)
    candidate = load_candidate(config, current.workspace)
    progress = scoring_progress(current, "champion", candidate.records)
    gate = candidate.against(champion, progress)
    gate.save(current.workspace.record("gate"))
    return gate
