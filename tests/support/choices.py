"""Four-choice questions and a model that answers them, with our code or lm-eval's `hf` model.

Each runs in its own process, forked from one that has already imported everything. The process
writes its results as JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

_PRELOAD = [
    "support.choices",
    "steadytrain.components.evaluate.harness",
    "lm_eval.models.huggingface",
    "transformers.models.llama.modeling_llama",
]
CHOICES = 4
LENGTHS = {"one-line": 1, "two-lines": 2}
"""Lines per choice."""


@dataclass(frozen=True)
class Found:
    """cpu_seconds, seconds: time for the answers.
    nats: log-likelihood of each choice, question by question.
    """

    cpu_seconds: float
    seconds: float
    nats: list[float]


def write_case(folder: Path, model: dict[str, Any], questions: int) -> None:
    """Write a model with random weights, its tokenizer, and questions on how a function continues.

    The choices are the next lines of that function and of three others. LENGTHS sets how many
    lines.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    from support.throughput import sources

    texts = sorted(set(sources()))
    generator = np.random.default_rng(0)
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=model["vocab_size"], special_tokens=["<|end|>"], show_progress=False
        ),
    )
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>").save_pretrained(folder)
    torch.manual_seed(0)
    config = AutoConfig.for_model(**model)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    cut = []
    for index in generator.permutation(len(texts)):
        lines = texts[index].splitlines(keepends=True)
        if 8 <= len(lines) <= 40:
            half = len(lines) // 2
            cut.append(("".join(lines[:half]).rstrip(), lines[half:]))
    for name, count in LENGTHS.items():
        found = []
        for place in range(questions):
            others = generator.choice(len(cut), CHOICES - 1, replace=False)
            choices = ["\n" + "".join(cut[index][1][:count]) for index in (place, *others)]
            found.append([cut[place][0], choices])
        (folder / f"{name}.json").write_text(json.dumps(found))


def answer(kind: str, questions: Path, out: Path, *, half: bool, batch_size: int = 1) -> Found:
    """Return the log-likelihoods of all choices by "ours" or "hf"; `batch_size` applies to "hf"."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    process = context.Process(target=_answer, args=(kind, questions, out, half, batch_size))
    process.start()
    process.join()
    assert process.exitcode == 0, kind
    return Found(**json.loads(out.read_text()))


def _answer(kind: str, questions: Path, out: Path, half: bool, batch_size: int) -> None:
    import torch
    from lm_eval.api.instance import Instance
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    dtype = torch.bfloat16 if half else torch.float32
    model = AutoModelForCausalLM.from_pretrained(questions.parent, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(questions.parent)
    asked = [
        Instance("loglikelihood", doc={}, arguments=(question, choice), idx=0)
        for question, choices in json.loads(questions.read_text())
        for choice in choices
    ]
    if kind == "ours":
        from steadytrain.components.evaluate.harness import Harness

        scorer: Any = Harness(model, tokenizer, batch_size=8, progress=lambda *_: None)
        assert not scorer.remarks, scorer.remarks
    else:
        from lm_eval.models.huggingface import HFLM

        scorer = HFLM(model, tokenizer=tokenizer, batch_size=batch_size, device="cpu")
    scorer.loglikelihood(asked[:CHOICES])
    began, cpu = time.perf_counter(), time.process_time()
    nats = [float(found) for found, _ in scorer.loglikelihood(asked)]
    done = Found(time.process_time() - cpu, time.perf_counter() - began, nats)
    out.write_text(json.dumps(asdict(done)))
