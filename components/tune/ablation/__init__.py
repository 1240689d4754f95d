"""What an ablation shows: the effect of each change, with its uncertainty."""
