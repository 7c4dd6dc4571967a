"""A backend over the Lt API, for either vendor: its algorithms for a Gemm, launches, times.

Reads and writes tensors on the GPU. The C API is lt_api.py's, a vendor's names are its table's.
"""

from __future__ import annotations

import ctypes
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from gemmtune import machine
from gemmtune.backends import explore, lt_api
from gemmtune.backends.base import Launch, Operands
from gemmtune.backends.lt_api import Config, Library, Owned, Problem, Vendor
from gemmtune.errors import BackendError
from gemmtune.gemm import SINGLE_APIS, Algo, Gemm

if TYPE_CHECKING:
    import torch

EXPLORED = 1000  # configurations beyond the library's own choices: the search picks among them
QUEUED = 512  # launches handed over at a time: beyond about 1,000 the driver makes the host wait
HOST_US = 12.0  # that handing over one launch takes at most
LEAD_US = 20.0  # of the device's waiting before the first launch, so that all are queued by then
CYCLES_PER_US = 2_000  # of a waiting GPU, at the highest clocks known


class Lt:
    """The algorithms of one vendor's Lt library; a subclass names the vendor.

    `numerics`: "type" leaves out what adds the parts of a split k up in the result's type, where
    the library itself does not choose it. `seed` draws the configurations explored. `given`: the
    configuration that the job's own call of a Gemm was given, where that is known.
    """

    name: ClassVar[str]
    vendor: ClassVar[Vendor]
    version_needs_device: ClassVar[bool] = False
    device = "cuda"

    def __init__(self, numerics: str = "type", explored: int = EXPLORED, seed: int = 0) -> None:
        self.numerics, self.explored, self.seed = numerics, explored, seed
        self.given: Mapping[Gemm, str] = {}
        self._forget()

    def _forget(self) -> None:
        self._library: Library | None = None
        self._handle: Owned | None = None
        self._problems: dict[Gemm, Problem] = {}
        self._needs: dict[tuple[Gemm, Algo], int] = {}
        self._listed: dict[Gemm, int] = {}
        self._space: torch.Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if not k.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    # -------------------------------------------------------------------- what needs no device

    def dev_cap(self) -> int:
        """Raises BackendError where there is no GPU."""
        found = machine.gpus()
        known = re.fullmatch(self.vendor.capability, found[0].capability) if found else None
        if known is None:
            raise BackendError(f"{self.name}: no GPU of its vendor's here: gemmtune doctor")
        return int(known[1]) * 100 + int(known[2], 16)

    def library(self) -> str:
        """Raises BackendError where torch has not loaded the library."""
        return f"{self.vendor.title} {self._version(self._loaded().loaded)}"

    def _version(self, loaded: ctypes.CDLL) -> str:
        raise NotImplementedError

    def unsupported(self, gemm: Gemm) -> str | None:
        """Why the Gemm cannot run here; None where it can."""
        g, vendor = gemm, self.vendor
        if g.api == "grouped_mm":
            return "grouped_mm: the groups' sizes are not in its key"
        if g.api in SINGLE_APIS:
            return f"{g.api}: whether it computes in tf32 is not in its key"
        if g.scale_mode:
            return f"scale mode {g.scale_mode}: only one scale per tensor"
        if g.epi not in vendor.epilogues:
            return f"epilogue {g.epi}: the library has none"
        if g.epi == "-" and g.bias_type != "-":
            return "a bias without the bias epilogue: the call adds it by another kernel"
        if g.epi in ("bias", "geluauxbias") and g.bias_type == "-":
            return f"the {g.epi} epilogue without a bias type"
        if g.epi not in ("-", "bias") and (g.fp8 or g.batched):
            return f"epilogue {g.epi} of an FP8 or batched GEMM: its operands are not made here yet"
        if g.comp not in vendor.compute or g.scale != "float32":
            return f"compute type {g.comp} with {g.scale} scales"
        for kind in (g.type_a, g.type_b, g.type_d):
            if kind not in vendor.types:
                return f"type {kind}"
        if g.fp8:
            return self._unsupported_fp8(g)
        if g.type_a != g.type_b or g.type_d not in (g.type_a, "float32"):
            return f"mixed types {g.type_a}/{g.type_b}/{g.type_d}"
        return None

    def _unsupported_fp8(self, g: Gemm) -> str | None:
        if g.type_d.startswith("float8"):
            return "an FP8 result: its scale and amax are not made here yet"
        if not (g.type_a.startswith("float8") and g.type_b.startswith("float8")):
            return f"mixed types {g.type_a}/{g.type_b}/{g.type_d}"
        if g.type_a == g.type_b == "float8e5m2":
            return "float8e5m2 times float8e5m2: the library has none"
        if g.batched:
            return "batched FP8"
        return None

    # ------------------------------------------------------------------------------ on the device

    def algos(self, gemm: Gemm) -> Sequence[Algo]:
        """The library's choices for the call's workspace, the default first; then others.

        An Algo's `aidx` is its rank in the library's list, and beyond it as found. The default is
        what the job's call was given, else what the library gives who asks for one. Raises
        BackendError where it has no algorithm.
        """
        problem = self._problem(gemm)
        found: dict[str, tuple[Config, int, int]] = {}  # settings, rank, workspace; by spelling
        for rank, (algo, need) in enumerate(problem.listed):
            config = problem.settings(algo)
            found.setdefault(spell(config), (config, rank, need))
        default, need = self._default(problem)
        found = {spell(default): found.get(spell(default), (default, 0, need)), **found}
        if self.explored:
            chosen = [config for config, _, _ in found.values()]
            for rank, (config, need) in enumerate(
                self._beyond(problem, chosen), len(problem.listed)
            ):
                found[spell(config)] = config, rank, need
        self._listed[gemm] = len(problem.listed)
        algos = [Algo(config["id"], rank, text) for text, (config, rank, _) in found.items()]
        self._needs |= {(gemm, algo): found[algo.config][2] for algo in algos}
        return algos

    def _default(self, problem: Problem) -> tuple[Config, int]:
        """The default's settings and the workspace that it needs."""
        if problem.gemm in self.given:
            config = parse(self.given[problem.gemm])
            try:
                return config, self._need(problem, problem.algo(config))
            except BackendError:
                pass  # another GPU's, which this one cannot run
        ((first, need),) = problem.heuristic(1)
        return problem.settings(first), need

    def _beyond(self, problem: Problem, chosen: Sequence[Config]) -> Iterable[tuple[Config, int]]:
        """Other configurations, with the workspace that each needs: explored by seed."""
        needs: dict[str, int] = {}

        def check(config: Config) -> float | None:
            try:
                need, waves = problem.check(problem.algo(config))
            except BackendError:
                return None
            needs[spell(config)] = need
            return waves if need <= problem.workspace_bytes else None

        seed = zlib.crc32(f"{self.seed} {tuple(problem.gemm)}".encode())
        found = explore.draw(self._spaces(problem), chosen, check, self.explored, seed)
        return [(config, needs[spell(config)]) for config in found]

    def _spaces(self, problem: Problem) -> dict[int, explore.Space]:
        """What each algorithm number may be set to, for those that suit the problem."""
        spaces, library, caps = {}, problem.library, self.vendor.caps
        g = problem.gemm
        for number in problem.ids():
            try:
                algo = ctypes.byref(problem.blank(number))
                one = {
                    name: library.get("MatmulAlgoCap", algo, caps[name])
                    for name in ("splitk", "reductions", "swizzle", "custom", "batch")
                }
                tiles, stages = (
                    library.get_all("MatmulAlgoCap", algo, caps[name]) or [0]
                    for name in ("tiles", "stages")
                )
                aligned = all(
                    library.get("MatmulAlgoCap", algo, caps[f"align_{x}"]) <= g.align
                    for x in ("abcd" if g.align else "")
                )
            except BackendError:
                continue  # listed, and yet not for these types or this GPU
            if not aligned or (g.batch > 1 and not one["batch"]):
                continue
            scheme = one["reductions"]
            kept = [s for s in (1, 2, 4) if scheme & s and self._adds_exactly(s, g)]
            spaces[number] = explore.Space(
                tiles,
                stages,
                range(max(one["custom"], 0) + 1),
                range(2 if one["swizzle"] else 1),
                self.vendor.clusters,
                kept if one["splitk"] else [],
            )
        return spaces

    def _adds_exactly(self, scheme: int, gemm: Gemm) -> bool:
        """Whether a reduction scheme may be explored: in compute type it is as exact as any."""
        return scheme == explore.COMPUTE_TYPE or self.numerics == "any" or gemm.type_d == "float32"

    def workspace_bytes(self, gemm: Gemm, algo: Algo) -> int:
        """Raises BackendError where the algorithm cannot run this Gemm."""
        if (gemm, algo) not in self._needs:
            problem = self._problem(gemm)
            self._needs[gemm, algo] = self._need(problem, problem.algo(parse(algo.config)))
        return self._needs[gemm, algo]

    def launcher(self, gemm: Gemm, algo: Algo) -> Launch:
        """Raises BackendError: an unknown spelling, or an algorithm that cannot run this Gemm."""
        problem = self._problem(gemm)
        made = problem.algo(parse(algo.config))
        need = self._need(problem, made)
        if need > problem.workspace_bytes:
            raise BackendError(
                f"{algo.config} needs {need} bytes of workspace, the call has "
                f"{problem.workspace_bytes}"
            )
        space, stream = self._workspace(problem.workspace_bytes), self._stream()
        return Prepared(
            problem.library.function("Matmul"),
            lambda status: problem.library.judge("Matmul", status),
            lambda o: problem.bind(made, o, space.data_ptr(), stream),
        )

    def time_us(self, launch: Launch, operands: Sequence[Operands], launches: int) -> float:
        """Mean microseconds per launch over back-to-back launches, operands in rotation.

        By events on the device: see `queued_us`.
        """
        assert isinstance(launch, Prepared)
        bound = [partial(launch.run, launch.bind(o)) for o in operands[:launches]]
        runs = [bound[i % len(bound)] for i in range(launches)]
        mean_us, launch.last_us = queued_us(runs, launch.last_us, HOST_US)
        return mean_us

    def unpack(self, words: bytes) -> Algo:
        """The algorithm in the library's own structure, as a call is given it; its rank unknown.

        Needs no device. Raises BackendError where the library cannot read it.
        """
        library = self._loaded()
        config = library.settings(library.algo_type.from_buffer_copy(words))
        return Algo(config["id"], 0, spell(config))

    def _need(self, problem: Problem, algo: Any) -> int:
        """The workspace that an algorithm needs. Raises BackendError where it cannot run."""
        return problem.check(algo)[0]

    def _loaded(self) -> Library:
        if self._library is None:
            self._library = Library(self.table(), self._open())
        return self._library

    def table(self) -> Vendor:
        """The vendor's table for the GPU here."""
        return self.vendor

    def _open(self) -> ctypes.CDLL:
        vendor = self.vendor
        return lt_api.find(vendor.libraries, vendor.title, vendor.missing)

    def _problem(self, gemm: Gemm) -> Problem:
        if gemm not in self._problems:
            library = self._loaded()
            if self._handle is None:
                self._wake()
                self._handle = library.create("")
            somewhere = self._workspace(self.vendor.workspace_bytes).data_ptr()
            self._problems[gemm] = Problem(library, self._handle, gemm, somewhere)
        return self._problems[gemm]

    def _wake(self) -> None:
        """Have torch make its context on the device, which the library then uses too."""
        import torch

        try:
            torch.zeros(1, device=self.device)
        except (RuntimeError, AssertionError) as e:  # AssertionError: a torch built without CUDA
            line = str(e).splitlines()[0]
            raise BackendError(f"torch cannot use the GPU ({line}): gemmtune doctor") from e

    def _stream(self) -> int:
        import torch

        return int(torch.cuda.current_stream().cuda_stream)

    def _workspace(self, size: int) -> torch.Tensor:
        """Memory for all launches, which follow one another on one stream."""
        import torch

        if self._space is None or self._space.numel() < size:
            self._space = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._space


def queued_us(
    runs: Sequence[Callable[[], object]], last_us: float, host_us: float
) -> tuple[float, float]:
    """Mean microseconds of launches back to back, and those of the last ones, by events.

    The device waits until enough launches are queued for it not to be kept waiting by the host:
    handing one over takes `host_us` at most, and running it took `last_us` the last time.
    """
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    total_us = 0.0
    for first in range(0, len(runs), QUEUED):
        part = runs[first : first + QUEUED]
        lead_us = LEAD_US + len(part) * max(0.0, host_us - last_us)
        torch.cuda._sleep(int(lead_us * CYCLES_PER_US))
        start.record()
        for run in part:
            run()
        end.record()
        end.synchronize()
        us = start.elapsed_time(end) * 1e3
        total_us, last_us = total_us + us, us / len(part)
    return total_us / len(runs), last_us


class Prepared:
    """A prepared launch; the arguments for each set of operands are made once.

    `function` is called with the first of what `bind` makes, the rest has to live as long;
    `judge` raises BackendError where its status is no success.
    """

    def __init__(
        self,
        function: Callable[..., int],
        judge: Callable[[int], None],
        bind: Callable[[Operands], tuple[Any, ...]],
    ) -> None:
        self._function, self._judge, self._bind = function, judge, bind
        self._bound: dict[tuple[int, ...], tuple[Any, ...]] = {}
        self.last_us = 0.0

    def __call__(self, o: Operands) -> None:
        """Raises BackendError."""
        self.run(self.bind(o))

    def bind(self, o: Operands) -> tuple[Any, ...]:
        """The call's arguments for these operands."""
        key = tuple([0 if t is None else t.data_ptr() for t in o])
        if key not in self._bound:
            self._bound[key] = self._bind(o)
        return self._bound[key]

    def run(self, bound: tuple[Any, ...]) -> None:
        """Raises BackendError."""
        if status := self._function(*bound[0]):
            self._judge(status)


def spell(config: Config) -> str:
    """An algorithm's settings in full: id=66 tile=24 stages=36 …"""
    return " ".join(f"{name}={value}" for name, value in config.items())


def parse(text: str) -> Config:
    """The settings that `spell` wrote. Raises BackendError for anything else."""
    pairs = re.findall(r"(\w+)=([0-9]+)", text)
    config = {name: int(value) for name, value in pairs}
    if not config or spell(config) != text:
        raise BackendError(f"not an algorithm's settings: {text!r}: sweep again")
    return config
