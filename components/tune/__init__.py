"""Hyperparameter tuning: a study of training runs that survives its driver."""
