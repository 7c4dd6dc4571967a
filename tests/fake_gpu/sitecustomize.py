"""Makes a machine without a GPU look like one with an H200, to tests whose jobs use the fakes of
cuBLASLt and cuBLAS: they are loaded as torch's are, and pynvml is the one beside this file."""

import ctypes
import os

for name in ("libcuda.so.1", "libcublasLt.so.13", "libcublas.so.13"):
    ctypes.CDLL(os.path.join(os.environ["GEMMTUNE_TEST_FAKES"], name))
