"""`python -m kvbench.integrations.lmeval`: lm_eval's command line with the model `kvbench` registered."""

from __future__ import annotations

import os
import sys

from kvbench.errors import UserError
from kvbench.log import say
from kvbench.machine import load_extra


def main() -> int:
    """Register the model and run lm_eval's command line; exit codes are those of `kvbench`."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as kvbench.cli does, before torch is imported
    try:
        command = load_extra("lm_eval.__main__", extra="lm-eval", what="kvbench.integrations.lmeval")
        import kvbench.integrations.lmeval.model  # noqa: F401  # registers itself

        command.cli_evaluate()
    except UserError as error:
        say(f"kvbench: {error}")
        return getattr(error, "exit_code", 2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
