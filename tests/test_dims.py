"""Each layer's shapes, for a tiny HF Llama, plain and under what distributes it (2 gloo ranks)."""

import functools
import json

import pytest
import torch
from torch import nn

from gemmtune.capture.dims import Dims, render

HIDDEN, HEADS, KV, FFN, VOCAB, TOKENS = 32, 4, 2, 48, 96, 8
LAYER = {
    "input_layernorm": [HIDDEN],
    "self_attn.q_proj": [HIDDEN, HIDDEN],
    "self_attn.k_proj": [HIDDEN * KV // HEADS, HIDDEN],
    "self_attn.v_proj": [HIDDEN * KV // HEADS, HIDDEN],
    "self_attn.o_proj": [HIDDEN, HIDDEN],
    "post_attention_layernorm": [HIDDEN],
    "mlp.gate_proj": [FFN, HIDDEN],
    "mlp.up_proj": [FFN, HIDDEN],
    "mlp.down_proj": [HIDDEN, FFN],
}
WEIGHTS = {
    "model.embed_tokens": [VOCAB, HIDDEN],
    **{f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in LAYER.items()},
    "model.norm": [HIDDEN],
    "lm_head": [VOCAB, HIDDEN],
}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV,
        vocab_size=VOCAB,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def step(model, dims):
    ids = torch.zeros(2, TOKENS, dtype=torch.long)
    dims.install()
    model(input_ids=ids, labels=ids).loss.backward()
    dims.remove()
    return dims.rows()


def by_name(rows):
    return {row["name"]: row for row in rows}


def test_plain_llama_in_order_of_execution():
    rows = step(llama(), Dims())
    assert json.loads(json.dumps(rows)) == rows
    assert [row["name"] for row in rows] == list(WEIGHTS)
    for row in rows:
        assert row["local"] == row["global"] == WEIGHTS[row["name"]]
        assert (row["placement"], row["mesh"], row["parameter"]) == ("none", None, "weight")
    found = by_name(rows)
    down = found["model.layers.1.mlp.down_proj"]
    assert (down["class"], down["input"]) == ("Linear", [2, TOKENS, FFN])
    assert down["output"] == [2, TOKENS, HIDDEN]
    assert found["model.embed_tokens"]["input"] == [2, TOKENS]
    assert found["lm_head"]["output"] == [2, TOKENS, VOCAB]


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(reentrant):
    model = llama()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    assert step(model, Dims()) == step(llama(), Dims())


def test_nothing_is_left_behind_and_later_steps_add_nothing():
    model, dims = llama(), Dims()
    rows = step(model, dims)
    model(input_ids=torch.zeros(5, 3, dtype=torch.long))
    assert dims.rows() == rows
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_own_parameters_biases_keywords_and_a_module_that_is_not_called():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3))
            self.inner = nn.Linear(3, 4)
            self.unused = nn.Linear(7, 7, bias=False)

        def forward(self, *, data):
            return {"result": self.inner(data["x"] * self.gain)}

    dims = Dims()
    dims.install()
    Scale()(data={"x": torch.ones(2, 3)})
    dims.remove()
    assert [(r["name"], r["parameter"], r["input"], r["output"]) for r in dims.rows()] == [
        ("Scale", "gain", [2, 3], [2, 4]),
        ("inner", "weight", [2, 3], [2, 4]),
        ("inner", "bias", [2, 3], [2, 4]),
        ("unused", "weight", None, None),
    ]
    text = render(dims.rows()).splitlines()
    assert text[0].split() == [
        *("name", "class", "input", "local", "weight", "global", "weight"),
        *("placement", "output"),
    ]
    assert text[1].split() == ["Scale.gain", "Scale", "2x3", "3", "3", "none", "2x4"]
    assert text[3].split() == ["inner.bias", "Linear", "2x3", "4", "4", "none", "2x4"]
    assert text[4].split() == ["unused", "Linear", "?", "7x7", "7x7", "none", "?"]


def test_a_forward_that_raises_leaves_a_row_without_output():
    model, dims = nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3)), Dims()
    dims.install()
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 2))
    dims.remove()
    outputs = [(r["name"], r["output"]) for r in dims.rows() if r["parameter"] == "weight"]
    assert outputs == [("0", [1, 3]), ("1", None)]


def test_a_compiled_model_stays_compiled_and_its_weights_are_listed():
    frames = []

    def backend(graph, _):
        frames.append(graph)
        return graph

    model = torch.compile(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4)), backend=backend)
    model(torch.ones(1, 2))
    dims = Dims()
    dims.install()
    model(torch.ones(1, 2))
    dims.remove()
    model(torch.ones(1, 2))
    assert len(frames) == 1
    rows = [r for r in dims.rows() if r["parameter"] == "weight"]
    assert [(r["name"], r["local"]) for r in rows] == [("0", [3, 2]), ("1", [4, 3])]


def ddp(model, mesh):
    return nn.parallel.DistributedDataParallel(model)


def fsdp1(model, mesh, orig):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    policy = functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}
    )
    device = torch.device("cpu")
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=orig, device_id=device
    )


def fsdp2(model, mesh):
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model, mesh):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {
        **{f"self_attn.{n}_proj": ColwiseParallel() for n in "qkv"},
        **{f"mlp.{n}_proj": ColwiseParallel() for n in ("gate", "up")},
        "self_attn.o_proj": RowwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    return model


KINDS = {
    "ddp": ddp,
    "fsdp1": functools.partial(fsdp1, orig=False),
    "fsdp1_orig": functools.partial(fsdp1, orig=True),
    "fsdp2": fsdp2,
    "tp": tensor_parallel,
}


def rank_main(rank, folder):
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = dist.init_device_mesh("cpu", (2,))
    for kind, distribute in KINDS.items():
        model = distribute(llama(), mesh)
        first = step(model, Dims())  # FSDP sets itself up
        again = step(model, Dims())
        with open(f"{folder}/{kind}-{rank}.json", "w") as f:
            json.dump([first, again], f)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def distributed(tmp_path_factory):
    """The rows of each rank by kind, the same in the first and the second step."""
    folder = tmp_path_factory.mktemp("dims")
    torch.multiprocessing.spawn(rank_main, (str(folder),), nprocs=2)
    rows = {}
    for kind in KINDS:
        for rank in range(2):
            first, again = json.loads((folder / f"{kind}-{rank}.json").read_text())
            assert first == again
            rows[kind, rank] = first
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS))
def test_names_globals_and_activations_are_the_models(distributed, kind):
    for rank in range(2):
        rows = distributed[kind, rank]
        assert [row["name"] for row in rows] == list(WEIGHTS)
        for row in rows:
            assert row["global"] == WEIGHTS[row["name"]]
            tokens = [2, TOKENS]
            assert row["output"][:2] == tokens
            assert row["input"][:2] == tokens


@pytest.mark.slow
def test_ddp_is_replicated(distributed):
    for row in distributed["ddp", 0]:
        assert row["local"] == row["global"]
        assert row["placement"] == "replicated on 2 ranks"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1_orig"])
def test_fsdp1_local_parts_add_up(distributed, kind):
    for zero, one in zip(distributed[kind, 0], distributed[kind, 1], strict=True):
        whole = torch.Size(zero["global"]).numel()
        assert zero["local"][0] + one["local"][0] == whole
        assert zero["placement"] == "flat, sharded"
        assert zero["mesh"] == [0, 1]


@pytest.mark.slow
def test_fsdp2_local_parts_are_the_shards(distributed):
    for row in distributed["fsdp2", 0]:
        assert row["placement"] == "(Shard(0),)"
        assert row["mesh"] == [0, 1]
        assert row["local"] == [row["global"][0] // 2, *row["global"][1:]]
    assert "(Shard(0),) on mesh [0, 1]" in render(distributed["fsdp2", 0])


@pytest.mark.slow
def test_tensor_parallel_local_parts_and_activations(distributed):
    rows = by_name(distributed["tp", 1])
    gate, down = rows["model.layers.0.mlp.gate_proj"], rows["model.layers.0.mlp.down_proj"]
    assert (gate["placement"], gate["local"]) == ("(Shard(0),)", [FFN // 2, HIDDEN])
    assert (down["placement"], down["local"]) == ("(Shard(1),)", [HIDDEN, FFN // 2])
    assert gate["output"][-1] == down["input"][-1] == FFN // 2
    assert rows["model.norm"]["placement"] == "none"
