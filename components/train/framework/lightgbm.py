"""Trees of LightGBM for learners that add some in each step, from the raw outputs so far."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from steadytrain.components.shared.config import ComputeConfig

Array = npt.NDArray[np.float64]
SETTINGS: Final = (
    *("num_leaves", "max_depth", "min_data_in_leaf", "max_bin"),
    *("lambda_l1", "lambda_l2", "min_gain_to_split", "bagging_fraction", "bagging_freq"),
    *("feature_fraction", "extra_trees", "path_smooth", "linear_tree", "min_sum_hessian_in_leaf"),
)
"""What `model.config` may say about trees of any data without categories."""
ROUNDS: Final = 10
"""Trees that a step adds."""
RATE: Final = 0.1
_LARGE: Final = 1_000_000
"""Values of a matrix from which a learner uses several threads."""


def threads_for(values: int, compute: ComputeConfig) -> int:
    """Return how many threads learn from a matrix of that many values.

    Threads that wait for each other are slower than one on a small table. A trial that runs next to
    others has its share of the cores in `compute.threads_per_rank`.
    """
    share = compute.threads_per_rank or len(os.sched_getaffinity(0))
    return share if values > _LARGE else 1


def exact(*, seed: int, step: int, rate: float, threads: int) -> dict[str, Any]:
    """Return the settings by which the trees of a step are the same in any attempt."""
    return {
        "learning_rate": rate,
        "num_threads": threads,
        "seed": seed + step,
        "data_random_seed": seed,
        "deterministic": True,
        "force_row_wise": True,
        "boost_from_average": False,
        "verbosity": -1,
    }


def next_trees(settings: dict[str, Any], binned: Any, raw: Array, rounds: int) -> bytes:
    """Return the trees of the next step, as text.

    Args:
        binned: lightgbm.Dataset that keeps its raw data.
        raw: outputs of the trees before: (rows, outputs).

    Raises:
        lightgbm.basic.LightGBMError: LightGBM refuses a setting.
    """
    import lightgbm

    binned.set_init_score(raw.ravel(order="F"))
    text: str = lightgbm.train(settings, binned, num_boost_round=rounds).model_to_string()
    return text.encode()


def added(part: bytes, threads: int, *matrices: Array) -> tuple[int, list[Array]]:
    """Return the number of leaves of a step's trees, and what they add: (rows, outputs) of each.

    They are read again, so that those from a checkpoint give the same bits.
    """
    import lightgbm

    text = part.decode()
    booster = lightgbm.Booster(model_str=text)
    leaves = sum(map(int, re.findall(r"^num_leaves=(\d+)$", text, re.MULTILINE)))
    return leaves, [_raw(booster, matrix, threads) for matrix in matrices]


def _raw(booster: Any, matrix: Array, threads: int) -> Array:
    if not len(matrix):
        return np.zeros((0, booster.num_model_per_iteration()))
    raw = booster.predict(matrix, raw_score=True, num_threads=threads)
    return np.asarray(raw, dtype=np.float64).reshape(len(matrix), -1)


def merged(texts: Sequence[str]) -> Any:
    """Return one lightgbm.Booster with the trees of several, in their order."""
    import lightgbm
    from lightgbm.basic import _LIB, _safe_call

    whole, *before = [lightgbm.Booster(model_str=text) for text in reversed(texts)]
    for booster in before:
        # LightGBM puts the other one's trees first.
        _safe_call(_LIB.LGBM_BoosterMerge(whole._handle, booster._handle))
    return whole
