"""What holds of capture over the interposer, in a process that it is preloaded into.

Run by test_calls.py; reads the folder of the fakes that it built. Each scenario is a process of
its own.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref
from pathlib import Path
from typing import Any

import torch
import transformer_engine_torch as tex
from fake_calls import spec
from interposer_job import Job, algo, gemm
from torch.utils.checkpoint import checkpoint
from transformer_engine.pytorch.cpp_extensions.gemm import Linear

from gemmtune.capture.calls import UNSPELLED, Calls
from gemmtune.capture.ops import Recorder
from gemmtune.capture.te import TeRecorder
from gemmtune.gemm import Gemm
from gemmtune.job.te_calls import Call

Rows = list[dict[str, Any]]


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


class Recording:
    """The recorders as a capture has them together."""

    def __init__(self, job: Job, timed: bool = False) -> None:
        self.calls = Calls(job.interposer, timed)
        self.torch, self.te = Recorder(self.calls), TeRecorder(self.calls)

    def claim(self, name: str, began: int, asked: Gemm | None = None) -> None:
        self.te._claim(Call(asked or gemm(), name, 0, ""), began)

    def rows(self) -> Rows:
        return self.calls.complete(self.torch.rows() + self.te.rows())

    def untranslated(self) -> dict[str, int]:
        return self.torch.untranslated() | self.te.untranslated() | self.calls.untranslated()

    def each(self, method: str) -> None:
        for part in (self.torch, self.te, self.calls):
            getattr(part, method)()

    def stop(self) -> None:
        self.torch.remove()
        self.te.remove()
        self.calls.stop()


@contextmanager
def recording(job: Job, timed: bool = False) -> Iterator[Recording]:
    """Checks that the rows are all that the library launched meanwhile."""
    before = job.lt.fake_calls()
    one = Recording(job, timed)
    yield one
    one.stop()
    assert sum(r["calls"] for r in one.rows()) == job.lt.fake_calls() - before


def counts(rows: Rows, *names: str) -> dict[tuple[Any, ...], int]:
    found: Counter[tuple[Any, ...]] = Counter()
    for row in rows:
        found[tuple(row[name] for name in names)] += row["calls"]
    return dict(found)


def rows_of(rows: Rows, made: Gemm) -> Rows:
    return [row for row in rows if row["gemm"] == list(made)]


def claimed_and_unclaimed_calls_are_the_librarys_count(job: Job) -> None:
    with recording(job) as recorder:
        for name, times in (("fprop", 3), ("wgrad", 2)):
            began = recorder.calls.begin()
            job.run(spec(), times)
            recorder.claim(name, began)
        job.run(spec(), 4)
        job.run(spec(k=64, settings=(0,) * 9), 5)  # the library chooses
    rows = recorder.rows()
    want = {("fprop",): 3, ("wgrad",): 2, ("other",): 4}
    assert counts(rows_of(rows, gemm()), "pass") == want
    assert counts(rows_of(rows, gemm(k=64)), "pass", "default") == {("other", ""): 5}
    assert {r["default"] for r in rows_of(rows, gemm())} == {algo().config}
    assert {r["time_s"] for r in rows} == {0.0} and recorder.untranslated() == {}
    assert counts(recorder.rows(), "pass") == counts(rows, "pass")  # asked twice, counted once


def what_te_was_asked_for_is_compared_with_the_librarys_calls(job: Job) -> None:
    with recording(job) as recorder:
        for asked, times in ((gemm(), 3), (gemm(align=0, ws_bytes=0), 2), (gemm(n=8, beta=1), 4)):
            began = recorder.calls.begin()
            job.run(spec(), times)
            recorder.claim("fprop", began, asked)
        recorder.claim("dgrad", recorder.calls.begin())
        job.run(spec(), 5)  # nobody's
    recorder.rows()
    named = "8x8x32 TN float32 +C -> 8x16x32 TN float32 (n, beta)"
    differ = {named: 4, "a GEMM -> no call of the library": 1}
    assert recorder.te.compared() == {"agree": 5, "differ": differ}


def a_call_has_the_mean_time_of_those_that_completed(job: Job) -> None:
    with recording(job, timed=True) as recorder:
        began = recorder.calls.begin()
        job.run(spec(), 3)
        recorder.claim("fprop", began)
        recorder.rows()
        job.cuda.fake_hold(1)
        job.run(spec(), 5)
    fprop, other = recorder.rows()
    assert (fprop["calls"], other["calls"]) == (3, 5) and fprop["time_s"] > 0
    assert abs(fprop["time_s"] / 3 - other["time_s"] / 5) < 1e-12
    job.cuda.fake_hold(0)


def what_another_thread_launches_is_not_claimed(job: Job) -> None:
    with recording(job) as recorder:
        calls = recorder.calls
        began = calls.begin()
        job.run(spec())
        in_thread(lambda: job.run(spec(k=64), 3))
        (mine,) = calls.since(began)
        recorder.claim("fprop", began)
        theirs: list[tuple[int, ...]] = []

        def work() -> None:
            first = calls.begin()
            assert first == 0
            job.run(spec(k=96), 2)
            theirs.append(calls.since(first))

        in_thread(work)
        assert len(theirs[0]) == 2 and len({*theirs[0], mine}) == 2
    found = {Gemm(*row["gemm"]).k: (row["pass"], row["calls"]) for row in recorder.rows()}
    assert found == {32: ("fprop", 1), 64: ("other", 3), 96: ("other", 2)}


def of_more_calls_than_the_trail_holds_the_rest_is_unclaimed(job: Job) -> None:
    with recording(job) as recorder:
        began = recorder.calls.begin()
        job.run(spec(), 100)
        spent = recorder.calls.since(began)
        assert len(spent) == 64 and len(set(spent)) == 1
        recorder.claim("fprop", began)
    assert counts(recorder.rows(), "pass") == {("fprop",): 64, ("other",): 36}


def what_no_table_can_spell_is_counted(job: Job) -> None:
    recorder = Recording(job)
    job.lt.fake_fail(7)
    job.run(spec(), 3)
    job.lt.fake_fail(-1)
    job.run(spec(), 2)
    assert recorder.untranslated() == {UNSPELLED: 3}
    assert counts(recorder.rows(), "pass") == {("other",): 2}
    recorder.stop()
    later = Calls(job.interposer)
    assert later.untranslated() == {}  # what came before is not asked for
    later.stop()


def a_forked_child_starts_afresh(job: Job) -> None:
    recorder = Recording(job)
    job.lt.fake_fail(7)
    job.run(spec(), 3)
    job.lt.fake_fail(-1)
    tex.product(torch.ones(8, 8), True, torch.ones(8, 8), False)
    recorder.rows()
    recorder.te.step = recorder.torch.step = 5
    child = os.fork()
    if not child:
        recorder.each("forget")
        ok = recorder.rows() == [] and recorder.untranslated() == {}
        job.lt.fake_fail(7)
        job.run(spec())
        job.lt.fake_fail(-1)
        tex.product(torch.ones(8, 8), False, torch.ones(8, 8), False)
        job.run(spec(), 2)
        found = counts(recorder.rows(), "pass")
        ok = ok and found == {("dgrad",): 1, ("other",): 2}
        ok = ok and {row["step"] for row in recorder.rows()} == {0}
        os._exit(0 if ok and recorder.untranslated() == {UNSPELLED: 1} else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert counts(recorder.rows(), "pass") == {("fprop",): 1}
    recorder.stop()


def rows_asked_for_by_two_threads_at_once_lose_no_call(job: Job) -> None:
    with recording(job) as recorder:
        done = threading.Event()

        def ask() -> None:
            while not done.is_set():
                recorder.rows()

        askers = [threading.Thread(target=ask) for _ in range(4)]
        for asker in askers:
            asker.start()
        for i in range(300):
            job.run(spec(k=8 + 8 * (i % 5)), 2)
        done.set()
        for asker in askers:
            asker.join()


class Model(torch.nn.Module):
    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.first, self.second = Linear(16, 24), Linear(24, 8)
        self.recompute = recompute  # by which kind of checkpointing, if any

    def forward(self, x: Any) -> Any:
        if self.recompute is None:
            return self.second(torch.relu(self.first(x)))
        y = checkpoint(self.first, x, use_reentrant=self.recompute)
        return self.second(torch.relu(y))


def step(model: Model) -> None:
    x = torch.randn(32, 16, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None and model.first.weight.grad is not None


PASSES = {"fprop": (24, 32, 16), "dgrad": (16, 32, 24), "wgrad": (16, 24, 32)}  # of `first`


def transformer_engines_gemms_have_their_pass_and_module(job: Job) -> None:
    original = tex.generic_gemm
    with recording(job) as recorder:
        assert tex.generic_gemm is not original
        for _ in range(2):
            step(Model())
            recorder.torch.next_step()
            recorder.te.step += 1
    assert tex.generic_gemm is original  # the job's own again
    rows = recorder.rows()
    sites = [(name, 0, site) for name in PASSES for site in ("first", "second")]
    on_library = [r for r in rows if Gemm(*r["gemm"]).api == "lt"]
    assert counts(on_library, "pass", "recompute", "site") == dict.fromkeys(sites, 2)
    first = {r["pass"]: tuple(r["gemm"][:3]) for r in on_library if r["site"] == "first"}
    assert first == PASSES
    assert {r["default"] for r in on_library} == {algo().config}
    assert recorder.te.compared() == {"agree": 12, "differ": {}}


def a_recomputed_forward_is_marked(job: Job) -> None:
    for reentrant in (True, False):
        with recording(job) as recorder:
            step(Model(reentrant))
        rows = [r for r in recorder.rows() if Gemm(*r["gemm"]).api == "lt"]
        found = counts(rows, "pass", "recompute", "site")
        want = {(name, 0, site): 1 for name in PASSES for site in ("first", "second")}
        assert found == want | {("fprop", 1, "first"): 1}, found


def torchs_operators_are_the_librarys_calls(job: Job) -> None:
    """The CPU's mm stands in for CUDA's: it calls the older API of the fake."""

    def mm(x: Any, w: Any) -> Any:
        out = torch.empty(x.shape[0], w.shape[1])
        ops = {name: int(t.stride(1) != 1) for name, t in (("trans_a", w), ("trans_b", x))}
        ld = {"lda": max(w.stride()), "ldb": max(x.stride())}
        made = spec(w.shape[1], x.shape[0], x.shape[1], api=1, **ops, **ld)
        pointers = (t.data_ptr() for t in (w, x, out))
        assert not job._job.job_gemm_on(byref(made), *pointers)
        return out

    x, w = torch.randn(32, 16), torch.randn(16, 24)
    expected = x @ w
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("mm", mm, "CPU")
        torch.testing.assert_close(x @ w, expected)
        torch.Tensor.is_cpu = False  # type: ignore[assignment,misc]
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 24, bias=False), torch.nn.ReLU(), torch.nn.Linear(24, 8, bias=False)
        )
        with recording(job) as recorder:
            model(x).square().sum().backward()
    rows = recorder.rows()
    want = {(name, site): 1 for name in PASSES for site in ("0", "2")}
    del want["dgrad", "0"]
    assert counts(rows, "pass", "site") == want
    assert {(Gemm(*r["gemm"]).api, r["default"]) for r in rows} == {("gemmex", "")}
    found = {(r["pass"], r["site"]): tuple(r["gemm"][:3]) for r in rows}
    assert found["fprop", "0"] == PASSES["fprop"] and found["dgrad", "2"] == (24, 32, 8)


def a_cpus_product_is_torchs_own_with_the_time_that_it_took(job: Job) -> None:
    recorder = Recording(job)
    for _ in range(3):
        torch.ones(64, 64) @ torch.ones(64, 64)
    (row,) = recorder.torch.rows()
    assert (Gemm(*row["gemm"]).api, row["calls"]) == ("mm", 3) and 0 < row["time_s"] < 10
    assert recorder.untranslated() == {}
    recorder.stop()


def an_operator_without_a_call_of_the_library_is_named(job: Job) -> None:
    torch.Tensor.is_cpu = False  # type: ignore[assignment,misc]
    recorder = Recording(job)
    torch.ones(4, 5) @ torch.ones(5, 6)
    assert recorder.untranslated() == {"mm without a call of the library": 1}
    recorder.stop()


SCENARIOS = [
    name
    for name, value in list(globals().items())
    if callable(value) and list(getattr(value, "__annotations__", {})) == ["job", "return"]
]

if __name__ == "__main__":
    globals()[sys.argv[1]](Job(Path(sys.argv[2])))
