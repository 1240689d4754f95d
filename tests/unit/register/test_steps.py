"""Evaluate, gate, register, and promote, one after another, as in the pipeline."""

from pathlib import Path

import mlflow
import pyarrow.parquet as pq
import pytest

from steadytrain.components.evaluate.step import run as evaluate
from steadytrain.components.register.stale import StaleVersion
from steadytrain.components.register.step import promote
from steadytrain.components.register.step import run as register
from steadytrain.components.report.facts import gather
from steadytrain.components.shared import digest
from steadytrain.components.shared.errors import BadInput, DataError, SteadytrainError
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.records import (
    DataProfile,
    EvaluationRecord,
    GateRecord,
    RegistrationRecord,
)
from steadytrain.components.shared.registry import PROFILE, Registry
from steadytrain.components.shared.tracking import use_tracking
from steadytrain.components.shared.workspace import Workspace


def whole(config):
    _, gate = evaluate(config)
    registered = register(config)
    return gate, promote(config) if gate.promoted else registered


def champion(config):
    version = Registry(config, Workspace.of(config)).by_alias(config.registry.champion_alias)
    return version and version.number


def test_evaluation_leaves_records_scores_and_a_page(trained):
    config = trained("first", 0.8)
    workspace = Workspace.of(config)
    evaluation, gate = evaluate(config)
    assert EvaluationRecord.load(workspace.record("evaluate")) == evaluation
    assert GateRecord.load(workspace.record("gate")) == gate
    assert evaluation.examples == 200
    assert evaluation.metrics["accuracy"].value == pytest.approx(0.8, abs=0.1)
    assert sum(map(sum, evaluation.confusion)) == 200
    assert evaluation.per_class["circle"]["support"] == 67
    assert evaluation.slices["small"]["examples"] == 50
    scores = pq.read_table(evaluation.scores)
    assert scores.num_rows == 200
    assert "prediction" in scores.column_names
    page = (workspace.evaluation / "evaluation.html").read_text()
    for word in ("accuracy", "Baseline", "triangle", "By slice", "Worst examples"):
        assert word in page
    assert "://" not in page


@pytest.mark.slow
def test_version_records_its_data_statistics(trained):
    profile = DataProfile(lengths=[[4], [6]], labels=[[5], [5]], words=[[7], [3]])
    config = trained("first", 0.8, {"profile": profile})
    whole(config)
    version = Registry(config, Workspace.of(config)).by_alias(config.registry.champion_alias)
    assert DataProfile.model_validate_json(version.tags[PROFILE]) == profile


@pytest.mark.slow
def test_evaluation_is_reused_and_its_promotion_stands(trained):
    config = trained("first", 0.8)
    workspace = Workspace.of(config)
    first, gate = evaluate(config)
    assert gate.promoted
    register(config)
    promote(config)
    again, standing = evaluate(config)
    assert again == first
    assert standing == gate
    assert promote(config).champion
    finished = [e for e in read_events(workspace.events) if e.name == "step_finished"]
    assert [e.reused for e in finished if e.stage == "evaluate"] == [False, True]


@pytest.mark.slow
def test_damaged_decision_is_repeated_and_the_champion_stays(trained):
    config = trained("first", 0.8)
    whole(config)
    workspace = Workspace.of(config)
    place = workspace.record("gate")
    place.write_bytes(place.read_bytes()[:100])
    _, gate = evaluate(config)
    assert not gate.promoted
    assert "is this same model" in gate.reason
    warned = [event.message for event in read_events(workspace.events) if event.name == "warned"]
    assert f"{place} cannot be read" in warned[-1]
    assert Registry(config, workspace).champion().number == "1"
    assert evaluate(config)[1] == gate


@pytest.mark.slow
def test_equal_weights_of_another_run_do_not_beat_themselves(trained):
    assert whole(trained("first", 0.8))[0].promoted
    gate, _ = whole(trained("second", 0.8))
    assert not gate.promoted
    assert "is this same model" in gate.reason


@pytest.mark.slow
def test_run_that_was_beaten_meanwhile_is_evaluated_again(trained):
    config = trained("first", 0.6)
    assert whole(config)[0].promoted
    assert whole(trained("second", 0.9))[0].promoted
    _, gate = evaluate(config)
    assert not gate.promoted
    assert gate.champion_version == "2"


@pytest.mark.slow
def test_weights_are_read_once_for_their_digest(trained, monkeypatch):
    config = trained("first", 0.8)
    read, file_digest = [], digest.file_digest

    def counted(path):
        read.append(path.name)
        return file_digest(path)

    monkeypatch.setattr(digest, "file_digest", counted)
    digest._digest_as_of.cache_clear()
    evaluate(config)
    register(config)
    assert read.count("model.safetensors") == 1


def test_changed_weights_are_evaluated_again(trained):
    first, _ = evaluate(trained("first", 0.8))
    second, _ = evaluate(trained("first", 0.6))
    assert second.metrics["accuracy"].value < first.metrics["accuracy"].value


def test_sample_is_fixed_and_has_the_requested_size(trained):
    sections = {"evaluation": {"max_examples": 50, "bootstrap_samples": 200}}
    first, _ = evaluate(trained("first", 0.8, **sections))
    second, _ = evaluate(trained("second", 0.6, **sections))
    ids = [pq.read_table(item.scores)["id"].to_pylist() for item in (first, second)]
    assert len(ids[0]) == 50
    assert ids[0] == ids[1]


def test_empty_test_side_is_rejected(trained):
    with pytest.raises(DataError, match="no records"):
        evaluate(trained("first", 0.8, {"examples": 0}))


def test_missing_model_is_reported(trained):
    config = trained("first", 0.8)
    Workspace.of(config).record("train").unlink()
    with pytest.raises(BadInput, match="has not finished"):
        evaluate(config)


def test_model_without_a_finite_loss_is_rejected(trained):
    config = trained("first", 0.8)
    (Workspace.of(config).model / "model.json").write_text('{"skill": 0.8, "scale": NaN}')
    with pytest.raises(SteadytrainError, match="not finite on 200 of 200"):
        evaluate(config)


@pytest.mark.slow
def test_first_model_becomes_champion_and_a_better_one_replaces_it(trained):
    first, second = trained("first", 0.6), trained("second", 0.9)
    gate, record = whole(first)
    assert gate.promoted
    assert record.champion
    assert champion(first) == "1"
    gate, record = whole(second)
    assert gate.promoted
    assert gate.champion_version == "1"
    assert "of version 1" in gate.reason
    assert champion(second) == record.version == "2"


@pytest.mark.slow
def test_equal_model_is_registered_but_not_promoted(trained):
    whole(trained("first", 0.9))
    second = trained("second", 0.7)
    gate, record = whole(second)
    assert not gate.promoted
    assert record.version == "2"
    assert not record.champion
    assert champion(second) == "1"
    # The gate's decision holds even if promotion is requested.
    assert not promote(second).champion
    assert champion(second) == "1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"split_digest": "another"}, "was trained on another split"),
        ({"labels": ["triangle", "circle", "square"]}, "has other labels"),
    ],
)
def test_incomparable_model_is_not_promoted(trained, changes, reason):
    whole(trained("first", 0.5))
    second = trained("second", 0.9, changes)
    gate, _ = whole(second)
    assert not gate.promoted
    assert reason in gate.reason
    assert champion(second) == "1"


@pytest.mark.slow
def test_champion_that_does_not_load_is_not_replaced(trained, tmp_path):
    first = trained("first", 0.5)
    whole(first)
    for path in Workspace.of(first).tracking_artifacts.rglob("model.json"):
        path.unlink()
    gate, _ = whole(trained("second", 0.9))
    assert not gate.promoted
    assert "version 1, cannot be loaded or scored" in gate.reason


@pytest.mark.slow
def test_champion_of_unknown_origin_is_not_replaced(trained):
    first = trained("first", 0.5)
    whole(first)
    registry = Registry(first, Workspace.of(first))
    registry.tracking.client.delete_model_version_tag("shapes", "1", "steadytrain.split_digest")
    gate, _ = whole(trained("second", 0.9))
    assert not gate.promoted
    assert "does not record its split digest" in gate.reason


@pytest.mark.slow
def test_version_records_its_origin_and_is_served(trained):
    config = trained("first", 0.8)
    evaluate(config)
    record = register(config)
    workspace = Workspace.of(config)
    assert RegistrationRecord.load(workspace.record("register")) == record
    assert record.model_uri == "models:/shapes/1"
    client = Registry(config, workspace).tracking.client
    version = client.get_model_version_by_alias("shapes", "candidate")
    assert version.version == "1" or version.version == 1
    for tag in (
        "data_fingerprint", "config_digest", "code_version", "split_digest", "labels_digest",
        "pipeline_run", "parent_model", "weights_digest",
    ):  # fmt: skip
        assert version.tags[f"steadytrain.{tag}"]
    assert version.tags["steadytrain.config_digest"] == config.digest()
    for word in ("# shapes", "## Gate", "accuracy", "## Data", config.digest()):
        assert word in version.description
    served = mlflow.pyfunc.load_model(record.model_uri)
    assert served.predict(["x"]) == ["circle"]
    assert served.metadata.signature is not None
    card = mlflow.artifacts.load_text(f"runs:/{version.run_id}/README.md")
    assert card == version.description


@pytest.mark.slow
def test_registering_twice_gives_one_version(trained):
    config = trained("first", 0.8)
    evaluate(config)
    assert register(config).version == register(config).version == "1"
    client = Registry(config, Workspace.of(config)).tracking.client
    assert len(client.search_model_versions("name = 'shapes'")) == 1


def models(config):
    tracking = use_tracking(config, Workspace.of(config))
    return tracking.client.search_logged_models([tracking.experiment_id])


@pytest.mark.slow
def test_model_of_a_process_that_died_before_it_had_a_version_is_removed(trained, monkeypatch):
    config = trained("first", 0.9)
    evaluate(config)

    def die(*_):
        raise SystemExit

    with monkeypatch.context() as dies:
        dies.setattr(Registry, "register", die)
        with pytest.raises(SystemExit):
            register(config)

    (orphan,) = models(config)
    record = register(config)
    (model,) = models(config)
    assert model.model_id != orphan.model_id
    found = Registry(config, Workspace.of(config)).tracking.client
    version = found.get_model_version(record.model_name, record.version)
    assert version.source == model.model_uri


@pytest.mark.slow
def test_promoting_twice_changes_nothing(trained):
    config = trained("first", 0.8)
    whole(config)
    assert promote(config).champion
    assert champion(config) == "1"


@pytest.mark.slow
def test_run_that_is_trained_again_has_a_new_version(trained):
    config = trained("first", 0.6)
    whole(config)
    trained("first", 0.9)
    _, record = whole(config)
    assert record.version == "2"
    assert len(models(config)) == 2, "both have a version"


@pytest.mark.slow
def test_promotion_of_an_earlier_model_is_not_that_of_the_next_one(trained):
    config = trained("first", 0.9)
    whole(config)
    workspace = Workspace.of(config)
    assert gather(workspace).promotion.champion
    trained("first", 0.6)
    gate, _ = whole(config)
    assert not gate.promoted
    facts = gather(workspace)
    assert (facts.registration.version, facts.registration.champion) == ("2", False)
    assert facts.promotion is None
    assert not StaleVersion(config, workspace).was_champion, "the first version was"


@pytest.mark.slow
def test_promotion_before_another_model_won_is_not_that_of_the_next_decision(trained):
    config = trained("first", 0.6)
    whole(config)
    whole(trained("second", 0.9))
    whole(config)
    facts = gather(Workspace.of(config))
    assert not facts.gate.promoted
    assert not facts.registration.champion
    assert facts.promotion is None


@pytest.mark.slow
@pytest.mark.parametrize(("skill", "wins"), [(0.65, True), (0.95, False)])
def test_new_champion_before_promotion_is_compared_by_the_gate(trained, skill, wins):
    config = trained("first", 0.8)
    _, gate = evaluate(config)
    register(config)
    assert gate.champion_version is None
    between = trained("between", skill)
    whole(between)
    record = promote(config)
    assert record.champion is wins
    assert champion(config) == ("1" if wins else "2")
    gate = GateRecord.load(Workspace.of(config).record("gate"))
    assert gate.promoted is wins
    assert gate.champion_version == "2"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scores.parquet", "baseline.parquet"])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"PAR1")])
def test_damaged_scores_are_named_by_the_promotion_that_needs_them(trained, name, damage):
    config = trained("first", 0.8)
    evaluate(config)
    register(config)
    whole(trained("between", 0.65))
    damage(Workspace.of(config).evaluation / name)
    with pytest.raises(BadInput, match=rf"{name} (cannot be read|does not hold scores)"):
        promote(config)
    assert champion(config) == "2"


@pytest.mark.slow
def test_alias_moved_by_hand_during_promotion_is_noticed(trained, monkeypatch):
    config = trained("first", 0.8)
    evaluate(config)
    register(config)
    trained("second", 0.9)
    second = trained("second", 0.9)
    evaluate(second)
    register(second)
    client = Registry(config, Workspace.of(config)).tracking.client
    honest = type(client).set_registered_model_alias

    def with_a_hand_in_between(self, name, alias, version):
        honest(self, name, alias, version)
        honest(self, name, alias, "2")

    monkeypatch.setattr(type(client), "set_registered_model_alias", with_a_hand_in_between)
    with pytest.raises(SteadytrainError, match="names version 2 now"):
        promote(config)
