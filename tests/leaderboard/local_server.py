"""A leaderboard server in the test's process, without its background threads, and its clients."""

from __future__ import annotations

from fastapi.testclient import TestClient

from kvbench.leaderboard.server.app import create_app
from kvbench.leaderboard.server.publisher import publish_accepted
from kvbench.leaderboard.server.state import State
from kvbench.leaderboard.server.submissions import claim, conclude
from kvbench.leaderboard.server.tables import Database
from kvbench.leaderboard.server.tokens import create_token
from kvbench.leaderboard.verification.repository import Repository
from kvbench.leaderboard.verification.verify import verify

from .conftest import tar


class LocalServer:
    """A server without its background threads, and three tokens."""

    def __init__(self, folder, db=None) -> None:
        self.state = State(folder / "state", folder / "results")
        self.state.make()
        self.database = Database(db or self.state.database)
        self.app = create_app(self.database, self.state)
        self.client = TestClient(self.app)
        self.tokens = {name: create_token(self.database, name, "submit") for name in ("ada", "bob")}
        self.tokens["root"] = create_token(self.database, "root", "admin")

    def head(self, name):
        return {"Authorization": f"Bearer {self.tokens[name]}"}

    def send(self, files, name="ada", **query):
        content = files if isinstance(files, bytes) else tar(files)
        return self.client.post("/api/submissions", content=content, headers=self.head(name), params=query)

    def withdraw(self, number, name="ada"):
        return self.client.post(f"/api/submissions/{number}/withdraw", headers=self.head(name))

    def status(self, number):
        return self.client.get(f"/api/submissions/{number}").json()["status"]

    def events(self, subject):
        found = self.client.get("/api/audit", headers=self.head("root"), params={"most": 1000}).json()
        return [x["action"] for x in reversed(found) if x["subject"] == subject]

    def work(self, owner="w"):
        """Verify everything that is queued, and publish it."""
        while (found := claim(self.database, owner)) is not None:
            record = verify(self.state.bundle(found.id), Repository([self.state.results])).conclude()
            conclude(self.database, owner, found.id, record)
        publish_accepted(self.database, self.state)
