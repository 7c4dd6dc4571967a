"""The reference job's arithmetic and command line: no training, no torch where none is needed."""

import subprocess
import sys

import pytest

from gemmtune.errors import UsageError
from gemmtune.llama.config import MODELS
from gemmtune.llama.figures import summarise, text
from gemmtune.llama.options import Options, parse, shard
from gemmtune.llama.peak import find_peak

# Parameters of the published checkpoints (the model cards' safetensors totals, without buffers).
PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_published_number_of_parameters(name):
    import torch

    from gemmtune.llama.model import Llama, TorchLayers

    config = MODELS[name]
    meta = {"device": "meta", "dtype": torch.bfloat16}
    model = Llama(config, TorchLayers(config.norm_eps, **meta), torch.bfloat16, **meta)
    assert sum(p.numel() for p in model.parameters()) == config.params
    assert config.params == PUBLISHED.get(name, config.params)
    assert config.params - MODELS[name].vocab * config.hidden == sum(
        p.numel() for name, p in model.named_parameters() if name != "embed.weight"
    )


def test_fused_layers_have_the_published_widths():
    import torch

    from gemmtune.llama.model import Block, TorchLayers

    config = MODELS["llama3-8b"]
    with torch.device("meta"):
        block = Block(config, TorchLayers(config.norm_eps), None)
    shapes = {name: tuple(p.shape) for name, p in block.named_parameters() if p.dim() == 2}
    assert shapes == {
        "attention.qkv.weight": (6144, 4096),
        "attention.o.weight": (4096, 4096),
        "mlp.fc1.weight": (28_672, 4096),
        "mlp.fc2.weight": (4096, 14_336),
    }
    assert {name: out for name, (_, out) in config.linears.items()} == {
        "qkv": 6144,
        "o": 4096,
        "fc1": 28_672,
        "fc2": 4096,
        "lm_head": 128_256,
    }
    assert MODELS["llama2-7b"].qkv_width == 3 * 4096
    assert MODELS["llama3-70b"].qkv_width == 10_240


def test_no_two_gemm_dimensions_of_the_tiny_model_are_equal():
    tiny = MODELS["tiny"]
    widths = [tiny.hidden, tiny.attn_width, tiny.qkv_width, tiny.ffn, tiny.fc1_width, tiny.vocab]
    assert len({*widths, Options().tokens, tiny.head_dim, tiny.seq}) == len(widths) + 3


def test_flops_per_token_follow_the_formula():
    # 6·(8,030,261,248 - 128,256·4,096) + 12·32·32·128·8,192
    assert MODELS["llama3-8b"].flops_per_token(8192) == 45_029_548_032 + 12_884_901_888
    # Per token, forward and backward, a linear layer does 6 FLOPs per weight; norms are the rest.
    tiny = MODELS["tiny"]
    weights = sum(
        rows * columns * (1 if name == "lm_head" else tiny.layers)
        for name, (rows, columns) in tiny.linears.items()
    )
    norms = (2 * tiny.layers + 1) * tiny.hidden
    assert tiny.flops_per_token(0) == 6 * (weights + norms)


@pytest.mark.parametrize(
    ("name", "gpu", "bf16", "fp8"),
    [
        ("AMD Instinct MI300X", "MI300X", 1307.4, 2614.9),
        ("AMD Instinct MI300X VF", "MI300X", 1307.4, 2614.9),
        ("AMD Instinct MI325X", "MI325X", 1307.4, 2614.9),
        ("AMD Instinct MI355X", "MI355X", 2516.6, 5033.2),
        ("NVIDIA H100 80GB HBM3", "H100", 989.4, 1978.9),
        ("NVIDIA H100 PCIe", "H100 PCIe", 756.5, 1513.0),
        ("NVIDIA H100 NVL", "H100 NVL", 835.5, 1670.5),
        ("NVIDIA H200", "H200", 989.4, 1978.9),
        ("NVIDIA B200", "B200", 2250.0, 4500.0),
    ],
)
def test_peak_rates_are_found_by_the_device_name(name, gpu, bf16, fp8):
    assert find_peak(name) == (gpu, bf16, fp8)


@pytest.mark.parametrize(
    "name", ["CPU", "NVIDIA GB200", "NVIDIA GH200 480GB", "AMD Instinct MI308X", "NVIDIA A100-SXM"]
)
def test_a_device_that_the_table_lacks_has_no_peak_rate(name):
    assert find_peak(name) is None


def test_throughput_is_worked_out_from_the_timed_steps():
    options = Options("llama3-8b", batch=2, accumulate=3, fsdp="2", precision="pure", te=True)
    f = summarise(options, "NVIDIA H200", 8, [11.0, 10.0], [4000.0, 6000.0], 2**30)
    tokens = 2 * 8192 * 3 * 2 / 10
    assert f["tokens_per_s_per_gpu"] == tokens
    assert f["tokens_per_s"] == 8 * tokens
    assert f["tflops_per_gpu"] == pytest.approx(tokens * 57_914_449_920 / 1e12)
    assert f["mfu"] == pytest.approx(f["tflops_per_gpu"] / 1978.9)
    assert "28.8% of 1,978.9 TFLOP/s (FP8, dense)" in text(f, "GPU")
    plain = Options("llama3-8b", fsdp="none", precision="pure", te=True, no_fp8=True)
    f = summarise(plain, "NVIDIA H200", 1, [1.0], [1e3], 0)
    assert f["peak_tflops"] == 989.4 and "precision pure + TE bf16," in text(f, "GPU")
    bf16 = summarise(Options("llama3-8b", precision="pure"), "NVIDIA H200", 1, [1.0], [1e3], 0)
    assert bf16["peak_tflops"] == 989.4
    fp32 = summarise(Options("llama3-8b", precision="fp32"), "NVIDIA H200", 1, [1.0], [1e3], 0)
    assert fp32["mfu"] is None


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--model gpt", "invalid choice: 'gpt'"),
        ("--batch 0", "'0' is not an integer of 1 or more"),
        ("--lr -1", "'-1' is not a number of 0 or more"),
        ("--lr nan", "'nan' is not a number of 0 or more"),
        ("--what", "unrecognized arguments: --what"),
        ("--fuse-wgrad", "add --te"),
        ("--no-fp8", "add --te"),
        ("--te --fuse-wgrad --fsdp 2", "take --fsdp none"),
        ("--te --precision fp32", "take --precision pure or default"),
        ("--te --compile", "leave --compile out"),
        ("--te --batch 1 --seq 100", "1 x 100 is 100: change --batch or --seq"),
    ],
)
def test_wrong_options_are_one_line_that_says_what_to_do(line, says):
    with pytest.raises(UsageError) as error:
        parse(line.split())
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_fsdp_is_chosen_by_the_number_of_processes():
    assert shard(Options(), 1).fsdp == "none"
    assert shard(Options(), 2).fsdp == "2"
    assert shard(Options(fsdp="1"), 2).fsdp == "1"
    with pytest.raises(UsageError, match="--fsdp none is for one process, and 2 are running"):
        shard(Options(fsdp="none"), 2)
    with pytest.raises(UsageError, match="--fuse-wgrad is for one process, and 2 are running"):
        shard(Options(te=True, fuse_wgrad=True), 2)


def test_the_help_has_an_example_and_needs_no_torch():
    code = (
        "import sys, runpy; sys.argv = ['llama', '--help']\n"
        "try: runpy.run_module('gemmtune.llama', run_name='__main__')\n"
        "except SystemExit as e: assert not e.code\n"
        "assert 'torch' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Example:  python -m gemmtune.llama --model tiny" in run.stdout
