"""The comparisons: a line per comparison, with the settings of both sides. Imports neither kvbench nor kvpress."""

from __future__ import annotations

from dataclasses import dataclass, field

KVPRESS = "0.5.5"


@dataclass(frozen=True)
class Plan:
    """The prompts of a model."""

    length: int
    """Tokens of a context; a multiple of 64, so that no budget below is a fraction of an entry."""
    prompts: int


MODELS = {"mini": Plan(512, 2), "smollm2-135m": Plan(256, 2)}

GATES, PREDICTOR, FILTERS = "<gates>", "<predictor>", "<filters>"
"""Stand for files that kvbench's side writes: random gates, KVzap's trained predictor, and Q-Filters' directions."""
FILES = {GATES: "gates.tsv", PREDICTOR: "predictor.npz", FILTERS: "filters.npz"}
"""Their names, after that of the model."""


@dataclass(frozen=True)
class Case:
    """One comparison."""

    method: str
    """kvbench's name."""
    press: str | None
    """A class of kvpress, of theirs.py, or one around another: `AdaKVPress(SnapKVPress)`. None: nothing to compare."""
    settings: dict[str, str] = field(default_factory=dict)
    options: dict[str, object] = field(default_factory=dict)
    """Arguments of the press, of the inner one if there are two."""
    outer: dict[str, object] = field(default_factory=dict)
    """Arguments of the outer press, in addition to the inner one."""
    budget: str = "25%"
    """Empty: the method has none."""
    ratio: str = "compression_ratio"
    """The press's argument for the share that it removes; empty: it has none."""
    eager: bool = False
    """Whether the press reads the attention matrix."""
    note: str = ""
    """The side that departs, and the source it departs from."""

    @property
    def name(self) -> str:
        """The comparison, as the tables call it."""
        return f"{self.method} / {self.press or 'none'}"


SNAPKV = {"window": "32", "kernel": "7", "pool": "avg"}
SNAP_PRESS = {"window_size": 32, "kernel_size": 7}

CASES = (
    Case("snapkv", "SnapKVPress", SNAPKV, SNAP_PRESS),
    Case("snapkv", "FirstOfEqual(GroupedSnapKV)", {**SNAPKV, "pool": "max"}, SNAP_PRESS, note=(
        "`GroupedSnapKV` pools as the grouped code of PyramidKV's authors does: the maximum, after the mean over the "
        "query heads. kvpress has average pooling only. Neighbors then have equal scores, of which `FirstOfEqual` "
        "keeps the first, as kvbench does; torch's `topk`, which kvpress and the authors call, may keep any.")),
    Case("streaming-llm", "StreamingLLMPress", {"positions": "original"}),
    Case("keydiff", "KeyDiffPress"),
    Case("knorm", "KnormPress", note=(
        "Equal tokens of the first layer have keys of equal norm. kvbench keeps the first of them; kvpress ranks them "
        "by the rounding of their rotation, so that another machine may keep others.")),
    Case("expected-attention", "ExpectedAttentionPress"),
    Case("observed-attention", "ObservedAttentionPress", eager=True),
    Case("h2o", "H2O", eager=True, note=(
        "kvpress has no H2O. `H2O` sums the attention weights that `ObservedAttentionPress` reads, without dividing "
        "them, and protects the last half of the budget. Eviction while decoding is not compared.")),
    Case("tova", "TOVAPress", note=(
        "`TOVAPress` always keeps the last token (kvpress/presses/tova_press.py, lines 56 to 59, says so); TOVA's "
        "authors and kvbench do not.")),
    Case("pyramidkv", "PyramidKVPress", {**SNAPKV, "window": "4"}, {**SNAP_PRESS, "window_size": 4}, note=(
        "`PyramidKVPress.get_layer_budget` (kvpress/presses/pyramidkv_press.py, lines 69 to 86) departs from the "
        "authors: it counts the window in a layer's budget, which they add to it, and does not round down to integer "
        "steps (line 85). Where the upper layers would get less than the window it gives every layer the same number, "
        "and says nothing (lines 79 to 81).")),
    Case("pyramidkv", "AuthorsPyramidKV(GroupedSnapKV)", {**SNAPKV, "window": "4", "pool": "max"},
         {**SNAP_PRESS, "window_size": 4},
         note="`AuthorsPyramidKV` has the layer budgets of the authors' `PyramidKVCluster`."),
    Case("adakv", "AdaKVPress(SnapKVPress)", SNAPKV, SNAP_PRESS, note=(
        "`AdaKVPress` (kvpress/presses/adakv_press.py, lines 65 to 74) departs from the authors: each head keeps its "
        "share `alpha` of the budget, protected tokens included, and the rest goes to the layer's best entries. The "
        "authors mix the two counts instead (`round(count * (1 - alpha) + floor)`), which gives heads with few top "
        "scores more entries. It masks entries and frees none (line 80).")),
    Case("adakv", "AuthorsAdaKV(GroupedSnapKV)", {**SNAPKV, "pool": "max"}, SNAP_PRESS, note=(
        "`AuthorsAdaKV` allocates as the authors' `AdaptiveSnapKVCluster` does. They truncate the floor and round each "
        "head's number, so that a layer may miss its budget by an entry per head; kvbench meets it.")),
    Case("kvzip", "KVzipPress", note=(
        "Three departures of kvpress/presses/kvzip_press.py from the authors. Without a chat template a line break "
        '(line 105), not their "Answer: ", stands between prompt and repeat, and the first tokens are repeated, so '
        "that no sink is in the softmax (lines 193 and 307). With one, only the first `n_sink` tokens of its head are "
        "protected (line 376): the others have a score of 0 and are the first to go.")),
    Case("kvzip", "MatchedKVzip", note=(
        "`MatchedKVzip` is `KVzipPress` with the authors' text between prompt and repeat, and with the protected "
        "tokens of kvbench: the head of the chat template, or four sinks without one.")),
    Case("kvzip-plus", "MatchedKVzip", options={"kvzip_plus_normalization": True}),
    Case("kvzap", "BudgetDMS(GivenKVzap)", {"window": "32"}, {"weights": PREDICTOR}, outer={"sliding_window_size": 32},
         budget="25%", note=(
        "`GivenKVzap` is `KVzapPress` with kvbench's predictor in place of the authors', which are those of a few "
        "models (kvpress/presses/kvzap_press.py, line 69). `BudgetDMS` is `DMSPress` with the threshold that leaves "
        "the budget, over all heads and layers. `DMSPress` masks entries and frees none "
        "(kvpress/presses/dms_press.py, lines 106 to 121).")),
    Case("dms", "BudgetDMS(GivenKVzap)", {"window": "32"}, {"weights": PREDICTOR}, outer={"sliding_window_size": 32},
         note="As `kvzap` at the end of the context. Eviction while decoding is not compared: the question is shorter "
              "than a period of `dms`."),
    Case("duo-attention", "GivenDuoAttention", {"gates": GATES, "sparsity": "0.5", "sinks": "16", "recent": "64"},
         {"head_compression_ratio": 0.5, "gates": GATES, "sink": 16, "recent": 64}, budget="paper", ratio="", note=(
        "`GivenDuoAttention` is `DuoAttentionPress` with gates from a file. It masks entries and frees none, and its "
        "windows do not slide while decoding.")),
    Case("chunkkv", "ChunkKVPress(SnapKVPress)", {"chunk": "16", "window": "32"}, {**SNAP_PRESS, "kernel_size": 1},
         outer={"chunk_length": 16}, note=(
        "`ChunkKVPress` (kvpress/presses/chunkkv_press.py, line 103) keeps a whole number of chunks, here the "
        "budget's; where chunks do not divide it, it keeps fewer entries and kvbench cuts the last chunk.")),
    Case("criticalkv", "CriticalKVPress(SnapKVPress)", SNAPKV, SNAP_PRESS),
    Case("cur", "CURPress"),
    Case("lagkv", "FirstOfEqual(LagKVPress)", {"lag": "32"}, {"lag_size": 32}, note=(
        "Ranks are equal across parts, so that ties decide part of the budget. Where a key channel is constant over a "
        "part, `LagKVPress` (kvpress/presses/lagkv_press.py, line 96) divides by zero and ranks NaN; the first layer "
        "of `mini` has such channels.")),
    Case("noncausal", "NonCausalAttnPress", {"scaled": "false"}, note=(
        "kvpress does not scale the logits (kvpress/presses/non_causal_attention_press.py, line 88); kvbench does so "
        "unless `scaled=false`. In the one head that differs, the two entries at the edge of the budget have scores "
        "that are equal to nine digits.")),
    Case("finch", "WindowFinch", {"positions": "original", "window": "32"}, {"last": 32}, note=(
        "`WindowFinch` is `FinchPress` with the window as an argument and without moving keys. kvpress multiplies a "
        "query's weights by the number of keys before it (kvpress/presses/finch_press.py, lines 73 to 75), kvbench by "
        "that of the keys that it sees, one more.")),
    Case("qfilter", "GivenQFilter", options={"filters": FILTERS}, note=(
        "`GivenQFilter` is `QFilterPress` with the directions that kvbench measured, with the opposite sign; kvpress "
        "downloads those of a list of models (kvpress/presses/qfilter_press.py, line 63).")),
    Case("think", "ThinKPress", {"ratio": "0.5", "window": "32", "recent": "0"},
         {"key_channel_compression_ratio": 0.5, "window_size": 32}, budget="", ratio="", note=(
        "No entry is dropped: the columns compare the channels of each head's keys. `ThinKPress` sets channels to zero "
        "and frees none (kvpress/presses/think_press.py, line 88), and thins the last entries, too, as kvbench does "
        "with `recent=0`; the authors leave 32 whole.")),
    Case("simlayerkv", "BudgetSimLayerKV", ratio="ratio", note=(
        "`BudgetSimLayerKV` is `SimLayerKVPress` with kvbench's budget in place of a threshold, and measures laziness "
        "over as many recent entries as kvbench. `SimLayerKVPress` leaves the last token out of the attention that it "
        "measures (kvpress/presses/simlayerkv_press.py, line 64, by line 67 of snapkv_press.py), which makes another "
        "layer of `smollm2-135m` lazy: measured without it by kvbench, too, all heads are equal. It keeps `n_recent - "
        "n_last` recent entries (line 110), one fewer than its documentation says.")),
    Case("leverage", "SeededLeverage", note=(
        "`SeededLeverage` is `LeverageScorePress` with kvbench's random projection, the same for all heads; kvpress "
        "draws one per head, without a seed (kvpress/presses/leverage_press.py, line 67). Equal tokens of the first "
        "layer have equal keys before rotation: both sides rank them by rounding, kvpress by that of float32, kvbench "
        "by that of rotating the keys back in float64.")),
    Case("compactor", "SeededCompactor", {"first": "28", "block": "32", "scaled": "false"},
         {"sink_size_start": 28, "chunk_size": 32}, note=(
        "`SeededCompactor` has `SeededLeverage` inside. With 28 and 4 protected tokens, blocks of 32 divide the rest: "
        "where they do not, kvpress sets the logits of the padding to -1e-9, which leaves it in the softmax "
        "(kvpress/presses/non_causal_attention_press.py, line 90).")),
    Case("random", None, note=(
        "Random numbers of two programs are not comparable. With a seed, `RandomPress` "
        "(kvpress/presses/random_press.py, lines 44 and 45) seeds a new generator in every layer, so all layers keep "
        "the same entries; kvbench's layers differ.")),
)
