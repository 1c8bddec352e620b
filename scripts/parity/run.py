"""`make parity`: builds an environment with kvpress, runs both sides on the same prompts, and writes docs/parity.md.

An argument is an extra package index, for a build of torch without CUDA.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cases import KVPRESS, MODELS
from compare import write_page

from kvbench.errors import UserError
from kvbench.hf.find import find_folder
from kvbench.machine import cache_folder, find_version

HERE = Path(__file__).parent
NEEDS = ("transformers<5.3",)
"""Of kvpress, which does not say so."""


def main() -> None:
    """Everything; a model that is absent is named before anything is installed."""
    try:
        for name in MODELS:
            find_folder(name)
    except UserError as error:
        sys.exit(str(error))
    python = build_environment(cache_folder() / "parity" / f"kvpress-{KVPRESS}", sys.argv[1:])
    alone = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, HERE / "ours.py", folder], check=True)
        subprocess.run([python, HERE / "theirs.py", folder], check=True, env=alone)
        write_page(Path(folder), HERE.parent.parent / "docs" / "parity.md")


def build_environment(folder: Path, indexes: list[str]) -> Path:
    """The interpreter of an environment with kvpress and this environment's torch; built once."""
    python, made = folder / "bin" / "python", folder / "made"
    if not made.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        torch = str(find_version("torch")).partition("+")[0]
        options = [x for index in indexes for x in ("--extra-index-url", index)]
        subprocess.run(
            [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--retries", "2", *options,
             f"torch=={torch}", f"kvpress=={KVPRESS}", *NEEDS],
            check=True,
        )
        made.touch()
    return python


if __name__ == "__main__":
    main()
