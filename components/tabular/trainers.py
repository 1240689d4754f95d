"""The trainers that `model.framework` names for tables."""

from steadytrain.components.tabular.learners import LightGBMLearner, LinearLearner
from steadytrain.components.train.framework import LearnerTrainer

LIGHTGBM = LearnerTrainer(LightGBMLearner)
SKLEARN = LearnerTrainer(LinearLearner)
