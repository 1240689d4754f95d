"""The trainers that `model.framework` names for series."""

from steadytrain.components.series.boosting import BoostingLearner
from steadytrain.components.series.learner import StatisticalLearner
from steadytrain.components.train.framework import LearnerTrainer

STATSFORECAST = LearnerTrainer(StatisticalLearner)
MLFORECAST = LearnerTrainer(BoostingLearner)
