"""Adapters: plain Transformers loads the exported model, with or without its base."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from steadytrain.components.shared.config import AdapterConfig, from_mapping
from steadytrain.components.shared.digest import BASE_FILE, weights_digest
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.model_source import base_content
from steadytrain.components.tasks.causal_lm import LanguageModelPackager, SupervisedFineTuning
from steadytrain.components.tasks.frozen_parts import attach
from steadytrain.components.tasks.sequence_classification import ClassifierPackager
from steadytrain.components.train.loop.export import export_model

from support.training import CLASSES, Bench, class_rows, language_rows, write_data
from support.training import LLAMA as NARROW

# A block of 4-bit numbers has 64 values.
LLAMA = {**NARROW, "hidden_size": 64, "intermediate_size": 128}
ADAPTER = {"kind": "lora", "rank": 4}
RECIPE = {"global_batch_size": 4, "max_steps": 6, "learning_rate": 1e-2, "save_steps": 3}
IDS = torch.arange(2, 34).reshape(2, 16)


def trained(root, data, name, model):
    """Return a bench that has finished training, in its own folder."""
    bench = Bench.make(root / name, data, training=RECIPE, model=model, compute={"device": "cpu"})
    bench.train_here()
    return bench


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rows = language_rows(24), language_rows(4, seed=1)
    return write_data(tmp_path_factory.mktemp("adapters") / "data", *rows)


@pytest.fixture(scope="module")
def base(tmp_path_factory, data):
    root = tmp_path_factory.mktemp("base")
    return str(trained(root, data, "base", {"config": LLAMA}).workspace.model)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, data, base):
    root = tmp_path_factory.mktemp("adapted")
    return {
        merge: trained(
            root, data, f"merge-{merge}", {"base": base, "adapter": {**ADAPTER, "merge": merge}}
        )
        for merge in (False, True)
    }


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS).logits


@pytest.mark.slow
def test_adapters_alone_and_merged_are_the_same_model_to_plain_transformers(adapted, base):
    alone, merged = (
        AutoModelForCausalLM.from_pretrained(adapted[merge].workspace.model)
        for merge in (False, True)
    )
    assert torch.allclose(logits(alone), logits(merged), atol=1e-5)
    before = AutoModelForCausalLM.from_pretrained(base)
    assert not torch.allclose(logits(merged), logits(before), atol=1e-2)


def test_adapters_are_exported_alone_or_merged(adapted):
    sizes = [
        sum(path.stat().st_size for path in adapted[merge].workspace.model.glob("*.safetensors"))
        for merge in (False, True)
    ]
    assert sizes[0] < sizes[1] / 2
    assert (adapted[False].workspace.model / "adapter_config.json").is_file()
    assert not (adapted[True].workspace.model / "adapter_config.json").exists()


def test_adapters_are_evaluated_on_their_base(adapted, data):
    bench = adapted[False]
    loaded = LanguageModelPackager(bench.config, data).load_exported(bench.workspace.model)
    merged = AutoModelForCausalLM.from_pretrained(adapted[True].workspace.model)
    assert torch.allclose(logits(loaded["model"]), logits(merged), atol=1e-5)
    assert type(loaded["model"]).__name__ == "LlamaForCausalLM"


def test_adapters_are_not_added_to_another_base(adapted, base, data, tmp_path):
    """For example, a shared folder is updated between training and registration."""
    bench = adapted[False]
    judged = weights_digest(bench.workspace.model)
    other = shutil.copytree(base, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    torch.manual_seed(0)
    save_file(
        {name: torch.randn_like(tensor) for name, tensor in weights.items()},
        other / "model.safetensors",
    )
    model = bench.config.model.model_copy(update={"base": str(other)})
    config = bench.config.model_copy(update={"model": model})
    with pytest.raises(BadInput, match="its files have changed since the adapters"):
        LanguageModelPackager(config, data).load_exported(bench.workspace.model)
    note = json.loads((bench.workspace.model / BASE_FILE).read_text())
    assert note["address"] == base
    forged = shutil.copytree(bench.workspace.model, tmp_path / "forged")
    (forged / BASE_FILE).write_text(json.dumps(note | {"content": base_content(config)}))
    assert weights_digest(forged) != judged


def test_checkpoints_hold_only_the_adapters(adapted):
    bench = adapted[False]
    (checkpoint, *_) = sorted(bench.workspace.checkpoints.glob("step-*"))
    names = [path.name for path in checkpoint.glob("*.model.safetensors")]
    assert names
    size = sum((checkpoint / name).stat().st_size for name in names)
    whole = sum(path.stat().st_size for path in adapted[True].workspace.model.glob("*.safetensors"))
    assert size < whole / 2


@pytest.fixture
def classes(tmp_path):
    return write_data(
        tmp_path / "data",
        class_rows(24),
        class_rows(4, seed=1),
        task="sequence_classification",
        schema=CLASSES,
        labels=["a", "b", "c"],
    )


def test_classifiers_new_head_is_trained_whole(tmp_path, classes, base):
    bench = trained(tmp_path, classes, "classes", {"base": base, "adapter": ADAPTER})
    loaded = ClassifierPackager(bench.config, classes).load_exported(bench.workspace.model)
    plain = AutoModelForSequenceClassification.from_pretrained(
        bench.workspace.model, num_labels=3, pad_token_id=1
    )
    assert torch.allclose(logits(loaded["model"]), logits(plain), atol=1e-5)


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_new_head_of_a_quantized_encoder_has_all_its_bits(tmp_path, classes, base, quantization):
    """Transformers leaves a last layer in full, unless it has a bias, as these have."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    vocabulary = AutoConfig.from_pretrained(base).vocab_size
    config = AutoConfig.for_model("bert", vocab_size=vocabulary, num_attention_heads=2, **sizes)
    AutoModel.from_config(config).save_pretrained(tmp_path / "bert")
    adapter = {**ADAPTER, "kind": "qlora", "quantization": quantization}
    model = {"base": str(tmp_path / "bert"), "adapter": adapter}

    bench = trained(tmp_path, classes, "classes", model)

    stored = load_file(bench.workspace.model / "adapter_model.safetensors")
    head = {name.rpartition(".")[2]: item for name, item in stored.items() if "classifier" in name}
    assert head["weight"].shape == (3, 64)
    assert {item.dtype for item in head.values()} == {torch.float32}
    assert head["bias"].abs().min() > 0


def test_layers_that_the_model_does_not_have_are_rejected(base):
    model = AutoModelForCausalLM.from_pretrained(base)
    with pytest.raises(BadInput, match=r"model\.adapter\.targets = \['nothing'\]"):
        attach(model, AdapterConfig(kind="lora", targets=["nothing"]))


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_table_with_two_uses_gets_no_adapters(target):
    """If trained for one use, they would also change the other use in the exported model."""
    adapter = AdapterConfig(kind="lora", rank=4, targets=[target])
    for tied in (False, True):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**LLAMA, vocab_size=32, tie_word_embeddings=tied)
        )
        if tied:
            with pytest.raises(BadInput, match=rf"{target} shares its weights"):
                attach(model, adapter)
        else:
            attach(model, adapter)


def test_defaults_are_those_of_the_rules():
    adapter = AdapterConfig(kind="lora")
    assert (adapter.rank, adapter.scale, adapter.dropout) == (16, 32, 0.05)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA, vocab_size=64))
    names = {
        name.split(".")[-4] for name in attach(model, adapter).state_dict() if "lora_A" in name
    }
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_frozen_base_is_in_half_precision_if_training_is(tmp_path, data, base):
    model = {"base": base, "adapter": ADAPTER}
    training = {**RECIPE, "bf16": True}
    bench = Bench.make(tmp_path, data, training=training, model=model, compute={"device": "cpu"})
    module = bench.train_here().parts.module
    kinds = {item.requires_grad: item.dtype for item in module.parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
    loaded = LanguageModelPackager(bench.config, data).load_exported(bench.workspace.model)["model"]
    assert {item.dtype for item in loaded.parameters()} == {torch.float32}


@pytest.fixture
def quantized(data, base):
    """A 4-bit model with adapters, and its packager."""
    content = {"name": "q", "data": {"source": ["x"]}, "training": {"bf16": True}}
    model = {"base": base, "adapter": {**ADAPTER, "kind": "qlora"}}
    config = from_mapping({**content, "model": model})
    module = SupervisedFineTuning(config, data).build_model()
    return attach(module, config.model.adapter), LanguageModelPackager(config, data)


def test_base_in_4_bits_stays_and_its_adapters_learn(quantized):
    model, _ = quantized
    kinds = {
        type(parameter).__name__: parameter.dtype
        for name, parameter in model.named_parameters()
        if "q_proj" in name and "lora" not in name
    }
    assert kinds == {"Params4bit": torch.uint8}
    model(input_ids=IDS, labels=IDS).loss.backward()
    trained = {name for name, item in model.named_parameters() if item.grad is not None}
    assert trained
    assert all("lora_" in name for name in trained)
    assert {item.dtype for item in model.parameters() if item.requires_grad} == {torch.float32}


def test_four_bit_adapters_are_evaluated_on_the_original_base(quantized, tmp_path, base):
    model, packager = quantized
    export_model(packager, model, tmp_path / "model")
    loaded = packager.load_exported(tmp_path / "model")["model"]
    plain = AutoModelForCausalLM.from_pretrained(base)
    # Untrained adapters add nothing.
    assert torch.equal(logits(loaded), logits(plain))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"training": {"optim": "paged_adamw_8bit"}}, r"training\.optim = 'paged_adamw_8bit'"),
        ({"training": {"fp16": True}}, r"training\.fp16 = True"),
        ({"compute": {"strategy": "fsdp", "offload": "all"}}, r"compute\.offload = 'all'"),
    ],
)
def test_cuda_only_settings_are_rejected_without_cuda(tmp_path, data, base, sections, told):
    model = {"base": base, **sections.pop("model", {})}
    bench = Bench.make(tmp_path, data, model=model, **sections)
    with pytest.raises(BadInput, match=told):
        bench.train_here()


def test_only_linear_layers_are_adapted_beside_stacked_experts():
    fields = {**LLAMA, "model_type": "mixtral", "vocab_size": 40, "num_local_experts": 2}
    config = AutoConfig.for_model(**fields)
    model = attach(AutoModelForCausalLM.from_config(config), AdapterConfig(kind="lora"))
    trained = [name for name, item in model.named_parameters() if item.requires_grad]
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in trained} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }


def test_only_adapters_of_a_model_without_a_head_are_trained():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = AutoConfig.for_model("bert", vocab_size=50, num_attention_heads=2, **sizes)
    model = attach(AutoModel.from_config(config), AdapterConfig(kind="lora", rank=4))
    names = [name for name, item in model.named_parameters() if item.requires_grad]
    assert names
    assert all(".lora_" in name for name in names)
