"""A tracking server that restarts, as a rollout does it, while a run begins."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import TrackingError
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import StepFailed, StepFinished, Warned
from steadytrain.components.shared.registry import Registry
from steadytrain.components.shared.stage import stage, start_run
from steadytrain.components.shared.workspace import Workspace

from support.command import wait_for
from support.ports import free_port
from support.proxy import Fault, Proxy


def of_kind(workspace: Workspace, kind: type) -> list:  # type: ignore[type-arg]
    return [event for event in read_events(workspace.events) if isinstance(event, kind)]


@pytest.mark.slow
def test_steps_wait_for_a_server_that_comes_back(
    make_config: Callable[..., RunConfig], proxy: Proxy
) -> None:
    config = make_config(tracking={"uri": proxy.uri}, recovery={"server_wait_seconds": 240})
    workspace = Workspace.of(config)

    def away(fault: Fault, warnings: int) -> None:
        """Fail until the step has warned so many times."""

        def come_back() -> None:
            wait_for(lambda: len(of_kind(workspace, Warned)) == warnings)
            proxy.usual = "forward"

        proxy.usual = fault
        threading.Thread(target=come_back).start()

    away("reset", 1)
    assert start_run(config) == workspace
    assert [event.stage for event in of_kind(workspace, StepFinished)] == ["begin"]
    (told,) = of_kind(workspace, Warned)
    assert "waiting up to 4 min for the tracking server" in told.message

    away("503", 2)
    with stage(config, "evaluate"):
        assert Registry(config, workspace).champion() is None
    assert len(of_kind(workspace, Warned)) == 2

    # A store with a database that restarts. This ended the run at once.
    away("500", 3)
    assert start_run(config) == workspace
    assert of_kind(workspace, Warned)[2].message.endswith("cannot be used: it answers 500")
    assert not of_kind(workspace, StepFailed)


def test_server_that_stays_down_is_a_failure_that_may_pass(
    make_config: Callable[..., RunConfig],
) -> None:
    uri = f"http://127.0.0.1:{free_port()}"
    config = make_config(tracking={"uri": uri}, recovery={"server_wait_seconds": 1})
    with pytest.raises(TrackingError) as failed:
        start_run(config)
    assert failed.value.passing
    (event,) = of_kind(Workspace.of(config), StepFailed)
    assert event.passing


def test_server_that_rejects_a_request_is_not_waited_for(
    make_config: Callable[..., RunConfig], answer: Callable[[int, str], str]
) -> None:
    config = make_config(tracking={"uri": answer(404, "<html>some other service</html>")})
    with pytest.raises(TrackingError) as failed:
        start_run(config)
    assert not failed.value.passing
    assert not of_kind(Workspace.of(config), Warned)
