"""The calls that become CUDA graphs ask nothing of the host: for every method, on fake tensors of a GPU."""

from __future__ import annotations

import copy
from contextlib import contextmanager, nullcontext
from types import CellType, FunctionType, GeneratorType, SimpleNamespace
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvbench.bench import decode
from kvbench.bench.decode import open_attention
from kvbench.bench.state import Setting, open_context
from kvbench.hf.tiny import placed, tiny_model
from kvbench.kernels.choice import using
from kvbench.method import Budget, BudgetKind, Method
from kvbench.methods.baseline.full import Full
from kvbench.methods.retrieval import infinigen
from kvbench.registry import find_method, list_entries
from kvbench.selection import ScoredMethod
from kvbench.techniques import calibration, parts
from kvbench.techniques.reading import ReadingMethod
from tests.toys.gpu import forget_tables

LENGTH, LATER = 96, 24
METHODS = [x.name for x in list_entries("method") if x.models == "autoregressive"]
WAITING = {"shadowkv", *(x for x in METHODS if issubclass(find_method(x), ReadingMethod))}
"""They wait for their selection, to fetch values from the host or to gather entries."""
ALIKE = {
    x for x in METHODS if find_method(x).attend is Method.attend
    and find_method(x).evict in (Method.evict, ScoredMethod.evict)
} - {"adakv", "cacheblend", "full", "snapkv", "xkv"}
"""Their steps after the context are those of the five methods: they neither attend nor evict in their own way."""
HAS_CUDA = torch.backends.cuda.is_built()
DEVICE = torch.device("cuda:0" if HAS_CUDA else "meta")
"""A torch without CUDA cannot index fake CUDA tensors; meta tensors that claim to be on a GPU take the same code."""
MODE = FakeTensorMode(allow_non_fake_inputs=True) if HAS_CUDA else nullcontext()
VALUES_ERROR = (DataDependentOutputException, DynamicOutputShapeException) if HAS_CUDA else RuntimeError
VALUES_MESSAGE = "" if HAS_CUDA else "meta tensor|Meta tensor|register_meta"
"""Of operations that need values, which these tensors lack."""
HOST_CALLS = ("tensor", "as_tensor", "new_tensor", "cuda", "cpu", "item", "tolist", "numpy", "__bool__", "__int__",
              "__float__", "__index__")
"""Functions of torch that copy between host and device."""
SDPA = "scaled_dot_product_attention"
FACTORIES = ("arange", "zeros", "ones", "full", "empty", "randperm", "randint", "rand", "randn")
"""Functions that make a tensor on the host unless they are given a device; a single number may stay there."""


class HostCalls(TorchFunctionMode):
    """Records calls that copy between host and device, and tensors made on the host, which are copied later.

    Calls of SDPA that may go to cuDNN count too: it builds a plan on the host for every new length.
    """

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, options = getattr(func, "__name__", ""), kwargs or {}
        if name in HOST_CALLS or (name == SDPA and torch.backends.cuda.cudnn_sdp_enabled()):
            self.names.append(name)
        found = func(*args, **options)
        if name in FACTORIES and "device" not in options and found.dim():
            self.names.append(name)
        return found


class Copies(TorchDispatchMode):
    """Records operations with tensors of the device and of the host, single numbers aside: each is a copy."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        places = {x.device for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor) and x.dim()}
        if len(places) > 1:
            self.names.append(func.__name__)
        return out


def put_on_gpu(call):
    """A copy of a call and of everything that it refers to, in which every tensor is a fake one on the GPU."""
    def move(tensor, memo):
        if id(tensor) not in memo:
            with MODE:
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE)
            memo[id(tensor)] = type(tensor)(fake, False) if isinstance(tensor, torch.nn.Parameter) else fake
        return memo[id(tensor)]

    def move_closure(function, memo):
        if function.__closure__ is None:
            return function
        cells = tuple(CellType(copy.deepcopy(x.cell_contents, memo)) for x in function.__closure__)
        return FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)

    kinds = {
        FunctionType: move_closure, GeneratorType: lambda opened, memo: opened,
        torch.device: lambda device, memo: DEVICE,
    }
    with (
        mock.patch.object(torch.Tensor, "__deepcopy__", move), mock.patch.dict(copy._deepcopy_dispatch, kinds),
        mock.patch.object(torch.nn.Parameter, "__deepcopy__", move),
    ):
        return copy.deepcopy(call)


@contextmanager
def fake_gpu():
    """Fake tensors, calibrated ones and trained parts are on an H100; kernels are not run, the code around them is."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    jit = pytest.importorskip("triton.runtime.jit")
    with (
        mock.patch.object(interpreter.InterpretedFunction, "run"), mock.patch.object(jit.JITFunction, "run"),
        mock.patch.dict(calibration._FOUND, put_on_gpu(calibration._FOUND)),
        mock.patch.dict(parts._MODULES, put_on_gpu(parts._MODULES)),
        mock.patch.object(infinigen, "_MODELS", {key: put_on_gpu(x) for key, x in infinigen._MODELS.items()}),
        mock.patch.object(torch.Tensor, "is_cuda", property(lambda x: x.device == DEVICE), create=True),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=SimpleNamespace(multi_processor_count=132)),
    ):
        yield
    forget_tables()


@contextmanager
def open_whole_step(job, session):
    """The call that `open_steps` captures."""
    with session.fork() as fork:
        fork.make_static()
        yield decode._Steps(job, fork).run


@contextmanager
def open_attention_of_step(job, session):
    """The call that `open_attention` captures."""
    with open_attention(job, session, graph=True) as timed:
        timed.prepare()
        yield timed.call


def list_questions(name):
    """Questions to the host of every captured call of a method under every implementation.

    The first call may copy what later ones then find on the GPU, so a call that asks is made again.
    """
    with placed("cpu", torch.bfloat16):
        model = tiny_model()
    made = find_method(name)().bind(model)
    chosen = made.budget_kind in (BudgetKind.STORED, BudgetKind.READ)
    budget = Budget("rows", max(made.minimum_entries(), LENGTH // 4)) if chosen else None
    method, job = made.fit(budget, model.shape(LENGTH)), Setting(model=model, later=LATER)
    found = {}
    with open_context(job, method, LENGTH, 1) as context:
        for opener in (open_attention_of_step, open_whole_step)[: 2 if made.graphable is None else 1]:
            with opener(job, context.session) as timed, fake_gpu():
                call = put_on_gpu(timed)
                for kernels in ("torch", "triton"):
                    with using(kernels):
                        found[opener.__name__, kernels] = record_questions(call) and record_questions(call)
    return found


def record_questions(call):
    """Questions to the host of one call."""
    with MODE, Copies() as copies, HostCalls() as calls:
        call()
    return calls.names + copies.names


@pytest.mark.few(8)
@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow) if x in ALIKE else x for x in METHODS])
def test_a_captured_call_asks_nothing_of_the_host(name):
    """Neither the attention of a step, nor the whole step of a method that does not say why it cannot be a graph.

    A CUDA graph cannot capture a copy from or to the host: the method would be timed with Python's launches.
    """
    if name in WAITING:
        with pytest.raises(VALUES_ERROR, match=VALUES_MESSAGE):
            list_questions(name)
    else:
        found = list_questions(name)
        assert found == {key: [] for key in found}


@pytest.mark.parametrize(("fault", "found"), [
    (lambda query: torch.tensor([1.0], device=query.device), ["tensor"]),
    (lambda query: torch.arange(3), ["arange"]),
    (lambda query: torch.ones(()).expand(3).to(query.device), ["_to_copy.default"]),
    (lambda query: query[..., torch.zeros((), dtype=torch.long).expand(3)], ["index.Tensor"]),
    (lambda query: query.cpu(), ["cpu", "_to_copy.default"] if HAS_CUDA else None),
    (lambda query: torch.nn.functional.scaled_dot_product_attention(query, query, query), [SDPA]),
    (lambda query: query.sum().item(), None), (lambda query: bool(query.any()), None),
    (lambda query: query[query > 0], None), (lambda query: torch.zeros(()) + query, []),
])
def test_every_kind_of_question_is_noticed(monkeypatch, fault, found):
    """A tensor from Python numbers, one made on the host, copies, an index on the host, SDPA of any kernel, values.

    A single number on the host is no copy.
    """
    attend = Full.attend
    monkeypatch.setattr(Full, "attend", lambda self, kv, step: (fault(step.query), attend(self, kv, step))[1])
    if found is None:
        with pytest.raises(VALUES_ERROR, match=VALUES_MESSAGE):
            list_questions("full")
    else:
        questions = list_questions("full")
        assert len(questions) == 4
        assert all(set(found) <= set(x) and bool(found) == bool(x) for x in questions.values())
