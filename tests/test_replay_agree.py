"""How ranks agree on the next round: rank 0 decides, the others read it from torch's store."""

from typing import Any

import pytest
import torch.distributed as dist

from gemmtune.replay import agree
from gemmtune.replay.plan import COMPARE, END, Round

ROUND = Round(COMPARE, 63, 5, 1, ("ab", "ba"))


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    store = dist.HashStore()

    def become(rank: int) -> dist.Store:
        prefixed = dist.PrefixStore(agree.KEY, store)
        monkeypatch.setattr(agree, "_store", lambda: (prefixed, rank))
        return store

    return become


def never() -> Round:
    raise AssertionError("only rank 0 decides")


def test_the_others_are_told_what_rank_0_decided(as_rank: Any) -> None:
    as_rank(0)
    assert agree.agree(1, lambda: ROUND) == ROUND
    assert agree.agree(2, lambda: Round(END, 83)) == Round(END, 83)
    for rank in (1, 2):
        store = as_rank(rank)
        before = store.timeout
        assert agree.agree(1, never) == ROUND
        assert agree.agree(2, never) == Round(END, 83)
        assert store.timeout == before  # the job's own


def test_a_rank_that_is_not_told_says_so_in_time(as_rank: Any) -> None:
    as_rank(1)
    with pytest.raises(agree.Lost, match="the decision of rank 0 did not arrive"):
        agree.agree(1, never, timeout_s=0.05)


def test_without_a_group_a_process_decides_alone() -> None:
    assert not dist.is_initialized()
    assert agree.agree(1, lambda: ROUND) == ROUND
