"""Hit rates against simulators of other authors, in an environment of their own."""

from __future__ import annotations

import json
import subprocess
import venv
from pathlib import Path

import pytest

from kvbench.trace.cache import simulate
from kvbench.trace.loaders import load
from kvbench.trace.policies import LRU, Optimum
from kvbench.trace.synthetic import make_trace

pytestmark = pytest.mark.slow
PACKAGES = ("kvcache-simulator==0.1.3", "libcachesim==0.3.5")
CAPACITIES = (300, 1000, 3000)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """Python with the simulators; kvbench never imports them (libCacheSim is GPL)."""
    folder = tmp_path_factory.mktemp("oracles")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    install = [python, "-m", "pip", "install", "-q", *PACKAGES]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the simulators cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    return python


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The synthetic trace in Mooncake's format."""
    trace = make_trace(7)
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    path.write_text("".join(
        json.dumps({"timestamp": int(x.time * 1000), "input_length": 512 * len(x.blocks), "output_length": 1,
                    "hash_ids": list(x.blocks)}) + "\n"
        for x in trace.requests if x.blocks
    ))
    return path


def test_hit_rates_are_those_of_other_simulators(oracle, path):
    """LRU and the optimum equal kvcache-simulator to the last token; LRU is near libCacheSim over single blocks."""
    script = Path(__file__).with_name("oracle.py")
    done = subprocess.run(
        [oracle, script, path, *map(str, CAPACITIES)], capture_output=True, text=True, check=True
    )
    theirs = json.loads(done.stdout)
    flat = {(name, size): rate for name, size, rate in theirs["flat"]}
    trace = load(path)
    half = len(trace.requests) // 2
    prompt = sum(x.input_tokens for x in trace.requests[half:])
    for policy, name in ((LRU, "lru"), (Optimum, "optimal")):
        for capacity in CAPACITIES:
            ran = simulate(trace, policy(), capacity)
            pairs = list(zip(ran.hits, trace.requests, strict=True))[half:]
            ours = sum(min(n * 512, x.input_tokens) for n, x in pairs) / prompt
            assert ours == pytest.approx(theirs["rates"][f"kvcache-simulator {name} {capacity}"], abs=1e-12)
            if name == "lru":
                assert sum(ran.hits) / trace.references == pytest.approx(flat["lru", capacity], abs=0.01)
