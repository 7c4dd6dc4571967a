from ..cpp_extensions.gemm import get_cublas_workspace


def get_workspace():
    """TE 1.x, and 2.x before 2.9: the workspace that modules hand to every GEMM."""
    return get_cublas_workspace(None, False, False)
