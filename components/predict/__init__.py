"""Batch prediction: a model of the registry, records of any format, predictions and refusals."""
