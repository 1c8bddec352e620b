"""`kvbench doctor`: check that this machine can run kvbench."""

from __future__ import annotations

from dataclasses import asdict

from kvbench.cli.options import Json
from kvbench.cli.output import print_json


def doctor_command(*, as_json: Json = False) -> int:
    """Check Python, packages, hardware, disk and bundled models.

    It says what is slow or missing here. Exit code 1 if something is wrong.
    """
    from kvbench.analysis.formatting import print_table
    from kvbench.cli.probes import examine

    findings = examine()
    print_table("", ("check", "", "found"), [
        (x.name, x.state, x.found if x.hint is None else f"{x.found}: {x.hint}") for x in findings
    ])
    if as_json:
        print_json([asdict(x) for x in findings])
    return 0 if all(x.ok for x in findings) else 1
