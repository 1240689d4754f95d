"""The answers match those of lm-eval's own `hf` model, with prefix sharing and with padding."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from steadytrain.components.evaluate.harness import Harness
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.documents import _REPLACED
from steadytrain.components.tasks.prefix_attention import attend_by_prefix

from support.lm_tasks import DOCUMENTS
from support.tiny import TEXTS, make_language_model, make_tokenizer

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
OTHERS = {
    "mistral": {**SMALL, "sliding_window": 20},
    "gemma2": {**SMALL, "head_dim": 8, "sliding_window": 16},
    "cohere": {**SMALL, "logit_scale": 0.3},
}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(100)


def model_of(kind, tokenizer):
    if kind not in OTHERS:
        return make_language_model(kind, len(tokenizer))
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, pad_token_id=0,
        **OTHERS[kind],
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(params=["gpt2", "llama", *OTHERS])
def pair(request, tokenizer):
    """Our model and lm-eval's, two separate models with equal weights."""
    from lm_eval.models.huggingface import HFLM

    ours = Harness(
        model_of(request.param, tokenizer), tokenizer, batch_size=4, progress=lambda *_: None
    )
    theirs = HFLM(model_of(request.param, tokenizer), tokenizer=tokenizer, device="cpu")
    return ours, theirs


def asked(kind, *arguments):
    from lm_eval.api.instance import Instance

    return Instance(kind, doc={}, arguments=arguments, idx=0, metadata=("task", 0, 1))


def questions():
    pairs = [(item["question"], f" {choice}") for item in DOCUMENTS for choice in item["choices"]]
    # Without context, with trailing space, one token long, and longer than the model's context.
    pairs += [("", TEXTS[0]), ("def add ", "(first"), (TEXTS[1], "x"), (TEXTS[1] * 3, TEXTS[0])]
    return [asked("loglikelihood", *pair) for pair in pairs]


def test_log_likelihoods_equal_those_of_lm_eval(pair):
    ours, theirs = (model.loglikelihood(questions()) for model in pair)
    assert np.allclose([nats for nats, _ in ours], [nats for nats, _ in theirs], rtol=0, atol=1e-4)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]


def test_greedy_continuations_are_reported_as_greedy(pair, tokenizer):
    _, theirs = pair
    ids = torch.tensor([tokenizer(TEXTS[0])["input_ids"]])
    likeliest = int(theirs.model(ids).logits[0, -1].argmax())
    requests = [(None, ids[0].tolist(), [token]) for token in (likeliest, likeliest - 1)]
    found = [[greedy for _, greedy in model._loglikelihood_tokens(requests)] for model in pair]
    assert found == [[True, False]] * 2


def test_rolling_log_likelihoods_equal_those_of_lm_eval(pair):
    texts = [*TEXTS, TEXTS[1] * 5]
    requests = [asked("loglikelihood_rolling", text) for text in texts]
    ours, theirs = (model.loglikelihood_rolling(requests) for model in pair)
    # The longest is a sum over several hundred tokens.
    assert np.allclose(ours, theirs, rtol=1e-6, atol=1e-4)


def test_generated_answers_equal_those_of_lm_eval(pair):
    settings = {"until": ["\n", "self"], "max_gen_toks": 12}
    requests = [asked("generate_until", item["question"], settings) for item in DOCUMENTS]
    requests.append(asked("generate_until", TEXTS[1] * 4, {"until": [], "max_gen_toks": 20}))
    ours, theirs = (model.generate_until(requests) for model in pair)
    assert ours == theirs
    assert any(ours)


def test_models_with_custom_attention_read_padded_batches(tokenizer):
    from lm_eval.models.huggingface import HFLM

    model = make_language_model("llama", len(tokenizer))
    model.set_attn_implementation("eager")
    ours = Harness(model, tokenizer, batch_size=4, progress=lambda *_: None)
    assert "its attention is 'eager'" in ours.remarks[0]
    theirs = HFLM(make_language_model("llama", len(tokenizer)), tokenizer=tokenizer, device="cpu")
    expected = [nats for nats, _ in theirs.loglikelihood(questions())]
    assert np.allclose([nats for nats, _ in ours.loglikelihood(questions())], expected, atol=1e-4)


def test_model_with_other_token_mixing_keeps_its_attention(tokenizer):
    model = make_language_model("llama", len(tokenizer))
    layer = model.model.layers[0].mlp.down_proj
    layer.register_forward_hook(lambda _, __, given: given + given.mean(1, keepdim=True))
    assert (
        attend_by_prefix(model, len(tokenizer))
        == "its layers mix continuations that share a prefix"
    )
    assert model.config._attn_implementation == _REPLACED


def test_unanswerable_requests_are_rejected(tokenizer):
    ours = Harness(
        make_language_model("gpt2", len(tokenizer)),
        tokenizer,
        batch_size=4,
        progress=lambda *_: None,
    )
    with pytest.raises(BadInput, match="a continuation of 0 tokens"):
        ours.loglikelihood([asked("loglikelihood", "def", "")])


def test_shared_prefixes_are_read_once(tokenizer):
    model = make_language_model("llama", len(tokenizer))
    read = []
    model.model.embed_tokens.register_forward_hook(
        lambda _, given, __: read.append(given[0].numel())
    )
    ours = Harness(model, tokenizer, batch_size=4, progress=lambda *_: None)
    read.clear()
    item = DOCUMENTS[0]
    ours.loglikelihood(
        [asked("loglikelihood", item["question"], f" {choice}") for choice in item["choices"]]
    )
    context = len(tokenizer(item["question"])["input_ids"])
    whole = [len(tokenizer(f"{item['question']} {c}")["input_ids"]) for c in item["choices"]]
    # The last token of each is only predicted. What the choices share is also read only once.
    assert sum(read) <= context + sum(length - context - 1 for length in whole)
