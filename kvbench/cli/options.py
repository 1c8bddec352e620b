"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="End standard output with one JSON line.")]
Out = Annotated[Path, typer.Option(help="Folder of runs, where a run is given by its id.")]
