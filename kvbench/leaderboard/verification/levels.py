"""Levels L1 to L3: reruns a bundle that passed L0, and adds the checks to its findings."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.errors import UserError
from kvbench.leaderboard.submission.outcome import RefusedError, flag
from kvbench.leaderboard.verification.fresh_seed import run_fresh_seed
from kvbench.leaderboard.verification.lookup import UnverifiableError
from kvbench.leaderboard.verification.rerun import draw_samples, rerun
from kvbench.leaderboard.verification.rerun_job import load_rerun_model
from kvbench.leaderboard.verification.verify import CheckedBundle

if TYPE_CHECKING:
    from kvbench.runs.progress import Progress

MIN_SECRET = 16
"""Minimum characters of a secret, so that it cannot be guessed."""


def rerun_levels(
    found: CheckedBundle, share: float, seed: int, secret: str | None,
    show_progress: Callable[[int], AbstractContextManager[Progress]],
) -> None:
    """Rerun a bundle that was not refused, and add the checks to its findings.

    share: of the samples. seed: draws the samples. secret: determines the fresh seed of L3, which includes L2; None: no
    run under a fresh seed.
    """
    bundle = found.bundle
    if bundle is None or found.level is None:
        return
    check = "rerun"
    try:
        model = load_rerun_model(bundle.spec)
        wanted = draw_samples(bundle.spec.samples, share, seed)
        with show_progress(len(wanted)) as progress:
            found.rerun, score, checks = rerun(bundle, model, wanted, seed, progress)
        found.checks += checks
        if any(x.outcome == "refused" for x in checks):
            return
        found.score = score
        check = "hidden"
        if secret is not None:
            found.hidden, concluded = run_fresh_seed(bundle, model, secret, show_progress)
            found.checks.append(concluded)
    except UnverifiableError as error:
        found.checks.append(flag(check, f"not run: {error}"))
    except RefusedError as error:
        found.checks.append(error.check)


def read_share(text: str) -> float:
    """Parse a percentage: `10%` gives 0.1.

    Raises:
        UserError: not a percentage above 0 and up to 100.
    """
    try:
        value = float(text.removesuffix("%")) / 100 if text.endswith("%") else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise UserError(f"--share {text} must be a percentage above 0% and up to 100%: 10% for L1, 100% for L2.")
    return value


def read_secret(where: str) -> str:
    """Read the secret of the fresh seed from a file, or from an environment variable given as `env:NAME`.

    Raises:
        UserError: it cannot be read, or is too short.
    """
    name = where.removeprefix("env:")
    try:
        found = os.environ.get(name, "") if where.startswith("env:") else Path(where).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--hidden-seed {where} cannot be read: {error}. Give a file, or env:NAME.") from error
    if where.startswith("env:") and name not in os.environ:
        raise UserError(f"--hidden-seed {where}: the variable {name} is not set. Set it, or give a file.")
    if len(found.strip()) < MIN_SECRET:
        raise UserError(f"--hidden-seed {where} holds fewer than {MIN_SECRET} characters: others could guess it.")
    return found.strip()
