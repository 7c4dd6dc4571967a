"""The interposer: a C library preloaded into the job, which its GEMM calls pass on their way."""
