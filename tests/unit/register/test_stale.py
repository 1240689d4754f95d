"""Versions that nothing needs anymore are found and deleted with their files. Others stay."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from mlflow.artifacts import download_artifacts
from mlflow.exceptions import MlflowException

from steadytrain.components.evaluate.step import run as evaluate
from steadytrain.components.register.stale import StaleVersion
from steadytrain.components.register.step import promote
from steadytrain.components.register.step import run as register
from steadytrain.components.shared.registry import TEST, Registry
from steadytrain.components.shared.workspace import Workspace


def registered(config):
    """Evaluate, register, and promote if the gate allows it. Return the run's `StaleVersion`."""
    _, gate = evaluate(config)
    register(config)
    if gate.promoted:
        promote(config)
    return StaleVersion(config, Workspace.of(config))


@pytest.mark.slow
def test_only_stale_versions_are_removed(trained):
    first_champion = registered(trained("first", 0.6))
    passed = registered(trained("second", 0.3))
    tagged = registered(trained("third", 0.2))
    champion = registered(trained("fourth", 0.9))
    candidate = registered(trained("fifth", 0.1))
    registry, version = tagged.registry, tagged.record.version
    registry.tracking.client.set_registered_model_alias(registry.name, "liked", version)

    assert not first_champion.is_there, "it was champion, and may have to be again"
    assert not tagged.is_there, "somebody has named it"
    assert not champion.is_there
    assert not candidate.is_there, "it is the newest candidate"
    assert passed.is_there

    assert passed.bytes > 0
    named = passed.record.model_name, passed.record.version
    uri = registry.tracking.client.get_model_version_download_uri(*named)
    artifacts = Path(download_artifacts(uri))
    assert passed.remove()
    assert not passed.is_there
    assert not [path for path in artifacts.rglob("*") if path.is_file()]
    with pytest.raises(MlflowException):
        registry.tracking.client.get_model_version(registry.name, passed.record.version)
    assert Registry.by_alias(registry, "champion").number == champion.record.version


@pytest.mark.slow
def test_removed_version_still_counts_as_judged_on_the_test_side(trained):
    registered(trained("first", 0.9))
    passed = registered(trained("second", 0.3))
    registered(trained("third", 0.2))
    digest = passed.registry.numbered(passed.record.version).tags[TEST]
    judged = partial(passed.registry.judged_on, digest, besides="")
    assert judged() == 3
    assert passed.remove()
    assert judged() == 3
    assert passed.registry.judged_on("other", besides="") == 0


@pytest.mark.slow
def test_version_that_gets_an_alias_meanwhile_stays(trained):
    registered(trained("first", 0.9))
    passed = registered(trained("second", 0.3))
    registered(trained("third", 0.2))
    assert passed.is_there
    client = passed.registry.tracking.client
    client.set_registered_model_alias(passed.registry.name, "liked", passed.record.version)
    assert not passed.remove()
    assert client.get_model_version(passed.registry.name, passed.record.version)
