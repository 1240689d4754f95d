"""Evaluation of the trained model, and the gate."""
