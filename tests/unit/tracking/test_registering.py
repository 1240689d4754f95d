"""The register step with a real MLflow server whose answers are lost, or which has an error."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from steadytrain.components.evaluate import step as evaluate
from steadytrain.components.register import step as register
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import TrackingError
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import Warned
from steadytrain.components.shared.tracking.connect import open_tracking
from steadytrain.components.shared.workspace import Workspace

from support.evaluating import make_config, train
from support.proxy import Fault, Proxy


@pytest.fixture
def evaluated(tmp_path: Path, proxy: Proxy) -> RunConfig:
    """A run that is to be registered; both of its names are new to the server."""
    own = f"{time.time_ns()}"
    config = make_config(
        tmp_path / "output",
        "lost",
        tracking={"uri": proxy.uri, "experiment": own},
        registry={"model_name": own},
    )
    Workspace.of(config).create()
    train(config, 0.8)
    evaluate.run(config)
    return config


def warnings(config: RunConfig) -> list[str]:
    events = read_events(Workspace.of(config).events)
    return [event.message for event in events if isinstance(event, Warned)]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("lose", "it closed the connection"),
        pytest.param("500", "it answers 500", marks=pytest.mark.slow),
    ],
)
def test_model_is_registered_once(
    evaluated: RunConfig, proxy: Proxy, fault: Fault, why: str
) -> None:
    """A lost answer left a second model, a second version, or ended the step with SQL."""
    left = {"mlflow/logged-models", "runs/outputs", "model-versions/create"}

    def first(method: str, path: str) -> bool:
        found = {end for end in left if method == "POST" and path.endswith(end)}
        left.difference_update(found)
        return bool(found)

    proxy.concerns = first
    proxy.queued.extend([fault] * len(left))
    record = register.run(evaluated)
    assert not proxy.queued
    tracking = open_tracking(evaluated, Workspace.of(evaluated))
    models = tracking.client.search_logged_models([tracking.experiment_id])
    (version,) = tracking.client.search_model_versions(f"name = '{evaluated.model_name}'")
    assert [str(model.status) for model in models] == ["READY"]
    assert version.version == record.version
    assert version.description
    assert set(warnings(evaluated)) == {f"waiting up to 5 min for the tracking server: {why}"}


@pytest.mark.parametrize("request_", ["runs/search", "runs/outputs"])
def test_error_that_stays_is_reported_in_the_words_of_the_server(
    evaluated: RunConfig, proxy: Proxy, request_: str
) -> None:
    """After recovery.server_wait_seconds, and so that the run is submitted again."""
    config = evaluated.model_copy(
        update={"recovery": evaluated.recovery.model_copy(update={"server_wait_seconds": 1})}
    )
    proxy.concerns = lambda method, path: method == "POST" and path.endswith(request_)
    proxy.queued.extend(["500"] * 99)
    with pytest.raises(TrackingError) as failed:
        register.run(config)
    assert failed.value.message == (
        f"the tracking store {proxy.uri} cannot be used: it answers 500"
    )
    assert "the log of the server says more" in failed.value.remedy
    assert failed.value.passing
    assert warnings(config) == ["waiting up to 1 s for the tracking server: it answers 500"]
