"""Every test: one thread, no network, a cache of its session's own, and kernels interpreted where there is no GPU."""

from __future__ import annotations

import atexit
import gc
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["HF_HUB_OFFLINE"] = "1"
if not Path("/dev/nvidiactl").exists():  # Triton reads it when a folder's conftest.py imports transformers
    os.environ["TRITON_INTERPRET"] = "1"

import hypothesis
import pytest

if TYPE_CHECKING:
    from .tape import Tape

TOYS = Path(__file__).parent / "toys" / "toy.py"
STARTED = time.monotonic()
RARELY = 10_000, 10, 50
"""New objects until the garbage collector searches the youngest, and searches until it goes on to older ones. Python's
usual numbers took a tenth of the tests' time: each full search is of a million objects."""
LOADERS = "kvbench.hf", "kvbench.bench.run", "kvbench.leaderboard.verification.rerun_job"
"""Modules whose `load_model` is called by commands and runs."""

# Machines are shared: how long an example took says nothing about it.
hypothesis.settings.register_profile("shared", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("shared")
hypothesis.settings.register_profile("quick", parent=hypothesis.settings.get_profile("shared"), max_examples=30)
gc.disable()  # until all tests are collected: nothing that is made before goes away


@pytest.fixture(scope="session", autouse=True)
def _any_cpu() -> Iterator[None]:
    """Default element types are those of a CPU with bfloat16 units, whatever this one has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvbench.machine.has_bfloat16_units", lambda: True)
        yield


@pytest.fixture(scope="session", autouse=True)
def _any_file_system() -> Iterator[None]:
    """Entries may be in files, also where the folder for temporary files is in memory, as in some containers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvbench.machine.find_file_system", lambda _: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Files of the user's own runs are neither read nor written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(scope="module", autouse=True)
def _no_runs_kept() -> Iterator[None]:
    """Free the runs that scripts/curated.py keeps: a million objects, which every full search of `gc` visits."""
    yield
    if (curated := sys.modules.get("curated")) is not None:
        curated.read_runs.cache_clear()


@pytest.fixture(scope="session", autouse=True)
def _bundled_once() -> Iterator[None]:
    """Commands and runs share a bundled model, as the cells of a sweep do: to load and prove it takes 0.15 s.

    Tests that call `load_model` themselves load it anew.
    """
    places = [sys.modules[x] for x in LOADERS if x in sys.modules]
    if not places:  # no module of these tests imports transformers, and that takes seconds
        yield
        return
    from kvbench import machine
    from kvbench.hf import load_model
    from kvbench.registry import MODELS

    loaded: dict[tuple[object, ...], tuple[Any, str | None]] = {}

    def load(name: str, device: str = "cpu", dtype: str | None = None, **options: Any) -> Any:
        folder = MODELS / name
        if folder.parent != MODELS or not folder.is_dir() or options:
            return load_model(name, device, dtype, **options)
        key = name, device, dtype, machine.has_bfloat16_units()
        if key not in loaded:
            model = load_model(name, device, dtype)
            loaded[key] = model, model.tokenizer.chat_template
        model, template = loaded[key]
        assert model.tokenizer.chat_template == template, "a test has changed a tokenizer that others use"
        return model

    with pytest.MonkeyPatch.context() as patch:
        for place in places:
            patch.setattr(place, "load_model", load)
        yield


@dataclass(frozen=True)
class Answer:
    """The output of a command line."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The last line of standard output."""
        return json.loads(self.out.splitlines()[-1])


@pytest.fixture
def kvbench(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Calls a command line in this process."""
    from kvbench.cli import call

    def answer(*arguments: object) -> Answer:
        capsys.readouterr()
        code = call([str(x) for x in arguments])
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return answer


@pytest.fixture(scope="session")
def chat_mini(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model in a folder of its own, whose tokenizer has a chat template."""
    from kvbench.registry import MODELS

    folder = tmp_path_factory.mktemp("chat") / "mini"
    shutil.copytree(MODELS / "mini", folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{% for x in messages %}[{{ x.role }}]{{ x.content }}[end]{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers with random weights and a tokenizer of one token per byte."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "tiny"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<end>", *alphabet])}
    bytes_only = Tokenizer(models.BPE(vocabulary, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token="<end>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, max_position_embeddings=512, eos_token_id=0, bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own: a task that is slow on purpose is slow in each of them."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def arguments(model_folder: Path, tmp_path: Path) -> list[str]:
    """A run of four samples that works, but for `--method`."""
    return [
        "run", "--task", f"{TOYS}:Toy", "--model", str(model_folder), "--samples", "4", "--device", "cpu", "--out",
        str(tmp_path / "runs"), "--json",
    ]


@pytest.fixture
def new_tape() -> type[Tape]:
    """Makes tapes."""
    from .tape import Tape

    return Tape


@pytest.fixture
def open_page() -> Iterator[Callable[..., Any]]:
    """Opens a file in Chromium; at the end nothing else was asked for, no error was logged and no dialog opened."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no chromium")
    seen: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])

        def opened(path: Path, width: int = 1280) -> Any:
            page = browser.new_page(viewport={"width": width, "height": 900})
            page.on("console", lambda x: seen.append(f"{x.type}: {x.text}"))
            page.on("pageerror", lambda x: seen.append(f"error: {x}"))
            page.on("dialog", lambda x: (seen.append(f"dialog: {x.message}"), x.dismiss()))
            page.on("request", lambda x: x.url.startswith(("file:", "data:", "blob:")) or seen.append(x.url))
            page.goto(path.as_uri())
            return page

        yield opened
        browser.close()
    assert seen == []


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--minutes 10`: as many tests as fit, from files in an order that changes with each commit."""
    parser.addoption("--minutes", type=float, help="skip tests that would start later; the commit chooses the order")


def pytest_configure(config: pytest.Config) -> None:
    """Set torch up, except in the process that only hands tests to xdist's workers, which wait for it to start.

    `make test` tries 30 examples of a property, `make test-all` 100.
    """
    if config.getoption("markexpr") == "not slow":
        hypothesis.settings.load_profile("quick")
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        import torch

        torch.set_num_threads(1)
        if not torch.cuda.is_available():
            os.environ["TRITON_INTERPRET"] = "1"  # before transformers, which imports triton


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` is applied
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the files by the commit under `--minutes`; without a GPU, skip what needs one, and mark cases as slow.

    Those are the cases beyond `few`. With a GPU, kernels are compiled and every case is quick.
    """
    if config.getoption("minutes") is not None:
        ask = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        commit = subprocess.run(ask, capture_output=True, text=True, check=False).stdout
        items.sort(key=lambda x: hashlib.sha256(f"{commit}{x.path.name}".encode()).digest())  # stable within a file
    import torch

    if torch.cuda.is_available():
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        elif item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for same in cases.values():
        count = next(iter(same[0].get_closest_marker("few").args), 1)
        for item in same[:-count]:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)  # before the fixtures of the test
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the tests for which `--minutes` leaves no time."""
    minutes = item.config.getoption("minutes")
    if minutes is not None and time.monotonic() - STARTED > 60 * minutes:
        pytest.skip(f"the {minutes:g} minutes of this run are over")


def pytest_collection_finish() -> None:
    """The garbage collector leaves out what was there before the first test: hundreds of megabytes of modules.

    Until the process ends, when modules may go away in order: pytest collects garbage twice before that.
    """
    gc.freeze()
    gc.set_threshold(*RARELY)
    gc.enable()
    atexit.register(gc.unfreeze)
