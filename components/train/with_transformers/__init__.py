"""The parts of every train_with_transformers.py: `common`, and a module for each kind of row.

transformers_script.py makes one file of a kind's module, of what it uses of `common` and of the
rest of this package, and of the run's values. Nothing else imports these modules.
"""
