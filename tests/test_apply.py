"""Choosing algorithms inside a process: the same numbers, counted, and open to failure."""

import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gemmtune import table
from gemmtune.backends import cpu
from gemmtune.backends.hipblaslt import HipblasLt
from gemmtune.errors import BackendError
from gemmtune.gemm import Algo, Gemm
from gemmtune.job import apply, files, kernels, steps
from gemmtune.job.apply import KernelApplier, open_applier
from gemmtune.job.coverage import Use, first_rows, summary
from gemmtune.table import Tuned

TRANSPOSED = Algo(cpu.IDS["transposed"], 0, "transposed")
ATEN = Algo(0, 0, cpu.DEFAULT)


@pytest.fixture
def applier() -> Iterator[KernelApplier]:
    one = KernelApplier()
    yield one
    one.close()


def gemm_of(op: str, *args: Any, **kwargs: Any) -> Gemm:
    return kernels.translate(op, args, kwargs)[0]


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


X, W, B, C = rand(6, 8), rand(8, 10), rand(10), rand(6, 10)
XS, WS, CS = rand(3, 6, 8), rand(3, 8, 10), rand(3, 6, 10)

# Each makes its own out tensors, so that a second call finds what the first one found.
CALLS: dict[str, Callable[[], torch.Tensor]] = {
    "mm": lambda: torch.mm(X, W),
    "mm of transposed operands": lambda: torch.mm(rand(8, 6).t(), rand(10, 8).t()),
    "mm of a part of a matrix": lambda: torch.mm(rand(9, 12)[:6, :8], W),
    "mm out": lambda: torch.mm(X, W, out=torch.empty(6, 10)),
    "mm out into a part of a matrix": lambda: torch.mm(X, W, out=torch.zeros(6, 12)[:, 1:11]),
    "mm out by columns": lambda: torch.mm(X, W, out=torch.empty(10, 6).t()),
    "addmm with a bias": lambda: torch.addmm(B, X, W),
    "addmm with a bias out": lambda: torch.addmm(B, X, W, out=torch.empty(6, 10)),
    "addmm with a bias out by columns": lambda: torch.addmm(B, X, W, out=torch.empty(10, 6).t()),
    "addmm with a scaled bias": lambda: torch.addmm(B, X, W, beta=0.5, alpha=2),
    "addmm": lambda: torch.addmm(C, X, W, beta=0.25, alpha=3),
    "addmm without beta": lambda: torch.addmm(torch.full((6, 10), torch.nan), X, W, beta=0),
    "addmm by columns": lambda: torch.addmm(C, X, W, out=torch.empty(10, 6).t()),
    "addmm in place": lambda: C.clone().addmm_(X, W),
    "addmm in place, scaled": lambda: C.clone().addmm_(X, W, beta=0.5, alpha=2),
    "addmm in place by columns": lambda: rand(10, 6).t().addmm_(X, W),
    "bmm": lambda: torch.bmm(XS, WS),
    "bmm out": lambda: torch.bmm(XS, WS, out=torch.empty(3, 6, 10)),
    "baddbmm": lambda: torch.baddbmm(CS, XS, WS, beta=0.5),
    "baddbmm with a bias": lambda: torch.baddbmm(B, XS, WS),
    "baddbmm in place": lambda: CS.clone().baddbmm_(XS, WS),
    "bfloat16": lambda: torch.mm(X.bfloat16(), W.bfloat16()),
    "float64": lambda: torch.addmm(B.double(), X.double(), W.double()),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_alternative_returns_what_the_native_call_does(
    name: str, applier: KernelApplier
) -> None:
    want = CALLS[name]()
    ((gemm, algo),) = applier.drain()
    assert algo is None
    applier.choose({gemm: TRANSPOSED})
    got = CALLS[name]()
    assert {k: v.calls for k, v in applier.drain().items()} == {(gemm, TRANSPOSED): 1}
    assert applier.fallbacks() == {}
    assert got.dtype == want.dtype and got.shape == want.shape and got.stride() == want.stride()
    torch.testing.assert_close(got, want)


def test_an_out_tensor_is_written_and_returned(applier: KernelApplier) -> None:
    applier.choose({gemm_of("mm", X, W, out=torch.empty(6, 10)): TRANSPOSED})
    out = torch.empty(6, 10)
    assert torch.mm(X, W, out=out) is out
    assert [algo for _, algo in applier.drain()] == [TRANSPOSED]
    torch.testing.assert_close(out, (X[:, :, None] * W).sum(1))


def test_the_gradients_are_those_of_the_native_calls(applier: KernelApplier) -> None:
    def gradients() -> list[torch.Tensor]:
        x, w, b = (t.clone().requires_grad_() for t in (X, W, B))
        torch.nn.functional.linear(x, w.t(), b).square().sum().backward()
        return [t.grad for t in (x, w, b)]  # type: ignore[misc]

    want = gradients()
    seen = [gemm for gemm, _ in applier.drain()]
    applier.choose(dict.fromkeys(seen, TRANSPOSED))
    torch.testing.assert_close(gradients(), want)
    launched = applier.drain()
    assert {gemm for gemm, algo in launched if algo == TRANSPOSED} == set(seen)
    assert len(seen) == 3 and len(launched) == 3


def test_the_default_is_the_jobs_own_kernel(
    applier: KernelApplier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("the backend ran")

    monkeypatch.setattr(applier, "_run", never)
    gemm = gemm_of("mm", X, W)
    applier.choose({gemm: ATEN})
    want = torch.mm(X, W)
    assert {k: v.calls for k, v in applier.drain().items()} == {(gemm, ATEN): 1}
    assert applier.fallbacks() == {}
    applier.close()
    assert torch.equal(torch.mm(X, W), want)


@pytest.mark.parametrize("error", [BackendError("does not fit"), RuntimeError("boom")])
def test_an_alternative_that_raises_falls_open_and_is_counted(
    error: Exception, applier: KernelApplier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(config: str, x: Any, w: Any, d: torch.Tensor, *_: Any) -> None:
        d.fill_(torch.nan)
        raise error

    monkeypatch.setattr(applier, "_run", spoil)
    calls = [CALLS["addmm in place"], CALLS["mm out"], CALLS["addmm with a bias"]]
    want = [call() for call in calls]
    seen = [gemm for gemm, _ in applier.drain()]
    applier.choose(dict.fromkeys(seen, TRANSPOSED))
    for _ in range(2):
        for call, value in zip(calls, want, strict=True):
            assert torch.equal(call(), value)
    assert {(algo, v.calls) for (_, algo), v in applier.drain().items()} == {(None, 2)}
    assert sorted(applier.fallbacks().values()) == [2, 2, 2]
    assert all(reason.endswith(str(error)) for reason in applier.fallbacks())


def test_a_translation_that_fails_falls_open(
    applier: KernelApplier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("no such layout")

    monkeypatch.setattr(kernels, "translate", broken)
    x = rand(5, 7)
    torch.testing.assert_close(torch.mm(x, x.t()), (x[:, None] * x).sum(-1))
    assert applier.fallbacks() == {"ValueError: no such layout": 1}


def test_an_error_of_the_job_is_the_jobs(applier: KernelApplier) -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.mm(X, X)


def test_an_out_that_torch_would_resize_or_that_is_an_operand_stays_native(
    applier: KernelApplier,
) -> None:
    small, same = torch.empty(0), torch.eye(4)
    want = torch.mm(X, W)
    applier.choose({gemm_of("mm", X, W): TRANSPOSED})
    assert torch.equal(torch.mm(X, W, out=small), want)
    assert sum(applier.fallbacks().values()) == 1
    gemm = gemm_of("addmm", same, same, same, out=same)
    applier.choose({gemm: TRANSPOSED})
    same.addmm_(same, same)
    assert sum(applier.fallbacks().values()) == 2


def overlapping(which: str) -> torch.Tensor:
    """A call whose `out` lies over something that it reads, or over itself."""
    memory = torch.arange(33.0 * 32).view(33, 32) / 1000
    upper, lower, eye = memory[:32], memory[1:], torch.eye(32)
    if which == "x":
        torch.mm(upper, eye + 1, out=lower)
    elif which == "c":
        torch.addmm(upper, eye, eye + 1, out=lower)
    elif which == "c turned":
        torch.addmm(upper.t(), eye, eye + 1, out=upper)
    elif which == "a row as bias":
        torch.addmm(upper[3], eye, eye + 1, out=upper)
    elif which == "a column as c":
        torch.addmm(upper[:, 3:4], eye, eye + 1, out=upper)
    elif which == "itself":
        torch.mm(eye, eye + 1, out=memory[:1].expand(32, 32))
    elif which == "another type":
        torch.mm(eye, eye + 1, out=memory.double()[:32])
    elif which == "baddbmm":
        memory = torch.arange(5.0 * 16 * 16).view(5, 16, 16)
        torch.baddbmm(memory[:4], memory[:4] * 2, memory[:4] * 3, out=memory[1:])
    return memory


@pytest.mark.parametrize("config", ["openblas", "split-n2", "transposed"])
@pytest.mark.parametrize(
    "which",
    ["x", "c", "c turned", "a row as bias", "a column as c", "itself", "another type", "baddbmm"],
)
def test_an_out_over_other_memory_of_the_call_is_treated_as_without_us(
    which: str, config: str, applier: KernelApplier
) -> None:
    def outcome() -> Any:
        try:
            return overlapping(which)
        except RuntimeError as error:
            return str(error)

    want = outcome()
    gemms = [known.gemm for known in applier._known.values() if known]  # torch may have refused
    assert gemms
    applier.choose({gemm: Algo(cpu.IDS[config], 0, config) for gemm in gemms})
    got = outcome()
    assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want
    assert applier.fallbacks()


def test_a_kernel_that_torch_lacks_is_missed_as_without_us(applier: KernelApplier) -> None:
    with pytest.raises(NotImplementedError):
        torch.mm(X, W, out_dtype=torch.float64)


def test_calls_of_several_threads_are_all_counted_while_the_choice_changes(
    applier: KernelApplier,
) -> None:
    gemm = gemm_of("mm", X, W)
    want = torch.mm(X, W)
    applier.drain()
    wrong = []

    def work() -> None:
        for _ in range(300):
            if not torch.allclose(torch.mm(X, W), want):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    counted = 0
    for t in threads:
        t.start()
    for turn in range(40):
        applier.choose({gemm: TRANSPOSED} if turn % 2 else {})
        counted += sum(v.calls for v in applier.drain().values())
    for t in threads:
        t.join()
    counted += sum(v.calls for v in applier.drain().values())
    assert counted == 4 * 300 and not wrong


def test_times_are_kept_only_when_asked_for() -> None:
    for timed in (False, True):
        one = open_applier("cpu", timed)
        torch.mm(X, W)
        (launches,) = one.drain().values()
        one.close()
        assert (launches.time_us > 0) is timed
        assert launches.calls == 1


def test_a_closed_applier_counts_nothing(applier: KernelApplier) -> None:
    applier.close()
    torch.mm(X, W)
    assert applier.drain() == {}


def test_a_backend_without_an_applier_is_an_error() -> None:
    with pytest.raises(BackendError, match="'abacus'"):
        open_applier("abacus")


def test_the_first_row_whose_workspace_fits_is_the_gemms() -> None:
    gemm = gemm_of("mm", X, W)._replace(ws_bytes=100)
    other = gemm._replace(n=7)
    ranges = [(gemm, 0, 99), (gemm, 100, 100), (gemm, 0, 200), (other, 0, 1000)]
    rows = [Tuned(0, g, low, high, ATEN) for g, low, high in ranges]
    assert first_rows(rows) == {gemm: 1, other: 3}


@pytest.mark.parametrize(
    ("uses", "line"),
    [
        (
            [Use(0, {"0": 40, "2": 20}, 9, 10), Use(1, {"0": 40}, 9, 10)],
            "2 of 3 rows used, on 2 ranks, 5 calls per step",
        ),
        ([Use(0, {"0": 7}, 9, 0)], "1 of 3 rows used, on 1 rank, 7 calls"),
        (
            [Use(0, {"0": 7}, 9, 7, {"mv does not fit": 3})],
            "1 of 3 rows used, on 1 rank, 1 calls per step; "
            "3 calls went through as the job made them (mv does not fit)",
        ),
        (
            [Use(0, {}, 9, 10)],
            "0 of 3 rows fit this job: it ran 9 different GEMMs, none of the table's: capture and"
            " sweep it",
        ),
        ([], "0 of 3 rows fit this job: none of its Python processes ran a GEMM of torch here"),
        ([Use(0, incompatible=["processor: A, B here"])], "0 of 3 rows used: processor: A, B here"),
    ],
)
def test_the_line_at_the_end_of_a_run(uses: list[Use], line: str) -> None:
    assert summary(uses, 3) == line


def test_a_rank_is_still_known_when_its_group_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    monkeypatch.setattr(files, "_in_group", {})
    monkeypatch.setenv("RANK", "0")
    with monkeypatch.context() as group:
        group.setattr(dist, "is_initialized", lambda: True)
        group.setattr(dist, "get_rank", lambda: 3)
        group.setattr(dist, "get_world_size", lambda: 4)
        assert files.rank() == (3, 4)
    assert files.rank() == (3, 4)


ROW = Tuned(904, gemm_of("mm", X, W), 0, table.WS_MAX, Algo(7, 0, "id=7 second=0 third=0"))


def test_a_library_whose_version_needs_the_gpu_is_asked_when_the_job_uses_it(
    monkeypatch, tmp_path, capsys
):
    waiting: list[Callable[[], None]] = []
    asked: list[str] = []
    table.write(tmp_path / "t.csv", [ROW], Tuned, {"backend": "hipblaslt"})

    def library(self: HipblasLt) -> str:
        asked.append("asked")
        raise BackendError("no such library")

    monkeypatch.delitem(sys.modules, "gemmtune.cli", raising=False)  # whose commands start nothing
    monkeypatch.setattr(torch.cuda, "_lazy_call", waiting.append)
    stops: list[Callable[[int], None]] = []

    def on_step(stop: Callable[[int], None]) -> SimpleNamespace:
        stops.append(stop)
        return SimpleNamespace(remove=lambda: None)

    monkeypatch.setattr(steps, "on_step", on_step)
    monkeypatch.setattr(HipblasLt, "library", library)
    monkeypatch.setattr(HipblasLt, "dev_cap", lambda self: 904)
    options = {"table": str(tmp_path / "t.csv"), "backend": None, "strict": False, "quiet": False}
    apply.start(options, str(tmp_path))
    assert len(waiting) == 1 and not asked
    waiting[0]()
    assert asked
    X @ W
    stops[0](0)
    assert "cannot be applied (no such library): the job goes on untuned" in capsys.readouterr().err
    apply.start({**options, "strict": True}, str(tmp_path))
    with pytest.raises(SystemExit, match="3"):
        waiting[1]()


def test_whatever_fails_when_the_gpu_comes_up_is_not_the_jobs(monkeypatch, tmp_path, capsys):
    waiting: list[Callable[[], None]] = []
    table.write(tmp_path / "t.csv", [ROW], Tuned, {"backend": "hipblaslt"})
    monkeypatch.delitem(sys.modules, "gemmtune.cli", raising=False)  # whose commands start nothing
    monkeypatch.setattr(torch.cuda, "_lazy_call", waiting.append)
    monkeypatch.setattr(apply, "compare", lambda *_: 1 / 0)
    options = {"table": str(tmp_path / "t.csv"), "backend": None, "strict": False, "quiet": False}
    apply.start(options, str(tmp_path))
    waiting[0]()
    assert "applying the table: ZeroDivisionError" in capsys.readouterr().err
