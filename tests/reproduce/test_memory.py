"""Printed bytes, batches and lengths against predictions from shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvbench.bench.forecast import GIB
from kvbench.bench.state import Setting, open_context
from kvbench.errors import UserError
from kvbench.hf import Model
from kvbench.registry import find_method
from kvbench.reproduce.claims import find_claims
from kvbench.reproduce.memory import judge_bytes, predict
from kvbench.reproduce.plan import BytesRequest, plan_claim
from kvbench.reproduce.verdict import Judgment
from kvbench.settings import configure


def judged(text: str) -> list[Judgment]:
    """The verdicts on all predicted numbers of a claim."""
    plans = [plan_claim(x) for x in find_claims(text)]
    return [judge_bytes(x.claim, x.prediction) for x in plans if x.prediction is not None]


def test_the_largest_batch_of_the_full_cache_by_hand():
    """Llama-3.1-8B: 131,072 bytes a token and 16.06 GB of weights on 80 GiB, 2 GiB of it kept free."""
    work = 6 * 4096 * 2 + 3 * 14336 * 2 + 128_256 * 6
    weights = 8_030_261_248 * 2
    expected = (78 * GIB - weights) // (61_440 * 131_072 + work)
    request = BytesRequest("largest batch", "full", "random:llama-3.1-8b", "a100", 61_440, None, ())
    assert predict(request, factor=False) == expected == 8


def test_batches_of_shadowkv_are_reproduced():
    """The baseline's batches are equal; ShadowKV's differ by 6 % at most."""
    found = judged("shadowkv:batch")
    assert [x.ours.value for x in found if x.claim.row == "full attention"] == [8, 4, 2]
    assert {x.verdict for x in found} == {"reproduced (bytes)"}


def test_a_gpu_that_kvbench_plan_does_not_know_is_refused():
    """A file of one's own may name any."""
    request = BytesRequest("largest batch", "full", "random:llama-3.1-8b", "v100", 61_440, None, ())
    with pytest.raises(UserError, match=r"unknown gpu 'v100'\. Did you mean 'h100'"):
        predict(request, factor=False)


def test_no_batch_is_a_multiple_of_none():
    """Where not even one full cache fits the GPU."""
    request = BytesRequest("largest batch", "snapkv", "random:llama-3.1-8b", "a100", 4_000_000, None, ())
    with pytest.raises(UserError, match="with 4,000,000 tokens does not fit NVIDIA A100"):
        predict(request, factor=True)


def test_the_name_of_a_gpu_may_have_spaces():
    """As device names have; `kvbench plan` has hyphens."""
    (claim,) = find_claims("r-kv:batch/r1-llama-8b/fullkv/8k")
    table = claim.table.model_copy(update={"gpu": "RTX 4090"})
    assert plan_claim(replace(claim, table=table)).prediction.gpu == "rtx-4090"


def test_a_method_that_compresses_after_the_prompt_extends_no_prompt():
    """SnapKV's longest prompt is not reproduced: kvbench holds the full cache until the prompt ends."""
    (found,) = judged("snapkv:speed/mistral-7b-v0.2/snapkv-1024/context-on-one-a100-80gb")
    assert found.ours.value == 1.0
    assert found.verdict == "not reproduced (bytes)"


@pytest.mark.parametrize(("claim", "expected"), [
    ("r-kv:batch", [62, 31, 436, 436, 303, 303, 159, 159]), ("triattention:bytes", [10.58]), ("xkv:bytes", [8.03]),
    ("polarquant:bytes", [4.13]), ("palu:bytes", [50.39]),
])
def test_bytes_of_later_methods_are_reproduced(claim, expected):
    """Batches, factors of compression and shares that follow from the papers' settings."""
    found = judged(claim)
    assert [x.ours.value for x in found] == pytest.approx(expected, abs=0.005)
    assert {x.verdict for x in found} == {"reproduced (bytes)"}


def test_a_context_that_is_coded_once_complete_is_no_longer_than_the_full_cache():
    """KVQuant's million tokens are not reproduced."""
    (found,) = judged("kvquant:longest")
    assert (found.ours.value, found.verdict) == (133_120, "not reproduced (bytes)")


def test_the_bits_of_the_qjl_abstract_are_not_those_of_its_code():
    """Its released settings take 15 % more bytes than a fifth of the cache."""
    (found,) = judged("qjl:bytes")
    assert found.ours.value == pytest.approx(4.25, abs=0.005)
    assert found.verdict == "not reproduced (bytes)"


def test_a_number_from_memory_says_so():
    """KIVI's lengths are from memory."""
    assert all("the number or its settings are from memory" in x.differs for x in judged("kivi:speed"))


@pytest.mark.few(2)
@pytest.mark.parametrize(("claim", "method", "settings", "heads"), [
    ("kivi:speed", "kivi", {"residual": "32"}, 32),
    ("mikv:bytes/llama-2-7b/int8-rest-at-int2", "mikv", {"high_bits": "8"}, 32),
    ("shadowkv:batch", "shadowkv", {"rank": "160", "chunk": "8"}, 8),
])
def test_predicted_bytes_are_those_of_the_stores(claim, method, settings, heads):
    """Two layers of the paper's heads, filled with random entries: the ledger counts the bytes that are predicted."""
    length = 512 if heads == 32 else 3072
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=heads, head_dim=128, max_position_embeddings=4096,
    )
    model = Model.from_module(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), id="heads-of-128")
    shape = model.shape(length)
    assert any(x.claim.method.method == method for x in judged(claim))
    fitted = configure(find_method(method), settings, "--set", method).fit(None, shape)
    with open_context(Setting(model, state="synthetic"), fitted, length, 1) as context:
        assert context.session.memory().stored_bytes == fitted.declared_bytes(shape)
