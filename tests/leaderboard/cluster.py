"""A PostgreSQL cluster of the tests' own, in a temporary folder, reached through a socket in it."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

DEBIAN = Path("/usr/lib/postgresql")
"""Where Debian installs each major version; its programs are not in PATH."""


def find_programs() -> Path | None:
    """The folder with initdb and pg_ctl, of the newest version."""
    if found := shutil.which("initdb"):
        return Path(found).parent
    versions = sorted((x for x in DEBIAN.glob("*/bin/initdb")), key=lambda x: int(x.parts[-3]))
    return versions[-1].parent if versions else None


@contextmanager
def run_cluster() -> Iterator[str]:
    """Start a cluster; gives the URL of a database on it, in which {} stands for the database's name."""
    programs = find_programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    as_user = {}
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        try:
            as_user = {"user": pwd.getpwnam("postgres").pw_name, "group": "postgres", "extra_groups": []}
        except KeyError:
            pytest.skip("the tests run as root, and there is no user postgres")
    folder = Path(tempfile.mkdtemp(prefix="kvb-pg-"))  # a socket's path has at most 107 characters
    if as_user:
        shutil.chown(folder, **{key: as_user[key] for key in ("user", "group")})

    def call(program: str, *words: str) -> None:
        subprocess.run(
            [programs / program, *words], check=True, stdout=subprocess.DEVNULL, cwd=folder, env={"LC_ALL": "C"},
            **as_user,
        )

    data = str(folder / "data")
    try:
        call("initdb", "-D", data, "-U", "tests", "-A", "trust", "-E", "UTF8", "--no-sync")
        call("pg_ctl", "start", "-w", "-D", data, "-l", str(folder / "log"), "-o", f"-k {folder} -h '' -F")
        try:
            yield f"postgresql+psycopg://tests@/{{}}?host={folder}"
        finally:
            call("pg_ctl", "stop", "-D", data, "-m", "immediate")
    finally:
        shutil.rmtree(folder)


def create_database(url: str, name: str) -> str:
    """Create an empty database; returns its URL."""
    from sqlalchemy import create_engine

    engine = create_engine(url.format("postgres"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(f'CREATE DATABASE "{name}"')
    engine.dispose()
    return url.format(name)
