"""Traces by name: public ones with their origin, hash and license, brought to the user's cache, and `synthetic`."""

from __future__ import annotations

import gzip
import hashlib
import urllib.error
import urllib.request
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

from kvbench.errors import UserError, unknown
from kvbench.machine import cache_folder
from kvbench.trace.loaders import load
from kvbench.trace.requests import Trace
from kvbench.trace.synthetic import make_trace

SYNTHETIC = "synthetic"


@dataclass(frozen=True)
class PublicTrace:
    """A public trace."""

    name: str
    kind: str
    file: str
    """Its name in a folder of copies, without .gz."""
    repository: str
    commit: str
    path: str
    sha256: str | None
    """Of the unpacked file; None: an archive of our own choice of files, which is not downloaded."""
    license: str
    contents: str

    @property
    def url(self) -> str:
        """Where the pinned file is."""
        return f"https://raw.githubusercontent.com/{self.repository}/{self.commit}/{self.path}"


MOONCAKE = ("kvcache-ai/Mooncake", "3b5a594133958449a1feaf1c9e0fc1b553e34a28")
AZURE = ("Azure/AzurePublicDataset", "b469a113cedca53ddc3bdea71a143dc4b7d8700c")
SOURCES = {x.name: x for x in (
    PublicTrace(
        "mooncake-conversation", "mooncake", "mooncake_conversation.jsonl", *MOONCAKE,
        "FAST25-release/traces/conversation_trace.jsonl",
        "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df", "Apache-2.0",
        "12,031 chat requests, hashes of 512-token blocks",
    ),
    PublicTrace(
        "mooncake-synthetic", "mooncake", "mooncake_synthetic.jsonl", *MOONCAKE,
        "FAST25-release/traces/synthetic_trace.jsonl",
        "bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131", "Apache-2.0",
        "3,993 requests on public data sets, hashes of 512-token blocks",
    ),
    PublicTrace(
        "azure-2023-conv", "azure", "azure_2023_conv.csv", *AZURE, "data/AzureLLMInferenceTrace_conv.csv",
        "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8", "CC-BY-4.0",
        "19,366 chat requests, arrivals and lengths only",
    ),
    PublicTrace(
        "azure-2023-code", "azure", "azure_2023_code.csv", *AZURE, "data/AzureLLMInferenceTrace_code.csv",
        "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6", "CC-BY-4.0",
        "8,819 code requests, arrivals and lengths only",
    ),
    PublicTrace(
        "coding-agents", "coding-agents", "coding_agents.tar", "callanjfox/kv-cache-tester",
        "94f6046dfd9c0c8bc0cdb24a5aa6579bac8669bf", "traces/", None, "Apache-2.0",
        "sessions of a coding agent, hashes of 64-token blocks, tool calls and their times",
    ),
)}


def find_folder() -> Path:
    """The folder of added traces in the user's cache."""
    return cache_folder() / "traces"


def find_trace(name: str, *, kind: str | None = None, seed: int = 0) -> Trace:
    """A trace by name, or by the path of its file.

    Raises:
        UserError: an unknown name, one that was not added, a format for a name, or a file that cannot be used.
    """
    if kind is not None and name in (SYNTHETIC, *SOURCES):
        raise UserError(f"--format {kind} is for the path of a file, and '{name}' is a name. Leave it out.")
    if name == SYNTHETIC:
        return make_trace(seed)
    if name in SOURCES:
        path = find_folder() / SOURCES[name].file
        if not path.exists():
            raise UserError(f"trace '{name}' is not in {find_folder()}. Run `kvbench trace add {name}` first.")
        return replace(load(path, SOURCES[name].kind), name=name)
    path = Path(name).expanduser()
    if not path.is_file():
        raise unknown("trace", name, [SYNTHETIC, *SOURCES], "Or give the path of a trace file.")
    return load(path, kind)


def add_trace(name: str, folder: Path | None = None) -> Path:
    """Bring a public trace to the user's cache, from a folder of copies or from its repository. Its path there.

    Raises:
        UserError: an unknown name, no copy or no network, or another hash than the recorded one.
    """
    if name not in SOURCES:
        raise unknown("trace", name, SOURCES)
    source = SOURCES[name]
    data = _download(source) if folder is None else _copy(source, folder)
    if source.sha256 is not None and (found := hashlib.sha256(data).hexdigest()) != source.sha256:
        raise UserError(
            f"trace '{name}' has the hash {found[:16]}..., and {source.sha256[:16]}... is recorded. Nothing was added: "
            "fetch the file again."
        )
    path = find_folder() / source.file
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(data)
        load(part, source.kind)
        part.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}. Make room or set XDG_CACHE_HOME.") from error
    finally:
        part.unlink(missing_ok=True)
    return path


def _copy(source: PublicTrace, folder: Path) -> bytes:
    for path in (folder / source.file, folder / f"{source.file}.gz"):
        if path.is_file():
            data = path.read_bytes()
            try:
                return gzip.decompress(data) if path.suffix == ".gz" else data
            except (OSError, EOFError, zlib.error) as error:
                raise UserError(f"{path} cannot be unpacked: {error}. Fetch it again.") from error
    raise UserError(f"{folder} holds neither {source.file} nor {source.file}.gz. Give the folder that has it.")


def _download(source: PublicTrace) -> bytes:
    if source.sha256 is None:
        raise UserError(
            f"trace '{source.name}' is a choice of files of github.com/{source.repository}/{source.path}. Pack them "
            f"as {source.file} and run `kvbench trace add {source.name} --from FOLDER`."
        )
    try:
        with urllib.request.urlopen(source.url, timeout=60) as answer:  # noqa: S310  # https, a pinned address
            data: bytes = answer.read()
    except (urllib.error.URLError, OSError) as error:
        raise UserError(
            f"{source.url} cannot be fetched: {error}. Where there is no network, give a folder with a copy: "
            f"`kvbench trace add {source.name} --from FOLDER`."
        ) from error
    return data
