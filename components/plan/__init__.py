"""The planner: memory, time and cost of a training run, and the GPUs to choose from."""
