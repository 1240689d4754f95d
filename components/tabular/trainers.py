"""The trainers that `model.framework` names for tables."""

from steadytrain.components.tabular.learners import sklearn
from steadytrain.components.tabular.learners.lightgbm import LightGBMLearner
from steadytrain.components.train.framework import LearnerTrainer

LIGHTGBM = LearnerTrainer(LightGBMLearner)
SKLEARN = LearnerTrainer(sklearn.learner, ("sklearn.ensemble", "sklearn.linear_model"))
