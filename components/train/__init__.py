"""Training that finishes: plan, attempts, recovery, and the loop on each rank."""
