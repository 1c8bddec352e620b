"""Documents with earlier names are read under the current names."""

from __future__ import annotations

from kvbench.runs.schema import upgrade

OLD = {
    "schema_version": 1, "latency": {"clock": "user"}, "certificate": {"facts": {"rows_dropped": 3, "rows_skipped": 4}},
    "denoising": {"canvas": 8, "passes": 4, "rows": 6.0, "baselines": {"none": {"passes": 8, "same": 1.0}}},
    "diffusion": {"canvas": 8, "rows_share": 0.5}, "budget": {"resolved": {"rows": 64}}, "ruler": {"before": 1.0},
    "scores": {"ruler": 1.0},
    "cells": [{"clock": "user", "predicted": {"largest_batch": 3}}], "command": {"clocks": ["kernel", "user"]},
}
NEW = {
    "schema_version": 2, "latency": {"timing": "end-to-end"},
    "effect": {"facts": {"entries_dropped": 3, "tokens_skipped": 4}},
    "denoising": {
        "response_length": 8, "nfe": 4, "computed_tokens": 6.0, "baselines": {"none": {"nfe": 8, "same_tokens": 1.0}}
    },
    "diffusion": {"response_length": 8, "computed_share": 0.5}, "budget": {"resolved": {"rows": 64}},
    "copy_bandwidth": {"before": 1.0}, "scores": {"ruler": 1.0},
    "cells": [{"timing": "end-to-end", "predicted": {"max_batch": 3}}],
    "command": {"timings": ["kernel", "end-to-end"]},
}


def test_earlier_names_become_current_ones():
    """Everywhere or within one name, for documents of version 1 and early documents of version 2."""
    assert upgrade(OLD) == NEW
    assert upgrade(OLD | {"schema_version": 2}) == NEW


def test_current_and_unknown_documents_stay_as_they_are():
    """Unknown versions are refused by the reader."""
    assert upgrade(NEW) == NEW
    assert upgrade(OLD | {"schema_version": 7}) == OLD | {"schema_version": 7}


def test_settings_keep_the_names_of_their_method():
    """A method of the user's own may call a setting as kvbench once called a field; its run was taken for another."""
    document = {"schema_version": 2, "method": {"settings": {"evidence": 3, "kind": "held"}}}
    assert upgrade(document) == document
