"""Training with another framework than PyTorch: the author writes a Learner, and gets the rest."""

from steadytrain.components.train.framework.learner import Learned, Learner
from steadytrain.components.train.framework.trainer import LearnerTrainer

__all__ = ["Learned", "Learner", "LearnerTrainer"]
