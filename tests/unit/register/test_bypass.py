"""Attempts to bypass the gate on a real registry. None of them may move the champion."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient

from steadytrain.components.evaluate.step import run as evaluate
from steadytrain.components.register.step import promote
from steadytrain.components.register.step import run as register
from steadytrain.components.shared.config import RegistryConfig, from_mapping
from steadytrain.components.shared.errors import (
    BadInput,
    ConfigError,
    SteadytrainError,
    StorageError,
)
from steadytrain.components.shared.records import GateRecord
from steadytrain.components.shared.registry import Registry
from steadytrain.components.shared.workspace import Workspace

SOURCES = Path(__file__).resolve().parents[3]


def whole(config):
    evaluate(config)
    register(config)
    return promote(config)


def holder(config, alias="champion"):
    version = Registry(config, Workspace.of(config)).by_alias(alias)
    return version and version.number


def changed(config, section, **fields):
    content = config.model_dump(mode="json")
    return from_mapping(content | {section: content[section] | fields})


def edit(config, step, **fields):
    path = Workspace.of(config).record(step)
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.fixture
def rejected(trained):
    """A champion, and a run whose worse model is registered."""
    assert whole(trained("first", 0.9)).champion
    config = trained("second", 0.6)
    evaluate(config)
    register(config)
    return config


@pytest.mark.parametrize("alias", ["champion", "Champion", "CHAMPION"])
def test_candidate_alias_cannot_be_champion(alias):
    with pytest.raises(ValueError, match="only the gate sets"):
        RegistryConfig(candidate_alias=alias)
    with pytest.raises(ValueError, match="only the gate sets"):
        RegistryConfig(candidate_alias=alias, champion_alias="production")


def test_aliases_must_differ_by_more_than_case():
    with pytest.raises(ValueError, match="only the gate sets"):
        RegistryConfig(candidate_alias="PROD", champion_alias="prod")
    with pytest.raises(ValueError, match="may have rejected"):
        RegistryConfig(candidate_alias="new", champion_alias="Candidate")
    assert RegistryConfig(candidate_alias="new", champion_alias="prod")


@pytest.mark.parametrize(
    "alias",
    ["", " ", "champion ", "champion\n", "chámpion", "latest", "LATEST", "v1", "V12", "a/b"],
)
@pytest.mark.parametrize("field", ["candidate_alias", "champion_alias"])
def test_alias_that_mlflow_interprets_is_rejected(field, alias):
    with pytest.raises(ValueError, match=field):
        RegistryConfig(**{field: alias})


@pytest.mark.parametrize("name", ["../../x", "a'b", "a/b", "a:b", ""])
def test_model_name_with_a_path_is_rejected(name):
    with pytest.raises(ValueError, match="model_name"):
        RegistryConfig(model_name=name)


def test_only_one_function_sets_aliases():
    found = [
        path.relative_to(SOURCES).as_posix()
        for room in ("components", "pipelines")
        for path in (SOURCES / room).rglob("*.py")
        for _ in range(path.read_text().count("set_registered_model_alias"))
    ]
    assert found == ["components/shared/registry.py"]


@pytest.mark.slow
def test_unvalidated_configuration_moves_no_champion(rejected):
    broken = rejected.registry.model_copy(update={"candidate_alias": "Champion"})
    with pytest.raises(BadInput, match="only a promotion moves"):
        register(rejected.model_copy(update={"registry": broken}))
    assert holder(rejected) == "1"


@pytest.mark.slow
def test_champion_of_another_configuration_is_out_of_reach(trained):
    names = {"champion_alias": "production", "candidate_alias": "staging"}
    assert whole(trained("first", 0.9, registry=names)).champion
    second = trained("second", 0.5, registry={"candidate_alias": "Production"})
    evaluate(second)
    with pytest.raises(BadInput, match="only a promotion moves"):
        register(second)
    assert holder(second, "production") == "1"


@pytest.mark.slow
def test_rejected_model_stays_rejected_if_its_record_changes(rejected):
    edit(rejected, "gate", promoted=True)
    with pytest.raises(BadInput, match="promoted without an improvement"):
        promote(rejected)
    edit(rejected, "gate", improvement=None, champion=None)
    with pytest.raises(BadInput, match="without a comparison"):
        promote(rejected)
    # Pretend the gate decided before any champion existed: it compares with the current one.
    edit(rejected, "gate", champion_version=None, champion_weights="")
    assert not promote(rejected).champion
    assert holder(rejected) == "1"


@pytest.mark.slow
@pytest.mark.parametrize("step", ["evaluate", "gate", "register"])
def test_missing_step_promotes_nothing(trained, step):
    config = trained("first", 0.9)
    evaluate(config)
    register(config)
    place = Workspace.of(config).record(step)
    place.unlink()
    with pytest.raises(BadInput, match="is missing"):
        (register if step == "evaluate" else promote)(config)
    assert holder(config) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "fields", "what"),
    [
        ("gate", {"floors": {"accuracy": 0.99}}, "configuration"),
        ("gate", {"margin": 0.5}, "configuration"),
        ("evaluation", {"confidence": 0.99}, "configuration"),
        ("evaluation", {"max_examples": 20}, "configuration"),
        ("training", {"seed": 7}, "configuration"),
        ("registry", {"champion_alias": "production"}, "alias"),
    ],
)
def test_decision_by_other_rules_promotes_nothing(trained, section, fields, what):
    config = trained("first", 0.9)
    evaluate(config)
    register(config)
    other = changed(config, section, **fields)
    with pytest.raises(BadInput, match=f"decision about another {what}"):
        promote(other)
    with pytest.raises(BadInput, match=f"decision about another {what}"):
        register(other)
    assert holder(config) is holder(config, "production") is None
    evaluate(other)
    promote(other)


@pytest.mark.slow
def test_decision_of_another_run_promotes_nothing(rejected, trained):
    better = trained("better", 0.99)
    evaluate(better)
    good = Workspace.of(better).record("gate")
    assert GateRecord.load(good).promoted
    shutil.copyfile(good, Workspace.of(rejected).record("gate"))
    with pytest.raises(BadInput, match="decision about another run"):
        promote(rejected)
    assert holder(rejected) == "1"


@pytest.mark.slow
def test_version_of_another_run_is_not_promoted(rejected, trained):
    better = trained("better", 0.99)
    evaluate(better)
    register(better)
    edit(better, "register", version="2")
    with pytest.raises(BadInput, match="not one that this run has registered"):
        promote(better)
    edit(better, "register", version="77")
    with pytest.raises(BadInput, match="not one that this run has registered"):
        promote(better)
    assert holder(better) == "1"


@pytest.mark.slow
def test_version_number_is_not_promoted_for_another_model(trained):
    """Version 1 of one registered model is not version 1 of another."""
    other = trained("other", 0.5, registry={"model_name": "elsewhere"})
    evaluate(other)
    register(other)
    config = trained("first", 0.9)
    evaluate(config)
    register(config)
    moved = changed(config, "registry", model_name="elsewhere")
    with pytest.raises(BadInput):
        promote(moved)
    evaluate(moved)
    with pytest.raises(BadInput, match="not one that this run has registered as elsewhere"):
        promote(moved)
    assert holder(moved) is None


def test_model_retrained_after_evaluation_is_not_registered(trained):
    config = trained("first", 0.9)
    evaluate(config)
    trained("first", 0.4)
    with pytest.raises(BadInput, match="decision about another model"):
        register(config)
    assert holder(config, "candidate") is None


@pytest.mark.slow
def test_model_retrained_after_registration_changes_no_promotion(trained):
    config = trained("first", 0.4)
    evaluate(config)
    register(config)
    trained("first", 0.9)
    evaluate(config)
    with pytest.raises(BadInput, match="decision about another model"):
        promote(config)
    assert holder(config) is None
    register(config)
    assert promote(config).version == holder(config) == "2"


@pytest.mark.slow
def test_repeated_decision_uses_the_evaluated_model(trained):
    config = trained("first", 0.8)
    evaluate(config)
    register(config)
    assert whole(trained("between", 0.7)).champion
    trained("first", 0.2)
    with pytest.raises(BadInput, match="evaluates a different model"):
        promote(config)
    assert holder(config) == "2"


@pytest.mark.parametrize("step", [evaluate, register])
def test_exchanged_weights_are_rejected(trained, step):
    config = trained("first", 0.9)
    if step is register:
        evaluate(config)
    (Workspace.of(config).model / "model.safetensors").write_text("others")
    with pytest.raises(BadInput, match="not those that the train step wrote"):
        step(config)
    assert holder(config, "candidate") is None


@pytest.mark.slow
def test_recreated_champion_with_the_same_number_is_compared(trained):
    """If a registered model is deleted and created again, its versions start at 1 again."""
    assert whole(trained("first", 0.5)).champion
    config = trained("second", 0.8)
    evaluate(config)
    client = Registry(config, Workspace.of(config)).tracking.client
    client.delete_registered_model("shapes")
    strong = trained("strong", 0.99)
    assert whole(strong).champion
    assert holder(config) == "1"
    register(config)
    assert not promote(config).champion
    assert holder(config) == "1"


@pytest.mark.slow
def test_registry_sets_the_alias_only_for_a_model_that_passed_the_gate(rejected, trained):
    registry = Registry(rejected, Workspace.of(rejected))
    gate = GateRecord.load(Workspace.of(rejected).record("gate"))
    with registry.locked() as check:
        for version in (registry.numbered("1"), registry.numbered("2")):
            for decision in (gate, gate.model_copy(update={"promoted": True})):
                if version.number == "2" and decision.promoted:
                    continue  # Such a record cannot be loaded from a file: see above.
                with pytest.raises(SteadytrainError, match="not the model that passed the gate"):
                    registry.name_champion(version, decision, check)
    assert holder(rejected) == "1"


@pytest.mark.slow
def test_promotion_whose_lock_expired_in_a_slow_request_moves_no_alias(trained, monkeypatch):
    """Another process takes over the lock while MLflow answers, and may promote its own model."""
    assert whole(trained("first", 0.5)).champion
    config = trained("second", 0.9)
    evaluate(config)
    register(config)
    expired, written = [], []

    def check():
        if expired:
            raise StorageError("the lock expired")

    @contextlib.contextmanager
    def locked(self):
        yield check

    def slow(self, name, tag, text):
        written.append(tag)
        expired.append(True)

    monkeypatch.setattr(Registry, "locked", locked)
    monkeypatch.setattr(MlflowClient, "set_registered_model_tag", slow)
    with pytest.raises(StorageError, match="the lock expired"):
        promote(config)
    assert len(written) == 1
    assert holder(config) == "1"


@pytest.mark.slow
def test_equal_aliases_are_rejected_with_their_fields(rejected):
    with pytest.raises(ConfigError, match=r"registry\.candidate_alias = 'champion'"):
        changed(rejected, "registry", candidate_alias="champion")
