"""Module paths as the user wrote the model, without the wrappers of training. Pure."""

from __future__ import annotations

# Attributes under which FSDP1, activation checkpointing, torch.compile, and DDP or DataParallel
# keep the module that they wrap (torch.distributed.fsdp._common_utils.FSDP_WRAPPED_MODULE,
# torch.distributed.algorithms._checkpoint.checkpoint_wrapper._CHECKPOINT_WRAPPED_MODULE,
# torch._dynamo.eval_frame.OptimizedModule).
WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})


def clean_name(name: str) -> str:
    """A name of `named_modules()` or `named_parameters()` without its wrappers.

    `_fsdp_wrapped_module.layers.0._checkpoint_wrapped_module.mlp` is `layers.0.mlp`. A leading
    `module.` is taken off too: DDP and DataParallel put it there, and nothing in a name tells
    theirs from a user's own root attribute `module`.
    """
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    while parts and parts[0] == "module":
        del parts[0]
    return ".".join(parts)
