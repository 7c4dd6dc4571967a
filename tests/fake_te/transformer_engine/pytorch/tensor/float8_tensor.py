"""Float8Tensor and its storage as far as a GEMM looks at them."""

import math

import torch


class Float8Tensor:
    def __init__(self, *, shape, dtype, data, fp8_scale_inv, fp8_dtype, data_transpose=None):
        assert data.dtype == torch.uint8 and fp8_scale_inv.dtype == torch.float32
        assert tuple(shape) == tuple(data.shape) and fp8_scale_inv.shape == (1,)
        self._data, self._fp8_dtype, self._scale_inv = data, fp8_dtype, fp8_scale_inv
        self._transpose, self.dtype, self.shape = data_transpose, dtype, torch.Size(shape)
        self.device = data.device


class Float8TensorStorage:
    """What backward keeps of an activation: here the transposed copy alone, (columns, *rows)."""

    def __init__(self, *, data_transpose, fp8_scale_inv, fp8_dtype):
        assert data_transpose.dtype == torch.uint8 and data_transpose.is_contiguous()
        self._data, self._transpose, self._scale_inv = None, data_transpose, fp8_scale_inv
        self._fp8_dtype = fp8_dtype

    def size(self):
        """As TE 2.11 tells it, wrong where the rows have more than one dimension."""
        size = self._transpose.size()
        return torch.Size([size[-1], math.prod(size[:-1])])
