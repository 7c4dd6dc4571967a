"""What holds of the interposer, in a process that it is preloaded into: run by test_interposer.py.

Reads the folder of the fakes that test_interposer.py built. Each scenario is a process of its own.
"""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import c_float, c_int32, c_uint64
from pathlib import Path

import fake_lt
from fake_calls import CAPTURING, HIP, SETTINGS, VENDOR, Spec, library, spec

from gemmtune.backends.blas import PLAIN
from gemmtune.gemm import LIBRARY_APIS, Algo, Gemm
from gemmtune.interposer import client
from gemmtune.interposer.client import REASONS, Interposer, InterposerApplier

UNALIGNED = (1034, 0, 0, 0, 0, 0, 0, 0, 0) if HIP else SETTINGS
DRIVER = "libamdhip64.so.6" if HIP else "libcuda.so.1"
APIS = LIBRARY_APIS[: 1 if HIP else 3]  # of hipBLAS nothing is caught
# hipBLASLt's solutions that stand for tiles of cuBLASLt; 1136 splits k in 4.
SOLUTIONS = {15: 1000, 20: 1017, 99: 9999}


def gemm(m: int = 8, n: int = 16, k: int = 32, **more: object) -> Gemm:
    own = {"bias_type": "-", "lda": k, "ldb": k, "ldd": m, "ws_bytes": 4096, "align": 16, **more}
    kind = own.pop("kind", "float32")
    return Gemm(m, n, k, "T", "N", kind, kind, kind, **{"api": "lt", **own})  # type: ignore[arg-type]


def algo(tile: int = 15, number: int = 20, splitk: int = 1, reduction: int = 0) -> Algo:
    if HIP:
        index = 1136 if splitk > 1 else SOLUTIONS[tile] if number == 20 else number
        return Algo(index, 0, f"id={index} second={1 << 28} third=0")  # the job's: a MiB
    return Algo(
        number,
        0,
        f"id={number} tile={tile} stages=0 splitk={splitk} reduction={reduction} swizzle=0 "
        "custom=0 inner=0 cluster=0",
    )


class Job:
    def __init__(self, folder: Path) -> None:
        self._job = library(folder)
        self.lt = ctypes.CDLL(str(folder / fake_lt.LIBRARIES[VENDOR]))
        self.lt.fake_calls.restype = c_uint64
        self.lt.fake_last.restype = ctypes.POINTER(c_int32)
        self.cuda = ctypes.CDLL(str(folder / DRIVER))
        self.backend = fake_lt.FAKES[VENDOR](folder / fake_lt.LIBRARIES[VENDOR])
        self.interposer = Interposer(self.backend)
        self.interposer.mode(True)

    def run(self, made: Spec, times: int = 1) -> int:
        """The status of the calls, whose result is checked."""
        out = c_float()
        status = int(self._job.job_gemm(ctypes.byref(made), times, ctypes.byref(out)))
        if not status and not made.type_a and made.epi == 1 and not made.beta:
            assert out.value == made.k, out.value
        return status

    def tile(self) -> int:
        """The tile of the last launch: the fake keeps id, split, tile, …"""
        if HIP:
            return {1000: 15, 1017: 20, 1136: 20}[self.lt.fake_last()[0]]
        return int(self.lt.fake_last()[2])

    def seen(self) -> dict[Gemm, int]:
        return {r.gemm: r.calls for r in self.interposer.drain()}

    def faults(self) -> dict[str, int]:
        counts = dict(zip(REASONS, self.interposer.faults(), strict=True))
        return {reason: count for reason, count in counts.items() if count}


def every_call_is_counted_with_its_key_and_default(job: Job) -> None:
    before = job.lt.fake_calls()
    specs = {
        gemm(): (spec(), 3),
        gemm(m=16): (spec(m=16), 2),
        gemm(beta=1): (spec(beta=0.5), 4),
        gemm(lda=40): (spec(lda=40), 1),
        gemm(ws_bytes=0): (spec(ws_bytes=0), 1),
        gemm(align=4): (spec(offset=4), 1),
        gemm(kind="bfloat16"): (spec(type_a=14, type_b=14, type_d=14), 5),
        gemm(epi="bias", bias_type="float32"): (spec(epi=4), 1),
        gemm(epi="bias", bias_type="bfloat16"): (spec(epi=4, bias_type=14), 1),
        gemm(batch=3, stride_a=256, stride_b=512, stride_d=128): (spec(batch=3), 1),
        gemm(k=64): (spec(k=64), 1),
    }
    for made, times in specs.values():
        assert job.run(made, times) == 0, made.m
    records = job.interposer.drain()
    expected = {g: times for g, (_, times) in specs.items()}
    assert {r.gemm: r.calls for r in records} == expected
    assert sum(expected.values()) == job.lt.fake_calls() - before
    assert {r.algo for r in records} == {algo()}
    assert not any(r.applied for r in records) and not job.faults()
    assert job.interposer.drain() == []


def batches_by_pointers_or_groups_pass_through_and_are_counted_as_no_gemm(job: Job) -> None:
    for mode in (1, 2):
        assert job.run(spec(batch=3, batch_mode=mode)) == 15  # the library's own answer
    assert job.run(spec(batch=3)) == 0
    assert list(job.seen().values()) == [1]
    assert job.faults() == {"calls that no table can spell": 2}


def fp8_keys_carry_fast_accumulation(job: Job) -> None:
    settings = SETTINGS if HIP else (66, 20, 1, 0, 0, 0, 0, 0, 0)
    eight = {"type_a": 28, "type_b": 29, "type_d": 14, "settings": settings}
    for fast in (0, 1):
        assert job.run(spec(m=16, k=32, fast=fast, **eight)) == 0
    kinds = {"type_a": "float8e4m3", "type_b": "float8e5m2", "type_d": "bfloat16"}
    exact = gemm(m=16)._replace(**kinds)
    # hipBLASLt has one way to add up.
    assert job.seen() == ({exact: 2} if HIP else {exact: 1, exact._replace(fast_accum=1): 1})


def the_older_api_is_counted_once_with_the_workspace_that_it_was_given(job: Job) -> None:
    before = job.lt.fake_calls()
    assert job.run(spec(api=1), 3) == 0
    assert job.run(spec(api=1, ws_bytes=0), 2) == 0
    assert job.run(spec(api=2, batch=2), 4) == 0
    assert job.run(spec(api=3), 5) == 0
    assert job.run(spec(api=4, batch=2), 6) == 0
    assert job.lt.fake_calls() - before == 20
    batched = gemm(api="gemmstridedbatchedex", batch=2, stride_a=256, stride_b=512, stride_d=128)
    assert job.seen() == {
        gemm(api="gemmex"): 3,
        gemm(api="gemmex", ws_bytes=0): 2,
        batched: 4,
        gemm(api="sgemm"): 5,
        batched._replace(api="sgemmstridedbatched"): 6,
    }


def a_choice_is_launched_and_counted_apart(job: Job) -> None:
    for api, name in enumerate(APIS):
        made = spec(api=api)
        job.interposer.choose({gemm(api=name): algo(20)})
        assert job.run(made, 5) == 0 and job.tile() == 20
        (record,) = job.interposer.drain()
        assert (record.algo, record.applied, record.calls) == (algo(20), True, 5)
        assert job.run(spec(k=64, api=api)) == 0 and job.tile() != 20  # no row: as the job made it
        job.interposer.choose({})
        assert job.run(made) == 0 and job.tile() != 20
        assert sum(r.applied for r in job.interposer.drain()) == 0
    assert not job.faults()


def a_batched_choice_computes_every_matrix(job: Job) -> None:
    made = spec(api=2, batch=3)
    name = "gemmstridedbatchedex"
    strides = {"stride_a": 256, "stride_b": 512, "stride_d": 128}
    job.interposer.choose({gemm(api=name, batch=3, **strides): algo(20)})
    assert job.run(made) == 0 and job.tile() == 20


def the_plain_call_as_a_choice_passes_through_and_counts_as_launched(job: Job) -> None:
    other = gemm(api="gemmex", k=64)
    job.interposer.choose({gemm(api="gemmex"): PLAIN, other: algo(20)})
    assert job.run(spec(api=1), 3) == 0 and job.tile() != 20
    assert job.run(spec(api=1, k=64), 2) == 0 and job.tile() == 20
    found = {r.gemm: (r.algo, r.applied, r.calls) for r in job.interposer.drain()}
    assert found == {gemm(api="gemmex"): (PLAIN, True, 3), other: (algo(20), True, 2)}
    job.interposer.choose({})
    assert job.run(spec(api=1)) == 0
    (record,) = job.interposer.drain()
    assert (record.algo, record.applied) == (None, False) and not job.faults()


def a_choice_that_needs_more_workspace_than_the_call_has_falls_back(job: Job) -> None:
    split = algo(20, splitk=4, reduction=2)  # 4 * 8 * 16 * 4 bytes
    for size, fits in ((2048, True), (2047, False)):
        job.interposer.choose({gemm(ws_bytes=size): split})
        assert job.run(spec(ws_bytes=size), 3) == 0
        assert (job.tile() == 20) is fits
    assert job.faults() == {"the algorithm needs more workspace than the call has": 3}


def a_choice_that_the_library_refuses_falls_back_at_every_call(job: Job) -> None:
    for wrong in (algo(99), algo(15, number=7)):
        job.interposer.choose({gemm(): wrong})
        assert job.run(spec(), 3) == 0 and job.tile() == 15
    assert job.faults() == {"the library refused the algorithm": 6}
    assert job.seen() == {gemm(): 6}


def a_call_that_fails_fails_as_the_jobs_own(job: Job) -> None:
    wrong = spec(settings=(9999 if HIP else 20, 99, 1, 0, 0, 0, 0, 0, 0))
    job.interposer.mode(False)
    plain = job.run(wrong)
    job.interposer.mode(True)
    assert job.run(wrong) == plain != 0
    assert job.seen() == {} and not job.faults()


def what_cannot_be_read_goes_through_and_is_counted(job: Job) -> None:
    attributes = (0, 1, 2, 13) if HIP else (0, 1, 2, 3, 4, 7)
    for attribute in attributes:
        job.lt.fake_fail(attribute)
        assert job.run(spec(), 2) == 0
    job.lt.fake_fail(-1)
    assert job.seen() == {}
    assert job.faults() == {
        "the library would not tell an attribute of the call": 2 * len(attributes)
    }
    assert job.run(spec()) == 0 and job.seen() == {gemm(): 1}


def a_descriptor_address_with_a_new_shape_has_its_own_row(job: Job) -> None:
    for k in (32, 64) * 20:  # malloc hands the freed descriptors' addresses out again
        assert job.run(spec(k=k)) == 0
    assert job.seen() == {gemm(): 20, gemm(k=64): 20}


def nothing_is_seen_where_it_is_off(job: Job) -> None:
    job.interposer.choose({gemm(): algo(20)})
    job.interposer.mode(False)
    assert job.run(spec(), 3) == 0 and job.tile() == 15
    assert job.seen() == {} and not job.faults()


def only_what_completed_is_timed_and_nothing_waits(job: Job) -> None:
    job.interposer.mode(True, timed=True)
    job.cuda.fake_hold(1)
    assert job.run(spec(), 10) == 0
    (record,) = job.interposer.drain()
    assert (record.calls, record.timed) == (10, 0)
    job.cuda.fake_hold(0)
    (record,) = job.interposer.drain()
    assert (record.calls, record.timed) == (0, 10) and record.time_us > 0
    assert job.run(spec(), 10) == 0
    assert job.interposer.drain()[0].timed == 10
    assert job.cuda.fake_events() == 20  # used again


def a_capturing_stream_is_left_alone_and_its_rows_applied(job: Job) -> None:
    job.interposer.mode(True, timed=True)
    job.interposer.choose({gemm(): algo(20)})
    assert job.run(spec()) == 0
    job.interposer.drain()
    events = job.cuda.fake_events()
    job.cuda.fake_capture(1)
    assert job.run(spec(stream=CAPTURING), 5) == 0 and job.tile() == 20
    assert job.run(spec(stream=CAPTURING, k=64, api=len(APIS) // 2), 5) == 0
    assert {(r.calls, r.timed) for r in job.interposer.drain()} == {(5, 0)}
    assert job.faults() == {"captured into a graph": 10}
    assert job.cuda.fake_events() == events
    assert job.run(spec(stream=2), 5) == 0  # another thread's stream is timed all the same
    assert job.interposer.drain()[0].timed == 5
    assert job.cuda.fake_violations() == 0


def a_forked_child_starts_counting_afresh(job: Job) -> None:
    job.interposer.choose({gemm(): algo(20)})
    assert job.run(spec(), 3) == 0
    child = os.fork()
    if not child:
        ok = job.seen() == {} and job.run(spec(), 2) == 0 and job.seen() == {gemm(): 2}
        os._exit(0 if ok and job.tile() == 20 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert job.seen() == {gemm(): 3}


def many_gemms_are_kept_apart(job: Job) -> None:
    sizes = [(m, k) for m in range(8, 48) for k in range(8, 48)]
    for m, k in sizes:
        assert job.run(spec(m=m, n=1, k=k, settings=UNALIGNED)) == 0
    seen = job.seen()
    assert len(seen) == len(sizes) and set(seen.values()) == {1}


def the_applier_tells_what_it_launched(job: Job) -> None:
    client.LIBRARIES[InterposerApplier.backend] = lambda: job.backend
    applier = InterposerApplier(timed=True)
    applier.choose({gemm(): algo(20), gemm(k=64): algo(99), gemm(api="mm"): algo(20)})
    for made, times in ((spec(), 4), (spec(k=64), 2), (spec(k=96), 1)):
        assert job.run(made, times) == 0
    drained = applier.drain()
    assert {at: found.calls for at, found in drained.items()} == {
        (gemm(), algo(20)): 4,
        (gemm(k=64), None): 2,
        (gemm(k=96), None): 1,
    }
    assert all(found.time_us > 0 for found in drained.values())
    assert applier.fallbacks() == {"the library refused the algorithm": 2}
    assert applier.graphed() == 0
    applier.close()
    assert job.run(spec()) == 0 and applier.drain() == {}


SCENARIOS = [
    name
    for name, value in list(globals().items())
    if callable(value) and getattr(value, "__annotations__", {}).get("job") == "Job"
]
OF_CUBLAS = {
    "batches_by_pointers_or_groups_pass_through_and_are_counted_as_no_gemm",
    "the_older_api_is_counted_once_with_the_workspace_that_it_was_given",
    "a_batched_choice_computes_every_matrix",
    "the_plain_call_as_a_choice_passes_through_and_counts_as_launched",
}

if __name__ == "__main__":
    globals()[sys.argv[1]](Job(Path(sys.argv[2])))
