"""The part of every train_with_transformers.py that is the same; nothing imports this module.

transformers_script.py puts the sources of RowOrder and Masking in the place of their imports, and
the values of a run in the place of RUN and ARGUMENTS. The result needs no steadytrain.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from steadytrain.components.techniques.masked_tokens.masking import Masking
from steadytrain.components.techniques.order import RowOrder

RUN: dict[str, Any] = {}
ARGUMENTS: dict[str, Any] = {}
# The sources of both and the run's values end here.

IGNORED = -100
PROBLEMS = {
    "class": "single_label_classification",
    "labels": "multi_label_classification",
    "number": "regression",
}


@dataclass
class Rows:
    """The rows of prepared data, from memory-mapped Arrow files.

    masking: what hides tokens, for a masked language model.
    """

    table: pa.Table
    masking: Masking | None = None

    @classmethod
    def of(cls, folder: Path, shards: Sequence[str]) -> Rows:
        files = (pa.ipc.open_file(pa.memory_map(str(folder / name))) for name in shards)
        return cls(pa.concat_tables([file.read_all() for file in files]))

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.drawn(index, 0, index)

    def drawn(self, index: int, *seed: int) -> dict[str, Any]:
        """Return a row; the tokens of one that is masked depend on the seed."""
        row = {name: self.table[name][index].as_py() for name in self.table.column_names}
        if self.masking is not None:
            row["input_ids"], row["targets"] = self.masking.apply(row["input_ids"], *seed)
        return row

    def lengths(self) -> Any:
        """Return the number of tokens of each row, int32 of shape (rows,)."""
        return np.array([len(item) for item in self.table["input_ids"]], dtype=np.int32)


class InOrder(torch.utils.data.Dataset[dict[str, Any]]):
    """The rows of all steps, in the order in which Trainer must see them.

    Trainer deals complete micro-batches to the ranks in turn. Each rank shall get a contiguous part
    of the global batch.
    """

    def __init__(self, rows: Rows, steps: int, micro: int, ranks: int) -> None:
        lengths = None if RUN["kind"] == "documents" else rows.lengths()
        batch, own = RUN["global_batch_size"], RUN["global_batch_size"] // ranks
        order = RowOrder(len(rows), ARGUMENTS["seed"], lengths, batch)
        self.rows, self.places = rows, list[tuple[int, int]]()
        for first in range(0, steps * batch, batch):
            taken = [*enumerate(order.take(first, batch), first)]
            for part in range(0, own, micro):
                for start in range(part, batch, own):
                    self.places += taken[start : start + micro]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        position, row = self.places[index]
        return self.rows.drawn(row, 1, ARGUMENTS["seed"], position)


def documents_of(row: Mapping[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of each document of a packed row, and 1 for each that the loss counts.

    The first one of a document has none before it.
    """
    result, start = [], 0
    for length in row["lengths"]:
        end = start + length
        result.append((row["input_ids"][start:end], [0, *row["targets"][start + 1 : end]]))
        start = end
    return result


def collate_documents(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Return each document of packed rows as a row of its own, padded on the right."""
    batch = padded([document for row in rows for document in documents_of(row)])
    counted = batch["labels"] == 1
    return batch | {"labels": torch.where(counted, batch["input_ids"], IGNORED)}


def collate_masked(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Return rows with hidden tokens, padded on the right, with those tokens as labels."""
    return padded([(row["input_ids"], row["targets"]) for row in rows])


def collate_texts(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Return texts, padded on the right to the longest, with what each one has.

    That is the index of its class, 0 or 1 for each label, or its standardized number.
    """
    batch = padded([(row["input_ids"], row["input_ids"]) for row in rows])
    types = "token_type_ids"
    if any(any(row.get(types, ())) for row in rows):
        batch[types] = padded([(row[types], row[types]) for row in rows])["labels"].clamp(min=0)
    targets: Any = [row["label"] for row in rows]
    if RUN["kind"] == "labels":
        places = range(len(RUN["labels"]))
        targets = [[float(place in of_row) for place in places] for of_row in targets]
    if RUN["kind"] == "number":
        targets = (np.asarray(targets, np.float64) - RUN["shift"]) / RUN["unit"]
        return batch | {"labels": torch.from_numpy(targets).float()}
    return batch | {"labels": torch.tensor(targets)}


COLLATORS = {"documents": collate_documents, "masked": collate_masked}


def padded(documents: Sequence[tuple[Sequence[int], Sequence[int]]]) -> dict[str, torch.Tensor]:
    """Return input_ids, attention_mask and labels, int64 of shape (documents, longest)."""
    longest = max(len(ids) for ids, _ in documents)
    batch = {
        "input_ids": torch.full((len(documents), longest), RUN["pad_token_id"]),
        "attention_mask": torch.zeros((len(documents), longest), dtype=torch.int64),
        "labels": torch.full((len(documents), longest), IGNORED),
    }
    for index, (ids, labels) in enumerate(documents):
        batch["input_ids"][index, : len(ids)] = torch.tensor(ids)
        batch["attention_mask"][index, : len(ids)] = 1
        batch["labels"][index, : len(ids)] = torch.tensor(labels)
    return batch


def build_model(tokenizer: Any) -> Any:
    """Return the model with the weights that the run begins with, in float32."""
    kind, labels = RUN["kind"], RUN["labels"]
    auto = AutoModelForMaskedLM if kind == "masked" else AutoModelForCausalLM
    settings: dict[str, Any] = {}
    if kind in PROBLEMS:
        auto = AutoModelForSequenceClassification
        settings = {
            "num_labels": len(labels),
            "id2label": dict(enumerate(labels)),
            "label2id": {label: index for index, label in enumerate(labels)},
            "problem_type": PROBLEMS[kind],
            "pad_token_id": RUN["pad_token_id"],
        }
    set_seed(ARGUMENTS["seed"])
    if RUN["base"] is None:
        special = ("bos_token_id", "eos_token_id", "pad_token_id")
        fields = {
            "vocab_size": len(tokenizer),
            **{name: getattr(tokenizer, name) for name in special},
        }
        settings |= RUN["dropout"].get(RUN["config"]["model_type"], {})
        config = AutoConfig.for_model(**{**fields, **settings, **RUN["config"]})
        return with_adapter(auto.from_config(config, dtype=torch.float32))
    where = {} if RUN["revision"] is None else {"revision": RUN["revision"]}
    if RUN["dropout"]:
        family = AutoConfig.from_pretrained(located(RUN["base"]), **where).model_type
        settings |= RUN["dropout"][family]
    settings |= quantization()
    model, loaded = auto.from_pretrained(
        located(RUN["base"]),
        ignore_mismatched_sizes=kind in PROBLEMS,
        output_loading_info=True,
        **where,
        **settings,
    )
    RUN["new"] = {*loaded["missing_keys"], *(key for key, *_ in loaded["mismatched_keys"])}
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            # Or a forward pass without gradients would repack the weights for good.
            layer.support_avx512bf16_for_cpu = False
    return with_adapter(model)


def number_head(model: Any) -> tuple[str, torch.nn.Linear]:
    """Return the name and the layer whose output is the number."""
    inner = f"{model.base_model_prefix}."
    heads = [
        (name, layer)
        for name, layer in model.named_modules()
        if type(layer) is torch.nn.Linear and layer.out_features == 1
        if not name.startswith(inner)
    ]
    if not heads:
        raise SystemExit("the model has no linear head for a number, which the script needs")
    return heads[-1]


@torch.no_grad()
def rescale(head: torch.nn.Linear, shift: float, unit: float) -> None:
    """Multiply what a head returns by the unit, and add the shift."""
    head.weight.mul_(unit)
    if head.bias is not None:
        head.bias.mul_(unit).add_(shift)


def standardize(rows: Rows, model: Any) -> None:
    """Let the head learn numbers with a mean of 0 and a deviation of 1.

    Without a bias, it cannot hold the mean: its numbers are divided by their root mean square.
    """
    numbers = rows.table["label"].to_numpy()
    name, head = number_head(model)
    biased = head.bias is not None
    RUN["shift"] = float(numbers.mean()) if biased else 0.0
    RUN["unit"] = float(numbers.std() if biased else math.sqrt(np.square(numbers).mean()))
    if RUN["base"] is not None and f"{name}.weight" not in RUN["new"]:
        # It returns numbers already.
        rescale(head, -RUN["shift"] / RUN["unit"], 1 / RUN["unit"])


def quantization() -> dict[str, Any]:
    """Return the settings for loading the base's weights in the bits of the run."""
    bits = RUN["quantization"]
    if bits is None:
        return {"dtype": torch.float32}
    from transformers import BitsAndBytesConfig

    computed, device = torch.float32, "cpu"
    if torch.cuda.is_available() and not ARGUMENTS["use_cpu"]:
        computed, device = torch.bfloat16, f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    if ARGUMENTS["bf16"] or ARGUMENTS["fp16"]:
        computed = torch.bfloat16 if ARGUMENTS["bf16"] else torch.float16
    how = BitsAndBytesConfig(
        load_in_4bit=bits != "int8",
        load_in_8bit=bits == "int8",
        bnb_4bit_quant_type="nf4" if bits == "int8" else bits,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=computed,
    )
    return {"dtype": computed, "quantization_config": how, "device_map": {"": device}}


def with_adapter(model: Any) -> Any:
    """Return the model with low-rank adapters, if the run trains those."""
    if RUN["adapter"] is None:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(**RUN["adapter"]))


def located(address: str) -> str:
    """Return a model's address as Transformers knows it: a folder, or a name on the hub."""
    scheme, _, rest = address.partition(":")
    if scheme == "hub":
        return rest
    if scheme == "package":
        package, _, inner = rest.partition("/")
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit(f"install the package {package}: it has the base model")
        return str(Path(spec.submodule_search_locations[0], inner))
    return address


def class_scores(given: Any) -> dict[str, float]:
    """Return accuracy and the mean F1 of the classes that are true or predicted."""
    predicted, true = np.argmax(given.predictions, axis=-1), given.label_ids
    scores = []
    for label in np.union1d(predicted, true):
        hits = np.sum((predicted == label) & (true == label))
        scores.append(2 * hits / (np.sum(predicted == label) + np.sum(true == label)))
    return {"accuracy": float(np.mean(predicted == true)), "macro_f1": float(np.mean(scores))}


def summed_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> Any:
    """Return the cross entropy of a micro-batch as its share of the whole step.

    Trainer gives each micro-batch the same weight with label smoothing, and does not divide the
    loss of a classifier by their number.

    Args:
        outputs: of the model, with logits (documents, tokens, vocabulary) or (texts, outputs).
        num_items_in_batch: targets of the step on all ranks; None in validation.
    """
    logits = outputs.logits.float()
    smoothing = 0.0 if num_items_in_batch is None else ARGUMENTS["label_smoothing_factor"]
    if num_items_in_batch is None:
        num_items_in_batch = (labels != IGNORED).sum()
    if RUN["kind"] == "number":
        return (logits[:, 0] - labels).square().sum() / num_items_in_batch
    if RUN["kind"] == "labels":
        # The labels of a text share its loss, and each counts as an item.
        binary = torch.nn.functional.binary_cross_entropy_with_logits
        return binary(logits, labels, reduction="sum") / num_items_in_batch
    if RUN["kind"] == "documents":
        if getattr(outputs, "aux_loss", None) is not None:
            raise SystemExit("label smoothing of a mixture of experts: the script has no such loss")
        logits, labels = logits[:, :-1], labels[:, 1:]
    total = torch.nn.functional.cross_entropy(
        logits.flatten(0, -2),
        labels.flatten(),
        reduction="sum",
        ignore_index=IGNORED,
        label_smoothing=smoothing,
    )
    return total / num_items_in_batch


class StopAt(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Ends training after a number of steps, without changing the schedule."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args
        control.should_training_stop |= state.global_step >= self.steps


def main() -> None:
    """Train as the run does, and save the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=RUN["data"], help="preprocess.json of the run's records")
    parser.add_argument("--output", default="transformers-output", help="folder to write")
    parser.add_argument("--stop-at", type=int, default=0, help="end after so many steps")
    given = parser.parse_args()
    if not Path(given.data).is_file():
        raise SystemExit(f"{given.data} is missing: `{RUN['prepare']}` prepares the data")
    record = json.loads(Path(given.data).read_text())
    folder, kind = Path(record["folder"]), RUN["kind"]
    RUN["labels"] = RUN["labels"] or record["labels"]
    train, validation = (
        Rows.of(folder, record["sides"][side]["shards"]) for side in ("train", "validation")
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / record["tokenizer"])
    if RUN["pad_token_id"] is None:
        padding = tokenizer.pad_token_id
        # Without a padding token, any will do: padding is masked.
        RUN["pad_token_id"] = (tokenizer.eos_token_id or 0) if padding is None else padding
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    micro, batch = ARGUMENTS["per_device_train_batch_size"], RUN["global_batch_size"]
    if batch % (ranks * micro):
        raise SystemExit(
            f"a global batch of {batch} is not {ranks} ranks of micro-batches of {micro}"
        )
    arguments = {**ARGUMENTS, "gradient_accumulation_steps": batch // (ranks * micro)}
    steps = ARGUMENTS["max_steps"]
    if steps < 0:
        steps = math.ceil(ARGUMENTS["num_train_epochs"] * len(train) / batch)
        arguments["max_steps"] = steps
    callbacks: list[TrainerCallback] = [StopAt(given.stop_at)] if given.stop_at else []
    if RUN["patience"] is not None and len(validation):
        callbacks.append(EarlyStoppingCallback(RUN["patience"], RUN["threshold"]))
    if not len(validation):
        arguments |= {"eval_strategy": "no", "load_best_model_at_end": False}
    if kind == "masked":
        train.masking = validation.masking = Masking.by(tokenizer, RUN["masking"])
    model = build_model(tokenizer)
    if kind == "number":
        standardize(train, model)
    own_loss = kind != "documents" or ARGUMENTS["label_smoothing_factor"]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(given.output, **arguments),
        train_dataset=InOrder(train, steps, micro, ranks),
        eval_dataset=validation if len(validation) else None,
        data_collator=COLLATORS.get(kind, collate_texts),
        compute_loss_func=summed_loss if own_loss else None,
        compute_metrics=class_scores if kind == "class" else None,
        callbacks=callbacks,
    )
    trainer.train()
    if kind == "number":
        # The saved model returns the numbers of the data.
        rescale(number_head(model)[1], RUN["shift"], RUN["unit"])
    trainer.save_model(str(Path(given.output, "model")))
    tokenizer.save_pretrained(str(Path(given.output, "model")))
    trainer.state.save_to_json(str(Path(given.output, "trainer_state.json")))


if __name__ == "__main__":
    main()
