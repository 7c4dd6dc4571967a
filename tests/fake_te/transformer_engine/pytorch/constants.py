import transformer_engine_torch as tex

TE_DType = tex.OF_TORCH
