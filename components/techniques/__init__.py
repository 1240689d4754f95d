"""One folder for each technique.

Its `__init__.py` has the settings, and the rules about what they cannot be combined with. What the
loss or the loop calls is next to it, and `page.md` is its page in the documentation. A folder is
found by being here.
"""
