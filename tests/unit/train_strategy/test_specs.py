"""What the specs of strategies promise, and what a package's own strategy gets from its spec."""

from __future__ import annotations

import subprocess
import sys

import pytest

from steadytrain.components.memory.setting import Setting
from steadytrain.components.shared import plugins
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.config.strategies import strategy_spec
from steadytrain.components.shared.errors import ConfigError
from steadytrain.components.sizing.batch import plan_batch
from steadytrain.components.train.failures import FailureClass
from steadytrain.components.train.fallbacks import fallbacks_for, next_fallback

from support.plugins import install_example

MINIMAL = {
    "name": "tiny",
    "data": {"task": "causal_lm", "source": ["x"]},
    "model": {"config": {"model_type": "llama"}},
}


@pytest.fixture
def example(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(install_example(tmp_path))
    yield
    strategy_spec.cache_clear()


def configured(**compute):
    return from_mapping({**MINIMAL, "compute": compute})


@pytest.mark.parametrize("name", plugins.names(plugins.STRATEGIES))
def test_fallback_shards_more(name):
    spec = strategy_spec(name)
    if spec.fallback:
        assert strategy_spec(spec.fallback).shards > spec.shards


@pytest.mark.parametrize("name", plugins.names(plugins.STRATEGIES))
def test_replicated_strategy_supports_every_setting_and_offloads_nothing(name):
    spec = strategy_spec(name)
    assert bool(spec.shards) == bool(spec.unsupported) == bool(spec.offloads)


def test_strategy_of_another_package_is_rejected_without_it():
    with pytest.raises(ConfigError, match="no installed package has fsdp_keep"):
        configured(strategy="fsdp_keep")


@pytest.mark.slow
def test_spec_decides_what_a_configuration_may_use(example):
    assert configured(strategy="fsdp_keep", nproc_per_node=2).compute.strategy == "fsdp_keep"
    with pytest.raises(ConfigError, match=r"compute\.strategy fsdp_keep cannot do that"):
        configured(strategy="fsdp_keep", offload="all")
    content = {**MINIMAL, "training": {"fp16": True}, "compute": {"strategy": "fsdp_keep"}}
    with pytest.raises(ConfigError, match=r"its loss scaler needs .*, and training\.fp16 is true"):
        from_mapping(content)


@pytest.mark.slow
def test_spec_decides_sharded_memory_and_fallback(example):
    setting = Setting(length=8, strategy="fsdp_keep", ranks=2)
    assert setting.shards_weights
    assert setting.shards_gradients
    assert setting.shards_optimizer
    plan = plan_batch(2, 2).changed(strategy="fsdp_keep", gradient_checkpointing=True)
    found = fallbacks_for(FailureClass.GPU_OOM, "GPU", ["fsdp_keep"])
    fallback, lowered = next_fallback(plan, found)
    assert (fallback.name, lowered.settings.strategy) == ("FSDP", "fsdp")


@pytest.mark.slow
def test_reading_specs_imports_no_torch():
    program = (
        "import sys; from steadytrain.components.shared.config.strategies import strategy_spec; "
        "[strategy_spec(name) for name in ('ddp', 'fsdp', 'zero3')]; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
