"""Sweeps: grids of runs from one file, executed on local workers or on Ray (docs/sweeps.md).

Each cell of a sweep is one `kvbench run` with the same results.
"""
