"""What a cross-validation shows: scores on each fold, comparisons, and predictions."""
