"""The trainers that `model.framework` names for tables."""

from steadytrain.components.tabular.learners import pytorch, sklearn
from steadytrain.components.tabular.learners.catboost import CatBoostLearner
from steadytrain.components.tabular.learners.keras import JaxLearner, TensorFlowLearner
from steadytrain.components.tabular.learners.lightgbm import LightGBMLearner
from steadytrain.components.tabular.learners.xgboost import XGBoostLearner
from steadytrain.components.train.framework import LearnerTrainer, ensemble

CATBOOST = LearnerTrainer(CatBoostLearner)
ENSEMBLE = LearnerTrainer(ensemble.learner)
JAX = LearnerTrainer(JaxLearner)
LIGHTGBM = LearnerTrainer(LightGBMLearner)
SKLEARN = LearnerTrainer(sklearn.learner, ("sklearn.ensemble", "sklearn.linear_model"))
PYTORCH = LearnerTrainer(pytorch.learner, ("steadytrain.components.tabular.learners.torch_tables",))
TENSORFLOW = LearnerTrainer(TensorFlowLearner)
XGBOOST = LearnerTrainer(XGBoostLearner)
