"""`kvbench doctor`: check that this machine can run kvbench."""

from __future__ import annotations

from kvbench.cli.options import Json
from kvbench.cli.output import print_json


def doctor_command(*, as_json: Json = False) -> int:
    """Check Python, packages, hardware, disk and bundled models. Exit code 1 if something is wrong."""
    from kvbench.analysis.formatting import print_table
    from kvbench.cli.probes import examine

    findings = examine()
    print_table("", ("check", "", "found"), [(x.name, "ok" if x.ok else "WRONG", x.found) for x in findings])
    if as_json:
        print_json([{"name": x.name, "ok": x.ok, "found": x.found} for x in findings])
    return 0 if all(x.ok for x in findings) else 1
