"""A package, so that `python -m test.fuzz` finds this folder and not the package `test` of Python
itself.
"""

from test.gpu import emulator

if emulator.is_wanted() and not emulator.is_installed():
    emulator.install()
