"""DapQ: pseudo tokens that leave no trace, the scores that they give, and their positions."""

from __future__ import annotations

import pytest
import torch

from kvbench.engine.agreement import FullCache
from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import tiny_model
from kvbench.kernels.choice import using
from kvbench.kernels.dense_attention.naive import attention_weights
from kvbench.method import Budget, Method, Moment
from kvbench.methods.eviction.dapq import DapQ

IDS = torch.randint(64, (80,), generator=torch.Generator().manual_seed(0)).tolist()


def test_pseudo_tokens_are_the_prompt_s_first_and_last():
    """Two first and three last tokens; a short prompt gives no more tokens than it has."""
    ids = torch.arange(10)[None]
    assert DapQ(pseudo=5, prefix=2).pseudo_ids(ids).tolist() == [[0, 1, 7, 8, 9]]
    assert DapQ(pseudo=5, prefix=0).pseudo_ids(ids).tolist() == [[5, 6, 7, 8, 9]]
    assert DapQ(pseudo=5, prefix=2).pseudo_ids(ids[:, :3]).tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("chunk", [None, 13])
def test_pseudo_tokens_leave_no_trace(chunk):
    """The logits are those of the prompt's end, the next position is the prompt's length, and only entries stay."""
    model = tiny_model()
    with Session(model, FullCache(), capacity=100) as session:
        wanted = session.prefill(IDS)
    fitted = DapQ(pseudo=16).fit(Budget("rows", 20), model.shape(80))
    with Session(model, fitted, capacity=100, chunk=chunk, track=True) as session:
        found = session.prefill(IDS)
        assert torch.allclose(found, wanted, atol=1e-5)
        assert session.seen == 80
        for store in session.layers:
            assert (store.n, store.seen, store.capacity, store.state) == (20, 80, 100, {})
            assert store.positions.max() < 80
        session.forward(torch.tensor([[1]]), Moment.DECODE)
        assert (session.layers[0].positions[..., -1] == 80).all()


class Catch(Method):
    """The full cache; notes the steps."""

    card = DapQ.card

    def attend(self, kv, step):
        """Note the step and the keys."""
        kv.state["query"], kv.state["keys"] = step.query, kv.keys.clone()
        return kv.attend(step)


def test_entries_are_scored_by_queries_after_the_prompt():
    """A run of the prompt with the pseudo tokens appended gives the queries; their mean attention chooses."""
    model = tiny_model()
    fitted = DapQ(pseudo=12, prefix=4, kernel=1).fit(Budget("rows", 20), model.shape(80))
    with Session(model, fitted, track=True) as session:
        session.prefill(IDS)
        kept = [store.positions for store in session.layers]
    with Session(model, Catch()) as session:
        session.forward(torch.tensor([IDS + IDS[:4] + IDS[-8:]]), Moment.CONTEXT_CHUNK)
        for store, positions in zip(session.layers, kept, strict=True):
            query, keys = store.state["query"][:, :, -12:], store.state["keys"]
            weights = attention_weights(query, keys, scale=16**-0.5, seen=92)[..., :80]
            best = weights.mean((2, 3)).topk(20).indices.sort(-1).values
            assert positions.equal(best.int())


def test_the_scoring_kernel_is_chosen_and_recorded():
    """As for every method that adds up attention."""
    model = tiny_model()
    fitted = DapQ().fit(Budget("rows", 20), model.shape(80))
    with using("torch") as ran, Session(model, fitted) as session:
        session.prefill(IDS)
    assert ran["window_scores"] == "torch"


def test_recent_entries_can_be_kept():
    """With recent=8 the last eight tokens stay."""
    model = tiny_model()
    fitted = DapQ(recent=8).fit(Budget("rows", 20), model.shape(80))
    with Session(model, fitted, track=True) as session:
        session.prefill(IDS)
        assert (session.layers[1].positions[..., -8:] == torch.arange(72, 80)).all()


def test_settings_and_lengths_without_a_meaning_are_refused():
    """More first tokens than pseudo tokens; positions that the model does not have."""
    with pytest.raises(UserError, match=r"dapq: prefix=5 .* Use a smaller one"):
        DapQ(pseudo=4, prefix=5)
    model = tiny_model()
    fitted = DapQ(pseudo=32).fit(Budget("rows", 20), model.shape(4090))
    with Session(model, fitted) as session, pytest.raises(UserError, match="Use a smaller --length"):
        session.prefill([1] * 4090)
