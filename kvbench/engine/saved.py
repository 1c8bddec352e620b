"""A session with a compressed cache, written to a file and read from it.

The file is in the safetensors format: its tensors are those of the stores, without room for later entries, and its
metadata is JSON with everything else. Reading it runs no code of the file: only stores of kvbench and of the session's
own method are made.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor

from kvbench.errors import UserError
from kvbench.hf.rope import Rope
from kvbench.method import Method
from kvbench.runs.spec import Record
from kvbench.store.blocks import Residual
from kvbench.store.entries import Buffer
from kvbench.store.file import FileEntries
from kvbench.store.layer import LayerKV
from kvbench.store.sealed import UnsealedError, read_sealed, write_sealed

if TYPE_CHECKING:
    from kvbench.engine.session import Session
    from kvbench.hf import Model

S = TypeVar("S", bound="Session")
FORMAT = 1
TRIED = 2
"""Tokens of a question and of its answer that are tried out on a session that was read."""
STORES = ("kvbench.store.", "kvbench.methods.", "kvbench.kernels.pack.")
"""Packages whose classes may be in a file."""
CONTAINERS: dict[str, type] = {x.__name__: x for x in (list, tuple, dict, Counter)}


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
        UserError: there is no context, its steps are static, a store holds what cannot be written, or the disk fails.
    """
    if session.shape is None:
        raise UserError("this session holds no context to save: call prefill first.")
    if session.is_static:
        raise UserError("a session with static steps cannot be saved: save it before make_static.")
    writer = _Writer(session.method, session.model)
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
        reader = _Reader(body["objects"], tensors, model, _list_modules(method))
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
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"{path} is no session that kvbench saved: {reason}. Prefill the context again.") from error
    return session


def _check_counts(session: Session) -> None:
    """Refuse counts that contradict the entries held or each other (`ValueError`); those of reads are believed."""
    shape, effect = session.shape, session.ledger.effect()
    assert shape is not None
    if session.seen < shape.length or not 0 <= session.behind <= session.seen or session.compress_seconds < 0:
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
    room = session.model.max_length - session.seen - pending
    if room < 0:
        raise ValueError(f"{session.seen + pending} tokens are more than the model takes")
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


def _list_modules(method: Method) -> frozenset[str]:
    """Modules of a method of the user's own, whose stores may be in a file, too."""
    return frozenset(x.__module__ for x in type(method).__mro__)


def _is_store(module: str, modules: frozenset[str]) -> bool:
    return module.startswith(STORES) or module in modules


@dataclass
class _Writer:
    """Turns values into JSON, and collects the tensors and objects that they refer to, each once."""

    method: Method
    model: Model
    tensors: list[Tensor] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    _found: dict[int, tuple[Any, dict[str, Any]]] = field(default_factory=dict)
    """Values by their id, and the references to them in the file."""

    def encode(self, value: Any) -> Any:
        """A value as JSON: a number, a text, or a mapping of its kind to what it holds."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, torch.device):
            return {"device": self._locate(value)}
        if isinstance(value, Rope):
            return {"rope": next(i for i, x in enumerate(self.model.ropes) if x is value)}
        if isinstance(value, bytes):
            return {"bytes": self.encode(torch.frombuffer(bytearray(value), dtype=torch.uint8))}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if type(value) in CONTAINERS.values():
            items = value.items() if isinstance(value, dict) else value
            return {type(value).__name__: [self.encode(x) for x in items]}
        if id(value) not in self._found:
            if isinstance(value, Tensor):
                reference = {"tensor": len(self.tensors), "on": self._locate(value.device)}
                self.tensors.append(value.detach().cpu().clone(memory_format=torch.contiguous_format))
                self._found[id(value)] = value, reference
            else:
                self._found[id(value)] = value, {"object": len(self.objects)}
                self.objects.append(None)
                self.objects[self._found[id(value)][1]["object"]] = self._encode_object(value)
        return self._found[id(value)][1]

    def _locate(self, device: torch.device) -> str:
        """Whether a device is the model's, or the host next to it."""
        return "model" if device.type == self.model.device.type else "host"

    def _encode_object(self, value: Any) -> Any:
        kind = type(value)
        name = f"{kind.__module__}:{kind.__qualname__}"
        if not _is_store(kind.__module__, _list_modules(self.method)) or "<" in kind.__qualname__:
            raise UserError(f"{self.method.card.name} cannot be saved: its stores hold a {name}.")
        held = dict(vars(value))
        if isinstance(value, FileEntries):
            held = {"entries": value.take(torch.arange(value.nbytes // value.entry_bytes))[None, None]}
        elif isinstance(value, Residual):
            held = {"entries": value.entries, "capacity": value.block.shape[2]}
        found = {}
        for key, x in held.items():
            if isinstance(x, Buffer):
                x.resume(value)
                own = {name: tensor[:, :, : value.n] for name, tensor in x.tensors.items()}
                found[key] = {"buffer": [x.capacity, self.encode(own)]}
            else:
                found[key] = self.encode(x)
        return {"class": name, "fields": found}


@dataclass
class _Reader:
    """Turns JSON into the values that it was made from."""

    described: list[Any]
    tensors: dict[str, Tensor]
    model: Model
    modules: frozenset[str]
    _made: dict[int, Any] = field(default_factory=dict)
    _placed: dict[int, Tensor] = field(default_factory=dict)

    def decode(self, value: Any) -> Any:
        """A value from its JSON."""
        if not isinstance(value, dict):
            return value
        (kind, held), *_ = value.items()
        if kind == "tensor":
            return self._place(held, value["on"])
        if kind == "object":
            return self._made[held] if held in self._made else self._make(held)
        if kind == "device":
            return torch.device("cpu") if held == "host" else self.model.device
        if kind == "rope":
            return self.model.ropes[held]
        if kind == "bytes":
            return self.decode(held).cpu().numpy().tobytes()
        if kind == "dtype":
            return getattr(torch, held)
        items = [self.decode(x) for x in held]
        return CONTAINERS[kind](dict(items) if kind in ("dict", "Counter") else items)

    def _place(self, index: int, on: str) -> Tensor:
        """A tensor on its device; in host memory next to a GPU it is pinned."""
        if index not in self._placed:
            tensor = self.tensors.pop(str(index))
            self._placed[index] = tensor.pin_memory() if on == "host" else tensor.to(self.model.device)
        return self._placed[index]

    def _make(self, index: int) -> Any:
        described = self.described[index]
        kind = self._find_class(described["class"])
        if kind in (FileEntries, Residual):
            self._made[index] = kind(**{name: self.decode(x) for name, x in described["fields"].items()})
            return self._made[index]
        value: Any = object.__new__(kind)
        self._made[index] = value
        vars(value).update({name: self.decode(x) for name, x in described["fields"].items() if not _is_buffer(x)})
        for name, x in described["fields"].items():
            if _is_buffer(x):
                capacity, own = x["buffer"][0], self.decode(x["buffer"][1])
                if any(tensor.shape[2] != value.n for tensor in own.values()):
                    raise ValueError(f"a {kind.__name__} holds other entries than the {value.n} that it counts")
                buffer = Buffer(own, capacity)
                for tensor in buffer.tensors.values():
                    tensor.zero_()  # pages are read whole, with weight zero for entries that are still to come
                buffer.write(0, own)
                buffer.join(value)
                setattr(value, name, buffer)
        if isinstance(value, LayerKV):
            _require_fields(value)
        return value

    def _find_class(self, name: str) -> type:
        module, _, path = name.partition(":")
        if not _is_store(module, self.modules):
            raise ValueError(f"{name} is no store")
        found = sys.modules.get(module) or importlib.import_module(module)
        kind = getattr(found, path)
        if not isinstance(kind, type) or kind.__module__ != module:
            raise ValueError(f"{name} is no store")
        return kind


def _require_fields(store: LayerKV) -> None:
    """Refuse a store whose fields are not of the types that an empty one has (`ValueError`)."""
    empty = type(store)()
    for name in (x.name for x in fields(empty)):
        kind, value = type(getattr(empty, name)), getattr(store, name)
        inside = issubclass(kind, LayerKV) and isinstance(value, LayerKV)  # a store within a store may be of any kind
        if kind is not NoneType and type(value) is not kind and not inside:
            raise ValueError(f"{name} of a {type(store).__name__} is no {kind.__name__}")


def _is_buffer(value: Any) -> bool:
    return isinstance(value, dict) and "buffer" in value
