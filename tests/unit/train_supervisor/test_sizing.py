"""How a run cuts its batch, by what its ledger and earlier runs tell."""

from __future__ import annotations

from dataclasses import replace

from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.events.types import DecisionMade
from steadytrain.components.train.recovery.ledger import History
from steadytrain.components.train.recovery.sizing import Sizing


def decided(micro_batch_size, **changes):
    return DecisionMade(
        attempt=1,
        failure_class="host_oom",
        action="retry_changed",
        reason="so",
        micro_batch_size=micro_batch_size,
        **changes,
    )


def test_what_was_decided_holds(config, data):
    sizing = Sizing(config, data, "GPU", 1)
    assert str(sizing.plan(History())) == "8 x 1"
    history = History(decisions=[decided(8, snapshot=False)])
    assert str(sizing.plan(history)) == "8 x 1, no snapshot in host memory"
    history.decisions.append(decided(4, snapshot=False, gradient_checkpointing=True))
    told = "4 x 2, activation checkpointing, no snapshot in host memory"
    assert str(sizing.plan(history)) == told


def test_fewer_nodes_have_more_of_the_same_batch_each(config, data):
    compute = {"nodes": 4, "nproc_per_node": 2}
    training = {"global_batch_size": 48, "micro_batch_size": 3}
    content = config.model_dump() | {"compute": compute, "training": training}
    sizing = Sizing(from_mapping(content), data, "GPU", 8)
    assert (sizing.nodes(History()), str(sizing.plan(History()))) == (4, "3 x 2")
    fewer = replace(decided(None), nodes=3)
    history = History(decisions=[fewer])
    assert (sizing.nodes(history), str(sizing.plan(history))) == (3, "2 x 4")
    assert sizing.plan(history).global_batch_size == 48


def test_a_host_without_room_for_a_snapshot_teaches_nothing_of_the_device(config, data):
    """Else a later run with a larger micro-batch would be held to this one's."""
    sizing = Sizing(config, data, "GPU", 1)
    sizing.remember(History(decisions=[decided(8, snapshot=False)]))
    assert not sizing._path.exists()


def test_of_a_smaller_micro_batch_all_but_the_snapshot_is_learned(config, data):
    sizing = Sizing(config, data, "GPU", 1)
    sizing.remember(History(decisions=[decided(2, snapshot=False)]))
    assert sizing.learned().micro_batch_size == 2
    assert sizing.learned().snapshot
