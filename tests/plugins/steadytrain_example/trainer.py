"""A trainer for `model.framework: token_counts`: stochastic gradient descent on token counts."""

from __future__ import annotations

import numpy as np

from steadytrain.components.tasks.encoding.tokens import load_tokenizer
from steadytrain.components.train.framework import Learned, LearnerTrainer
from steadytrain_example.task import TokenCountsPackager
from steadytrain_example.token_counts import counts, log_chances, new_classifier

_RATE = 1.0
_EVALUATED_AT_ONCE = 256


class TokenCountsLearner:
    """Learns from rows of `input_ids` and `label`.

    `model.config.alpha` is the strength of the penalty on the weights.
    """

    metric, greater_is_better = "loss", False

    def __init__(self, config, data):
        self.packager = TokenCountsPackager(config, data)
        self.rate = config.training.learning_rate or _RATE
        self.tokens = len(load_tokenizer(data.path(data.tokenizer)))
        self.model = new_classifier(
            len(data.labels),
            self.tokens,
            rate=self.rate,
            alpha=config.model.config.get("alpha", 1e-5),
        )
        self.parameters = self.model.coef_.size + self.model.intercept_.size

    def learn(self, rows, *, learning_rate_scale):
        features, labels = self._inputs(rows)
        loss = float(_losses(self.model, features, labels).mean())
        self.model.eta0 = self.rate * learning_rate_scale
        self.model.partial_fit(features, labels)
        return Learned(loss, learning_rate=self.model.eta0)

    def validate(self, rows):
        losses, hits, part = [], [], []

        def evaluate():
            features, labels = self._inputs(part)
            losses.extend(_losses(self.model, features, labels))
            hits.extend(self.model.predict(features) == labels)
            part.clear()

        for row in rows:
            part.append(row)
            if len(part) == _EVALUATED_AT_ONCE:
                evaluate()
        if part:
            evaluate()
        return {"loss": float(np.mean(losses)), "accuracy": float(np.mean(hits))}

    def state(self):
        model = self.model
        return {"coef": model.coef_, "intercept": model.intercept_, "t": np.array(model.t_)}

    def restore(self, state):
        self.model.coef_, self.model.intercept_ = state["coef"], state["intercept"]
        self.model.t_ = float(state["t"])

    def export(self, folder):
        self.packager.export(self.model, folder)

    def _inputs(self, rows):
        texts, labels = zip(*((row["input_ids"], int(row["label"])) for row in rows), strict=True)
        return counts(texts, self.tokens), np.array(labels)


def _losses(model, features, labels):
    return -log_chances(model, features)[np.arange(len(labels)), labels]


TOKEN_COUNTS = LearnerTrainer(TokenCountsLearner)
