"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON line, last on standard output.")]
Out = Annotated[Path, typer.Option(help="Folder in which run ids are looked up.")]
Baseline = Annotated[str | None, typer.Option(
    help="Method or id of the run that the others are compared with. Default: the full cache."
)]
