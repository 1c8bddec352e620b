"""Every method that shrinks, encodes or skips entries has published numbers in the claims files, or a reason."""

from __future__ import annotations

from collections.abc import Mapping

from kvbench.registry import list_entries
from kvbench.reproduce.claims import list_claims
from kvbench.reproduce.coverage import list_claims_of, read_reasons
from kvbench.reproduce.paper import list_papers

LATER = ("reuse",)
"""Families whose papers are not covered yet."""


def find_uncovered(reasons: Mapping[str, str]) -> set[str]:
    """Methods with neither numbers nor a reason, and those with both."""
    covered = {x for name, paper in list_papers().items() for claim in list_claims(name, paper)
               for x in claim.method.method.split("+")}
    names = [x.name for x in list_entries("method") if x.facts["family"] not in LATER and x.name != "full"]
    return {x for x in names if (x in covered) == (x in reasons)}


def test_every_method_has_numbers_or_a_reason():
    """And not both; no reason is about a method that is not there."""
    reasons = read_reasons()
    assert find_uncovered(reasons) == set()
    assert reasons.keys() <= {x.name for x in list_entries("method")}


def test_a_reason_that_is_lost_or_out_of_date_would_be_found():
    """One without numbers loses its reason, one with numbers gets one."""
    reasons = read_reasons()
    del reasons["kvzip-plus"]
    assert find_uncovered(reasons | {"r-kv": "It has numbers."}) == {"kvzip-plus", "r-kv"}


def test_numbers_of_a_combination_count_for_its_parts():
    """AdaKV is in papers together with SnapKV."""
    assert {"snapkv+adakv"} <= {x.method.method for x in list_claims_of("adakv")}


def test_the_command_lists_numbers_with_their_protocol(kvbench):
    """Model, budget, printed number, source, and what is missing."""
    answer = kvbench("reproduce", "--method", "triattention", "--json")
    assert answer.code == 0, answer.err
    numbers = {x["id"]: x for x in answer.json["numbers"]}
    cell = numbers["triattention:aime/qwen3-8b/triattention/aime25"]
    assert (cell["printed"], cell["model"], cell["budget"], cell["evidence"]) == (
        32.9, "Qwen/Qwen3-8B", "2048", "verified"
    )
    assert cell["missing"]
    assert answer.json["reason"] is None


def test_the_command_says_why_there_is_no_number(kvbench):
    """In one sentence; a method that nobody knows is refused."""
    answer = kvbench("reproduce", "--method", "kvzip-plus", "--json")
    assert (answer.code, answer.json["numbers"]) == (0, [])
    assert "not found" in answer.out
    answer = kvbench("reproduce", "--method", "kvzip-pluss")
    assert answer.code == 2
    assert "Did you mean 'kvzip-plus'?" in answer.err
