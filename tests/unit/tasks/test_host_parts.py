"""Where a base model's parts are loaded. The meta device stands in for a GPU."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from steadytrain.components.shared.config import AdapterConfig, from_mapping
from steadytrain.components.tasks import models
from steadytrain.components.tasks.encoding.tokens import load_tokenizer
from steadytrain.components.tasks.frozen_parts import FrozenHead
from steadytrain.components.tasks.models import leave_on_the_host, places

from support.training import LLAMA, VOCABULARY, language_rows, write_data

GPU = "meta"
BOTH = {"frozen_embeddings": "host", "frozen_head": "4bit"}
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def folder(tmp_path):
    def make(**fields):
        config = AutoConfig.for_model(**{**LLAMA, "vocab_size": VOCABULARY, **fields})
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
        return tmp_path

    return make


def placed(folder, **frozen):
    adapter = AdapterConfig(kind="qlora", **frozen)
    return places(AutoModelForCausalLM, folder, adapter, GPU, run_code=False)


@pytest.mark.parametrize(
    ("tied", "frozen", "on_host"),
    [
        (False, {}, set()),
        (False, {"frozen_embeddings": "host"}, {TABLE}),
        (False, {"frozen_head": "8bit"}, {HEAD}),
        (False, BOTH, {TABLE, HEAD}),
        # The table stays on the device, where the head is made from it.
        (True, {"frozen_head": "8bit"}, set()),
        (True, BOTH, {TABLE, HEAD}),
    ],
)
def test_host_parts_never_go_to_the_gpu(folder, tied, frozen, on_host):
    path = folder(tie_word_embeddings=tied)
    there = placed(path, **frozen)
    assert set(there.values()) == ({GPU, "cpu"} if on_host else {GPU})
    # Accelerate places a named module together with everything below it.
    assert not any(
        name.startswith(part)
        for part, at in there.items()
        if at == GPU and part
        for name in on_host
    )
    if not on_host:
        return
    assert "" not in there
    model = AutoModelForCausalLM.from_pretrained(path, device_map=there)
    leave_on_the_host(model, GPU)
    devices = {name: item.device.type for name, item in model.named_parameters()}
    assert {name for name, at in devices.items() if at == "cpu"} == on_host
    whole = AutoModelForCausalLM.from_pretrained(path)
    for name in on_host:
        assert model.get_parameter(name).equal(whole.get_parameter(name))
    assert model.hf_device_map == {"": GPU}
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())


@pytest.mark.parametrize("tied", [False, True])
def test_four_bit_base_is_ready_for_the_gpu_once_built(folder, monkeypatch, tmp_path, tied):
    """No later operation may find a part on a different device than its inputs."""
    from bitsandbytes.nn import Linear4bit  # takes seconds: it compiles functions

    base = folder(tie_word_embeddings=tied, hidden_size=64, intermediate_size=128)
    data = write_data(tmp_path / "data", language_rows(4), language_rows(2))
    model = {"base": str(base), "adapter": {"kind": "qlora", **BOTH}}
    content = {"name": "q", "data": {"source": ["x"]}, "training": {"bf16": True}}
    config = from_mapping({**content, "model": model})
    of_cpu = models._precision(config)
    assert of_cpu["device_map"] == {"": "cpu"}
    monkeypatch.setattr(models, "_precision", lambda _: {**of_cpu, "device_map": {"": GPU}})
    tokenizer = load_tokenizer(data.path(data.tokenizer))
    built = models.build(AutoModelForCausalLM, config, data, tokenizer)
    assert {item.device.type for item in built.parameters()} == {GPU}
    assert built.get_input_embeddings().table.equal(
        AutoModelForCausalLM.from_pretrained(base).get_input_embeddings().weight.bfloat16()
    )
    assert isinstance(built.get_output_embeddings(), FrozenHead)
    assert isinstance(built.model.layers[0].mlp.up_proj, Linear4bit)


def test_other_parameters_go_to_the_gpu(folder):
    class Odd(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.model, self.scale = inner, torch.nn.Parameter(torch.ones(1))

        def get_input_embeddings(self):
            return self.model.get_input_embeddings()

        def get_output_embeddings(self):
            return None

    class Auto:
        @staticmethod
        def from_config(config, **_):
            return Odd(AutoModelForCausalLM.from_config(config))

    adapter = AdapterConfig(kind="qlora", **BOTH)
    there = places(Auto, folder(), adapter, GPU, run_code=False)
    assert there["scale"] == GPU
    assert [name for name, at in there.items() if at == "cpu"] == ["model.model.embed_tokens"]
