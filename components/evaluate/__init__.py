"""Judging the trained model, and the gate."""
