"""The process that verifies: a child of the server, which nothing that is sent can take down with it.

It reads one request per line and answers with one line. Where the server ends, however it ends, so does this: no
bundle is verified twice at the same time.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import sys
import threading
from pathlib import Path

MOST_MEMORY = 16 << 30
"""Bytes of address space, most of which torch reserves and never uses."""


def main() -> None:
    """Answer until the server is gone."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else is printed is no answer
    requests: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = MOST_MEMORY if hard == resource.RLIM_INFINITY else min(MOST_MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most if soft == resource.RLIM_INFINITY else min(most, soft), hard))
    while True:
        bundle, results = json.loads(requests.get())
        try:
            answer = judge(Path(bundle), Path(results))
        except Exception as error:  # noqa: BLE001  # the reason is told, and the next one is looked at
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"})
        answers.write(f"{answer}\n")
        answers.flush()


def judge(bundle: Path, results: Path) -> str:
    """verification.json of a bundle among the rows that are there, on one line."""
    from kvbench.leaderboard.submission.repository import Repository
    from kvbench.leaderboard.verification.verify import verify

    return verify(bundle, Repository([results])).conclude().model_dump_json()


def _listen(requests: queue.Queue[str]) -> None:
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
