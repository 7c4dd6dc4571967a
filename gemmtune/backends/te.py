"""Transformer Engine for ROCm as a backend: its own tuner proposes, our measurement decides.

TE tunes inside whatever process launches a GEMM first, and keeps what it chose to the process's
end. So every question is a process of its own (sweep/te_worker.py), with TE_HIPBLASLT_* saying
what TE is to do, and the row that it saves read back. Its tuner times on a warm cache and checks
nothing: what it proposes is launched by processes that have that one algorithm, beside one that has
the default, and goes through the sweep like any other backend's. Never yet run on an AMD GPU.
"""

from __future__ import annotations

import copy
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from gemmtune import machine
from gemmtune.backends import te_call
from gemmtune.backends.base import Launch, Operands
from gemmtune.dialects import te
from gemmtune.errors import BackendError, TableError
from gemmtune.gemm import Algo, Gemm
from gemmtune.textfile import read_text

WORKER = "gemmtune.sweep.te_worker"
VARIABLES = "TE_HIPBLASLT_"
RUN_COUNT, ALGO_COUNT = 30, 100
TIME_LIMIT_S = 600.0  # of one tuning process
# The GEMMs by which an installed TE is got to know, and what it is to launch beside a bias.
PROBES = (
    Gemm(64, 64, 64, "T", "N", *("bfloat16",) * 3, "-", 64, 64, 64, api="lt"),
    Gemm(64, 64, 64, "T", "N", "float8e4m3", "float8e4m3", "bfloat16", "-", 64, 64, 64, api="lt"),
)


class Saved(NamedTuple):
    """What TE chose: its row, and microseconds by its own clock (0 where it did not tune)."""

    row: te.Row
    us: float = 0.0


class Known(NamedTuple):
    """What an installed TE is like."""

    dialect: str
    dev_cap: int
    fp8_bias: str  # the bias type in its key for FP8 GEMMs without a bias


class Te:
    """TE's algorithms for the GEMMs of a job, on this process's first GPU."""

    name = "te"
    device = "cuda"
    starts_s = 2 * TIME_LIMIT_S  # that its own processes may take, of which each loads TE

    def __init__(
        self, numerics: str = "type", run_count: int = RUN_COUNT, algo_count: int = ALGO_COUNT
    ) -> None:
        self.numerics, self.run_count, self.algo_count = numerics, run_count, algo_count
        self.gpu: str | None = None  # what HIP_VISIBLE_DEVICES is to say; None: as it is
        self.known: Known | None = None
        self._needs: dict[tuple[Gemm, Algo], int] = {}

    def lanes(self) -> list[Te]:
        """This backend once for each GPU that this process may use, itself for the first."""
        visible = os.environ.get("HIP_VISIBLE_DEVICES") or os.environ.get("CUDA_VISIBLE_DEVICES")
        count = len(machine.gpus())
        names = visible.split(",")[:count] if visible else list(map(str, range(count)))
        if len(names) < 2:
            return [self]
        lanes = [self, *(copy.copy(self) for _ in names[1:])]
        for lane, name in zip(lanes, names, strict=True):
            lane.gpu, lane._needs = name, {}
        return lanes

    # ----------------------------------------------------------------------- the installed TE

    def know(self) -> Known:
        """The dialect, and more, learnt from what TE saves. Raises BackendError."""
        if self.known is None:
            if self.device != "cpu" and not any(gpu.vendor == "AMD" for gpu in machine.gpus()):
                raise BackendError("te: no AMD GPU is seen here: gemmtune doctor")
            try:
                rows, dialect = self._launch(PROBES, {})
            except BackendError:  # of FP8, say, on an older GPU
                rows, dialect = self._launch(PROBES[:1], {})
            fp8 = next((row for row in rows if row.fp8), None)
            if not rows:
                raise BackendError("Transformer Engine saved no row for a GEMM that it launched")
            bias = fp8.bias_type if fp8 else "float32"
            self.known = Known(dialect, rows[0].dev_cap, bias)
        return self.known

    def dev_cap(self) -> int:
        return self.know().dev_cap

    def library(self) -> str:
        """hipBLASLt's build, of which algorithm numbers are. Raises BackendError."""
        from gemmtune.backends.hipblaslt import HipblasLt

        return HipblasLt().library()

    def about(self) -> dict[str, Any]:
        """For the table's provenance."""
        return {"te": self.know()._asdict(), "te_tuning": [self.run_count, self.algo_count]}

    def unsupported(self, gemm: Gemm) -> str | None:
        return te_call.unsupported(gemm)

    # ------------------------------------------------------------------------------ the tuner

    def algos(self, gemm: Gemm) -> Sequence[Algo]:
        """The default, what TE's tuner takes, and what it takes of those before and after that.

        The tuner's winner may fail our checks or be lucky; the others stand in for it then. Raises
        BackendError where TE cannot launch the Gemm, or launches another.
        """
        self._hold()
        default = self._choose(gemm, 0)
        count, best = self.algo_count, None
        while best is None:
            try:
                best = self._choose(gemm, 0, count)
            except BackendError:
                # te-v1 reads beyond hipBLASLt's list where that is shorter than what it asks for.
                if count == 1:
                    raise
                count = max(1, count // 2)
        found = [best]
        rank = best.row.aidx
        for first, last in ((1, rank), (max(rank, 0) + 1, count)):
            if rank > 0 and first < last:
                try:
                    found.append(self._choose(gemm, first, last - first))
                except BackendError:
                    continue  # the list ends before
        rows = {saved.row.aidx: saved.row for saved in (default, *found)}
        algos = []
        for at in sorted(rows):
            algo = Algo(rows[at].algo_id, at, f"rank={at}")
            self._needs[gemm, algo] = rows[at].ws_min
            algos.append(algo)
        return algos

    def workspace_bytes(self, gemm: Gemm, algo: Algo) -> int:
        return self._needs[gemm, algo]

    def _choose(self, gemm: Gemm, first: int, count: int = 0) -> Saved:
        """What TE takes of the heuristic's results from `first`, `count` of them; 0: `first`."""
        variables = {"ALGO_SELECTION": first, "LOG_TUNING": 1}
        if count:
            variables |= {"TUNING_RUN_COUNT": self.run_count, "TUNING_ALGO_COUNT": count}
        rows, _ = self._launch([gemm], variables)
        if len(rows) != 1:
            raise BackendError(f"Transformer Engine saved {len(rows)} rows for one GEMM")
        self._same(gemm, rows[0])
        time_ns = re.findall(r"Select hipBLASLt algo \d+ with time (\d+) ns", self._said)
        return Saved(rows[0], float(time_ns[-1]) / 1e3 if time_ns else 0.0)

    def _same(self, gemm: Gemm, row: te.Row) -> None:
        """Raise BackendError where TE launched something else than was asked for."""
        differ = [n for n in te.SAID if getattr(gemm, n) != getattr(row, n)]
        if differ:
            said = ", ".join(f"{n} {getattr(row, n)} for {getattr(gemm, n)}" for n in differ)
            raise BackendError(f"Transformer Engine launched another GEMM than asked for: {said}")
        if gemm.ws_bytes and gemm.ws_bytes != row.ws_max:
            raise BackendError(
                f"Transformer Engine gives this GEMM {row.ws_max} bytes of workspace here, and the "
                f"job had {gemm.ws_bytes}: sweep in the job's own environment"
            )

    def _launch(self, gemms: Sequence[Gemm], variables: dict[str, int]) -> tuple[list[te.Row], str]:
        """The rows that TE saves of some GEMMs, and its dialect. Raises BackendError."""
        with tempfile.TemporaryDirectory(prefix="gemmtune-te-") as folder:
            save = Path(folder) / "saved.csv"
            env = self._environment(variables) | {f"{VARIABLES}ALGO_SAVE": str(save)}
            words = [*self._command("once", "0"), *(json.dumps(list(g)) for g in gemms)]
            try:
                done = subprocess.run(
                    words,
                    env=env,
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=TIME_LIMIT_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise BackendError(f"Transformer Engine took over {TIME_LIMIT_S:.0f} s") from None
            self._said = done.stdout
            if done.returncode:
                raise BackendError(f"Transformer Engine: {_last(done.stderr or done.stdout)}")
            if not save.exists():
                raise BackendError(
                    "the installed Transformer Engine saves no algorithms: it is not AMD's (on an "
                    "NVIDIA GPU: --backend cublaslt)"
                )
            try:
                document = te.read(read_text(save), "what Transformer Engine saved")
            except TableError as e:
                raise BackendError(f"{e}: a dialect that this gemmtune does not know") from None
            return document.rows, document.dialect

    def _hold(self) -> None:
        """Let this process see its lane's GPU alone. In a worker this comes before HIP starts."""
        if self.gpu is not None:
            os.environ["HIP_VISIBLE_DEVICES"] = self.gpu
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)

    def _command(self, mode: str, number: str) -> list[str]:
        return [sys.executable, "-m", WORKER, mode, self.device, number]

    def _environment(self, variables: dict[str, int]) -> dict[str, str]:
        """The user's own, but for TE's tuning variables."""
        self._hold()
        kept = {k: v for k, v in os.environ.items() if not k.startswith(VARIABLES)}
        return kept | {VARIABLES + name: str(value) for name, value in variables.items()}

    # ------------------------------------------------------------------------------- launches

    def launcher(self, gemm: Gemm, algo: Algo) -> Launch:
        """A process of TE that has this algorithm alone. Raises BackendError."""
        if not (rank := re.fullmatch(r"rank=(\d+)", algo.config)):
            raise BackendError(f"not an algorithm of this backend: {algo.config!r}: sweep again")
        ours, theirs = socket.socketpair()
        os.set_inheritable(theirs.fileno(), True)
        words = [*self._command("serve", str(theirs.fileno())), json.dumps(list(gemm))]
        env = self._environment({"ALGO_SELECTION": int(rank[1])})
        with theirs:
            child = subprocess.Popen(words, env=env, pass_fds=[theirs.fileno()])
        return Remote(child, Connection(ours.detach()), self.device)

    def time_us(self, launch: Launch, operands: Sequence[Operands], launches: int) -> float:
        """Mean microseconds per launch over back-to-back launches, operands in rotation."""
        assert isinstance(launch, Remote)
        bound = [launch.bind(o) for o in operands[:launches]]
        return float(launch.ask("time", [bound[i % len(bound)] for i in range(launches)]))

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if not k.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._needs = {}


class Remote:
    """Launches in another process, on operands whose memory it shares."""

    def __init__(self, child: subprocess.Popen[bytes], pipe: Connection, device: str) -> None:
        import torch
        import torch.multiprocessing

        torch.multiprocessing.set_sharing_strategy("file_system")
        self.child, self.pipe, self.gpu = child, pipe, device != "cpu"
        self.kept: dict[int, tuple[int, Operands]] = {}
        self._answer()

    def bind(self, o: Operands) -> int:
        """The number by which the process knows a set of operands."""
        if id(o) not in self.kept:
            self.ask("bind", o)
            self.kept[id(o)] = len(self.kept), o
        return self.kept[id(o)][0]

    def __call__(self, o: Operands) -> None:
        self.ask("run", self.bind(o))

    def ask(self, word: str, value: Any) -> Any:
        """Raises BackendError with what TE said, or how its process ended."""
        if self.gpu:
            import torch

            torch.cuda.synchronize()  # the operands are written by then
        try:
            self.pipe.send((word, value))
        except OSError:
            self._ended()
        return self._answer()

    def _answer(self) -> Any:
        try:
            reason, value = self.pipe.recv()
        except (EOFError, OSError):
            self._ended()
        if reason:
            raise BackendError(reason)
        return value

    def _ended(self) -> None:
        code = self.child.wait()
        raise BackendError(f"Transformer Engine's process ended with code {code}") from None

    def __del__(self) -> None:
        self.pipe.close()


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it said nothing"
