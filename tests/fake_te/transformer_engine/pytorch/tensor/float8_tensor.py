"""Float8Tensor as far as a GEMM looks at it."""

import torch


class Float8Tensor:
    def __init__(self, *, shape, dtype, data, fp8_scale_inv, fp8_dtype, data_transpose=None):
        assert data.dtype == torch.uint8 and fp8_scale_inv.dtype == torch.float32
        assert tuple(shape) == tuple(data.shape) and fp8_scale_inv.shape == (1,)
        self._data, self._fp8_dtype, self._scale_inv = data, fp8_dtype, fp8_scale_inv
        self._transpose, self.dtype, self.shape = data_transpose, dtype, torch.Size(shape)
        self.device = data.device
