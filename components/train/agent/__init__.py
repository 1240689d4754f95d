"""The agent: a program that runs an attempt's ranks, one agent per node, and reports on them."""
