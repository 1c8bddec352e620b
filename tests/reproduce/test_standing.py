"""Which finished runs are those of a number: asked as the paper asked, and nothing near to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.reproduce.claims import find_claims
from kvbench.reproduce.plan import plan_claim
from kvbench.reproduce.standing import _answers
from kvbench.request import Request

WANTED = plan_claim(find_claims("snapkv:longbench/mistral-7b-v0.2/snapkv-1024/qasper")[0]).requests[0]
MADE = replace(WANTED, turns=1, history="golden", scorer="longbench-f1@1")
"""As a run's own spec says it: with what was left to defaults."""


def test_a_run_answers_what_was_asked():
    """Also from another folder, on another device, in chunks."""
    assert _answers(MADE, WANTED)
    assert _answers(replace(MADE, out=Path("elsewhere"), device="cuda", chunk=4096, kernels="triton"), WANTED)


@pytest.mark.parametrize("change", [
    {"samples": 100}, {"length": 32_768}, {"budget": "25%"}, {"visibility": "hidden"}, {"dtype": "bfloat16"},
    {"seed": 1}, {"split": "dev"}, {"suite": None}, {"method_settings": ("window=64", "kernel=7", "pool=max")},
])
def test_a_run_that_was_asked_otherwise_does_not(change):
    """Whatever it is that differs."""
    assert not _answers(replace(MADE, **change), WANTED)


def test_a_length_that_was_left_out_is_the_task_s_own():
    """Nothing else that a run might have had."""
    wanted = Request(method="full", task="niah")
    assert _answers(replace(wanted, length=1024), wanted)
    assert not _answers(replace(wanted, length=2048), wanted)
