"""What may change when a run continues, and what may not: every field, with a real ledger."""

from __future__ import annotations

import shutil

import pytest

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config import (
    ComputeConfig,
    ModelConfig,
    RecoveryConfig,
    TrainingConfig,
    from_mapping,
)
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import Warned
from steadytrain.components.train import step
from steadytrain.components.train.recovery.ledger import Ledger
from steadytrain.components.train.recovery.supervisor import Supervisor
from steadytrain.components.train.recovery.takeover import (
    accepted,
    inputs_digest,
    may_differ,
    refused,
    settings,
)

from support.plugins import write_plugin

REFUSED = {
    "model": {
        "base": "package:sklearn",
        "revision": "main",
        "config": {"model_type": "gpt2"},
        "tokenizer": "hub:other",
        "vocab_size": 9000,
        "added_tokens": ["<note>"],
        "export_dtype": "float32",
    },
    "training": {
        "global_batch_size": 16,
        "num_train_epochs": 2.0,
        "max_steps": 77,
        "learning_rate": 3e-4,
        "lr_scheduler_type": "linear",
        "warmup_steps": 0.1,
        "weight_decay": 0.1,
        "label_smoothing_factor": 0.1,
        "max_grad_norm": 0.5,
        "adam_beta1": 0.8,
        "adam_beta2": 0.99,
        "adam_epsilon": 1e-7,
        "bf16": True,
        "fp16": True,
        "seed": 7,
        "full_determinism": True,
        "metric_for_best_model": "loss",
        "greater_is_better": False,
        "load_best_model_at_end": False,
        "early_stopping_patience": 3,
        "early_stopping_threshold": 0.1,
        "layer_decay": 0.9,
        "base_global_batch_size": 8,
    },
}
ACCEPTED = {
    "training": {
        "micro_batch_size": 2,
        "gradient_checkpointing": True,
        "torch_compile": True,
        "prefetch_batches": 3,
        "loader_workers": 2,
        "attention": "sdpa",
        "goal": "best",
        "logging_steps": 3,
        "eval_steps": 7,
        "save_steps": 5,
        "save_strategy": "time",
        "save_total_limit": 4,
        "save_keep_every": 10,
    },
    "compute": {
        "launcher": "process",
        "nodes": 2,
        "nproc_per_node": 2,
        "threads_per_rank": 3,
        "price_per_hour": 2.5,
        "budget_usd": 2.5,
        "device": "auto",
        "strategy": "fsdp",
    },
    "recovery": {
        "reuse_ttl_seconds": 1.0,
        "checkpoints": "elsewhere",
        "seconds_between_failures": 7.0,
        "stop_grace_seconds": 7.0,
        "max_failures_per_class": 7,
        "backoff_seconds": 7.0,
        "backoff_max_seconds": 70.0,
        "jitter": False,
        "breaker_failures": 7,
        "breaker_reset_seconds": 7.0,
        "min_nodes": 1,
        "min_sequence_length": 64,
        "resubmit": 1,
        "max_preemptions": 9,
        "on_demand_at_last": True,
        "hang_timeout_seconds": 7.0,
        "start_timeout_seconds": 7.0,
        "lease_seconds": 7.0,
        "server_wait_seconds": 7.0,
        "spike_threshold": 7.0,
        "spike_window": 7,
    },
}
SECTIONS_WITHIN = {
    *("compute.pods", "model.adapter", "model.dropout"),
    *("training.averaging", "training.curriculum", "training.monitor", "training.profile"),
}
NOT_ALONE = {
    *("training.optim", "compute.offload", "compute.offload_path"),
    *("compute.prefer", "compute.nccl"),
    "model.trust_remote_code",
    *("model.framework", "training.order", "training.components", "training.lr_scaling"),
    *("training.distillation", "training.contrastive", "training.batch_contrastive"),
    *("training.r_drop", "training.focal_loss", "training.class_weights"),
    *("training.adversarial", "training.dpo", "training.kto", "training.masking"),
    *("training.mixup", "training.augmentation", "training.image_augmentation"),
    *("training.mixture", "training.multi_task", "training.label_thresholds", "model.fusion"),
    "training.denoising",
    *("training.param_groups", "training.gradient_compression"),
    *("training.optim_args", "training.lr_scheduler_kwargs", "training.order_options"),
}
"""Fields that can change only together with another field of this run, or need another package."""
SECTIONS = {
    "model": ModelConfig,
    "training": TrainingConfig,
    "compute": ComputeConfig,
    "recovery": RecoveryConfig,
}


def fields(table):
    return [
        pytest.param(section, name, value, id=f"{section}.{name}")
        for section, changes in table.items()
        for name, value in changes.items()
    ]


def test_tables_cover_every_field():
    told = {
        f"{section}.{name}"
        for table in (REFUSED, ACCEPTED)
        for section in table
        for name in table[section]
    }
    known = {
        f"{section}.{name}" for section, kind in SECTIONS.items() for name in kind.model_fields
    }
    assert told | SECTIONS_WITHIN | NOT_ALONE == known


@pytest.fixture
def begun(config, data, launcher):
    """Start a run, and return a function that makes a supervisor with one setting changed."""
    supervisor = Supervisor(config, data, launcher("finish"))
    supervisor.launcher = NoRanks(supervisor.launcher)
    with pytest.raises(Reached):
        supervisor.run()

    def make(section="", name="", value=None, *, fingerprint=data.fingerprint):
        content = config.model_dump()
        if section:
            content[section] = {**content[section], name: value}
        if (section, name) == ("model", "base"):
            content["model"]["config"] = {}
        changed = data.model_copy(update={"fingerprint": fingerprint})
        other = Supervisor(from_mapping(content), changed, NoRanks(launcher("finish")))
        assert other.workspace == supervisor.workspace
        return other

    return make


class Reached(Exception):
    """The supervisor would start the ranks now."""


class NoRanks:
    def __init__(self, launcher):
        self.world_size, self.device = launcher.world_size, launcher.device
        self.host_memory = launcher.host_memory

    def start(self, folder):
        raise Reached


def warned(supervisor):
    events = read_events(supervisor.workspace.events)
    return [event.message for event in events if isinstance(event, Warned)]


@pytest.mark.parametrize(("section", "name", "value"), fields(REFUSED))
def test_changed_learning_settings_are_rejected_by_name(begun, section, name, value):
    other = begun(section, name, value)
    with pytest.raises(BadInput, match="cannot continue with these: ") as error:
        other.run()
    assert f"{section}.{name} " in error.value.message
    assert f"-> {value!r}" in error.value.message
    assert error.value.message.count(" -> ") == 1 + (name == "base")
    assert may_differ() in error.value.remedy


def test_changed_averaging_is_rejected_by_its_field(begun):
    other = begun("training", "averaging", {"kind": "swa"})
    with pytest.raises(BadInput, match=r"training\.averaging\.kind 'none' -> 'swa'"):
        other.run()


def test_only_frozen_embedding_placement_of_adapters_may_change(tmp_path, data):
    (tmp_path / "config.json").write_text("{}")
    content = {"name": "a", "data": {"source": ["x"]}}

    def with_adapter(**fields):
        adapter = {"kind": "lora", **fields}
        return from_mapping({**content, "model": {"base": str(tmp_path), "adapter": adapter}})

    before = with_adapter()
    moved, cut = with_adapter(frozen_embeddings="host"), with_adapter(frozen_head="8bit")
    told = settings(before, data), settings(moved, data)
    assert refused(*told) == []
    assert "'device' -> 'host'" in accepted(*told)
    assert "not bit for bit" not in accepted(*told)
    assert inputs_digest(before, data) == inputs_digest(moved, data)
    (why,) = refused(settings(before, data), settings(cut, data))
    assert why.startswith("model.adapter.frozen_head ")
    assert inputs_digest(before, data) != inputs_digest(cut, data)


@pytest.mark.parametrize(("section", "name", "value"), fields(ACCEPTED))
def test_other_settings_may_change_and_are_listed(begun, section, name, value):
    other = begun(section, name, value)
    with pytest.raises(Reached):
        other.run()
    (told,) = warned(other)
    assert f"{section}.{name} " in told
    assert f"-> {value!r}" in told
    assert told.count(" -> ") == 1
    order = ("micro_batch_size", "gradient_checkpointing", "torch_compile", "attention")
    reorders = name in order or (
        section == "compute" and name not in ("price_per_hour", "budget_usd", "launcher")
    )
    assert ("not bit for bit" in told) == reorders


@pytest.mark.parametrize(
    ("section", "name", "value", "change"),
    [
        ("compute", "pods", {"memory": "7Gi"}, "compute.pods.memory '16Gi' -> '7Gi'"),
        ("training", "monitor", {"layers": True}, "training.monitor.layers False -> True"),
        ("training", "profile", {"steps": [1, 2]}, "training.profile.steps None -> [1, 2]"),
    ],
)
def test_settings_within_sections_may_change_and_are_reported_by_field(
    begun, section, name, value, change
):
    other = begun(section, name, value)
    with pytest.raises(Reached):
        other.run()
    (told,) = warned(other)
    assert told.endswith(f"continues with changed settings: {change}")


@pytest.mark.parametrize(
    ("section", "name", "value", "note"),
    [
        ("training", "eval_steps", 7, "may select other weights"),
        ("recovery", "spike_threshold", 0.0, "other steps may count as diverged"),
    ],
)
def test_settings_that_change_what_is_learned_from_here_on_say_so(
    begun, config, data, section, name, value, note
):
    other = begun(section, name, value)
    with pytest.raises(Reached):
        other.run()
    assert note in warned(other)[0]
    assert step._key(other.config, data) != step._key(config, data)


def test_fields_that_an_older_version_did_not_know_do_not_prevent_a_resume(config, data):
    before, now = settings(config, data), settings(config, data)
    del before["training"]["distillation"]["top_k"]
    # Older versions recorded some sections beside the one that they are in.
    before["training.averaging"] = {"kind": "ema"} | before["training"].pop("averaging")
    assert refused(before, now) == []
    before["training.averaging"]["kind"] = "ema"
    assert refused(before, now) == ["training.averaging.kind 'ema' -> 'none'"]


def test_changed_adapter_is_rejected_by_its_field(begun):
    with pytest.raises(BadInput, match=r"model\.adapter\.rank 16 -> 8"):
        begun("model", "adapter", {"rank": 8}).run()


def changed(config, data, common, section, name, value):
    """Return the settings before and after a change, both with `common` in the compute section."""
    content = config.model_dump()
    for field, told in common.items():
        content["compute"][field] = told
    before = settings(from_mapping(content), data)
    content[section] = {**content[section], name: value}
    return before, settings(from_mapping(content), data)


def test_changed_optimizer_is_rejected(config, data):
    change = changed(config, data, {"device": "auto"}, "training", "optim", "adamw_bnb_8bit")
    assert refused(*change) == ["training.optim 'adamw_torch' -> 'adamw_bnb_8bit'"]


def test_optimizer_placement_may_change(config, data):
    change = changed(config, data, {"strategy": "zero2"}, "compute", "offload", "optimizer")
    assert refused(*change) == []
    assert "compute.offload 'none' -> 'optimizer'; sums" in accepted(*change)


def test_changed_data_are_rejected(begun):
    with pytest.raises(BadInput, match=r"data\.fingerprint 'f+' -> 'a+'"):
        begun(fingerprint="a" * 64).run()


def test_changed_base_model_files_are_rejected(config, data, tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    (base / "model.safetensors").write_bytes(b"weights")
    based = config.model_copy(
        update={"model": config.model.model_copy(update={"base": str(base), "config": {}})}
    )
    before = settings(based, data), inputs_digest(based, data)
    (base / "README.md").write_text("a word more")
    assert (settings(based, data), inputs_digest(based, data)) == before
    copied = shutil.copytree(base, tmp_path / "copied")
    elsewhere = config.model_copy(
        update={"model": based.model.model_copy(update={"base": str(copied)})}
    )
    assert inputs_digest(elsewhere, data) == before[1]
    (base / "model.safetensors").write_bytes(b"WEIGHTS")
    (told,) = refused(before[0], settings(based, data))
    assert told.startswith("base.content")
    assert "files of model.base" in told
    assert inputs_digest(based, data) != before[1]


STRATEGY = """
from dataclasses import replace
from steadytrain.components.train.strategy.specs import DDP
Plugin = replace(DDP, title="mine")
"""


def test_other_code_of_the_same_strategy_is_rejected_and_another_strategy_is_not(
    begun, data, tmp_path, monkeypatch
):
    site = write_plugin(tmp_path / "site", plugins.STRATEGIES, "own_ddp", STRATEGY)
    monkeypatch.syspath_prepend(site)
    foreign = begun("compute", "strategy", "own_ddp")
    with pytest.raises(Reached):
        foreign.run()
    before = step._key(foreign.config, data)
    (site / "own_ddp_package.py").write_text(f"{STRATEGY}# another version\n")

    assert step._key(foreign.config, data) != before
    with pytest.raises(BadInput, match=r"plugins\.strategy own_ddp .*own_ddp_package"):
        begun("compute", "strategy", "own_ddp").run()
    with pytest.raises(Reached):
        begun("compute", "strategy", "ddp").run()


def test_unchanged_run_continues_silently(begun):
    other = begun()
    with pytest.raises(Reached):
        other.run()
    assert not warned(other)


def test_ledger_without_settings_still_rejects(begun, monkeypatch):
    history = Ledger.history

    def silent(ledger):
        found = history(ledger)
        found.supervisor = None
        return found

    monkeypatch.setattr(Ledger, "history", silent)
    with pytest.raises(BadInput) as error:
        begun("training", "seed", 7).run()
    assert error.value.message.endswith("cannot continue with these")
