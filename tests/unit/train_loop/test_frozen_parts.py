"""Full training runs on a CPU, with a quantized frozen model and with lighter frozen parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from steadytrain.components.memory.setting import Setting
from steadytrain.components.memory.shape import shape_of
from steadytrain.components.memory.states import weight_bytes
from steadytrain.components.shared.config import AdapterConfig, from_mapping
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.causal_lm import SupervisedFineTuning
from steadytrain.components.tasks.frozen_parts import (
    FrozenHead,
    HostEmbedding,
    attach,
    lighten,
    parameter_count,
)
from steadytrain.components.train.loop.optim import OptimizerBuilder
from steadytrain.components.train.loop.setup import build_module, recompute_activations

from support.training import LLAMA as NARROW
from support.training import Bench, language_rows, losses_of, write_data

LLAMA = {**NARROW, "hidden_size": 64, "intermediate_size": 128}
TIED = {**LLAMA, "tie_word_embeddings": True}
STEPS = 6
RECIPE = {
    "global_batch_size": 4,
    "max_steps": STEPS,
    "learning_rate": 1e-2,
    "save_steps": 3,
    "save_total_limit": 9,
    "logging_steps": 1,
}
PLAIN = {"kind": "lora", "rank": 4}
TOLERANCES = {"8bit": 1e-3, "4bit": 2e-2}
"""Tolerated differences in loss, relative to the plain path."""
FOUR_BITS = {"kind": "qlora"}
EIGHT_BITS = {"kind": "qlora", "quantization": "int8"}
LIGHTENED = {"frozen_embeddings": "host", "frozen_head": "4bit"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rows = language_rows(24), language_rows(4, seed=1)
    return write_data(tmp_path_factory.mktemp("frozen") / "data", *rows)


def bench_of(root, data, model, training=None):
    return Bench.make(
        root, data, training={**RECIPE, **(training or {})}, model=model, compute={"device": "cpu"}
    )


@pytest.fixture(scope="module", params=[LLAMA, TIED], ids=["untied", "tied"])
def base(request, tmp_path_factory, data):
    """Train a model until its loss depends on each part."""
    bench = bench_of(
        tmp_path_factory.mktemp("base"), data, {"config": request.param}, {"max_steps": 12}
    )
    bench.train_here()
    return str(bench.workspace.model)


@pytest.fixture(scope="module")
def losses(tmp_path_factory, data, base):
    """Train with the given adapter settings, once each. Return the bench and its losses."""
    known = {}

    def of(**frozen):
        key = json.dumps(frozen, sort_keys=True)
        if key not in known:
            model = {"base": base, "adapter": {**PLAIN, **frozen}}
            bench = bench_of(tmp_path_factory.mktemp("run"), data, model)
            bench.train_here()
            known[key] = bench, losses_of(bench.workspace)
        return known[key]

    return of


@pytest.mark.slow
def test_base_model_is_trained(losses):
    _, plain = losses()
    assert plain[1] < 3.5


def test_host_lookup_is_bit_identical(losses, base):
    tied = AutoConfig.from_pretrained(base).tie_word_embeddings
    # A tied table leaves the device only if the head has its own copy there.
    beside = {"frozen_head": "8bit"} if tied else {}
    assert losses(frozen_embeddings="host", **beside)[1] == losses(**beside)[1]


@pytest.mark.parametrize("bits", TOLERANCES)
def test_quantized_head_losses_are_within_the_stated_error(losses, bits):
    _, plain = losses()
    _, found = losses(frozen_head=bits)
    assert found != plain
    assert found == pytest.approx(plain, rel=TOLERANCES[bits])


@pytest.mark.parametrize("base", [LLAMA], ids=["untied"], indirect=True)
@pytest.mark.parametrize("quantization", ["nf4", "fp4", "int8"])
def test_quantized_layers_learn_as_lora_does(losses, quantization):
    _, plain = losses()
    other = {} if quantization == "nf4" else {"quantization": quantization}
    _, found = losses(**FOUR_BITS, **other)
    assert found != plain
    assert (found == losses(**FOUR_BITS)[1]) == (quantization == "nf4")
    assert found == pytest.approx(
        plain, rel=TOLERANCES["8bit" if quantization == "int8" else "4bit"]
    )
    assert found[STEPS] < found[1]


@pytest.mark.parametrize("base", [LLAMA], ids=["untied"], indirect=True)
def test_plan_counts_layers_in_8_bits_as_they_are(data, base):
    from bitsandbytes.nn import Linear8bitLt  # takes seconds: it compiles functions

    adapter = AdapterConfig(**EIGHT_BITS, rank=4)
    model = {"base": base, "adapter": adapter.model_dump()}
    content = {"name": "q", "data": {"source": ["x"]}, "model": model, "compute": {"device": "cpu"}}
    config = from_mapping(content)
    module = build_module(config, SupervisedFineTuning(config, data))
    layers = [part for part in module.modules() if isinstance(part, Linear8bitLt)]
    # PEFT moves them from the weights to the layers.
    scales = [part.state.SCB for part in layers]
    held = [*module.parameters(), *scales]
    setting = Setting(length=64, adapter=adapter, cuda=False)
    found = weight_bytes(shape_of(json.loads((Path(base) / "config.json").read_text())), setting)
    assert {scale.dtype for scale in scales} == {torch.float32}
    assert found == sum(item.nbytes for item in held)


@pytest.mark.parametrize("base", [LLAMA], ids=["untied"], indirect=True)
def test_validation_leaves_layers_in_4_bits_unchanged(losses, data, base, tmp_path, monkeypatch):
    from bitsandbytes.nn import Linear4bit, modules

    monkeypatch.setattr(modules, "has_avx512bf16", lambda: True)
    model = {"base": base, "adapter": {**PLAIN, **FOUR_BITS}}
    bench = bench_of(tmp_path, data, model, {"eval_steps": 1})
    module = bench.train_here().parts.module
    assert losses_of(bench.workspace) == losses(**FOUR_BITS)[1]
    frozen = [part.weight for part in module.modules() if isinstance(part, Linear4bit)]
    assert {weight.dtype for weight in frozen} == {torch.uint8}
    assert all(weight.quant_state.nested for weight in frozen)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [EIGHT_BITS, LIGHTENED, {**FOUR_BITS, **LIGHTENED}])
def test_training_resumes_bit_for_bit(losses, data, base, tmp_path, frozen):
    bench, whole = losses(**frozen)
    rest = bench_of(tmp_path, data, {"base": base, "adapter": {**PLAIN, **frozen}})
    rest.train_here(resume_from=bench.workspace.checkpoints / "step-00000003")
    assert losses_of(rest.workspace) == {n: whole[n] for n in range(4, STEPS + 1)}
    one, other = ((b.workspace.model / "adapter_model.safetensors") for b in (bench, rest))
    assert one.read_bytes() == other.read_bytes()


def test_checkpoints_and_adapters_exclude_frozen_parts(losses):
    bench, _ = losses(**LIGHTENED)
    plain, _ = losses()
    held = [
        sorted(path.stat().st_size for path in run.workspace.checkpoints.rglob("*.safetensors"))
        for run in (bench, plain)
    ]
    assert held[0] == held[1]
    sizes = [
        (run.workspace.model / "adapter_model.safetensors").stat().st_size for run in (bench, plain)
    ]
    assert sizes[0] == sizes[1]


@pytest.mark.slow
def test_export_is_an_ordinary_model_with_the_bases_weights(tmp_path, data, base):
    adapter = {**PLAIN, **LIGHTENED, "merge": True}
    bench = bench_of(tmp_path, data, {"base": base, "adapter": adapter})
    bench.train_here()
    merged, before = (
        AutoModelForCausalLM.from_pretrained(folder) for folder in (bench.workspace.model, base)
    )
    for part in ("get_input_embeddings", "get_output_embeddings"):
        assert getattr(merged, part)().weight.equal(getattr(before, part)().weight)
    inner = "model.layers.0.self_attn.q_proj.weight"
    assert not merged.get_parameter(inner).equal(before.get_parameter(inner))


SMALL_CARD = {"bf16": True, "optim": "paged_adamw_8bit", "learning_rate": 1e-2}


def steps_in_4_bits(data, base, **frozen):
    """Return the loss of each step, as on a 6 GB card.

    That means NF4 layers, paged 8-bit AdamW, and activation checkpointing. It calls the parts
    directly, because a full run on a CPU refuses paged AdamW, whose kernels need a GPU.
    """
    adapter = {"kind": "qlora", "rank": 4, **frozen}
    config = from_mapping(
        {
            "name": "q",
            "data": {"source": ["x"]},
            "model": {"base": base, "adapter": adapter},
            "training": SMALL_CARD,
        }
    )
    task = SupervisedFineTuning(config, data)
    model = build_module(config, task)
    assert task.ready(model) == []
    recompute_activations(model, configured=True)
    optimizer, found = OptimizerBuilder(config.training)(model.train()), []
    batch = task.collate(language_rows(4, seed=2))
    for _ in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = task.compute_loss(model, batch).total / task.weight(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss))
    return found


@pytest.mark.slow
def test_all_small_card_settings_work_together(data, base):
    tied = AutoConfig.from_pretrained(base).tie_word_embeddings
    plain = steps_in_4_bits(data, base)
    if not tied:
        assert steps_in_4_bits(data, base, frozen_embeddings="host") == plain
    found = steps_in_4_bits(data, base, **LIGHTENED)
    assert found == pytest.approx(plain, rel=TOLERANCES["4bit"])
    assert found[-1] < found[0]


@pytest.mark.long
@pytest.mark.parametrize("base", [LLAMA], ids=["untied"], indirect=True)
def test_two_ranks_train_with_frozen_parts(losses, data, base, tmp_path):
    model = {"base": base, "adapter": {**PLAIN, "dropout": 0.0, **LIGHTENED}}
    compute = {"device": "cpu", "nproc_per_node": 2}
    bench = Bench.make(tmp_path / "two", data, training=RECIPE, model=model, compute=compute)
    assert bench.run(ranks=2).code == 0
    _, alone = losses(dropout=0.0, **LIGHTENED)
    assert losses_of(bench.workspace) == pytest.approx(alone, rel=1e-4)


def llama(**fields):
    config = {**LLAMA, "vocab_size": 64, **fields}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)


@pytest.mark.parametrize("tied", [False, True])
def test_parameter_count_includes_frozen_parts(tied):
    model = llama(tie_word_embeddings=tied)
    count, table = parameter_count(model), 64 * 64
    assert count == sum(item.numel() for item in model.parameters())
    adapter = AdapterConfig(kind="lora", **LIGHTENED)
    adapted = attach(model, adapter)
    trained = sum(item.numel() for item in adapted.parameters() if item.requires_grad)
    # A head with its own weights is not a tied table.
    assert parameter_count(adapted) == count + trained + tied * table


def test_host_embeddings_are_not_on_the_device():
    adapter = AdapterConfig(kind="lora", frozen_embeddings="host", frozen_head="8bit")
    model = attach(llama(), adapter)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(table, HostEmbedding)
    assert isinstance(head, FrozenHead)
    moved = model.to("meta")
    assert moved.get_input_embeddings().table.device.type == "cpu"
    assert {item.device.type for item in moved.parameters()} == {"meta"}
    assert not any(
        item.shape == (64, 64) and item.is_floating_point() for item in head.parameters()
    )


@pytest.mark.parametrize(
    ("fields", "frozen", "told"),
    [
        (
            {"tie_word_embeddings": True},
            {"frozen_embeddings": "host"},
            "the head is the same table",
        ),
        (
            {"hidden_size": 32, "intermediate_size": 64},
            {"frozen_head": "4bit"},
            r"frozen_head = '4bit': the head takes 32 values, which is not a multiple of 64",
        ),
        (
            {"model_type": "gemma3_text", "head_dim": 16},
            {"frozen_embeddings": "host"},
            "not a plain table but .*ScaledWordEmbedding",
        ),
    ],
)
def test_unsupported_model_is_rejected(fields, frozen, told):
    with pytest.raises(BadInput, match=told) as error:
        attach(llama(**fields), AdapterConfig(kind="lora", **frozen))
    assert error.value.remedy


@pytest.mark.parametrize("frozen", [{"frozen_embeddings": "host"}, {"frozen_head": "8bit"}])
def test_model_without_named_embeddings_is_rejected(frozen):
    with pytest.raises(BadInput, match=f"{next(iter(frozen))}.* but None"):
        lighten(torch.nn.Linear(64, 64), AdapterConfig(kind="lora", **frozen))


def test_applying_twice_changes_nothing():
    adapter = AdapterConfig(kind="lora", **LIGHTENED)
    model = llama()
    lighten(model, adapter)
    parts = model.get_input_embeddings(), model.get_output_embeddings()
    lighten(model, adapter)
    assert (model.get_input_embeddings(), model.get_output_embeddings()) == parts


def test_bits_of_weights_that_are_not_quantized_are_rejected():
    with pytest.raises(ValueError, match="does not quantize the layers"):
        AdapterConfig(kind="lora", quantization="fp4")


def test_head_with_an_adapter_of_its_own_is_rejected():
    adapter = AdapterConfig(kind="lora", targets=["lm_head"], frozen_head="8bit")
    with pytest.raises(BadInput, match="not a plain linear layer but peft"):
        attach(llama(), adapter)
