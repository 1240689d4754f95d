"""The part of every train_with_transformers.py that is the same; nothing imports this module.

transformers_script.py puts the source of RowOrder in the place of its import, and the values of a
run in the place of RUN and ARGUMENTS. The result needs no steadytrain.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from steadytrain.components.techniques.order import RowOrder

RUN: dict[str, Any] = {}
ARGUMENTS: dict[str, Any] = {}
# The source of the row order and the run's values end here.

IGNORED = -100


class Rows:
    """The rows of prepared data, from memory-mapped Arrow files."""

    def __init__(self, folder: Path, shards: Sequence[str]) -> None:
        files = (pa.ipc.open_file(pa.memory_map(str(folder / name))) for name in shards)
        self.table = pa.concat_tables([file.read_all() for file in files])

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: self.table[name][index].as_py() for name in self.table.column_names}

    def lengths(self) -> Any:
        """Return the number of tokens of each row, int32 of shape (rows,)."""
        return np.array([len(item) for item in self.table["input_ids"]], dtype=np.int32)


class InOrder(torch.utils.data.Dataset[dict[str, Any]]):
    """The rows of all steps, in the order in which Trainer must see them.

    Trainer deals complete micro-batches to the ranks in turn. Each rank shall get a contiguous part
    of the global batch.
    """

    def __init__(self, rows: Rows, steps: int, micro: int, ranks: int) -> None:
        lengths = rows.lengths() if RUN["padded"] else None
        batch, own = RUN["global_batch_size"], RUN["global_batch_size"] // ranks
        order = RowOrder(len(rows), ARGUMENTS["seed"], lengths, batch)
        self.rows, self.places = rows, list[int]()
        for step in range(steps):
            taken = order.take(step * batch, batch)
            for part in range(0, own, micro):
                for start in range(part, batch, own):
                    self.places += taken[start : start + micro]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[self.places[index]]


def collate_language(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Return each document of packed rows as a row of its own, padded on the right.

    A token is a label if the loss counts it. The first one of a document has none before it.
    """
    documents = []
    for row in rows:
        start = 0
        for length in row["lengths"]:
            ids = row["input_ids"][start : start + length]
            wanted = [0, *row["targets"][start + 1 : start + length]]
            labels = [
                token if target else IGNORED for token, target in zip(ids, wanted, strict=True)
            ]
            documents.append((ids, labels))
            start += length
    return padded(documents)


def collate_texts(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Return texts, padded on the right to the longest, with the index of each one's class."""
    batch = padded([(row["input_ids"], row["input_ids"]) for row in rows])
    return batch | {"labels": torch.tensor([row["label"] for row in rows])}


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


def build_model(tokenizer: Any, labels: Sequence[str]) -> Any:
    """Return the model with the weights that the run begins with, in float32."""
    auto = AutoModelForSequenceClassification if labels else AutoModelForCausalLM
    settings: dict[str, Any] = {}
    if labels:
        settings = {
            "num_labels": len(labels),
            "id2label": dict(enumerate(labels)),
            "label2id": {label: index for index, label in enumerate(labels)},
            "problem_type": "single_label_classification",
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
    model = auto.from_pretrained(
        located(RUN["base"]),
        dtype=torch.float32,
        ignore_mismatched_sizes=bool(labels),
        **where,
        **settings,
    )
    return with_adapter(model)


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
        outputs: of the model, with logits (documents, tokens, vocabulary) or (texts, classes).
        num_items_in_batch: targets of the step on all ranks; None in validation.
    """
    logits = outputs.logits.float()
    if logits.ndim == 3:
        if getattr(outputs, "aux_loss", None) is not None:
            raise SystemExit("label smoothing of a mixture of experts: the script has no such loss")
        logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    smoothing = ARGUMENTS["label_smoothing_factor"] if num_items_in_batch is not None else 0.0
    total = torch.nn.functional.cross_entropy(
        logits, labels, reduction="sum", ignore_index=IGNORED, label_smoothing=smoothing
    )
    if num_items_in_batch is None:
        num_items_in_batch = (labels != IGNORED).sum()
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
    folder, labels = Path(record["folder"]), record["labels"] if RUN["padded"] else []
    train, validation = (
        Rows(folder, record["sides"][side]["shards"]) for side in ("train", "validation")
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
    trainer = Trainer(
        model=build_model(tokenizer, labels),
        args=TrainingArguments(given.output, **arguments),
        train_dataset=InOrder(train, steps, micro, ranks),
        eval_dataset=validation if len(validation) else None,
        data_collator=collate_texts if labels else collate_language,
        compute_loss_func=summed_loss if labels or ARGUMENTS["label_smoothing_factor"] else None,
        compute_metrics=class_scores if labels else None,
        callbacks=callbacks,
    )
    trainer.train()
    trainer.save_model(str(Path(given.output, "model")))
    tokenizer.save_pretrained(str(Path(given.output, "model")))
    trainer.state.save_to_json(str(Path(given.output, "trainer_state.json")))


if __name__ == "__main__":
    main()
