"""Python's garbage collector, which start-up keeps from searching 400,000 objects that live as long as the process.

torch and transformers bring them. Searching them again and again takes an eighth of the CPU time until a run begins,
and a quarter of a second in each full collection after it.
"""

from __future__ import annotations

import atexit
import gc

RARELY = 100_000
"""New objects until the collector searches them, while packages are imported."""
_usual = gc.get_threshold()


def collect_rarely() -> None:
    """Let the collector search rarely from now on."""
    gc.set_threshold(RARELY, *_usual[1:])


def collect_as_usual() -> None:
    """Let the collector work as usual, but leave out all present objects.

    At exit it has them back: the libraries look for leaks then.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)
    gc.set_threshold(*_usual)
