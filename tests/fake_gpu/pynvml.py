"""An NVML with one GPU, of which it knows the name and what algorithm numbers depend on."""


def _nothing(*_: object) -> None:
    return None


nvmlInit = nvmlShutdown = _nothing  # noqa: N816


def nvmlDeviceGetCount() -> int:  # noqa: N802
    return 1


def nvmlDeviceGetHandleByIndex(index: int) -> int:  # noqa: N802
    return index + 1


def nvmlDeviceGetName(handle: int) -> str:  # noqa: N802
    return "Fake H200"


def nvmlDeviceGetCudaComputeCapability(handle: int) -> tuple[int, int]:  # noqa: N802
    return 9, 0
