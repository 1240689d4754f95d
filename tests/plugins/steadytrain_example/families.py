"""A family of models that searches try, too."""

from steadytrain.components.automl.portfolio import Family
from steadytrain.components.shared.config import Dimension

STUMPS = Family(
    "lightgbm",
    {"model_type": "lightgbm", "rounds_per_step": 10, "num_leaves": 2},
    {"stumps": (1, {"learning_rate": 0.1})},
    package="lightgbm",
    max_steps=50,
    space={"learning_rate": Dimension(low=0.02, high=0.3, log=True)},
)
