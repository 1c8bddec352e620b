"""The command line. Results go to standard output, log lines and errors to standard error."""

from __future__ import annotations

import errno
import functools
import io
import os
import re
import signal
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from typing import Annotated, Any

import typer

from kvbench import __version__
from kvbench.cli import (
    answers,
    bench,
    check,
    compare,
    doctor,
    explain,
    leaderboard,
    models,
    query,
    report,
    reproduce,
    run,
    score,
    show,
    submit,
    suggest,
    sweep,
    trace,
)
from kvbench.cli.output import echo
from kvbench.collector import collect_rarely
from kvbench.errors import UserError, describe_error, find_own_line, unknown
from kvbench.log import say

# Newer versions of typer contain their own click; its base exception is reached through a class that typer exports.
CLICK_ERROR: type[Exception] = next(x for x in typer.BadParameter.__mro__ if x.__name__ == "ClickException")
INTERRUPTED = 130
RESUMED = ("run", "sweep", "reproduce", "explain")
"""Commands that save samples and continue when they are called again."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
AGAIN = "Run the same command to continue: saved samples are kept."

app = typer.Typer(
    name="kvbench", add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        echo(f"kvbench {__version__}")
        raise typer.Exit


@app.callback()
def callback(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A benchmark harness for KV-cache techniques of language models."""


app.command("run")(run.run_command)
app.command("sweep")(sweep.sweep_command)
app.command("list")(show.list_command)
app.command("show")(show.show_command)
app.command("doctor")(doctor.doctor_command)
app.command("check")(check.check_command)
app.command("score")(score.score_command)
app.command("answers")(answers.answers_command)
app.command("compare")(compare.compare_command)
app.command("bench")(bench.bench_command)
app.command("plan")(bench.plan_command)
app.command("report")(report.report_command)
app.command("suggest")(suggest.suggest_command)
app.command("query")(query.query_command)
app.command("reproduce")(reproduce.reproduce_command)
app.command("explain")(explain.explain_command)
app.command("submit")(submit.submit_command)
app.add_typer(leaderboard.app, name="leaderboard")
app.add_typer(models.app, name="models")
app.add_typer(trace.app, name="trace")


class _Announcer(MetaPathFinder):
    """Says when the import of torch begins, which takes seconds; it looks at every import and finds nothing."""

    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname == "torch":
            sys.meta_path.remove(self)
            collect_rarely()  # until kvbench.hf is imported
            say("importing torch and transformers, which takes seconds ...")


def main() -> None:
    """Entry point of the `kvbench` command."""
    sys.meta_path.insert(0, _Announcer())
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an arrow that the locale lacks must not end a finished run
    # On a busy CPU, OpenMP threads that spin while waiting cost up to thirty times the work itself. OpenMP reads this
    # variable when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if _is_resumed(sys.argv[1:]):
        signal.signal(signal.SIGTERM, _terminate)
    sys.exit(call(sys.argv[1:]))


def _is_resumed(arguments: Sequence[str]) -> bool:
    return bool(arguments) and arguments[0] in RESUMED


def _terminate(*_: object) -> None:
    """End by SIGTERM, as without this handler, but say that nothing is lost, and end the workers of a sweep."""
    os.write(2, f"\nkvbench: terminated. {AGAIN}\n".encode())
    if (multiprocessing := sys.modules.get("multiprocessing")) is not None:
        for worker in multiprocessing.active_children():
            worker.terminate()  # it would finish its sample first, and hold the lock of the run's folder
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def call(arguments: Sequence[str]) -> int:
    """Run a command line.

    Returns:
        The exit code: 0 success, 1 failure with a printed reason, 2 bad input, 3 GPU lost, 130 interrupted.
    """
    try:
        return _run(arguments)
    except Exception as error:
        if not find_own_line(error):
            raise
        return _stop(f"{describe_error(error)}. Correct the file; `kvbench check` of it tries every invariant.", 2)


def _run(arguments: Sequence[str]) -> int:
    try:
        code = _command().main(list(arguments), prog_name="kvbench", standalone_mode=False)
    except UserError as error:
        return _stop(str(error), getattr(error, "exit_code", 2))
    except CLICK_ERROR as error:
        return _stop(_explain(error), 2)
    except OSError as error:
        if error.errno in FULL and error.filename is None:  # of a table or a line, to a file on a full disk
            next_step = AGAIN if _is_resumed(arguments) else "Free space, or write it elsewhere."
            return _stop(f"the output cannot be written: {error.strerror}. {next_step}", 1)
        if error.errno != errno.ENAMETOOLONG:
            raise
        name = max(str(error.filename).split("/"), key=len)
        return _stop(f"'{name[:40]}...' ({len(name)} characters) is too long for the name of a file or folder.", 2)
    except RuntimeError as error:  # pathlib's, of a path such as ~name/file
        if "home directory" not in str(error):
            raise
        found = re.search(r"(?<![^\s=])~[^\s/]*", " ".join(arguments))
        return _stop(f"there is no home folder '{found[0] if found else '~'}'. Give the path without ~.", 2)
    except typer.Abort:  # Ctrl-C with older versions of typer; newer ones return the code
        code = INTERRUPTED
    if code == INTERRUPTED:
        return _stop(f"interrupted. {AGAIN}" if _is_resumed(arguments) else "interrupted.", code)
    return code if isinstance(code, int) else 0


@functools.cache  # building it takes longer than a short command
def _command() -> Any:
    return typer.main.get_command(app)


def _stop(message: str, code: int) -> int:
    echo(f"kvbench: {message}", err=True)
    return code


def _explain(error: Exception) -> str:
    """A click error in one line, with the nearest valid name and a hint."""
    context: Any = getattr(error, "ctx", None)
    if context is None:
        return str(error)
    message = " ".join(error.format_message().split())  # type: ignore[attr-defined]  # every click error has it
    found: Any = getattr(error.__cause__, "errors", list)()
    if found:  # pydantic's, of newer versions of typer: without the value
        message = message.replace("Invalid value", f"Invalid value '{found[0]['input']}'", 1)
    if message.startswith("No such command"):
        return str(unknown("command", message.split("'")[1], context.command.list_commands(context)))
    if message.startswith("No such option"):
        options = [name for x in context.command.params for name in x.opts if name.startswith("--")]
        return str(unknown("option", message.split()[3].rstrip("."), options, f"See `{context.command_path} --help`."))
    return f"{message.rstrip('.')}. See `{context.command_path} --help`."
