"""Evaluation, gate, registration and promotion in one step, for fewer pods."""
