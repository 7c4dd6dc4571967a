"""gemmtune finds faster GEMM algorithms for one training job and proves the gain in that job."""

__version__ = "0.1.0"


def step() -> None:
    """Mark the end of a training step by hand, for a job without a torch optimizer.

    Does nothing outside a job started by gemmtune, so it can stay in the training script.
    """
    import sys

    steps = sys.modules.get("gemmtune.job.steps")
    if steps is not None:
        steps.mark()


def work(
    *, tokens: float | None = None, flops: float | None = None, peak_flops: float | None = None
) -> None:
    """Say what a training step of this process is, for tokens/s, TFLOP/s and MFU in a comparison.

    `tokens` and `flops` (of the model, recomputation not counted) are those of one step on one
    rank, `peak_flops` the most FLOP/s that its device can do. They hold until they are said anew.
    Does nothing outside a job started by gemmtune, so it can stay in the training script.
    """
    import sys

    steps = sys.modules.get("gemmtune.job.steps")
    if steps is not None:
        steps.set_work(tokens, flops, peak_flops)
