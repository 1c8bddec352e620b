"""Checks the suite that a run says it is a part of."""

from __future__ import annotations

import re
from pathlib import Path

from kvbench.errors import UserError
from kvbench.leaderboard.submission.outcome import RefusedError, flag, ok, quote
from kvbench.leaderboard.submission.records import Check
from kvbench.leaderboard.verification.lookup import skeleton
from kvbench.registry import list_entries
from kvbench.runs.spec import RunSpec
from kvbench.sweep.suite import list_suites

LABEL = re.compile(r"([a-z0-9][a-z0-9-]*)@([A-Za-z0-9.]+)")


def check_suite(spec: RunSpec) -> Check:
    """Compare a run with the suite of that name. A suite from a file of the submitter's own is a label, and flagged.

    Raises:
        RefusedError: the suite has no such run, or its name is none or can be taken for that of a suite of kvbench.
    """
    found = LABEL.fullmatch(spec.suite or "")
    if found is None:
        raise RefusedError("suite", f"its suite {quote(spec.suite)} is not NAME@VERSION")
    name, version = found.groups()
    known = {x.name: x for x in list_suites()}
    if name not in known:
        alike = next((x for x in known if skeleton(x) == skeleton(name)), None)
        if alike is not None:
            raise RefusedError("suite", f"its suite {quote(name)} can be taken for the suite {alike}")
        return flag("suite", f"suite {quote(spec.suite)} is not one of kvbench's: a label of the submitter's")
    if version != known[name].version:
        return flag("suite", f"suite {quote(spec.suite)} has version {known[name].version} here: not compared")
    asked = {
        "method": "full", "length": spec.task.length, "turns": spec.turns, "mode": spec.mode, "samples": spec.samples,
        "split": spec.split,
    }
    names = [y for x in list_entries("task") if x.name == spec.task.name for y in x.names]
    reasons = []
    for task in names:
        try:
            known[name].cells({**asked, "task": task}, Path("runs"))
        except UserError as error:
            reasons.append(str(error).partition(" To change")[0])
        else:
            return ok("suite", f"a run of suite {spec.suite}")
    reason = reasons[0] if reasons else f"task {quote(spec.task.name)} is not registered here"
    raise RefusedError("suite", f"the run is none of {spec.suite}: {reason}")
