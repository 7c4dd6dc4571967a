"""What capture says of the job's GPU and of one step's kernels, and the regime that follows.

The GPU is a stand-in for pynvml (test_nvml.driver); jobs, steps and torch's profiler are real.
"""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_capture import MLP
from test_nvml import UUID, driver

from gemmtune import nvml, regime, table
from gemmtune.capture import profile, session
from gemmtune.cli.capture import _kernels, _power
from gemmtune.job import readings, steps
from gemmtune.table import Shape

FULL = nvml.Reading(1410, 685.0, 63, ("power cap",), 0, (), 700.0, 1980, 3201, 100, 5000.0)
IDLE = FULL._replace(sm_mhz=1980, power_w=410.0, throttled=())


@pytest.mark.parametrize(
    ("kernel", "gemm"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN", True),
        ("nvjet_qqtst_128x256_128x4_2x1_v_bz_TNT", True),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas", True),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64>(x)", True),
        ("ampere_bf16_s1688gemm_bf16_128x128_ldg8_f2f_stages_32x1_nn", True),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(x)", True),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x64_MI16x16x1", True),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<float>>(x)", False),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(x)", False),
        ("sm80_xmma_fprop_implicit_gemm_indexed_bf16_nhwckrsc_nhwc_tilesize128x128", False),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>", False),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", False),
        ("Memcpy DtoD (Device -> Device)", False),
    ],
)
def test_gemms_are_told_by_the_names_of_the_libraries_kernels(kernel, gemm):
    assert profile.is_gemm(kernel) == gemm


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)).map(lambda s: (s[0], sum(s)))))
def test_busy_is_what_at_least_one_kernel_covers(spans):
    assert profile.union_us(spans) == len({i for start, end in spans for i in range(start, end)})


def test_a_step_is_its_gemms_and_the_largest_of_the_rest():
    times = [("nvjet_a", 30.0), ("nvjet_b", 20.0), ("void soft<max>", 5.0), ("void soft<max>", 6.0)]
    times += [(f"small{i}", i / 10) for i in range(9)]
    found = profile.summarise(times, 90.0, 100.0, profile.is_gemm)
    assert (found["step_us"], found["busy_us"], found["gemm_us"]) == (100.0, 90.0, 50.0)
    assert found["others"][:2] == [["soft<max>", 11.0, 2], ["small8", 0.8, 1]]
    assert len(found["others"]) == profile.OTHERS
    first, second, *_ = _kernels(found)
    assert first == "one step profiled: 0.1 ms, GEMMs 50%, idle 10%; the largest others:"
    assert second.split() == ["11.0%", "0.011", "ms", "2x", "soft<max>"]


def test_of_several_ranks_the_one_that_waited_least_is_shown():
    assert profile.merge_steps([None, {"step_us": 9.0}, {"step_us": 7.0}]) == {"step_us": 7.0}
    assert profile.merge_steps([None]) == {}


def over(seconds, *seen):
    """A meter's readings, evenly over so many seconds."""
    return [(i * seconds / (len(seen) - 1), reading) for i, reading in enumerate(seen)]


@pytest.mark.parametrize(
    ("seconds", "seen", "said"),
    [
        (3.0, [FULL] * 5, "685 W (685 to 685) of its 700 W cap, SM clock 1,410 MHz (boost 1,980)"),
        (0.3, [FULL] * 5, "63 C: the job runs at the power cap, so"),  # the driver named the cap
        (3.0, [IDLE] * 5, "below the power cap, so candidates are ranked by call time"),
        (0.3, [IDLE] * 5, "0.3 s are too short to tell"),
        (3.0, [FULL._replace(throttled=())] * 5, "at the power cap"),
        (3.0, [IDLE._replace(power_cap_w=0.0)] * 5, "410 W (410 to 410), SM clock"),
        (3.0, [IDLE._replace(power_w=0.0)] * 5, "the GPU tells no power, SM clock"),
        (3.0, [IDLE._replace(power_w=0.0)] * 5, "whether the job runs at its power cap cannot be"),
    ],
)
def test_the_regime_is_said_in_plain_words(seconds, seen, said):
    line, *rest = _power(profile.merge_power({0: profile.power(over(seconds, *seen))}))
    assert said in line and not rest


def test_ranks_at_the_cap_and_heat_are_named():
    hot = IDLE._replace(throttled=("thermal, by software",))
    ranks = {i: profile.power(over(3.0, *[FULL if i < 3 else hot] * 4)) for i in range(4)}
    joined = profile.merge_power({**ranks, 4: {}})
    assert joined["regime"] == regime.AT_CAP and joined["ranks_at_cap"] == "0-2"
    assert joined["power_w"] == [685.0, 410.0, 685.0] and joined["throttled"]["power cap"] == 0.75
    first, second = _power(joined)
    assert "at the power cap on rank 0-2," in first
    assert second.startswith("its clocks were held down (thermal, by software) in 25%")


@pytest.mark.parametrize("wrong", [{}, {"gpu": 7}, {"gpu": {"regime": "hot"}}, {"gpu": {}}])
def test_a_table_that_does_not_say_has_no_regime(wrong):
    assert regime.of(wrong) == ""


def test_the_meter_reads_while_steps_are_recorded_and_lets_go_of_the_driver(monkeypatch, tmp_path):
    found = driver(
        nvmlDeviceGetClockInfo=1410,
        nvmlDeviceGetMaxClockInfo=1980,
        nvmlDeviceGetPowerUsage=685_000,
        nvmlDeviceGetEnforcedPowerLimit=700_000,
        nvmlDeviceGetUtilizationRates=SimpleNamespace(gpu=98, memory=40),
        nvmlDeviceGetCurrentClocksEventReasons=0x4,
    )
    monkeypatch.setitem(__import__("sys").modules, "pynvml", found)
    monkeypatch.setattr(readings, "METER_S", 0.01)
    monkeypatch.setattr(readings, "meter", lambda: readings.Meter(UUID))
    monkeypatch.setattr(steps, "_steps", steps._Steps())
    asked = {"steps": 2, "warmup": 1, "stop": False, "dims": False, "optimizer": None}
    session.Session({**asked, "profile": None, "time": False, "backend": None}, str(tmp_path))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    for _ in range(3):
        optimizer.step()
        time.sleep(0.05)
    (path,) = tmp_path.glob("rank-*.json")
    record = json.loads(path.read_text())
    assert record["gpu"]["power_w"] == [685.0] * 3 and record["gpu"]["seconds"] > 0.05
    assert record["gpu"]["busy_percent"][0] == 98 and record["gpu"]["max_sm_mhz"] == 1980
    assert record["profile"] is None  # on a CPU only where asked for
    assert profile.merge_power({0: record["gpu"]})["regime"] == regime.AT_CAP
    assert found.state.open == 0


def test_one_more_step_is_profiled_and_changes_nothing_else(gemmtune, tmp_path):
    (tmp_path / "train.py").write_text(MLP + "for i in range(9): step(); print('step', i)")
    job = ("--", "train.py")
    plain = gemmtune("capture", "-o", "a.csv", "--stop", *job, cwd=tmp_path)
    done = gemmtune("capture", "-o", "b.csv", "--stop", "--profile", *job, cwd=tmp_path)
    (_, without), (rows, made) = (table.read(tmp_path / f, Shape) for f in ("a.csv", "b.csv"))
    assert "profile" not in without and "gpu" not in made
    step = made["profile"]
    assert 0 < step["gemm_us"] <= step["busy_us"] <= step["step_us"]
    assert step["others"] and all("mm" not in name for name, _, _ in step["others"])
    assert [row._replace(time_us=0) for row in rows] == [
        row._replace(time_us=0) for row in table.read(tmp_path / "a.csv", Shape).rows
    ]
    assert (plain.stdout.count("step"), done.stdout.count("step")) == (1, 2)
    assert "one step profiled:" in done.stderr and "optimizer calls" not in done.stderr
    assert "if all ran at the best rate seen for their type, the step would be at most" in (
        done.stderr
    )


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("step()\nstep()\nmodel(torch.ones(5, 12))", "that takes one step after the recorded"),
        (
            "from torch.profiler import profile\np = profile()\nfor _ in range(4): step()",
            "the job has a profiler of its own",
        ),
    ],
    ids=["ends in that step", "has a profiler"],
)
def test_a_job_that_cannot_be_profiled_is_recorded_all_the_same(gemmtune, tmp_path, code, said):
    (tmp_path / "train.py").write_text(MLP + code)
    done = gemmtune("capture", "-o", "s.csv", "--profile", "--", "train.py", cwd=tmp_path)
    assert said in done.stderr and "Traceback" not in done.stderr
    assert len(table.read(tmp_path / "s.csv", Shape).rows) == 5
