"""What ranks, strategies, devices and adapters support is known before anything starts."""

from __future__ import annotations

import pytest

from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import ConfigError

from support.minimal import MINIMAL, problems


def test_ranks_are_counted_over_all_nodes():
    training = {"global_batch_size": 24, "micro_batch_size": 3}
    wide = {**MINIMAL, "training": training, "compute": {"nodes": 4, "nproc_per_node": 2}}
    assert from_mapping(wide).compute.world_size == 8
    told = problems({**wide, "training": {"global_batch_size": 20}})
    assert "compute.nodes 4" in str(told["training.global_batch_size"])
    assert "compute.nodes" in problems({**MINIMAL, "compute": {"launcher": "process", "nodes": 2}})


@pytest.mark.parametrize(
    ("section", "fields", "told"),
    [
        ("compute", {"strategy": "tensor_parallel"}, "Megatron-LM"),
        ("compute", {"strategy": "single", "nproc_per_node": 2}, "it has one rank"),
        ("compute", {"offload": "all", "strategy": "ddp"}, "one of these can: fsdp, zero3"),
        ("compute", {"offload": "optimizer", "strategy": "fsdp"}, "zero1, zero2, zero3"),
        ("compute", {"offload": "disk", "strategy": "zero2"}, "one of these can: zero3"),
        ("compute", {"offload_path": "/nvme"}, "which writes no files"),
        ("compute", {"offload": "disk", "strategy": "zero3", "offload_path": "x"}, "pattern"),
    ],
)
def test_unworkable_strategy_is_rejected_with_an_alternative(section, fields, told):
    with pytest.raises(ConfigError, match=told):
        from_mapping({**MINIMAL, section: fields})


def test_cuda_settings_are_rejected_on_a_cpu():
    paged = {"optim": "paged_adamw_8bit"}
    with pytest.raises(ConfigError, match="use adamw_torch"):
        from_mapping({**MINIMAL, "compute": {"device": "cpu"}, "training": paged})


@pytest.mark.parametrize(
    ("section", "fields", "setting"),
    [
        ("training", {"fp16": True}, "training.fp16"),
        ("training", {"torch_compile": True}, "training.torch_compile"),
        ("model", {"adapter": {"kind": "qlora"}}, "model.adapter.kind qlora"),
        ("model", {"adapter": {"frozen_head": "8bit"}}, "model.adapter.frozen_head 8bit"),
        ("model", {"adapter": {"frozen_head": "4bit"}}, "model.adapter.frozen_head 4bit"),
        (
            "model",
            {"adapter": {"frozen_embeddings": "host"}},
            "model.adapter.frozen_embeddings host",
        ),
    ],
)
@pytest.mark.parametrize("strategy", ["fsdp", "zero1", "zero2", "zero3"])
def test_settings_that_need_the_complete_state_are_rejected_with_sharding(
    strategy, section, fields, setting
):
    if section == "model":
        fields = {"base": "hub:x", "adapter": {"kind": "lora", **fields["adapter"]}}
    content = {**MINIMAL, section: fields}
    with pytest.raises(ConfigError, match=rf"compute\.strategy = .*{setting.partition(' ')[0]} is"):
        from_mapping({**content, "compute": {"strategy": strategy}})
    assert from_mapping(content).conflict_with(strategy).startswith(f"{setting}: ")
    assert not from_mapping({**content, "compute": {"strategy": "ddp"}}).conflict_with("ddp")


def test_unknown_strategy_is_rejected_with_the_known_ones():
    with pytest.raises(ConfigError, match="ddp, fsdp, single, zero1, zero2, zero3"):
        from_mapping({**MINIMAL, "compute": {"strategy": "zero4"}})


@pytest.mark.parametrize(
    ("adapter", "told"),
    [
        ({"frozen_head": "4bit"}, r"frozen_head.*without adapters nothing is frozen"),
        ({"frozen_embeddings": "host"}, r"frozen_embeddings.*without adapters"),
    ],
)
def test_only_frozen_parts_are_kept_in_another_form(adapter, told):
    with pytest.raises(ConfigError, match=told):
        from_mapping({**MINIMAL, "model": {"base": "hub:x", "adapter": adapter}})


def test_adapters_without_a_base_are_rejected():
    model = {"config": {"model_type": "llama"}, "adapter": {"kind": "lora"}}
    with pytest.raises(ConfigError, match=r"there is no model\.base"):
        from_mapping({**MINIMAL, "model": model})
