"""How ranks share the training state: replicated, or split into shards."""
