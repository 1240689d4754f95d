"""What every script has: the rows in the order of the run, its first weights, and Trainer."""

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
    AutoTokenizer,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from steadytrain.components.tasks.frozen_parts import adapted_parts, quantized_modules
from steadytrain.components.techniques.base import IGNORED
from steadytrain.components.techniques.mixup.mixing import PARTNER
from steadytrain.components.techniques.order import RowOrder

RUN: dict[str, Any] = {}
ARGUMENTS: dict[str, Any] = {}


class Kind:
    """What a row is, and what is learned from it.

    auto: Transformers' class that loads the model.
    trainer: Trainer, or a subclass with a loss of its own.
    grouped: whether the rows of a global batch have similar lengths.
    partnered: whether a row of training comes with the row before it in its global batch, the
        first with the last.
    own_loss: whether `loss` takes the place of the model's own.
    scores: what Trainer computes from the predictions of a validation; None is only the loss.
    new: the weights that the base model lacked.
    """

    auto: Any
    trainer: Any = Trainer
    grouped = True
    own_loss = True
    partnered = False
    scores: Any = None
    new: frozenset[str] = frozenset()

    def __init__(self, record: Mapping[str, Any], tokenizer: Any) -> None:
        self.record, self.tokenizer = record, tokenizer
        # Without a padding token, any will do: padding is masked.
        padding = tokenizer.pad_token_id if tokenizer else 0
        self.padding: int = (tokenizer.eos_token_id or 0) if padding is None else padding

    def config(self) -> dict[str, Any]:
        """Return the fields of a new model that the run gives."""
        return dict(RUN["config"])

    def settings(self) -> dict[str, Any]:
        """Return further fields of the model's configuration."""
        return {}

    def new_modules(self) -> list[str]:
        """Return the modules whose weights the base model lacked."""
        return sorted({name.rpartition(".")[0] for name in self.new})

    def begin(self, rows: Rows, model: Any) -> None:
        """Prepare to learn from the rows of the training side."""

    def draw(self, row: dict[str, Any], *seed: int) -> dict[str, Any]:
        """Return what is learned from a row.

        Args:
            seed: all that a random choice depends on. The first one is 1 in training, else 0.
        """
        del seed
        return row

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return a micro-batch."""
        raise NotImplementedError

    def loss(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> Any:
        """Return the loss of a micro-batch as its share of the whole step.

        Trainer gives each micro-batch the same weight with label smoothing, and does not divide the
        loss of a classifier by their number.

        Args:
            outputs: of the model, with logits.
            num_items_in_batch: targets of the step, or in validation of the batch, on all ranks.
        """
        return cross_entropy(outputs.logits.float(), labels, num_items_in_batch)

    def end(self, model: Any) -> None:
        """Change the trained model before it is saved."""

    def padded(
        self, documents: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> dict[str, torch.Tensor]:
        """Return input_ids, attention_mask and labels, int64 of shape (documents, longest)."""
        longest = max(len(ids) for ids, _ in documents)
        batch = {
            "input_ids": torch.full((len(documents), longest), self.padding),
            "attention_mask": torch.zeros((len(documents), longest), dtype=torch.int64),
            "labels": torch.full((len(documents), longest), IGNORED),
        }
        for index, (ids, labels) in enumerate(documents):
            batch["input_ids"][index, : len(ids)] = torch.tensor(ids)
            batch["attention_mask"][index, : len(ids)] = 1
            batch["labels"][index, : len(ids)] = torch.tensor(labels)
        return batch


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, items: Any) -> torch.Tensor:
    """Return the sum over the labels, divided by the number of items; None counts the labels."""
    total = torch.nn.functional.cross_entropy(
        logits.flatten(0, -2),
        labels.flatten(),
        reduction="sum",
        ignore_index=IGNORED,
        label_smoothing=smoothing(),
    )
    return total / ((labels != IGNORED).sum() if items is None else items)


def smoothing() -> float:
    """Return the label smoothing, which validation does not have."""
    return float(ARGUMENTS["label_smoothing_factor"]) if torch.is_grad_enabled() else 0.0


@dataclass
class Rows:
    """The rows of prepared data, from memory-mapped Arrow files."""

    table: pa.Table
    kind: Kind

    @classmethod
    def of(cls, folder: Path, shards: Sequence[str], kind: Kind) -> Rows:
        files = (pa.ipc.open_file(pa.memory_map(str(folder / name))) for name in shards)
        return cls(pa.concat_tables([file.read_all() for file in files]), kind)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.drawn(index, 0, index)

    def drawn(self, index: int, *seed: int) -> dict[str, Any]:
        """Return what is learned from a row, which may depend on the seed."""
        row = {name: self.table[name][index].as_py() for name in self.table.column_names}
        return self.kind.draw(row, *seed)

    def lengths(self) -> Any:
        """Return the number of tokens of each row, int32 of shape (rows,)."""
        return np.array([len(item) for item in self.table["input_ids"]], dtype=np.int32)


class InOrder(torch.utils.data.Dataset[dict[str, Any]]):
    """The rows of all steps, in the order in which Trainer must see them.

    Trainer deals complete micro-batches to the ranks in turn. Each rank shall get a contiguous part
    of the global batch.
    """

    def __init__(self, rows: Rows, steps: int, micro: int, ranks: int) -> None:
        lengths = rows.lengths() if rows.kind.grouped else None
        batch, own = RUN["global_batch_size"], RUN["global_batch_size"] // ranks
        order = RowOrder(len(rows), ARGUMENTS["seed"], lengths, batch)
        self.rows, self.places = rows, list[tuple[int, int]]()
        self.partners = dict[int, tuple[int, int]]()
        for first in range(0, steps * batch, batch):
            taken = [*enumerate(order.take(first, batch), first)]
            if rows.kind.partnered:
                self.partners |= {taken[index][0]: taken[index - 1] for index in range(batch)}
            for part in range(0, own, micro):
                for start in range(part, batch, own):
                    self.places += taken[start : start + micro]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        position, _ = place = self.places[index]
        row = self.drawn(*place)
        if position in self.partners:
            row[PARTNER] = self.drawn(*self.partners[position])
        return row

    def drawn(self, position: int, row: int) -> dict[str, Any]:
        return self.rows.drawn(row, 1, ARGUMENTS["seed"], position)


def documents_of(row: Mapping[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of each document of a row, and those that the loss counts.

    The others are IGNORED. The first one of a document has none before it.
    """
    result, start = [], 0
    for length in row["lengths"]:
        ids, counted = (row[name][start : start + length] for name in ("input_ids", "targets"))
        wanted = [token if count else IGNORED for token, count in zip(ids, counted, strict=True)]
        result.append((ids, [IGNORED, *wanted[1:]]))
        start += length
    return result


def build_model(kind: Kind) -> Any:
    """Return the model with the weights that the run begins with, in float32."""
    settings = kind.settings()
    set_seed(ARGUMENTS["seed"])
    if RUN["base"] is None:
        fields = token_fields(kind.tokenizer) if kind.tokenizer else {}
        settings |= RUN["dropout"].get(RUN["config"]["model_type"], {})
        config = AutoConfig.for_model(**{**fields, **settings, **kind.config()})
        return kind.auto.from_config(config, dtype=torch.float32)
    where = {} if RUN["revision"] is None else {"revision": RUN["revision"]}
    new_head = bool(settings)
    if RUN["dropout"]:
        family = AutoConfig.from_pretrained(located(RUN["base"]), **where).model_type
        settings |= RUN["dropout"][family]
    settings |= quantization() | {"ignore_mismatched_sizes": new_head, "output_loading_info": True}
    model, loaded = kind.auto.from_pretrained(located(RUN["base"]), **where, **settings)
    kind.new = frozenset((*loaded["missing_keys"], *(key for key, *_ in loaded["mismatched_keys"])))
    if full := quantized_modules(model, kind.new_modules()):
        # Modules that are trained, such as a classifier, keep full precision.
        kept = [*model.hf_quantizer.modules_to_not_convert, *full]
        settings["quantization_config"].llm_int8_skip_modules = kept
        del model
        set_seed(ARGUMENTS["seed"])
        model, _ = kind.auto.from_pretrained(located(RUN["base"]), **where, **settings)
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            # Or a forward pass without gradients would repack the weights for good.
            layer.support_avx512bf16_for_cpu = False
    return model


def token_fields(tokenizer: Any) -> dict[str, Any]:
    """Return the fields of a new model that its tokenizer determines."""
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {"vocab_size": len(tokenizer), **{name: getattr(tokenizer, name) for name in special}}


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


def with_adapter(model: Any, kind: Kind) -> Any:
    """Return the model with low-rank adapters, if the run trains those."""
    if RUN["adapter"] is None:
        return model
    from peft import LoraConfig, get_peft_model

    parts = adapted_parts(model, RUN["adapter"]["target_modules"], kind.new_modules())
    return get_peft_model(model, LoraConfig(**{**RUN["adapter"], **parts}))


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


class MeanTrainer(Trainer):  # type: ignore[misc]  # transformers has no types
    """Trainer with a loss that needs more than what the model returns: the mean over the rows.

    All micro-batches have as many.
    """

    loss_is_scaled_for_ga = False

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        del num_items_in_batch
        loss = self.row_losses(model, inputs).mean().float()
        return (loss, {}) if return_outputs else loss

    def row_losses(self, model: Any, batch: dict[str, Any]) -> torch.Tensor:
        """Return the loss of each row of a micro-batch, (rows,)."""
        raise NotImplementedError


class StopAt(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Ends training after a number of steps, without changing the schedule."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args
        control.should_training_stop |= state.global_step >= self.steps


def train(kind_type: type[Kind]) -> None:
    """Train as the run does, and save the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=RUN["data"], help="preprocess.json of the run's records")
    parser.add_argument("--output", default="transformers-output", help="folder to write")
    parser.add_argument("--stop-at", type=int, default=0, help="end after so many steps")
    given = parser.parse_args()
    if not Path(given.data).is_file():
        raise SystemExit(f"{given.data} is missing: `{RUN['prepare']}` prepares the data")
    record = json.loads(Path(given.data).read_text())
    folder = Path(record["folder"])
    name = record["tokenizer"]
    tokenizer = AutoTokenizer.from_pretrained(folder / name) if name else None
    kind = kind_type(record, tokenizer)
    rows, validation = (
        Rows.of(folder, record["sides"][side]["shards"], kind) for side in ("train", "validation")
    )
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    micro, batch = ARGUMENTS["per_device_train_batch_size"], RUN["global_batch_size"]
    if batch % (ranks * micro):
        raise SystemExit(
            f"a global batch of {batch} is not {ranks} ranks of micro-batches of {micro}"
        )
    arguments = {**ARGUMENTS, "gradient_accumulation_steps": batch // (ranks * micro)}
    steps = ARGUMENTS["max_steps"]
    if steps < 0:
        steps = math.ceil(ARGUMENTS["num_train_epochs"] * len(rows) / batch)
        arguments["max_steps"] = steps
    callbacks: list[TrainerCallback] = [StopAt(given.stop_at)] if given.stop_at else []
    if RUN["patience"] is not None and len(validation):
        callbacks.append(EarlyStoppingCallback(RUN["patience"], RUN["threshold"]))
    if not len(validation):
        arguments |= {"eval_strategy": "no", "load_best_model_at_end": False}
    # Before the arguments, which may have each rank load only its part of the weights.
    model = build_model(kind)
    kind.begin(rows, model)
    model = with_adapter(model, kind)
    how = TrainingArguments(given.output, **arguments)
    if how.n_gpu > 1:
        raise SystemExit(f"{how.n_gpu} GPUs for one process: start it with torchrun")
    trainer = kind.trainer(
        model=model,
        args=how,
        train_dataset=InOrder(rows, steps, micro, ranks),
        eval_dataset=validation if len(validation) else None,
        data_collator=kind.collate,
        compute_loss_func=kind.loss if kind.own_loss else None,
        compute_metrics=kind.scores,
        callbacks=callbacks,
    )
    trainer.train()
    kind.end(model)
    trainer.save_model(str(Path(given.output, "model")))
    if tokenizer:
        tokenizer.save_pretrained(str(Path(given.output, "model")))
    trainer.state.save_to_json(str(Path(given.output, "trainer_state.json")))
