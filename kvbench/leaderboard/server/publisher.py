"""The thread that copies accepted bundles into the results folder and rebuilds the site."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import threading
from pathlib import Path

from kvbench.leaderboard.server.state import State
from kvbench.leaderboard.server.submissions import list_submissions
from kvbench.leaderboard.server.tables import Database, Status, Submission
from kvbench.leaderboard.submission.archive import TRASH, read_files, write_folder
from kvbench.leaderboard.submission.bundle import open_head
from kvbench.leaderboard.submission.outcome import RefusedError
from kvbench.leaderboard.submission.records import VERIFICATION, Verification
from kvbench.leaderboard.submission.seal import seal
from kvbench.log import say
from kvbench.runs.files import SaveError

BUILD = "import sys; from kvbench.cli import call; sys.exit(call(sys.argv[1:]))"
REMOVED = (Status.WITHDRAWN, Status.SUPERSEDED)
RETRY_S = 10.0
"""Seconds until the next attempt after a failure, for example while another process builds the site."""
PUBLISHING = threading.Lock()
"""Held while folders of the results are replaced."""


class Publisher(threading.Thread):
    """Publishes when it starts, and whenever a verification ends or a submission is withdrawn."""

    def __init__(self, database: Database, state: State) -> None:
        super().__init__(name="publisher", daemon=True)
        self._database, self._state = database, state
        self._stopped, self._woken = threading.Event(), threading.Event()
        self._build: subprocess.Popen[bytes] | None = None

    def wake(self) -> None:
        """Signal that something changed."""
        self._woken.set()

    def publish(self) -> None:
        """Change the results before anything else is verified or sent again; the thread builds the site.

        Else a copy of an accepted run would pass, and a withdrawn run that is sent again and refused would stay.
        """
        self.wake()
        with contextlib.suppress(OSError):  # the thread tries again and prints the error
            publish_accepted(self._database, self._state)

    def stop(self) -> None:
        """Stop the thread and kill a running build; the old site stays."""
        self._stopped.set()
        self.wake()
        if self._build is not None:
            self._build.kill()
        self.join()

    def run(self) -> None:
        """Publish after each change, until stopped."""
        while not self._stopped.is_set():
            self._woken.clear()
            done = False
            try:
                publish_accepted(self._database, self._state)
                done = self._build_site()
            except Exception as error:  # noqa: BLE001  # errors of the database or the disk may pass
                say(f"publishing: {type(error).__name__}: {error}.")
            self._woken.wait(None if done else RETRY_S)

    def _build_site(self) -> bool:
        """Build the site in a separate process, so that drawing charts does not delay requests."""
        command = [sys.executable, "-c", BUILD, "leaderboard", "build", str(self._state.results), "-o"]
        self._build = subprocess.Popen(  # noqa: S603  # our own command
            [*command, str(self._state.site)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, process_group=0,  # Ctrl-C stops us, and we stop it
        )
        _, log = self._build.communicate()
        if self._build.returncode and not self._stopped.is_set():
            say(f"the site was not built: {log.decode(errors='replace').strip()}")
        return self._build.returncode == 0


def publish_accepted(database: Database, state: State) -> None:
    """Copy accepted bundles with their verification to the results; remove withdrawn and superseded ones."""
    with PUBLISHING:
        _publish(database, state)


def _publish(database: Database, state: State) -> None:
    for x in list_submissions(database):
        folder = state.results / x.submitter / x.run_id
        if x.status in REMOVED and _find_identity(folder) == x.id:
            _remove(folder)
    for x in list_submissions(database):
        folder = state.results / x.submitter / x.run_id
        if x.status is not Status.ACCEPTED or _find_identity(folder) == x.id:
            continue
        if _is_curated(folder):
            say(f"{folder} is a curated run and is kept: submission {x.id} has the same folder and is not shown.")
            continue
        try:
            files = _gather(state, x)
        except RefusedError as error:
            say(f"submission {x.id} is not shown: its bundle is damaged: {error}.")
            continue
        try:
            _remove(folder)
            write_folder(files, folder)
        except (SaveError, OSError) as error:  # such as a submitter with the name of a file
            say(f"submission {x.id} is not shown: {error}")


def _gather(state: State, found: Submission) -> dict[str, bytes]:
    assert found.verification is not None, "an accepted submission was verified"
    record = seal(Verification.model_validate_json(found.verification))
    return {**read_files(state.bundle(found.id)), VERIFICATION: f"{record.model_dump_json()}\n".encode()}


def _is_curated(folder: Path) -> bool:
    """Whether the folder holds a complete run without a manifest; an incomplete submission does not count."""
    try:
        return open_head(read_files(folder)).manifest is None
    except RefusedError:
        return False


def _find_identity(folder: Path) -> str | None:
    try:
        manifest = open_head(read_files(folder)).manifest
    except RefusedError:
        return None
    return None if manifest is None else manifest.identity


def _remove(folder: Path) -> None:
    """Rename first, so that readers never see half a folder, then delete."""
    trash = folder.with_name(f"{TRASH}{folder.name}")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)
