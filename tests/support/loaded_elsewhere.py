"""Load exported models as their users do, without steadytrain: a program of its own.

Arguments: a JSON file with [name, kind, folder, base] for each model, and the file to write what
each returns to. Kinds are the functions below.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

IDS = [[3, 4, 5, 6], [7, 8, 9, 10]]
PROMPT = "<turn> w5<stop><turn>"
TEXTS = ["w3 w4 w5 w6", "w7"]


def classes(model: Any) -> dict[str, Any]:
    logits = model.float().eval()(input_ids=torch.tensor(IDS)).logits
    return {"logits": logits.tolist(), "labels": list(model.config.id2label.values())}


def classifier_pipeline(folder: str, _: str) -> Any:
    """Two texts of different lengths at once, as one after the other."""
    from transformers import pipeline

    pipe = pipeline("text-classification", model=folder, dtype=torch.float32, device="cpu")
    return {"together": pipe(TEXTS, batch_size=2), "alone": [pipe(text)[0] for text in TEXTS]}


def plain_classifier(folder: str, _: str) -> Any:
    from transformers import AutoModelForSequenceClassification as Auto

    return classes(Auto.from_pretrained(folder))


def adapters_by_transformers(folder: str, _: str) -> Any:
    from transformers import AutoConfig
    from transformers import AutoModelForSequenceClassification as Auto

    config = AutoConfig.from_pretrained(Path(folder) / "model_config")
    return classes(Auto.from_pretrained(folder, config=config, dtype=torch.float32))


def adapters_by_peft(folder: str, base: str) -> Any:
    from peft import PeftModel
    from transformers import AutoConfig
    from transformers import AutoModelForSequenceClassification as Auto

    config = AutoConfig.from_pretrained(Path(folder) / "model_config")
    model = Auto.from_pretrained(base, config=config, dtype=torch.float32)
    return classes(PeftModel.from_pretrained(model, folder))


def auto_peft(folder: str, _: str) -> Any:
    from peft import AutoPeftModelForCausalLM

    model = AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return {"logits": model(input_ids=torch.tensor(IDS)).logits.tolist()}


def language_model(folder: str, _: str) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    logits = model(input_ids=torch.tensor(IDS)).logits.float()
    return {"dtype": str(model.dtype), "logits": logits.tolist()}


def chat(folder: str, _: str) -> Any:
    """What is generated, with the model's own settings for its end."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    written = model.generate(ids, max_new_tokens=30, do_sample=False)[0, ids.shape[1] :]
    return {"text": tokenizer.decode(written), "count": len(written)}


def generating_pipeline(folder: str, _: str) -> Any:
    from transformers import pipeline

    pipe = pipeline("text-generation", model=folder, dtype=torch.float32, device="cpu")
    options = {"max_new_tokens": 4, "do_sample": False, "return_full_text": False}
    together = pipe(TEXTS, batch_size=2, **options)
    return {"together": together, "alone": [pipe(text, **options) for text in TEXTS]}


def sentences(folder: str, _: str) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(folder, device="cpu").encode(TEXTS).tolist()


def by_mlflow(folder: str, _: str) -> Any:
    import mlflow

    pipe = mlflow.transformers.load_model(folder)
    return {"dtype": str(pipe.model.dtype), **classes(pipe.model)}


KINDS: dict[str, Callable[[str, str], Any]] = {
    kind.__name__: kind
    for kind in (
        classifier_pipeline,
        plain_classifier,
        adapters_by_transformers,
        adapters_by_peft,
        auto_peft,
        language_model,
        chat,
        generating_pipeline,
        sentences,
        by_mlflow,
    )
}


def main(models: Path, found: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(11)
    with torch.inference_mode():
        answers = {
            name: KINDS[kind](folder, base)
            for name, kind, folder, base in json.loads(models.read_text())
        }
    found.write_text(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
