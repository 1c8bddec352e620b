"""The invariants in bfloat16, as `kvbench check --device cuda` tries them on a GPU; here on a CPU."""

from __future__ import annotations

import pytest
import torch

from kvbench.check import INVARIANTS, POLICY_INVARIANTS, NotApplicableError
from kvbench.check.trial import LENGTH, require_same_entries
from kvbench.hf.tiny import placed, tiny_model
from kvbench.kernels.pack import dequantize, quantize
from kvbench.method import Moment
from kvbench.methods.eviction.snapkv import SnapKV
from kvbench.methods.quantization.full_int8 import FullInt8
from kvbench.methods.quantization.kivi import Kivi
from kvbench.methods.quantization.packed import GROUP
from kvbench.methods.quantization.turboquant import TurboQuant
from kvbench.registry import find_method, list_entries
from kvbench.store.coders import SplitCoder

METHODS = [x.name for x in list_entries("method")]
BY_ORDER = ("first token is exact", "chunks do not matter", "forced tokens equal decode steps",
            "static steps equal eager steps", "committed tokens are computed")
"""Invariants that compare computations in different orders, which round differently."""


@pytest.fixture(autouse=True)
def _in_bfloat16():
    """Tiny models are in bfloat16."""
    with placed("cpu", torch.bfloat16):
        yield


@pytest.mark.few
@pytest.mark.parametrize("name", METHODS)
def test_invariants_hold_in_bfloat16(name):
    """Rounding changes no logit by more than allowed, and at most a few of the kept entries."""
    kind = find_method(name)
    known = INVARIANTS if kind.card.models == "autoregressive" else POLICY_INVARIANTS
    assert tiny_model().module.dtype == torch.bfloat16
    for invariant in known.keys() & set(BY_ORDER):
        try:
            assert known[invariant](kind())
        except NotApplicableError as reason:
            assert str(reason)  # noqa: PT017  # a reason is asked for


def test_few_other_entries_are_allowed():
    """One of 40 is allowed and reported; three are not, and in float32 not one is."""
    kept = [[], [torch.arange(40)]]  # in the second layer: those of equal tokens in the first may change places
    one, three = ([[], [torch.cat([torch.arange(n), torch.arange(n, 40) + 100])]] for n in (39, 37))
    assert require_same_entries(kept, kept, "") is True
    assert require_same_entries(one, kept, "") is False
    with pytest.raises(AssertionError, match="chunks: other entries were kept"):
        require_same_entries(three, kept, "chunks")
    with placed("cpu", torch.float32), pytest.raises(AssertionError):
        require_same_entries(one, kept, "")


class ForgetsOne(SnapKV):
    """A planted fault: the first decode step removes one entry, forced tokens remove none."""

    def attend(self, kv, step):
        if step.moment is Moment.DECODE and step.seen == LENGTH + 6:
            kv.keep(torch.arange(1, kv.n).expand(*kv.keys.shape[:2], -1))
        return super().attend(kv, step)


def test_one_entry_less_is_found():
    """Other entries move logits by more than rounding does."""
    with pytest.raises(AssertionError, match=r"logits differ by [1-9]"):
        INVARIANTS["forced tokens equal decode steps"](ForgetsOne())


class FittedOnce(SplitCoder):
    """Keeps the channels that were found first."""

    def fit(self, x):
        return self if self.order is not None else super().fit(x)


class FromTheLastChunk(TurboQuant):
    """A planted fault: the outlier channels are those of the last chunk, not of the context."""

    def coders(self, layer):
        return tuple(FittedOnce(x.share, x.large, x.small) for x in super().coders(layer))

    def evict(self, kv, step):
        if step.moment.compresses and not kv.coded:
            last = step.query.shape[2]
            kv.key_coder, kv.value_coder = (
                coder.fit(x[:, :, -last:])
                for coder, x in ((kv.key_coder, kv.keys), (kv.value_coder, kv.values))
            )
        super().evict(kv, step)


class GroupsFromTheChunk(Kivi):
    """A planted fault: groups of keys are counted from the last chunk's border, not from the first token."""

    def evict(self, kv, step):
        if step.moment.compresses:
            first = step.query.shape[2] % GROUP
            wrong = kv.keys[:, :, first : first + GROUP]
            wrong.copy_(dequantize(quantize(wrong, self.key_bits, tokens=GROUP)))
        super().evict(kv, step)


class OneEntryTwice(FullInt8):
    """A planted fault: the first entry of the last chunk is quantized twice, first with one bit less."""

    def evict(self, kv, step):
        if step.moment.compresses:
            at = step.query.shape[2]
            for entries in (kv.keys, kv.values):
                entry = entries[:, :, -at]
                unit = entry.abs().amax(-1, keepdim=True) / 63
                entry.copy_((entry / unit).round() * unit)
        super().evict(kv, step)


@pytest.mark.few
@pytest.mark.parametrize("fault", [FromTheLastChunk, GroupsFromTheChunk, OneEntryTwice])
def test_codes_that_depend_on_chunks_are_found(fault):
    """Logits are compared as strictly as in float32, because both sides have the same entries before coding."""
    with pytest.raises(AssertionError, match="after GQA, chunks of 1: logits differ"):
        INVARIANTS["chunks do not matter"](fault())


@pytest.mark.gpu
@pytest.mark.parametrize("name", METHODS)
def test_invariants_hold_on_a_gpu(kvbench, name):
    """`kvbench check NAME --device cuda`."""
    answer = kvbench("check", name, "--device", "cuda")
    assert answer.code == 0, answer.out
