"""Import optional packages, with an error that names the extra to install."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from kvbench.errors import UserError


def load_extra(module: str, *, extra: str, what: str) -> Any:
    """Import a module of an optional package, without the warnings of its import.

    what: the feature that needs it, as the subject of the error message.

    Raises:
        UserError: it cannot be imported.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0].replace("_", "-")
        raise UserError(
            f"{what} needs the package {package} ({error}). Install it: pip install 'kvbench[{extra}]'"
        ) from error
