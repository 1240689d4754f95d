"""Train a study's winner again on fresh seeds, and let the best model go through the gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import TrainingFailed
from steadytrain.components.shared.records import GateRecord, RegistrationRecord, TrainRecord

_LONGEST_PREFIX: Final = 43
"""Characters. With a digest, it still has to be a valid name of a run."""


@dataclass(frozen=True)
class Trained:
    """A winner on several seeds.

    config: the run with the best model.
    trained: by seed, the runs that did not fail.
    """

    config: RunConfig
    trained: Mapping[int, TrainRecord]


@dataclass(frozen=True)
class Retrained(Trained):
    """What became of a winner."""

    gate: GateRecord
    registration: RegistrationRecord


def fresh_seeds(best: RunConfig, count: int) -> Sequence[int]:
    """Return seeds that no trial of a study trained with."""
    seed = best.training.seed
    return range(seed + 1, seed + 1 + count)


def retrain(
    best: RunConfig, seeds: Sequence[int], *, compared: int, greater_is_better: bool
) -> Retrained:
    """Train a configuration on each seed as an ordinary run; evaluate and register the best one.

    The test side is opened once, for the best model. For the arguments and errors of the training,
    see `train_on`.

    Raises:
        SteadytrainError: another step failed; the message and the remedy are those of the step.
    """
    from steadytrain.components.evaluate.step import run as evaluate
    from steadytrain.components.register.step import promote
    from steadytrain.components.register.step import run as register

    chosen = train_on(best, seeds, compared=compared, greater_is_better=greater_is_better)
    _, gate = evaluate(chosen.config)
    registration = register(chosen.config)
    if gate.promoted:
        registration = promote(chosen.config)
    return Retrained(chosen.config, chosen.trained, gate, registration)


def train_on(
    best: RunConfig, seeds: Sequence[int], *, compared: int, greater_is_better: bool
) -> Trained:
    """Train a configuration on each seed as an ordinary run, and choose the best run.

    The best is chosen by its score on the validation side. A seed whose training fails is left
    out. Calling this again continues the same runs.

    Args:
        best: the winner. Its seed is replaced, and its `run` begins the names of the runs.
        seeds: seeds that the study did not train with.
        compared: number of configurations that the study compared.
        greater_is_better: whether a higher validation score is better.

    Raises:
        TrainingFailed: training failed on every seed.
    """
    configs = {seed: on_seed(best, seed, compared) for seed in seeds}
    trained, failed = dict[int, TrainRecord](), list[TrainingFailed]()
    for seed, config in configs.items():
        try:
            trained[seed] = _train(config)
        except TrainingFailed as error:
            failed.append(error)
    if not trained:
        raise failed[0]
    return Trained(configs[best_seed(trained, greater_is_better=greater_is_better)], trained)


def named_after(study: RunConfig, best: RunConfig) -> RunConfig:
    """Return a winner's configuration whose runs have the name of the study, if that is set.

    So the same settings are another run in the next study, which may have other data.
    """
    return best.model_copy(update={"run": study.run})


def on_seed(best: RunConfig, seed: int, compared: int) -> RunConfig:
    """Return the configuration of a winner's run on one seed.

    Each seed is a run of its own, named by its configuration, after `best.run` if that is set.
    """
    config = best.model_copy(
        update={
            "run": None,
            "training": best.training.model_copy(update={"seed": seed}),
            "gate": best.gate.model_copy(update={"compared": compared}),
        }
    )
    if best.run is None:
        return config
    run = f"{best.run[:_LONGEST_PREFIX]}-{config.digest()[:8]}"
    return config.model_copy(update={"run": run})


def best_seed(trained: Mapping[int, TrainRecord], *, greater_is_better: bool) -> int:
    """Return the seed with the best validation score, the first one if several have it."""
    sign = 1 if greater_is_better else -1
    return max(trained, key=lambda seed: sign * trained[seed].best_score)


def _train(config: RunConfig) -> TrainRecord:
    # Each step imports its libraries only when it is reached: bad input shows at once.
    from steadytrain.components.preprocess.step import run as preprocess
    from steadytrain.components.train.recovery.takeover import begin_run
    from steadytrain.components.train.step import run_stage

    begin_run(config)
    return run_stage(config, preprocess(config))
