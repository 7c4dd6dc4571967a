"""The reference job's command line: from arguments to checked Options. Pure, needs no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from gemmtune.errors import UsageError
from gemmtune.llama.config import MODELS, Config

EXAMPLE = """\
Example:  python -m gemmtune.llama --model tiny --steps 5
          python -m gemmtune.llama --model tiny --spawn 2 --fsdp 2
          torchrun --nproc-per-node 8 -m gemmtune.llama --model llama3-8b --batch 4 --te"""

# FP8 GEMMs need every dimension to be a multiple of this; the tokens are one of them.
FP8_MULTIPLE = 16


@dataclass(frozen=True)
class Options:
    """One run of the job, as on its command line; None leaves the choice to the job."""

    model: str = "tiny"
    layers: int | None = None
    batch: int = 2
    seq: int | None = None
    accumulate: int = 1
    steps: int = 10
    warmup: int = 2
    lr: float = 3e-4
    clip: float = 1.0
    seed: int = 0
    fsdp: str | None = None
    spawn: int = 1
    precision: str | None = None
    checkpoint: str = "none"
    compile: bool = False
    te: bool = False
    no_fp8: bool = False
    fuse_wgrad: bool = False
    device: str = "auto"
    json: str | None = None

    @property
    def config(self) -> Config:
        """The model's dimensions, with --layers and --seq applied."""
        config = MODELS[self.model]
        return replace(config, layers=self.layers or config.layers, seq=self.seq or config.seq)

    @property
    def fp8(self) -> bool:
        return self.te and not self.no_fp8

    @property
    def tokens(self) -> int:
        """Tokens of one forward pass on one rank: the n of every GEMM of the model."""
        return self.batch * self.config.seq


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists the options)")


def _at_least(least: int) -> Any:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer of {least} or more")
        return value

    return parse


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return value


def _parser() -> argparse.ArgumentParser:
    p = _Parser(
        prog="python -m gemmtune.llama",
        description="Train a Llama on synthetic data and print its throughput: a job to tune.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    default = Options()
    model = p.add_argument_group("model")
    model.add_argument("--model", choices=list(MODELS), default=default.model)
    model.add_argument("--layers", type=_at_least(1), metavar="N", help="blocks, for a proxy")
    model.add_argument("--te", action="store_true", help="Transformer Engine layers, in FP8")
    model.add_argument("--no-fp8", action="store_true", help="with --te: its layers in bf16")
    model.add_argument(
        "--fuse-wgrad",
        action="store_true",
        help="with --te and without FSDP: weight gradients accumulate in float32 in their GEMM",
    )
    model.add_argument("--compile", action="store_true", help="torch.compile the model")
    run = p.add_argument_group("training")
    run.add_argument(
        "--batch",
        type=_at_least(1),
        default=default.batch,
        metavar="N",
        help="sequences of one forward pass on one rank (default %(default)s)",
    )
    run.add_argument("--seq", type=_at_least(2), metavar="N", help="tokens of a sequence")
    run.add_argument(
        "--accumulate",
        type=_at_least(1),
        default=default.accumulate,
        metavar="N",
        help="forward and backward passes per optimizer step (default %(default)s)",
    )
    run.add_argument(
        "--steps",
        type=_at_least(1),
        default=default.steps,
        metavar="N",
        help="timed optimizer steps (default %(default)s)",
    )
    run.add_argument(
        "--warmup",
        type=_at_least(0),
        default=default.warmup,
        metavar="N",
        help="optimizer steps before them (default %(default)s)",
    )
    run.add_argument("--lr", type=_number, default=default.lr, help="AdamW's (default %(default)s)")
    run.add_argument(
        "--clip",
        type=_number,
        default=default.clip,
        help="largest gradient norm, 0 for none (default %(default)s)",
    )
    run.add_argument("--seed", type=_at_least(0), default=default.seed)
    run.add_argument(
        "--checkpoint",
        choices=["none", "reentrant", "nonreentrant"],
        default=default.checkpoint,
        help="recompute each block's activations in the backward pass (default %(default)s)",
    )
    run.add_argument(
        "--precision",
        choices=["pure", "default", "fp32"],
        help="pure: parameters, gradient reduction and buffers in bf16; default: bf16 compute on "
        "float32 parameters, reduction in float32; fp32: all float32. "
        "Unless given: default on a GPU, fp32 on a CPU",
    )
    where = p.add_argument_group("machine")
    where.add_argument("--device", choices=["auto", "cpu", "cuda"], default=default.device)
    where.add_argument(
        "--fsdp",
        choices=["none", "1", "2"],
        help="fully sharded data parallel, version 1 or 2; unless given: none for one process, "
        "else 2",
    )
    where.add_argument(
        "--spawn",
        type=_at_least(1),
        default=default.spawn,
        metavar="N",
        help="start N processes here (torch.multiprocessing.spawn), without torchrun",
    )
    where.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    return p


def parse(argv: Sequence[str] | None = None) -> Options:
    """Options from the arguments (sys.argv without a value).

    Raises UsageError, and SystemExit after --help.
    """
    options = Options(**vars(_parser().parse_args(argv)))
    for name in ("no_fp8", "fuse_wgrad"):
        if getattr(options, name) and not options.te:
            raise UsageError(f"--{name.replace('_', '-')} is Transformer Engine's: add --te")
    if options.fuse_wgrad and options.fsdp not in (None, "none"):
        raise UsageError("--fuse-wgrad keeps whole weights on one GPU: take --fsdp none")
    if options.te and options.precision == "fp32":
        raise UsageError("--te computes in FP8 and bf16: take --precision pure or default")
    if options.te and options.compile:
        raise UsageError("--te layers are not compiled by torch.compile: leave --compile out")
    if options.fp8 and options.tokens % FP8_MULTIPLE:
        raise UsageError(
            f"--te needs batch x seq to be a multiple of {FP8_MULTIPLE}, and "
            f"{options.batch} x {options.config.seq} is {options.tokens}: change --batch or "
            "--seq, or add --no-fp8"
        )
    return options


def shard(options: Options, world: int) -> Options:
    """`options` with --fsdp decided for `world` processes; UsageError where they do not fit."""
    fsdp = options.fsdp or ("none" if world == 1 else "2")
    if world > 1 and options.fuse_wgrad:
        raise UsageError(f"--fuse-wgrad is for one process, and {world} are running")
    if world > 1 and fsdp == "none":
        raise UsageError(f"--fsdp none is for one process, and {world} are running: take 1 or 2")
    return replace(options, fsdp=fsdp)
