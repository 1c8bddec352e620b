"""The server as one FastAPI application: the API, the site, and the background threads."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.types import Scope

from kvbench import __version__
from kvbench.leaderboard.server.api import Services, router
from kvbench.leaderboard.server.leftovers import occupy
from kvbench.leaderboard.server.publisher import Publisher
from kvbench.leaderboard.server.state import State
from kvbench.leaderboard.server.tables import Database
from kvbench.leaderboard.server.worker import Worker

BUILDING = "<!doctype html><title>kvbench</title><p>The leaderboard is being built. Reload the page in a minute.</p>"


class Site(StaticFiles):
    """Serves the folder of the site, which does not exist before the first build."""

    async def check_config(self) -> None:
        """Accept a folder that does not exist yet."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Serve one file, or 503 while the first build is running."""
        try:
            return await super().get_response(path, scope)
        except HTTPException:
            if self.directory is None or not Path(self.directory).is_dir():  # noqa: ASYNC240  # a quick look
                return HTMLResponse(BUILDING, 503, headers={"Retry-After": "10"})
            raise


def create_app(database: Database, state: State) -> FastAPI:
    """Create the application. Its threads start and stop with it."""
    publisher = Publisher(database, state)
    worker = Worker(database, state, publisher.publish)

    @asynccontextmanager
    async def live(_: FastAPI) -> AsyncIterator[None]:
        with occupy(state):
            publisher.start()
            worker.start()
            yield
            worker.stop()
            publisher.stop()

    app = FastAPI(
        title="kvbench leaderboard", version=__version__, lifespan=live, docs_url=None, redoc_url=None,
        description="Receives submissions, verifies them, and shows the accepted runs.",
    )
    app.state.services = Services(database, state, worker, publisher)
    app.include_router(router)

    @app.middleware("http")
    async def _(request: Request, follow: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await follow(request)
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        return response

    app.mount("/", Site(directory=state.site, html=True, check_dir=False))
    return app
