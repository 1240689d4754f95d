"""Tokens that a run adds: in the tokenizer, in the trained model, and in what is exported."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from steadytrain.components.memory.model import architecture_of
from steadytrain.components.preprocess.step import run
from steadytrain.components.shared.config import ModelConfig, from_mapping
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import Warned
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tasks.models import add_tokens, load_frozen

from support.data import sentence, write_jsonl
from support.tiny import make_language_model, make_tokenizer
from support.training import Bench, losses_of, weights_digest
from support.whole_runs import RECIPE
from support.whole_runs import run as whole_run

MARKS, NAME = ["<|turn|>", "<|over|>"], "[caffeine]"
TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}: {{ m.content }}<|over|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"
)


def llama(size, *, tied):
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            tie_word_embeddings=tied,
        )
    )


def bert(size):
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    return BertForMaskedLM(BertConfig(vocab_size=size, num_attention_heads=2, **shape))


MODELS = {
    "tied": lambda size: llama(size, tied=True),
    "untied": lambda size: llama(size, tied=False),
    "padded": lambda size: llama(size + 1, tied=False),
    "roomy": lambda size: llama(size + 64, tied=False),
    "bias": bert,
}


@pytest.mark.parametrize("kind", MODELS)
def test_new_rows_are_the_mean_and_others_stay(kind):
    tokenizer = make_tokenizer(50)
    size = len(tokenizer)
    model = MODELS[kind](size).eval()
    if kind == "bias":
        torch.nn.init.normal_(model.get_output_embeddings().bias)
    ids = torch.arange(10)[None]
    with torch.inference_mode():
        before = model(input_ids=ids).logits
    tokenizer.add_tokens([*MARKS, NAME])
    add_tokens(model, tokenizer, [*MARKS, NAME])
    rows = size + 64 if kind == "roomy" else size + 3
    assert model.config.vocab_size == rows
    with torch.inference_mode():
        after = model(input_ids=ids).logits
    assert torch.equal(after[..., :size], before[..., :size])
    # A mean of rows gives the mean of their logits.
    mean = before[..., :size].mean(-1, keepdim=True).expand(-1, -1, 3)
    torch.testing.assert_close(after[..., size : size + 3], mean)
    given = model.get_input_embeddings().weight
    torch.testing.assert_close(given[size : size + 3], given[:size].mean(0).expand(3, -1))
    tied = given is model.get_output_embeddings().weight
    assert tied == (kind in ("tied", "bias"))


@pytest.fixture
def base(tmp_path):
    tokenizer = make_tokenizer(50)
    tokenizer.save_pretrained(tmp_path / "base")
    make_language_model("llama", len(tokenizer)).save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


@pytest.fixture
def chats(tmp_path):
    rows = [
        {"prompt": f"{NAME} {sentence(n, 3)}", "completion": f"{sentence(n + 500, 3)} {NAME}"}
        for n in range(60)
    ]
    return write_jsonl(tmp_path / "chats.jsonl", rows)


def configuration(tmp_path, source, base, **model):
    return from_mapping(
        {
            "name": "tokens",
            "output": str(tmp_path / "output"),
            "data": {
                "source": [str(source)],
                "task": "supervised_finetuning",
                "chat_template": TEMPLATE,
                "sequence_length": 128,
            },
            "model": {"base": base, "added_tokens": [*MARKS, NAME], **model},
        }
    )


def test_the_exported_model_has_the_tokens(tmp_path, base, chats):
    """Plain Transformers loads it, with the logits of the trained model."""
    config = configuration(tmp_path, chats, base)
    record = run(config)
    recipe = {"global_batch_size": 4, "max_steps": 3, "learning_rate": 1e-2, "eval_steps": 3}
    model = {"base": base, "added_tokens": [*MARKS, NAME]}
    bench = Bench.make(tmp_path / "run", record, model=model, training=recipe)
    training = bench.train_here()
    tokenizer = AutoTokenizer.from_pretrained(bench.workspace.model)
    loaded = AutoModelForCausalLM.from_pretrained(bench.workspace.model)
    size = len(make_tokenizer(50))
    assert tokenizer.convert_tokens_to_ids([*MARKS, NAME]) == [size, size + 1, size + 2]
    assert loaded.config.vocab_size == len(tokenizer) == size + 3
    chat = [{"role": "user", "content": f"a{NAME}"}, {"role": "assistant", "content": "b"}]
    ids = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=False)
    assert {size, size + 1, size + 2} < set(ids[0].tolist())
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == f"user: a{NAME}\nassistant: b\n"
    assert loaded.generation_config.eos_token_id == [0, size + 1]
    module = training.parts.module.eval()
    with torch.inference_mode():
        torch.testing.assert_close(loaded(input_ids=ids).logits, module(input_ids=ids).logits)
    learned = loaded.get_output_embeddings().weight[size:]
    assert len({*map(tuple, learned.tolist())}) == 3
    reference = load_frozen(
        AutoModelForCausalLM, base, "model.base", bench.config, record, tokenizer
    )
    rows = reference.get_output_embeddings().weight
    torch.testing.assert_close(rows[size:], rows[:size].mean(0).expand(3, -1))


@pytest.mark.long
def test_a_killed_run_and_two_ranks_learn_the_same_tokens(tmp_path, base, chats):
    record = run(configuration(tmp_path, chats, base))
    sections = {"training": RECIPE, "model": {"base": base, "added_tokens": [*MARKS, NAME]}}
    whole = whole_run(tmp_path / "whole", record, sections)
    killed = whole_run(tmp_path / "killed", record, sections, killed=True)
    assert weights_digest(killed) == weights_digest(whole)
    for shards in ("ddp", "fsdp", "zero3"):
        shared = whole_run(tmp_path / shards, record, sections, ranks=2, strategy=shards)
        assert losses_of(shared) == pytest.approx(losses_of(whole), rel=1e-4)
        assert AutoModelForCausalLM.from_pretrained(shared.model).config.vocab_size == len(
            AutoTokenizer.from_pretrained(shared.model)
        )


def test_other_tokens_are_other_data(tmp_path, base, chats):
    config = configuration(tmp_path, chats, base, added_tokens=[*MARKS, NAME, "[unseen]"])
    found = run(config)
    warned = [
        event.message.rpartition(": ")[2]
        for event in read_events(Workspace.of(config).events)
        if isinstance(event, Warned) and "model.added_tokens" in event.message
    ]
    assert warned == ["[unseen]"]
    fewer = run(configuration(tmp_path, chats, base, added_tokens=MARKS))
    assert fewer.fingerprint != found.fingerprint
    assert fewer.sides["train"].tokens > found.sides["train"].tokens


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"added_tokens": ["<|end|>"]}, "'<|end|>', which the tokenizer has already"),
        ({"added_tokens": ["a", "a"]}, "'a' is listed 2 times"),
        ({"added_tokens": [" "]}, "' ' is only white space"),
        ({"adapter": {"kind": "lora"}}, "adapters freeze the embeddings"),
    ],
)
def test_tokens_that_cannot_be_added_are_refused(tmp_path, base, chats, model, told):
    with pytest.raises((BadInput, ConfigError)) as raised:
        run(configuration(tmp_path, chats, base, **model))
    assert told in str(raised.value)


def test_a_teacher_without_the_tokens_is_refused(tmp_path, base, chats):
    config = configuration(tmp_path, chats, base)
    other = config.training.distillation.model_copy(update={"teacher": f"{base}/"})
    training = config.training.model_copy(update={"distillation": other})
    with pytest.raises(BadInput, match=r"does not have the tokens of model\.added_tokens"):
        run(config.model_copy(update={"training": training}))


def test_the_plan_counts_their_rows(base):
    size = architecture_of(ModelConfig(base=base))["vocab_size"]
    assert architecture_of(ModelConfig(base=base, added_tokens=MARKS))["vocab_size"] == size + 2
    scratch = {"model_type": "gpt2"}
    assert architecture_of(ModelConfig(config=scratch, added_tokens=MARKS))["vocab_size"] == 8194
