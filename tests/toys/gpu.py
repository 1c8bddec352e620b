"""A GPU without hardware: tensors are computed on the CPU and know on which of the two they would be."""

from __future__ import annotations

import traceback
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from kvbench.kernels.bitmap_attention import torch as bitmaps
from kvbench.kernels.cast_attention import torch as casts
from kvbench.methods.quantization import nvfp4, zipcache
from kvbench.methods.retrieval import sentencekv
from kvbench.store import coders, rotation
from kvbench.techniques import codebooks

GPU = torch.device("cuda", 0)
HOST = torch.device("cpu")
ROOT = str(Path(__file__).parents[2])
CROSSING = {"copy_", "set_", "__setitem__", "__getitem__", "to", "_has_compatible_shallow_copy_type"}
"""Functions that take tensors of both. An index on the host is copied, and a value set on the host, too."""
PINNED = {"empty", "zeros", "ones", "full", "tensor"}
PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "addmm", "baddbmm", "einsum"}
IDLE = ("synchronize", "empty_cache", "set_device", "reset_peak_memory_stats")


def is_on_gpu(tensor):
    """Whether a tensor would be on the GPU."""
    return getattr(tensor, "on_gpu", False)


def put(found, on_gpu):
    """Note where tensors would be."""
    for x in tree_leaves(found):
        if isinstance(x, torch.Tensor):
            x.on_gpu = on_gpu
    return found


def names_gpu(device):
    """Whether a device, as torch's functions take it, is the GPU."""
    return not isinstance(device, torch.Tensor) and torch.device(device).type == "cuda"


class SimulatedGpu(TorchFunctionMode):
    """Collects calls that a GPU refuses: mixed devices, numpy, products of integers, generators of the other device."""

    def __init__(self):
        super().__init__()
        self.refused = []

    def refuse(self, what):
        """Note a call and the lines of kvbench that made it."""
        lines = [x for x in traceback.extract_stack() if x.filename.startswith(ROOT) and x.filename != __file__]
        self.refused.append(f"{what} in " + " < ".join(
            f"{x.filename.removeprefix(ROOT)}:{x.lineno}" for x in lines[:-4:-1]
        ))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, options = getattr(func, "__name__", ""), dict(kwargs or {})
        if name in ("__get__", "__set__"):
            return self.use_property(func, name, args)
        given = [x for x in tree_leaves((args, options)) if isinstance(x, torch.Tensor)]
        place, args = self.find_place(name, args, options)
        on_gpu = any(map(is_on_gpu, given)) if place is None else place
        self.check(name, given, args, options, on_gpu=on_gpu)
        if name == "pin_memory":
            return args[0]
        if name in PINNED:
            options.pop("pin_memory", None)
        found = func(*args, **options)
        if place is not None and given and found is given[0] and is_on_gpu(found) != on_gpu:
            found = found.detach().clone()  # a transfer makes another tensor
        if name == "__deepcopy__":
            return put(found, is_on_gpu(args[0]))
        written = [x for x in tree_leaves(found) if isinstance(x, torch.Tensor) and any(x is y for y in given)]
        return found if written else put(found, on_gpu)

    def use_property(self, func, kind, args):
        """Attributes of tensors."""
        name = getattr(func.__self__, "__name__", "")
        if kind == "__get__" and name == "device":
            return GPU if is_on_gpu(args[0]) else HOST
        if kind == "__get__" and name == "is_cuda":
            return is_on_gpu(args[0])
        found = func(*args)
        if kind == "__set__" and isinstance(args[1], torch.Tensor):
            put(args[0], is_on_gpu(args[1]))
        return found if found is None else put(found, is_on_gpu(args[0]))

    @staticmethod
    def find_place(name, args, options):
        """Whether the call asks for the GPU or the host, or None; and its arguments on the CPU."""
        place = None
        if options.get("device") is not None:
            place = names_gpu(options["device"])
            options["device"] = HOST
        elif name == "to":
            changed = list(args)
            for i, x in enumerate(args[1:], 1):
                if isinstance(x, torch.Tensor):
                    place = is_on_gpu(x)
                elif isinstance(x, torch.device | str):
                    place, changed[i] = names_gpu(x), HOST
            args = tuple(changed)
        elif name in ("cpu", "cuda"):
            place, args = name == "cuda", args[:1]
        return place, args

    def check(self, name, given, args, options, *, on_gpu):
        """Refuse what CUDA refuses. Single numbers on the host may stay there."""
        hosted = [x for x in given if not is_on_gpu(x) and x.dim()]
        if name == "numpy" and is_on_gpu(args[0]):
            self.refuse("numpy of a tensor on the GPU")
        if name == "__getitem__" and not is_on_gpu(args[0]) and any(is_on_gpu(x) and x.dim() for x in given):
            self.refuse("a tensor on the host indexed by one on the GPU")
        if name not in CROSSING | {"__deepcopy__"} and hosted and any(map(is_on_gpu, given)):
            self.refuse(f"{name} of tensors on both devices")
        if name in PRODUCTS and on_gpu and not any(x.is_floating_point() for x in given):
            self.refuse(f"{name} of integers")
        for x in tree_leaves((args, options)):
            if isinstance(x, torch.Generator) and getattr(x, "on_gpu", False) != on_gpu:
                self.refuse(f"{name} with the other device's generator")


class Generator(torch.Generator):
    """A generator that knows its device."""

    def __new__(cls, device="cpu"):
        made = super().__new__(cls)
        made.on_gpu = names_gpu(device)
        return made


def forget_tables():
    """Drop the tables that functions keep by device: those of a simulated one are none of a real one."""
    for module in (codebooks, rotation, coders, nvfp4, zipcache, sentencekv, bitmaps, casts):
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()


@contextmanager
def simulated_gpu():
    """`cuda` is a device; what it would refuse is collected."""
    copy = torch.nn.Parameter.__deepcopy__
    properties = SimpleNamespace(multi_processor_count=132, L2_cache_size=1 << 20)
    with ExitStack() as patches:
        for name in IDLE:
            patches.enter_context(mock.patch.object(torch.cuda, name))
        for owner, name, value in (
            (torch, "Generator", Generator), (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "get_device_properties", lambda device=None: properties),
            (torch.nn.Parameter, "__deepcopy__", lambda self, memo: put(copy(self, memo), is_on_gpu(self))),
        ):
            patches.enter_context(mock.patch.object(owner, name, value))
        yield patches.enter_context(SimulatedGpu())
