"""The verification process: a child of the server, so that no bundle can crash the server.

It reads one request per line and writes one line in reply. It ends when the server ends, however that happens, so no
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

MAX_MEMORY = 16 << 30
"""Bytes of address space; torch reserves most of it without using it."""


def main() -> None:
    """Answer requests until the server ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # keep all other output out of the replies
    requests: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = MAX_MEMORY if hard == resource.RLIM_INFINITY else min(MAX_MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most if soft == resource.RLIM_INFINITY else min(most, soft), hard))
    while True:
        bundle, results = json.loads(requests.get())
        try:
            answer = verify_bundle(Path(bundle), Path(results))
        except Exception as error:  # noqa: BLE001  # reply with the error, then take the next request
            from kvbench.leaderboard.submission.outcome import refuse  # its reasons are short and printable

            answer = json.dumps({"error": refuse("verification", f"{type(error).__name__}: {error}").reason})
        answers.write(f"{answer}\n")
        answers.flush()


def verify_bundle(bundle: Path, results: Path) -> str:
    """Verify a bundle against the published results; returns verification.json as one line."""
    from kvbench.leaderboard.verification.repository import Repository
    from kvbench.leaderboard.verification.verify import verify

    return verify(bundle, Repository([results])).conclude().model_dump_json()


def _listen(requests: queue.Queue[str]) -> None:
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
