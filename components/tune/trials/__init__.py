"""Trials: training runs of a study that stop at a step and continue from there."""
