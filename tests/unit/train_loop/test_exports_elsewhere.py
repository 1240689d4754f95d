"""What is exported works elsewhere: Transformers, PEFT, sentence-transformers and MLflow load it.

All models are loaded in one fresh process, which does not have steadytrain.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import mlflow
import pyarrow as pa
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedTokenizerFast,
)

from steadytrain.components.tasks.encoding.text_pairs import TextPairEncoder
from steadytrain.components.tasks.encoding.tokens import encode_chat, load_tokenizer
from steadytrain.components.techniques.contrastive_texts.loss import embedded

from support import loaded_elsewhere
from support.loaded_elsewhere import IDS, TEXTS
from support.training import (
    CLASSES,
    LLAMA,
    VOCABULARY,
    Bench,
    class_rows,
    language_rows,
    write_data,
    write_tokenizer,
)

pytestmark = pytest.mark.slow

BERT = {
    "model_type": "bert",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "vocab_size": VOCABULARY,
    "pad_token_id": 1,
}
LABELS = ["bad", "good", "odd"]
RECIPE = {"global_batch_size": 8, "max_steps": 6, "learning_rate": 1e-2, "eval_steps": 6}
LORA = {"kind": "lora", "rank": 4}
STOP = 3


def base_of(folder, config, auto):
    torch.manual_seed(0)
    model = auto.from_config(AutoConfig.for_model(**{"vocab_size": VOCABULARY, **config}))
    model.to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
    return str(folder)


def without_padding(folder):
    """Take the padding token from a tokenizer."""
    tokenizer = load_tokenizer(folder)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    assert load_tokenizer(folder).pad_token is None


class Trained:
    """A trained and exported model, and the logits that it returned here."""

    def __init__(self, root, data, recipe=RECIPE, **sections):
        bench = Bench.make(root, data, training=recipe, **sections)
        self.training = bench.train_here()
        self.folder, self.packager = bench.workspace.model, self.training.parts.packager
        self.module = self.training.parts.module.eval()

    @torch.inference_mode()
    def logits(self):
        return self.module(input_ids=torch.tensor(IDS)).logits.float()


def classifier(root, *, padding=True, **model):
    data = write_data(
        root / "data",
        class_rows(40),
        class_rows(6, seed=1),
        task="sequence_classification",
        schema=CLASSES,
        labels=LABELS,
        sequence_length=32,
    )
    if not padding:
        without_padding(root / "data" / "tokenizer")
    return Trained(root, data, model=model)


def language(root, *, padding=True, **model):
    data = write_data(root / "data", language_rows(24), language_rows(4, seed=1))
    if not padding:
        without_padding(root / "data" / "tokenizer")
    return Trained(root, data, model=model)


def chatting(root):
    """Train on chats whose turns end with <stop>, with a tokenizer whose end is <end>."""
    words = {word: index for index, word in enumerate(["<end>", "<pad>", "<turn>", "<stop>"])}
    words |= {f"w{index}": index for index in range(4, VOCABULARY)}
    core = Tokenizer(WordLevel(words, unk_token="<end>"))
    core.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<end>",
        pad_token="<pad>",
        extra_special_tokens=["<turn>", "<stop>"],
    )
    tokenizer.chat_template = "{% for m in messages %}<turn>{{ m['content'] }}<stop>{% endfor %}"
    rows, ends = [], set()
    for first in range(4, 12):
        chat = [
            {"role": "user", "content": f"w{first}"},
            {"role": "assistant", "content": f"w{first + 1} w{first + 2} w{first + 3}"},
        ]
        encoded = encode_chat(tokenizer, chat)
        ends |= encoded.ends
        length = len(encoded.input_ids)
        rows.append(
            {
                "input_ids": encoded.input_ids,
                "targets": encoded.targets,
                "lengths": [length],
            }
        )
    data = write_data(root / "data", rows, rows, task="supervised_finetuning", tokenizer=False)
    tokenizer.save_pretrained(root / "data" / "tokenizer")
    data = data.model_copy(update={"tokenizer": "tokenizer", "turn_ends": sorted(ends)})
    recipe = {**RECIPE, "max_steps": 60, "eval_steps": 60}
    return Trained(root, data, recipe, model={"config": LLAMA})


def embedding(root):
    schema = TextPairEncoder.schema
    rows = [
        {"input_ids": [3 + index, 4 + index, 5 + index, 6 + index], "lengths": [2, 2]}
        for index in range(24)
    ]
    data = write_data(root / "data", rows, rows[:4], task="text_embedding", schema=schema)
    recipe = {**RECIPE, "batch_contrastive": {"rows": 4}}
    return Trained(root, data, recipe, model={"config": BERT})


def logged(folder, trained):
    """Log a model to MLflow and return its URI."""
    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    mlflow.set_experiment(experiment_id=mlflow.create_experiment("e", str(folder / "artifacts")))
    records = pa.table({"text": ["w3 w4"]})
    with mlflow.start_run():
        uri = trained.packager.log_model(
            trained.folder, name="model", records=records, metadata={"a": "b"}
        )
    return mlflow.artifacts.download_artifacts(uri, dst_path=str(folder / "fetched"))


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    root = tmp_path_factory.mktemp("bases")
    return {
        "llama": base_of(root / "llama", LLAMA, AutoModelForCausalLM),
        "bert": base_of(root / "bert", BERT, AutoModelForMaskedLM),
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory, bases):
    root = tmp_path_factory.mktemp("trained")
    adapted = {"adapter": LORA}
    return {
        "plain": classifier(root / "plain", config=BERT),
        "adapters": classifier(root / "adapters", base=bases["bert"], **adapted),
        "merged": classifier(root / "merged", base=bases["bert"], adapter={**LORA, "merge": True}),
        "decoder": classifier(root / "decoder", padding=False, config=LLAMA),
        "language": language(root / "language", padding=False, base=bases["llama"]),
        "language adapters": language(root / "lora", base=bases["llama"], **adapted),
        "chat": chatting(root / "chat"),
        "embedding": embedding(root / "embedding"),
    }


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory, trained, bases):
    """Return what each way to load a model returned in a fresh process."""
    root = tmp_path_factory.mktemp("elsewhere")
    kinds = {
        "plain": ("plain_classifier", "plain", ""),
        "pipeline": ("classifier_pipeline", "decoder", ""),
        "adapters by Transformers": ("adapters_by_transformers", "adapters", ""),
        "adapters by PEFT": ("adapters_by_peft", "adapters", bases["bert"]),
        "merged": ("plain_classifier", "merged", ""),
        "language": ("language_model", "language", ""),
        "generation": ("generating_pipeline", "language", ""),
        "language adapters": ("auto_peft", "language adapters", ""),
        "chat": ("chat", "chat", ""),
        "sentences": ("sentences", "embedding", ""),
    }
    models = [
        [name, kind, str(trained[of].folder), base] for name, (kind, of, base) in kinds.items()
    ]
    models.append(["MLflow", "by_mlflow", logged(root, trained["adapters"]), ""])
    (root / "models.json").write_text(json.dumps(models))
    subprocess.run(
        [sys.executable, loaded_elsewhere.__file__, root / "models.json", root / "found.json"],
        check=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    return json.loads((root / "found.json").read_text())


def dtypes(folder: Path):
    found = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as tensors:
            found |= {tensors.get_tensor(name).dtype for name in tensors.keys()}  # noqa: SIM118
    return found


def test_exports_keep_the_precision_of_the_base(trained):
    assert dtypes(trained["language"].folder) == {torch.bfloat16}
    assert json.loads((trained["language"].folder / "config.json").read_text())["dtype"] == (
        "bfloat16"
    )
    assert dtypes(trained["merged"].folder) == {torch.bfloat16}
    assert dtypes(trained["plain"].folder) == {torch.float32}
    assert dtypes(trained["adapters"].folder) == {torch.float32}
    # The model in memory stays as it was.
    assert {item.dtype for item in trained["language"].module.parameters()} == {torch.float32}


def test_export_dtype_overrides_the_precision(tmp_path, trained):
    given = trained["language"]
    model = given.packager.config.model.model_copy(update={"export_dtype": "float16"})
    given.packager.config, before = (
        given.packager.config.model_copy(update={"model": model}),
        given.packager.config,
    )
    try:
        given.packager.export(given.module, tmp_path)
    finally:
        given.packager.config = before

    assert dtypes(tmp_path) == {torch.float16}


@pytest.mark.parametrize(
    ("name", "of", "within"),
    [
        ("plain", "plain", 1e-5),
        ("adapters by Transformers", "adapters", 1e-5),
        ("adapters by PEFT", "adapters", 1e-5),
        ("merged", "merged", 2e-2),
        ("language", "language", 5e-2),
        ("language adapters", "language adapters", 1e-4),
        ("MLflow", "adapters", 2e-2),
    ],
)
def test_outputs_elsewhere_are_those_of_the_trained_model(trained, elsewhere, name, of, within):
    found = torch.tensor(elsewhere[name]["logits"])

    assert (found - trained[of].logits()).abs().max() <= within


@pytest.mark.parametrize(
    "name", ["plain", "adapters by Transformers", "adapters by PEFT", "merged", "MLflow"]
)
def test_class_names_are_kept(elsewhere, name):
    assert elsewhere[name]["labels"] == LABELS


def test_mlflow_serves_the_precision_of_the_base(elsewhere):
    assert elsewhere["MLflow"]["dtype"] == "torch.bfloat16"


def test_pipelines_take_several_texts_at_once(elsewhere):
    both = elsewhere["pipeline"]
    for one, alone in zip(both["together"], both["alone"], strict=True):
        assert one["label"] == alone["label"]
        assert one["score"] == pytest.approx(alone["score"], abs=1e-4)
    assert elsewhere["generation"]["together"] == elsewhere["generation"]["alone"]


def test_a_chat_model_stops_at_the_end_of_its_turn(trained, elsewhere):
    folder = trained["chat"].folder

    assert elsewhere["chat"] == {"text": "w6 w7 w8 <stop>", "count": 4}
    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [0, STOP]
    assert any("<stop>" in remark for remark in trained["chat"].training.parts.remarks)


def test_sentence_transformers_embeds_as_we_do(trained, elsewhere):
    model = trained["embedding"].module
    ids = [[3, 4, 5, 6], [7]]
    for index, tokens in enumerate(ids):
        batch = {"input_ids": torch.tensor([tokens]), "attention_mask": torch.ones(1, len(tokens))}
        with torch.inference_mode():
            ours = embedded(model, batch)[0]
        found = torch.tensor(elsewhere["sentences"][index])
        assert torch.cosine_similarity(found, ours, dim=0) > 1 - 1e-5
        assert TEXTS[index].count("w") == len(tokens)
