"""The parts of every train_with_transformers.py: `common`, and classes for each kind of row.

transformers_script.py makes one file of a kind's class, of what it uses of this package, and of
the run's values. Nothing else imports these modules.
"""
