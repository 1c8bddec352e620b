"""Grids of runs: a file of cells, what each comes to, and who runs them (docs/sweeps.md).

Nothing in this room can change what a sample comes to: a cell is one `kvbench run`.
"""
