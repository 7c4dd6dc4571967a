from .gemm import *  # noqa: F403
