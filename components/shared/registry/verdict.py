"""What a gate decision is about: it is valid for one model and one set of rules.

A record of an earlier model, another configuration or another run must not decide about this model.
"""

from __future__ import annotations

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.effects import Use
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import GateRecord, Subject
from steadytrain.components.shared.workspace import Workspace

_NAMES = {
    "schema_version": "version of the record",
    "run_id": "run",
    "model_name": "registered model",
    "champion_alias": "alias",
    "weights_digest": "model (digest of the weights)",
    "rules": "configuration of data, evaluation and gate (digest)",
}


def decided_about(config: RunConfig, weights_digest: str) -> Subject:
    """Return the subject of a gate decision, for the digest of the candidate's weights."""
    return Subject(
        run_id=config.run_id,
        model_name=config.model_name,
        champion_alias=config.registry.champion_alias,
        weights_digest=weights_digest,
        rules=value_digest(config.counted(Use.GATE)),
    )


def decision(config: RunConfig, workspace: Workspace, weights_digest: str) -> GateRecord:
    """Return the gate's decision about these weights.

    Raises:
        BadInput: if it is missing or is about something else.
    """
    path = workspace.record("gate")
    gate = GateRecord.load(path)
    wanted = decided_about(config, weights_digest).model_dump()
    for name, value in gate.subject.model_dump().items():
        if value != wanted[name]:
            raise BadInput(
                f"{path} is a decision about another {_NAMES[name]}: {value}, not {wanted[name]}",
                remedy="run the evaluate step again, with this configuration",
            )
    return gate
