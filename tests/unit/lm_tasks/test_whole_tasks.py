"""Complete tasks return the same results as lm-eval's own command with its `hf` model."""

import pytest

from steadytrain.components.evaluate.bootstrap import Resampling
from steadytrain.components.evaluate.language_tasks import run_lm_tasks
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.lm_tasks import open_lm_tasks

from support.lm_tasks import write_tasks
from support.tiny import make_language_model, make_tokenizer

HOW = Resampling(200, 0.95, 0)


@pytest.fixture
def tasks(tmp_path):
    """Tasks with few-shot examples before each question, sampled the same way as in lm-eval."""
    shots = {"fewshot_split": "test", "num_fewshot": 2}
    return write_tasks(tmp_path, choosing=shots, answering=shots)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_scores_and_standard_errors_are_the_same(tasks, kind):
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    tokenizer = make_tokenizer(100)
    config = from_mapping(
        {
            "name": "a",
            "data": {"source": ["x"]},
            "model": {"base": "y"},
            "evaluation": {"tasks": list(tasks.values())},
        }
    )
    model = make_language_model(kind, len(tokenizer), positions=256)
    ours = run_lm_tasks(
        {"model": model, "tokenizer": tokenizer},
        open_lm_tasks(config),
        batch_size=4,
        how=HOW,
        progress=lambda *_: None,
    )
    other = HFLM(
        make_language_model(kind, len(tokenizer), positions=256), tokenizer=tokenizer, device="cpu"
    )
    theirs = simple_evaluate(other, tasks=list(tasks.values()), bootstrap_iters=200)["results"]
    for name, score in ours.scores.items():
        task, _, metric = name.partition("/")
        assert score.value == pytest.approx(theirs[task][f"{metric},none"], rel=1e-6), name
        error = theirs[task][f"{metric}_stderr,none"]
        if error != "N/A":
            assert score.stderr == pytest.approx(error)
    assert len(ours.scores) == 5
    assert not ours.remarks


def test_error_of_a_ratio_is_that_of_resampled_documents(tasks):
    tokenizer = make_tokenizer(100)
    config = from_mapping(
        {
            "name": "a",
            "data": {"source": ["x"]},
            "model": {"base": "y"},
            "evaluation": {"tasks": [tasks["reading"]]},
        }
    )
    components = {"model": make_language_model("llama", len(tokenizer)), "tokenizer": tokenizer}
    found = run_lm_tasks(
        components, open_lm_tasks(config), batch_size=4, how=HOW, progress=lambda *_: None
    )
    bits = found.scores["reading/bits_per_byte"]
    answers = found.answers.to_pylist()
    values = [row["value"] for row in answers]
    weights = [row["weight"] for row in answers]
    assert bits.value == pytest.approx(sum(values) / sum(weights))
    # The delta method: the residuals of a ratio.
    residuals = [value - bits.value * weight for value, weight in zip(values, weights, strict=True)]
    expected = sum(item**2 for item in residuals) ** 0.5 / sum(weights)
    assert bits.stderr == pytest.approx(expected, rel=0.3)
