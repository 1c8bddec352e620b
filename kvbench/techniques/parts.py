"""Trained parts of methods: small networks next to a model, in safetensors files that name the model.

A part belongs to one method and one model. Its file's metadata have the method, the SHA-256 of the model's files, and
the data that it was trained on. The files of bundled models are in `kvbench/models/parts`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from kvbench.constraints import setting_fields
from kvbench.errors import UserError, first_line

if TYPE_CHECKING:
    from kvbench.hf import Model
    from kvbench.method import Card

M = TypeVar("M", bound=nn.Module)
Rename = Callable[[str], str | None]
"""From a name in the authors' files to that of the part's module; None: not of the part."""
PICKLED = (".bin", ".pt", ".pth")
SHIPPED = Path(__file__).parents[1] / "models" / "parts"


class TrainedMethod(Protocol):
    """A method with a trained part."""

    card: ClassVar[Card]

    @property
    def weights(self) -> str:
        """A file that the user gives; empty: none."""

    @property
    def steps(self) -> int:
        """Training steps, if the run trains the part."""


@dataclass(frozen=True)
class TrainedPart:
    """Weights by name, what they were trained on, and the metadata of their file. sha256: of the weights."""

    weights: Mapping[str, Tensor]
    data: str
    facts: Mapping[str, str]
    sha256: str


_FOUND: dict[str, TrainedPart] = {}
_HASHES: dict[tuple[str, str, str, str], TrainedPart] = {}
"""Of the parts found in this process, by method, file or settings, model and element type."""
_MODULES: dict[str, tuple[str, nn.Module]] = {}
"""By the hash of a part's weights: the hash of the last model that was bound, and the module for it with the weights.

The authors' files do not say which model they are for, so every other model is checked.
"""


def find_part(
    method: TrainedMethod, model: Model, train: Callable[[], Mapping[str, Tensor]], how: str,
    rename: Rename | None = None,
) -> str:
    """Read a part from a file, the one that is shipped for this model, or train it; its hash, for `get_part`.

    train: makes the weights. how: the data and settings of `train`, in words. rename: reads the authors' files, or
    folders with them.

    Raises:
        UserError: the file is unreadable, or of another method or model; `steps` is set, and nothing is trained; the
            model is spread over several devices.
    """
    name = method.card.name
    if model.device_map is not None:
        raise UserError(
            f"{name} has a trained part, which stands on one device, and {model.id} is spread over several. Leave "
            "--device-map out, or use a method without a trained part, such as snapkv."
        )
    file = Path(method.weights).expanduser() if method.weights else None
    if sets_steps(type(method), method.steps) and (file or find_shipped(name, model.id, model.sha256)):
        raise UserError(
            f"{name}: steps={method.steps} has no effect, because no part is trained: "
            f"{f'its weights are those of {file}' if file else f'kvbench has trained weights for {model.id}'}. Leave "
            "--set steps out."
        )
    key = name, _identify(file) if file else how, model.sha256, model.dtype
    if key not in _HASHES:
        if file:
            published = None if rename is None else read_published(file, name, rename)
            part = read_part(file, name, model) if published is None else published
        else:
            part = find_shipped(name, model.id, model.sha256) or make_part(train(), how)
        _HASHES[key] = part
    part = _HASHES[key]
    _FOUND[part.sha256] = part  # another file may have the same weights and other facts
    return part.sha256


def sets_steps(kind: type, steps: object) -> bool:
    """Whether this is not the number of training steps that a method has by default."""
    return steps != setting_fields(kind)["steps"].default


def _identify(path: Path) -> str:
    """A file, or the files of a folder, as they are now: one that was written again has other weights."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return " ".join([str(path), *(f"{x.name} {x.stat().st_mtime_ns} {x.stat().st_size}" for x in files if x.exists())])


def find_shipped(method: str, model: str, sha256: str) -> TrainedPart | None:
    """The part that is shipped for a model, which a run without a file of the user's uses; None: there is none.

    sha256: of the model.
    """
    path = SHIPPED / f"{method}-{model}.safetensors"
    if not path.exists() or (facts := read_metadata(path)).get("model_sha256") != sha256:
        return None
    return _load_part(path, facts)


def get_part(sha256: str) -> TrainedPart:
    """The part that was found under this hash."""
    return _FOUND[sha256]


def load_module(method: str, model: Model, sha256: str, make: Callable[[], nn.Module]) -> None:
    """Give a part's weights to a module on the model's device, for `get_module`; once per process, model and device.

    make: the module without these weights.

    Raises:
        UserError: the weights have other names or shapes.
    """
    fitting, held = _MODULES.get(sha256, ("", None))
    if held is not None and fitting == model.sha256 and {x.device for x in held.parameters()} <= {model.device}:
        return
    part, module = get_part(sha256), make()
    check_shapes(method, model, part, {name: tuple(x.shape) for name, x in module.state_dict().items()})
    module.load_state_dict(dict(part.weights))
    _MODULES[sha256] = model.sha256, module.to(model.device).requires_grad_(requires_grad=False)


def get_module(sha256: str | None, kind: type[M]) -> M:
    """The module that was loaded with the weights under this hash, which has this type."""
    assert sha256 is not None
    _, module = _MODULES[sha256]
    assert isinstance(module, kind)
    return module


def make_part(weights: Mapping[str, Tensor], data: str, facts: Mapping[str, str] | None = None) -> TrainedPart:
    """A part of these weights."""
    total = hashlib.sha256()
    for name in sorted(weights):
        total.update(f"{name} {tuple(weights[name].shape)} ".encode())
        total.update(weights[name].detach().float().cpu().contiguous().numpy().tobytes())
    return TrainedPart(dict(weights), data, facts or {}, total.hexdigest())


def write_part(
    path: Path, method: str, model: Model, weights: Mapping[str, Tensor], data: str, **facts: object
) -> None:
    """Write weights to a file, with the method, the model, the data and facts of the training."""
    metadata = {"method": method, "model": model.id, "model_sha256": model.sha256, "data": data}
    metadata |= {name: json.dumps(x) for name, x in facts.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: x.detach().contiguous() for name, x in weights.items()}, path, metadata=metadata)


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a file.

    Raises:
        UserError: it cannot be read.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder, and kvbench reads the weights from a safetensors file. Give the file.")
    try:
        with safe_open(path, "pt") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is no readable safetensors file: {first_line(error)}. Check the path.") from error


def read_part(path: Path, method: str, model: Model) -> TrainedPart:
    """The weights in a file, in float32.

    Raises:
        UserError: the file is unreadable, or of another method or model.
    """
    facts = read_metadata(path)
    if facts.get("method") != method:
        raise UserError(
            f"{path} has weights of method {facts.get('method')!r}, not {method!r}. Give a file that was written for "
            f"{method}, or leave --set weights out."
        )
    if facts.get("model_sha256") != model.sha256:
        raise UserError(
            f"{path} was trained for model {facts.get('model')!r} ({str(facts.get('model_sha256'))[:12]}), and "
            f"{model.id} is {model.sha256[:12]}. Give weights of this model, or leave --set weights out."
        )
    return _load_part(path, facts)


def _load_part(path: Path, facts: Mapping[str, str]) -> TrainedPart:
    with safe_open(path, "pt") as file:
        weights = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118  # no mapping
    return make_part(weights, facts.get("data", "unknown"), facts)


def read_published(path: Path, method: str, rename: Rename) -> TrainedPart | None:
    """A part in the authors' files, in float32; None: `write_part` wrote the file.

    Raises:
        UserError: a file is unreadable or pickled, or no file has weights of the part.
    """
    if path.suffix in PICKLED:
        raise UserError(
            f'{path} is pickled, and kvbench reads safetensors files only. Convert it: python -c "import torch, '
            f"safetensors.torch as s; s.save_file({{k: x.contiguous() for k, x in torch.load('{path}', "
            f"weights_only=True).items()}}, '{path.with_suffix('.safetensors')}')\""
        )
    if path.is_file() and "method" in read_metadata(path):
        return None
    weights: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        read_metadata(file)
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # no mapping
                own = rename(name)
                if own is not None:
                    weights[own] = opened.get_tensor(name).float()
    if not weights:
        raise UserError(
            f"{path} has no weights of {method}, by kvbench's names or its authors'. Give a file or a folder of "
            "safetensors files that has them, or leave --set weights out."
        )
    return make_part(weights, "the authors' weights; the file does not say for which model")


def rename_layers(pattern: str, names: Mapping[str, str]) -> Rename:
    """Names `N.own` from names that match, whose groups are the layer and a key of `names`."""
    compiled = re.compile(pattern)

    def rename(name: str) -> str | None:
        found = compiled.fullmatch(name)
        return f"{found[1]}.{names[found[2]]}" if found is not None and found[2] in names else None

    return rename


def check_shapes(method: str, model: Model, part: TrainedPart, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse weights of other names or shapes than this model needs.

    Raises:
        UserError: with the first difference.
    """
    found = {name: tuple(x.shape) for name, x in part.weights.items()}
    for name in sorted(found.keys() | dict(wanted).keys()):
        if found.get(name) != wanted.get(name):
            raise UserError(
                f"{method}: weight {name!r} has shape {found.get(name)}, and {model.id} needs {wanted.get(name)}. "
                "Give weights that were trained for this model's shape."
            )
