"""AutoML: a portfolio of configurations on folds, an ensemble of them, and one honest board."""
