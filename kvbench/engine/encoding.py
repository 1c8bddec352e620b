"""The stores of a session as JSON and tensors, and back; nothing but stores is ever made."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvbench.errors import UserError
from kvbench.hf.rope import Rope
from kvbench.store.blocks import Residual
from kvbench.store.entries import Buffer
from kvbench.store.file import FileEntries
from kvbench.store.layer import LayerKV

if TYPE_CHECKING:
    from kvbench.hf import Model
    from kvbench.method import Method

STORES = ("kvbench.store.", "kvbench.methods.", "kvbench.kernels.pack.")
"""Packages whose classes may be in a file."""
CONTAINERS: dict[str, type] = {x.__name__: x for x in (list, tuple, dict, Counter)}


def list_modules(method: Method) -> frozenset[str]:
    """Modules of a method of the user's own, whose stores may be in a file, too."""
    return frozenset(x.__module__ for x in type(method).__mro__)


def _is_store(module: str, modules: frozenset[str]) -> bool:
    return module.startswith(STORES) or module in modules


@dataclass
class StoreWriter:
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
                number = len(self.objects)
                self._found[id(value)] = value, {"object": number}
                self.objects.append(None)  # its place: objects that it refers to come after it
                self.objects[number] = self._encode_object(value)
        return self._found[id(value)][1]

    def _locate(self, device: torch.device) -> str:
        """Whether a device is the model's, or the host next to it."""
        return "model" if device.type == self.model.device.type else "host"

    def _encode_object(self, value: Any) -> Any:
        kind = type(value)
        name = f"{kind.__module__}:{kind.__qualname__}"
        if not _is_store(kind.__module__, list_modules(self.method)) or "<" in kind.__qualname__:
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
class StoreReader:
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
