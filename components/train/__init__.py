"""Fault-tolerant training: the step, its attempts, recovery, and the loop on each rank."""
