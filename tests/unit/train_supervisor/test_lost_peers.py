"""A rank is killed in the middle of a collective: what the others report is retried."""

from __future__ import annotations

import pytest

from steadytrain.components.train.failures import FailureClass, classify

from support import lost_peers
from support.reported import reported

pytestmark = pytest.mark.slow

ECHOES = (FailureClass.NETWORK, FailureClass.COLLECTIVE_TIMEOUT)
OTHERS = [work for work in lost_peers.COLLECTIVES if work is not lost_peers.all_reduce]


def judge(errors, ranks):
    assert len(errors) == ranks - 1, errors
    for error in errors:
        assert classify([error], {error.rank: 1}, {}).failure_class in ECHOES, error
    lost = reported("Preempted", "pod x was removed from its node", rank=1, time=9e9)
    assert classify([*errors, lost], {0: 1}, {}).failure_class is FailureClass.PREEMPTION
    # On one machine, the exit of the killed rank is the cause.
    assert classify(errors, {1: -9, 0: 1}, {}).rank == lost_peers.VICTIM


def test_survivor_of_a_collective_is_an_echo(tmp_path):
    judge(lost_peers.survivors(tmp_path, lost_peers.all_reduce), 2)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("work", OTHERS, ids=lambda work: work.__name__)
def test_survivor_of_any_collective_is_an_echo(tmp_path, work, ranks):
    errors = lost_peers.survivors(tmp_path, work, ranks=ranks)
    # A rank that needs nothing from the killed one may report that another survivor has left.
    judge(errors, ranks)


@pytest.mark.parametrize(
    "work", [lost_peers.store, pytest.param(lost_peers.store_wait, marks=pytest.mark.long)]
)
def test_loss_of_the_stores_host_is_an_echo(tmp_path, work):
    errors = lost_peers.survivors(tmp_path, work, host=lost_peers.VICTIM)
    judge(errors, 2)
    assert errors[0].kind in ("DistNetworkError", "DistStoreError")
