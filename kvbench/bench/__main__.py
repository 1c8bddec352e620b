"""Print saved bench files: `python -m kvbench.bench [--brief] FILE...`; --brief prints one line per time."""

from __future__ import annotations

import sys
from pathlib import Path

from kvbench.analysis.formatting import print_table
from kvbench.bench.records import Bench
from kvbench.bench.table import describe, list_lines, make_tables
from kvbench.errors import UserError
from kvbench.log import printable, say
from kvbench.runs.files import read_file


def main(arguments: list[str]) -> int:
    """Print the cells of every file."""
    brief = arguments[:1] == ["--brief"]
    files = arguments[brief:]
    if not files or not all(Path(x).is_file() for x in files):
        wrong = "no file" if not files else f"no file {next(x for x in files if not Path(x).is_file())}"
        say(f"kvbench: {wrong}. Usage: python -m kvbench.bench [--brief] FILE..., files of `kvbench bench --out`.")
        return 2
    try:
        for path in files:
            bench = read_file(Path(path), Bench)
            title = f"{path}, {bench.status}: {describe(bench)}"
            if brief:
                sys.stdout.write(printable("\n".join([title, *list_lines(bench), ""])))
            else:
                sys.stdout.write(printable(f"{title}\n"))
                for table in make_tables(bench):
                    print_table(*table)
    except UserError as error:
        say(f"kvbench: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
