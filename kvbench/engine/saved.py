"""A session with a compressed cache, written to a file and read from it.

The file is in the safetensors format: its tensors are those of the stores, without room for later entries, and its
metadata is JSON with everything else. Reading it runs no code of the file: only stores of kvbench and of the session's
own method are made.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from safetensors import SafetensorError
from torch import Tensor

from kvbench.engine.encoding import StoreReader, StoreWriter, list_modules
from kvbench.errors import UserError, first_line
from kvbench.runs.spec import Record
from kvbench.store.sealed import UnsealedError, read_sealed, write_sealed

if TYPE_CHECKING:
    from kvbench.engine.session import Session
    from kvbench.hf import Model
    from kvbench.method import Method

S = TypeVar("S", bound="Session")
FORMAT = 1
TRIED = 2
"""Tokens of a question and of its answer that are tried out on a session that was read."""


class SessionState(Record):
    """Numbers of a session outside its stores."""

    capacity: int
    chunk: int | None
    recompress: bool
    seen: int
    batch: int
    length: int
    """Tokens of the context."""
    compress_seconds: float
    pending: list[list[int]]
    behind: int
    exact: bool


def write_session(session: Session, path: Path) -> int:
    """Write a session with a context; a file of this name is replaced once the new one is complete. Returns its bytes.

    Raises:
        UserError: there is no context, its steps are static, the model is spread over devices, a store holds what
            cannot be written, or the disk fails.
    """
    if session.shape is None:
        raise UserError("this session holds no context to save: call prefill first.")
    if session.is_static:
        raise UserError("a session with static steps cannot be saved: save it before make_static.")
    if len(set((session.model.device_map or {}).values())) > 1:
        raise UserError(
            "a session on a model that is spread over several devices cannot be saved. Load the model without "
            "device_map."
        )
    writer = StoreWriter(session.method, session.model)
    body = {
        "format": FORMAT,
        "model": _describe_model(session.model),
        "method": _describe_method(session.method),
        "session": SessionState(
            capacity=session.capacity, chunk=session.chunk, recompress=session.recompress, seen=session.seen,
            batch=session.batch, length=session.shape.length, compress_seconds=session.compress_seconds,
            pending=session.pending, behind=session.behind, exact=session.exact,
        ).model_dump(),
        "ledger": session.ledger.to_json(),
        "logits": writer.encode(session.logits),
        "layers": [writer.encode(x) for x in session.layers],
        "objects": writer.objects,
    }
    header = json.dumps(body)
    tensors = {str(i): x for i, x in enumerate(writer.tensors)}
    try:
        write_sealed(path, header, tensors)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} could not be written: {error}. Free the disk, or use another folder.") from error
    return path.stat().st_size


def read_session(path: Path, model: Model, method: Method, make: type[S]) -> S:
    """A session as it was written, on this model under this method.

    Raises:
        UserError: there is no such file, it is damaged, or it is of another model, method or version.
    """
    header, tensors = _read(path)
    try:
        body = json.loads(header)
        if body["format"] != FORMAT:
            raise UserError(
                f"{path} has format {body['format']}, this kvbench reads {FORMAT}. Prefill the context again."
            )
        _require_equal(path, "model", body["model"], _describe_model(model))
        _require_equal(path, "method", body["method"], _describe_method(method))
        reader = StoreReader(body["objects"], tensors, model, list_modules(method))
        held = SessionState.model_validate(body["session"])
        session = make(model, method, capacity=held.capacity, chunk=held.chunk, recompress=held.recompress)
        layers = [reader.decode(x) for x in body["layers"]]
        if [type(x) for x in layers] != [type(x) for x in session.layers]:
            raise ValueError("its layers are others than those of the method")
        session.layers[:], session.logits = layers, reader.decode(body["logits"])
        session.seen, session.batch, session.pending = held.seen, held.batch, held.pending
        session.behind, session.exact = held.behind, held.exact
        session.shape, session.compress_seconds = model.shape(held.length), held.compress_seconds
        session.ledger.load_json(body["ledger"], session.shape, session.batch)
        _check_counts(session)
        _try_out(session)
    except UserError:
        raise
    except Exception as error:  # whatever a forged file makes fail
        raise UserError(
            f"{path} is no session that kvbench saved: {first_line(error)}. Prefill the context again."
        ) from error
    return session


def _check_counts(session: Session) -> None:
    """Refuse counts that contradict the entries held or each other (`ValueError`); those of reads are believed."""
    shape, effect = session.shape, session.ledger.effect()
    assert shape is not None
    placed = session.behind <= session.seen if session.method.reads_parts else session.behind == 0
    if session.seen < shape.length or not placed or session.compress_seconds < 0:
        raise ValueError(f"{session.seen} tokens, {session.behind} behind, do not follow a context of {shape.length}")
    for layer, store in zip(shape.layers, session.layers, strict=True):
        kept, heads = store.entries_kept(), session.batch * layer.kv_heads
        if store.seen != session.seen or len(kept) != heads or max(kept) > session.seen:
            raise ValueError(f"a layer of {len(kept)} heads and {store.seen} tokens, the session has {session.seen}")
        counters = store.facts()
        if least := [name for name, x in counters.items() if x.value < 0]:
            raise ValueError(f"{least[0]} is negative")
        whole = layer.window is None and not session.method.skips_layers
        if whole and "entries_dropped" in counters:  # a head that drops entries may hold one that stands for them
            dropped, gone = counters["entries_dropped"].value, heads * session.seen - sum(kept)
            if not gone <= dropped <= gone + heads:
                raise ValueError(f"{dropped} entries dropped of a layer that lacks {gone}")
    if effect.identity != (session.exact and session.method.identity(shape)):
        raise ValueError("its context is said to be exact, or not to be")


def _try_out(session: Session) -> None:
    """Ask a short question on a fork, so that stores with wrong content fail here and not in later use."""
    pending = max((len(x) for x in session.pending), default=0)
    needed = max(session.seen, session.seen - session.behind) + pending
    room = session.model.max_length - needed
    if room < 0:
        raise ValueError(f"{needed} tokens or positions are more than the model takes")
    tried = min(TRIED, (room + 1) // 2)  # the last token of an answer is not run
    with session.fork() as trial:
        if tried:
            trial.ask([0] * tried, tried, stop=frozenset())
        if session.logits is None or trial.logits is None or session.logits.shape != trial.logits.shape:
            raise ValueError("its logits are not those of its conversations")
        trial.memory()
        trial.effect()


def _read(path: Path) -> tuple[str, dict[str, Tensor]]:
    """The header and the tensors of a file whose hash is right."""
    if not path.is_file():
        raise UserError(f"there is no file {path}. Save a session there first.")
    try:
        return read_sealed(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is damaged or no safetensors file: {error}. Prefill the context again.") from error
    except UnsealedError as error:
        raise UserError(f"{path} is damaged or no saved session: {error}. Prefill the context again.") from error


def _describe_model(model: Model) -> dict[str, str]:
    return {"id": model.id, "sha256": model.sha256, "dtype": model.dtype, "device": model.device.type}


def _describe_method(method: Method) -> dict[str, str]:
    """Name, version, and every setting with the resolved budget, of which hashes stand for what was calibrated."""
    held = {x.name: repr(getattr(method, x.name)) for x in fields(method)}
    return {"name": method.card.name, "version": method.card.version, **held}


def _require_equal(path: Path, kind: str, saved: dict[str, str], given: dict[str, str]) -> None:
    for name in {**saved, **given}:
        if saved.get(name) != given.get(name):
            raise UserError(
                f"{path} was saved with another {kind}: {name} was {saved.get(name)} and is {given.get(name)}. "
                f"Load it with the {kind} that it was saved with, or prefill the context again."
            )
