"""The smallest trainer: Naive Bayes on token counts."""

import numpy as np

from steadytrain.components.train.framework import Learned, LearnerTrainer


class NaiveBayes:
    """Counts which tokens occur in the texts of each class."""

    metric, greater_is_better = "accuracy", True

    def __init__(self, config, data):
        self.counts = np.ones((len(data.labels), config.model.vocab_size))
        self.parameters = self.counts.size

    def learn(self, rows, *, learning_rate_scale):
        loss = -np.mean([self._log_chances(row)[row["label"]] for row in rows])
        for row in rows:
            np.add.at(self.counts[row["label"]], row["input_ids"], learning_rate_scale)
        return Learned(loss=float(loss), learning_rate=learning_rate_scale)

    def validate(self, rows):
        hits = [self._log_chances(row).argmax() == row["label"] for row in rows]
        return {"accuracy": float(np.mean(hits))}

    def state(self):
        return {"counts": self.counts}

    def restore(self, state):
        self.counts = state["counts"]

    def export(self, folder):
        np.save(folder / "counts.npy", self.counts)

    def _log_chances(self, row):
        shares = self.counts / self.counts.sum(axis=1, keepdims=True)
        scores = np.log(shares[:, row["input_ids"]]).sum(axis=1)
        return scores - np.logaddexp.reduce(scores)


NAIVE_BAYES = LearnerTrainer(NaiveBayes)
