"""Mistakes that the tests have to notice, one hunk each in a `.diff` file for each room.

    python -m test.mutants              from the root of the repository: all rooms
    python -m test.mutants linalg       one room

A mutant is a unified diff of a few lines without numbers: a file below `curvlinops_plus/`, then the
lines. It is applied to a copy, and the tests that reach the changed function run until one fails.
Who adds a mechanism adds the mistakes that one could make in it; who removes one removes its
mutants.
"""
