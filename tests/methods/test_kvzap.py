"""KVzap and DMS: the regression, what the predictor learns, the kept entries, and eviction while decoding."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
import torch

from kvbench.engine.agreement import FullCache
from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.kernels.dense_attention.naive import dense_attention
from kvbench.method import Budget, Method, Moment
from kvbench.methods.eviction.dms import DMS, DelayedKV
from kvbench.methods.eviction.kvzap import KVzap, Teacher, fit_line, train
from kvbench.registry import find_method
from kvbench.settings import configure
from kvbench.techniques import calibration

LENGTH = 100


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ids(count, seed=1):
    """Random tokens. [T]"""
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Recorder(Method):
    """The full cache, which keeps every layer's hidden states."""

    hidden: dict[int, list] = field(default_factory=dict)
    card: ClassVar = FullCache.card
    reads_hidden: ClassVar = True

    def attend(self, kv, step):
        """Attend, and remember."""
        self.hidden.setdefault(step.layer, []).append(step.hidden[0])
        return kv.attend(step)


@pytest.fixture
def planted(monkeypatch):
    """A predictor of random weights for the tiny model, and each layer's scores of any tokens."""
    model = tiny_model()
    weights = tuple(draw(65, 2, seed=layer).float() for layer in range(2))
    monkeypatch.setitem(calibration._FOUND, "planted", weights)

    def score(tokens, used=weights):
        recorder = Recorder()
        with Session(model, recorder) as session:
            session.prefill(tokens)
        return torch.stack([
            (torch.cat(recorder.hidden[x]) @ used[x][:-1] + used[x][-1]).T for x in range(2)])  # [layers, H_kv, T]

    return model, weights, score


def open_with(model, method, rows=20):
    """A session with the planted predictor at a budget."""
    fitted = replace(method, predictor="planted").fit(Budget("rows", rows), model.shape(LENGTH))
    return Session(model, fitted, capacity=LENGTH + 200, track=True)


def stored(session):
    """Positions by layer and head, as sets."""
    found = []
    for store in session.layers:
        frozen = store.frozen.position.split(store.frozen.counts)
        found.append([set(x.tolist()) | set(y.tolist()) for x, y in zip(frozen, store.positions[0], strict=True)])
    return found


def test_the_regression_is_the_closed_form():
    """Against the normal equations with a column of ones that is not penalized; not through the origin."""
    inputs, targets = draw(40, 3) + 2, draw(40, 2, seed=1) + 5
    ones = torch.cat([inputs, torch.ones(40, 1, dtype=torch.float64)], dim=1)
    penalty = torch.diag(torch.tensor([1.0, 1, 1, 0], dtype=torch.float64))
    wanted = torch.linalg.solve(ones.T @ ones + penalty, ones.T @ targets)
    assert torch.allclose(fit_line(inputs, targets).double(), wanted, atol=1e-6)
    through = torch.linalg.solve(inputs.T @ inputs + penalty[:3, :3], inputs.T @ targets)
    assert not torch.allclose(fit_line(inputs, targets)[:3].double(), through, atol=1e-2)


def test_the_predictor_learns_kvzip_plus():
    """On another text predictions correlate with the scores, and those of the other layer's predictor do not."""
    model = tiny_model()
    method = KVzap(tokens=2048).bind(model)
    text, found = ids(1024, seed=9), {}
    with Session(model, replace(Teacher(), rows=1023, length=1024), capacity=1024) as session:
        session.prefill(text)
        for layer, store in enumerate(session.layers):
            truth = store.state["score"][0, :, 4:].log()
            for used in range(2):
                weights = calibration.calibrated(method.predictor, used)
                predicted = (store.state["hidden"][0] @ weights[:-1] + weights[-1]).T[:, 4:]
                found[layer, used] = min(
                    torch.corrcoef(torch.stack(x))[0, 1].item() for x in zip(predicted, truth, strict=True))
    assert min(found[0, 0], found[1, 1]) > 0.3, found  # a random model attends to chance in its second layer
    assert max(found[0, 1], found[1, 0]) < 0, found


def test_the_target_is_the_logarithm():
    """The intercept is not penalized, so on the training text predictions have the mean of the scores' logarithms."""
    model = tiny_model()
    weights = train(model, 1024)
    text = calibration.calibration_ids(model, 1024)
    with Session(model, replace(Teacher(), rows=1023, length=1024), capacity=1024) as session:
        session.prefill(text)
        for store, found in zip(session.layers, weights, strict=True):
            scores = store.state["score"][0]
            known = (scores > 0).all(0)
            predicted = (store.state["hidden"][0] @ found[:-1] + found[-1]).T[:, known]
            assert torch.allclose(predicted.mean(1), scores[:, known].log().mean(1), atol=1e-3)


def test_kvzap_keeps_the_best_predictions_of_all_heads_and_layers(planted):
    """The entries and their number follow from the scores of one sequence; another layer's predictor gives others."""
    model, weights, score = planted
    context = ids(LENGTH)

    def best(scores):
        scores = scores.clone()
        scores[..., LENGTH - 10 :] = torch.inf  # half of the budget
        marks = torch.zeros(scores.numel(), dtype=torch.bool)
        marks[scores.flatten().topk(20 * 4).indices] = True
        return [[set(x.nonzero().flatten().tolist()) for x in layer] for layer in marks.view(scores.shape)]

    with open_with(model, KVzap()) as session:
        session.prefill(context)
        assert stored(session) == best(score(context))
        assert stored(session) != best(score(context, weights[::-1]))
        assert len({len(x) for layer in stored(session) for x in layer}) > 1


@pytest.mark.parametrize(("window", "kept"), [(4, 4), (128, 10)])
def test_dms_drops_what_leaves_the_window_below_the_threshold(planted, window, kept, monkeypatch):
    """After 100 tokens and 57 more, examined 16 at a time, each head has the window and what reaches the threshold."""
    model, _, score = planted
    tokens, predicted, predict = ids(157), {}, DMS.predict

    def spy(self, step):
        predicted.setdefault(step.layer, []).append(predict(self, step))
        return predicted[step.layer][-1]

    monkeypatch.setattr(DMS, "predict", spy)  # later hidden states depend on what was dropped
    with open_with(model, DMS(window=window, period=16)) as session:
        session.prefill(tokens[:LENGTH])
        assert sum(len(x) for layer in stored(session) for x in layer) == 20 * 4
        session.question(tokens[LENGTH : LENGTH + 7], 50)
        session.force(tokens[LENGTH + 7 :])
        found = stored(session)
        assert {x.n for x in session.layers} == {kept + 57 % 16}
    scores = torch.stack([torch.cat(predicted[x], dim=-1)[0] for x in range(2)])
    assert torch.allclose(scores[..., :LENGTH], score(tokens[:LENGTH]), atol=1e-5)
    pool = scores[..., :LENGTH].clone()
    pool[..., LENGTH - kept :] = torch.inf
    threshold = pool.flatten().topk(20 * 4).values.min()
    examined = 157 - kept - 57 % 16  # the question's seven tokens wait for the period to be full
    dropped = 0
    for layer in range(2):
        for head in range(2):
            wanted = {x for x in range(examined) if scores[layer, head, x] >= threshold} | set(range(examined, 157))
            assert found[layer][head] == wanted
            dropped += len(set(range(LENGTH, examined)) - wanted)
    assert dropped > 20


def test_dms_without_a_delay_is_told_apart(planted):
    """The tokens of the window stay although most of them lie below the threshold."""
    model, _, score = planted
    context = ids(LENGTH)
    with open_with(model, DMS(window=8)) as session:
        session.prefill(context)
        threshold = session.layers[0].state["threshold"].item()
        low = (score(context)[..., LENGTH - 8 :] < threshold).sum()
        assert low > 8
        assert all(set(range(LENGTH - 8, LENGTH)) <= x for layer in stored(session) for x in layer)


def test_the_ragged_block_grows_in_the_order_of_heads(make_step):
    """After three moves each head attends to exactly its own marked entries and the dense rest, in a batch of two."""
    store = DelayedKV(ragged=True, bounded=True, slack=4, entry_state=("score",), track=True)
    keys, values = draw(2, 3, 30, 4).float(), draw(2, 3, 30, 5, seed=1).float()
    query = draw(2, 6, 1, 4, seed=2).float()
    marks = torch.rand(2, 3, 30, generator=torch.Generator().manual_seed(3)) < 0.5
    marks[..., 24:] = True
    start = 0
    for stop in (12, 20, 30):
        store.append(make_step(query.expand(-1, -1, stop - start, -1), keys[:, :, start:stop], values[:, :, start:stop],
                               before=start, moment=Moment.TURN_END))
        store.retire(marks[:, :, stop - store.n : stop - 6])
        start = stop
    assert store.n == 6
    assert store.entries_kept() == marks.sum(-1).flatten().tolist()
    assert store.dropped == (~marks).sum()
    step = make_step(query, keys[:, :, 29:], values[:, :, 29:], before=29, moment=Moment.DECODE)
    found = store.attend(step)
    for batch in range(2):
        for head in range(6):
            mask = marks[batch, head // 2]
            some = (x[batch, head // 2, mask][None, None] for x in (keys, values))
            wanted = dense_attention(query[batch : batch + 1, head : head + 1], *some, scale=1.0, seen=int(mask.sum()))
            assert torch.allclose(found[batch, head], wanted[0, 0].float(), atol=1e-5)


def test_forks_do_not_see_each_other_s_evictions(planted):
    """A branch that drops entries leaves the other's as they are."""
    model, _, _ = planted
    with open_with(model, DMS(window=4, period=8)) as session:
        session.prefill(ids(LENGTH))
        before = stored(session)
        with session.fork() as branch:
            branch.force(ids(40, seed=2))
            assert stored(branch) != before
        assert stored(session) == before


@pytest.mark.parametrize("name", ["kvzap", "dms"])
@pytest.mark.parametrize(("setting", "value"), [("tokens", "100"), ("window", "-1")])
def test_settings_without_a_meaning_are_refused(name, setting, value):
    """The message names the value and the rule."""
    with pytest.raises(UserError, match=rf"{setting} must be .* got {value}"):
        configure(find_method(name), {setting: value}, "--set", name)
