"""Module paths come without wrappers, for names that torch's own wrappers make."""

import pytest
import torch
from torch import nn

from gemmtune.job.names import clean_name


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("", ""),
        ("model.layers.0.mlp", "model.layers.0.mlp"),
        ("_fsdp_wrapped_module", ""),
        ("module", ""),
        ("module.module.lm_head", "lm_head"),
        ("_orig_mod.module.model.layers.3.mlp.up_proj", "model.layers.3.mlp.up_proj"),
        ("_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.mlp", "model.layers.0.mlp"),
        ("layers.0._checkpoint_wrapped_module._orig_mod.mlp.weight", "layers.0.mlp.weight"),
        ("encoder.module.fc", "encoder.module.fc"),
        ("modules.fc", "modules.fc"),
    ],
)
def test_wrappers_are_taken_off(name, clean):
    assert clean_name(name) == clean


def test_names_made_by_torchs_wrappers_are_the_users():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def model():
        return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))

    names = {n for n, m in model().named_modules() if isinstance(m, nn.Linear)}
    wrapped = model()
    wrapped[1] = checkpoint_wrapper(wrapped[1])
    compiled = nn.DataParallel(torch.compile(wrapped))
    found = {clean_name(n) for n, m in compiled.named_modules() if isinstance(m, nn.Linear)}
    assert found == names == {"0", "1.0"}
