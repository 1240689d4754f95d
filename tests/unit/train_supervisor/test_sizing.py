"""How a run splits its batch, based on its ledger and on earlier runs."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from mlflow.store.entities import PagedList

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.events.types import AttemptStarted, DecisionMade
from steadytrain.components.shared.records import SideRecord
from steadytrain.components.shared.tracking.finish import PLAN, log_lineage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.recovery.history import History
from steadytrain.components.train.recovery.sizing import Sizing


def decided(micro_batch_size, **changes):
    return DecisionMade(
        attempt=1,
        failure_class="host_oom",
        action="retry_changed",
        reason="so",
        batch=BatchSettings(micro_batch_size, **{"strategy": "", **changes}),
    )


def test_earlier_decision_holds(config, data):
    sizing = Sizing(config, data, "GPU", 1)
    assert str(sizing.plan(History())) == "8 x 1"
    history = History(decisions=[decided(8, snapshot=False)])
    assert str(sizing.plan(history)) == "8 x 1, no snapshot in host memory"
    history.decisions.append(decided(4, snapshot=False, gradient_checkpointing=True))
    told = "4 x 2, activation checkpointing, no snapshot in host memory"
    assert str(sizing.plan(history)) == told


def test_fewer_nodes_get_larger_shares_of_the_same_batch(config, data):
    compute = {"nodes": 4, "nproc_per_node": 2}
    training = {"global_batch_size": 48, "micro_batch_size": 3}
    content = config.model_dump() | {"compute": compute, "training": training}
    sizing = Sizing(from_mapping(content), data, "GPU", 8)
    assert (sizing.nodes(History()), str(sizing.plan(History()))) == (4, "3 x 2")
    fewer = replace(decided(1), batch=None, nodes=3)
    history = History(decisions=[fewer])
    assert (sizing.nodes(history), str(sizing.plan(history))) == (3, "2 x 4")
    assert sizing.plan(history).global_batch_size == 48


def test_host_without_room_for_a_snapshot_sets_no_device_limit(config, data):
    """Otherwise a later run with a larger micro-batch would be limited to this one's."""
    sizing = Sizing(config, data, "GPU", 1)
    sizing.remember(History(decisions=[decided(8, snapshot=False)]))
    assert not sizing._path.exists()


def test_smaller_micro_batch_is_learned_without_its_snapshot(config, data):
    sizing = Sizing(config, data, "GPU", 1)
    sizing.remember(History(decisions=[decided(2, snapshot=False)]))
    assert sizing.learned().batch.micro_batch_size == 2
    assert sizing.learned().batch.snapshot


H100 = "NVIDIA H100 80GB HBM3"
WIDE = {"global_batch_size": 64, "micro_batch_size": None}
LARGE = {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 24, "vocab_size": 32_000}


SMALL = {**LARGE, "hidden_size": 512, "num_hidden_layers": 4}


TALL = {**LARGE, "hidden_size": 8192, "num_hidden_layers": 40, "intermediate_size": 28_672}
"""Large enough that the plan uses the host's memory too."""


def sized(config, data, device=H100, ranks=1, **sections):
    content = config.model_dump()
    sections.setdefault("model", {"config": SMALL})
    for section, fields in sections.items():
        content[section] = {**content[section], **fields}
    content["compute"] |= {"device": "auto", "nproc_per_node": ranks}
    return Sizing(from_mapping(content), data, device, ranks)


def test_run_on_a_known_gpu_starts_as_planned(config, data):
    """The planned micro-batch is larger than the one derived without a plan."""
    sizing = sized(config, data, training=WIDE)
    assert str(sizing.plan(History())) == "64 x 1"
    assert sizing.planned().action == "planned"
    assert "64 x 1 on 1 x H100 (80 GB each): a rank of llama from scratch needs" in (
        sizing.planned().reason
    )
    unknown = sized(config, data, "GPU", training=WIDE)
    assert (str(unknown.plan(History())), unknown.planned()) == ("8 x 8", None)


def reasons(sizing, history):
    return {item.field: (item.text, item.reason) for item in sizing.decisions(history)}


def test_each_part_of_a_plan_has_its_reason(config, data):
    told = reasons(sized(config, data, ranks=2, training=WIDE), History())
    assert told["compute.strategy"][0] == "ddp"
    assert "rule: strategy by size" in told["compute.strategy"][1]
    assert told["training.micro_batch_size"] == (
        "32",
        "the rank's whole share of the global batch fits",
    )
    field, (text, reason) = [*told.items()][-1]
    assert (field, text) == ("training.save_strategy", "(open)")
    assert reason.startswith("100 training examples are fewer than 100,000")
    assert reason.endswith("and at Young's interval")
    strategy = {"compute": {"strategy": "zero1"}, "training": {**WIDE, "save_steps": 7}}
    told = reasons(sized(config, data, ranks=2, **strategy), History())
    assert told["compute.strategy"] == ("zero1", "set by you")
    assert told["training.save_steps"] == ("7", "set by you")


TABLE = {"task": "tabular_classification", "target": "y"}
MONTHLY = {"task": "forecasting", "target": "y", "series": {"time": "day", "horizon": 3}}


@pytest.mark.parametrize(
    ("documents", "changes", "framework", "model_type", "by_time"),
    [
        (100_000, {}, None, None, True),
        (100, TABLE, "sklearn", "linear", True),
        (100, MONTHLY, "mlforecast", "lightgbm", True),
        (100, MONTHLY, "pytorch", "mlp", False),
    ],
    ids=["many", "table", "boosted series", "network of series"],
)
def test_many_examples_and_learners_of_all_rows_are_saved_by_time_alone(
    config, data, documents, changes, framework, model_type, by_time
):
    side = SideRecord(shards=[], rows=100, documents=documents)
    content = config.model_dump(exclude_defaults=True)
    if framework:
        content["model"] = {"framework": framework, "config": {"model_type": model_type}}
    content["data"] |= changes
    sizing = Sizing(
        from_mapping(content), data.model_copy(update={"sides": {"train": side}}), "GPU", 1
    )
    (last,) = [item for item in sizing.decisions(History()) if "save" in item.field]
    field = "training.save_steps" if by_time else "training.save_strategy"
    assert (last.field, last.value) == (field, None)
    assert (last.reason == "Young's interval") is by_time


@pytest.mark.parametrize("device", [H100, "GPU"], ids=["planned", "derived"])
@pytest.mark.parametrize(
    ("ranks", "strategy", "told"),
    [(1, "auto", "single"), (2, "auto", "ddp"), (2, "zero1", "zero1")],
)
def test_lineage_names_the_strategy_that_the_report_shows(
    config, data, device, ranks, strategy, told
):
    sizing = sized(config, data, device, ranks, training=WIDE, compute={"strategy": strategy})
    begun = AttemptStarted(
        attempt=1,
        world_size=ranks,
        batch=sizing.plan(History()).settings,
        gradient_accumulation_steps=1,
    )
    workspace = Workspace.of(sizing.config)
    workspace.create()
    workspace.stream("train").emit(begun)
    tags = {}
    client = SimpleNamespace(
        set_tag=lambda run, name, value: tags.update({name: value}),
        search_logged_models=lambda *places, **query: PagedList([], None),
    )
    tracking = SimpleNamespace(client=client, experiment_id="1")
    log_lineage(tracking, "run", sizing.config, workspace)
    assert reasons(sizing, History())["compute.strategy"][0] == told
    assert json.loads(tags[PLAN])["strategy"] == told


def test_change_after_a_failure_names_the_failure(config, data):
    history = History(decisions=[decided(16)])
    for device in (H100, "GPU"):
        sizing = sized(config, data, device, training={**WIDE, "micro_batch_size": 32})
        told = reasons(sizing, history)
        assert told["training.micro_batch_size"] == ("16", "retry changed: so")
        assert told["compute.strategy"][0] == "single"
    assert "no formula" in told["compute.strategy"][1]
    assert reasons(sizing, History())["training.micro_batch_size"] == ("32", "set by you")


def test_user_settings_are_the_starting_point(config, data):
    micro = sized(config, data, training={"global_batch_size": 64, "micro_batch_size": 4})
    assert str(micro.plan(History())) == "4 x 16"
    zero = sized(config, data, ranks=2, compute={"strategy": "zero1"})
    assert zero.plan(History()).settings.strategy == "zero1"
    recomputing = sized(config, data, training={"gradient_checkpointing": True})
    assert recomputing.plan(History()).settings.gradient_checkpointing


def test_model_too_large_for_one_gpu_is_sharded_from_the_start(config, data):
    model = {"config": {**LARGE, "intermediate_size": 8192, "num_attention_heads": 16}}
    sections = {"model": model, "training": {**WIDE, "global_batch_size": 8, "bf16": True}}
    alone = sized(config, data, **sections).plan(History())
    assert (alone.settings.strategy, alone.micro_batch_size) == ("ddp", 8)
    shared = sized(config, data, "Tesla A100-SXM4-40GB", ranks=4, **sections)
    assert shared.plan(History()).settings.strategy == "ddp"
    known = sized(config, data, "NVIDIA A100-SXM4-40GB", ranks=4, **sections)
    assert known.plan(History()).settings.strategy == "fsdp"


def test_model_that_never_fits_starts_as_configured(config, data):
    """The OOM fallbacks may find a size that fits, even if the formula says that nothing does."""
    sizing = sized(config, data, model={"config": {"model_type": "llama"}}, training=WIDE)
    assert (str(sizing.plan(History())), sizing.planned()) == ("8 x 8", None)


@pytest.mark.parametrize(("host", "offloads"), [(None, True), (10**12, True), (10**10, False)])
def test_start_stays_within_host_memory(config, data, host, offloads):
    sections = {"model": {"config": TALL}, "training": {**WIDE, "optim": "adamw_torch"}}
    sizing = replace(sized(config, data, ranks=8, **sections), host_memory=host)
    assert (sizing.plan(History()).settings.offload != "none") == offloads


def test_oom_after_a_plan_falls_back_from_there(config, data):
    sizing = sized(config, data, training=WIDE)
    history = History(decisions=[decided(32, strategy="ddp")])
    assert str(sizing.plan(history)) == "32 x 2"


def test_plan_is_estimated_if_the_formula_covers_the_gpu(config, data):
    sizing = sized(config, data, ranks=2, training=WIDE)
    plan = sizing.plan(History())
    assert sizing.estimate(plan.changed(gradient_checkpointing=True)) < sizing.estimate(plan)
    assert sizing.estimate(plan.changed(strategy="fsdp")) < sizing.estimate(plan)
    assert sized(config, data, "GPU", training=WIDE).estimate(plan) is None
