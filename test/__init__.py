"""A package, so that `python -m test.fuzz` finds this folder and not the package `test` of Python
itself.
"""
