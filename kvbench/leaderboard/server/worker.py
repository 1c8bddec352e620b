"""The thread that verifies queued submissions one at a time, in a child process."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable

from kvbench.leaderboard.server import submissions
from kvbench.leaderboard.server.state import State
from kvbench.leaderboard.server.submissions import LEASE_S
from kvbench.leaderboard.server.tables import Database, Submission
from kvbench.leaderboard.submission.records import Verification
from kvbench.log import say

IDLE_S = 1.0
"""Seconds between polls of the database, to which other servers may add submissions."""
LIMIT_S = 900.0
"""Seconds that one verification may take."""
VERIFIER = ("-m", "kvbench.leaderboard.server.verifier")
CHILD_ENV = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
"""Environment of the child: no downloads and no GPU."""


class StoppedError(Exception):
    """The server is stopping, or the submission was withdrawn."""


class Worker(threading.Thread):
    """Verifies queued submissions until it is stopped."""

    def __init__(self, database: Database, state: State, concluded: Callable[[], None]) -> None:
        super().__init__(name="verification", daemon=True)
        self._database, self._state, self._concluded = database, state, concluded
        self._owner = f"worker {uuid.uuid4().hex[:12]}"
        self._child: subprocess.Popen[bytes] | None = None
        self._stopped, self._woken = threading.Event(), threading.Event()

    def wake(self) -> None:
        """Signal that a submission was queued."""
        self._woken.set()

    def stop(self) -> None:
        """Return the current submission to the queue, and stop."""
        self._stopped.set()
        self.wake()
        self.join()

    def run(self) -> None:
        """Verify queued submissions."""
        try:
            while not self._stopped.is_set():
                self._woken.clear()
                try:
                    found = submissions.claim(self._database, self._owner)
                    if found is not None:
                        self._verify(found)
                        continue
                except Exception as error:  # noqa: BLE001  # the database may come back
                    say(f"verification: {type(error).__name__}: {error}. Trying again.")
                    self._end()  # else the reply that it still owes would be read as that of the next submission
                self._woken.wait(IDLE_S)
        finally:
            self._end()

    def _verify(self, found: Submission) -> None:
        try:
            answer = self._ask(found)
            if "error" in answer:
                done = submissions.fail(self._database, self._owner, found.id, str(answer["error"]))
            else:
                record = Verification.model_validate_json(json.dumps(answer))
                done = submissions.conclude(self._database, self._owner, found.id, record)
            if done:
                self._concluded()
        except StoppedError:
            self._end()
            submissions.release(self._database, self._owner, found.id)

    def _ask(self, found: Submission) -> dict[str, object]:
        """Send a submission to the child and wait for its reply, renewing the claim while it runs.

        Raises:
            StoppedError: the server is stopping, or the claim is lost.
        """
        child = self._start()
        assert child.stdin is not None and child.stdout is not None
        request = json.dumps([str(self._state.bundle(found.id)), str(self._state.results)])
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(f"{request}\n".encode())
            child.stdin.flush()
        deadline, heard = time.monotonic() + LIMIT_S, b""
        while not heard.endswith(b"\n"):
            if select.select([child.stdout], [], [], min(IDLE_S, LEASE_S / 3))[0]:
                part = os.read(child.stdout.fileno(), 1 << 16)
                if not part:
                    self._end()
                    return {"error": "the verification ended without a result: too much memory, or a crash"}
                heard += part
            elif time.monotonic() > deadline:
                self._end()
                return {"error": f"the verification took more than {LIMIT_S:.0f} s"}
            if self._stopped.is_set() or not submissions.renew(self._database, self._owner, found.id):
                raise StoppedError
        answer: dict[str, object] = json.loads(heard)
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self._child = subprocess.Popen(  # noqa: S603  # our own module
                [sys.executable, *VERIFIER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env={**os.environ, **CHILD_ENV}, process_group=0,  # Ctrl-C stops us, and we stop it
            )
        return self._child

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None
