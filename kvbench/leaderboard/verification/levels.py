"""Beyond L0: what a verifier runs of a bundle that passed, and the level that it comes to."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.errors import UserError
from kvbench.leaderboard.verification.fresh_seed import run_hidden
from kvbench.leaderboard.verification.lookup import StrangerError
from kvbench.leaderboard.verification.outcome import RefusedError, flag
from kvbench.leaderboard.verification.rerun import draw, rerun
from kvbench.leaderboard.verification.runnable import load_again
from kvbench.leaderboard.verification.verify import Findings

if TYPE_CHECKING:
    from kvbench.runs.runner import Progress

SHORTEST = 16
"""Characters of a secret, so that nobody finds it by trying."""


@dataclass(frozen=True)
class Wish:
    """What to run."""

    share: float | None
    """Of the samples, again; None: none."""
    seed: int
    """That draws them."""
    secret: str | None
    """That makes a fresh seed; None: no such run."""


def raise_level(found: Findings, wish: Wish, show_progress: Callable[[int], AbstractContextManager[Progress]]) -> None:
    """Run what is wished of a bundle that was not refused, and add what came of it."""
    bundle = found.bundle
    if bundle is None or found.level is None:
        return
    check = "rerun"
    try:
        model = load_again(bundle.spec)
        if wish.share is not None:
            wanted = draw(bundle.spec.samples, wish.share, wish.seed)
            with show_progress(len(wanted)) as progress:
                found.rerun, checks = rerun(bundle, model, wanted, wish.seed, progress)
            found.checks += checks
        check = "hidden"
        if wish.secret is not None:
            with show_progress(bundle.spec.samples) as progress:
                found.hidden, concluded = run_hidden(bundle, model, wish.secret, progress)
            found.checks.append(concluded)
    except StrangerError as error:
        found.checks.append(flag(check, f"{error}: it was not run again"))
    except RefusedError as error:
        found.checks.append(error.verdict)


def read_share(text: str) -> float:
    """`10%` as 0.1.

    Raises:
        UserError: not a percentage above 0.
    """
    try:
        value = float(text.removesuffix("%")) / 100 if text.endswith("%") else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise UserError(f"--share {text} must be a percentage above 0%, such as 10%, or 100% for a full rerun.")
    return value


def read_secret(where: str) -> str:
    """The secret of hidden seeds, from a file or, as `env:NAME`, from an environment variable.

    Raises:
        UserError: there is none, or it is too short.
    """
    name = where.removeprefix("env:")
    try:
        found = os.environ.get(name, "") if where.startswith("env:") else Path(where).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--hidden-seed {where} cannot be read: {error}. Give a file, or env:NAME.") from error
    if len(found.strip()) < SHORTEST:
        raise UserError(f"--hidden-seed {where} holds fewer than {SHORTEST} characters: others could guess it.")
    return found.strip()
