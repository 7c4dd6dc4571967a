"""An NVML with one GPU, of which it knows the name and what algorithm numbers depend on."""


def _nothing(*_: object) -> None:
    return None


nvmlInit = nvmlShutdown = _nothing


def nvmlDeviceGetCount() -> int:
    return 1


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index + 1


def nvmlDeviceGetName(handle: int) -> str:
    return "Fake H200"


def nvmlDeviceGetCudaComputeCapability(handle: int) -> tuple[int, int]:
    return 9, 0


NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
