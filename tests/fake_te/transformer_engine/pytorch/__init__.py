from torch.utils.checkpoint import checkpoint  # noqa: F401

from .cpp_extensions import *  # noqa: F403
from .module.linear import LayerNormMLP, Linear, autocast  # noqa: F401
