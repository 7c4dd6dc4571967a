"""What each layer of the job's model has: shapes of input, weight (local and global) and output.

`Dims` runs inside the job for one step and yields rows of JSON values; `render` makes a text table
of them. Reads and writes no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from gemmtune.job.names import clean_name

COLUMNS = ("name", "class", "input", "local weight", "global weight", "placement", "output")
NOT_SHARDED = "none"


class Dims:
    """Watches one forward of every module with parameters of its own.

    FSDP gathers a module's parameters while it runs, so they are looked at just before: on entry
    to the outermost module, for all modules in it. Modules that run inside a graph compiled by
    torch.compile have no call of their own: their input and output are unknown (None).
    """

    def __init__(self) -> None:
        self._rows: dict[int, list[dict[str, Any]]] = {}  # by the module's id
        self._order: dict[int, None] = {}
        self._modules: dict[int, Module] = {}  # keeps them alive, so that their ids stay theirs
        self._hooks: list[Any] = []

    def install(self) -> None:
        """Watch until `remove()`."""
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, with_kwargs=True),
        ]

    def remove(self) -> None:
        """Stop watching; the rows stay."""
        while self._hooks:
            self._hooks.pop().remove()
        self._modules.clear()

    def rows(self) -> list[dict[str, Any]]:
        """A row for each parameter, by its module's first call; modules never called come last.

        Keys: name (the module's, without wrappers), parameter, class, input, local, global,
        output (shapes as lists; None where unknown), placement (text) and mesh (nested lists of
        ranks, or None). Input and output are this rank's.
        """
        modules = [*self._order, *(m for m in list(self._rows) if m not in self._order)]
        return [dict(row) for m in modules for row in self._rows.get(m, ())]

    def _enter(self, module: Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if id(module) not in self._modules:
            self._look(module)
        if torch._C._current_graph_task_id() == -1:  # else a forward repeated in backward
            self._order.setdefault(id(module))

    def _leave(self, module: Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for row in self._rows.get(id(module), ()):
            if row["output"] is None:
                row["input"] = _shape_of_first((args, kwargs))
                row["output"] = _shape_of_first(output)

    def _look(self, root: Module) -> None:
        flat = _flat_parameters(root)
        replicated = ""
        for path, module in root.named_modules():
            name = clean_name(path)
            if type(module).__name__ == "DistributedDataParallel":
                replicated = f"replicated on {_world()} ranks"
            for row in self._rows.get(id(module), ()):  # seen before on its own
                row["name"] = name or row["name"]
            if id(module) in self._modules:
                continue
            self._modules[id(module)] = module
            weights = flat.get(id(module)) or {
                key: _weight(parameter, replicated)
                for key, parameter in module._parameters.items()
                if parameter is not None and not hasattr(parameter, "_param_infos")
            }
            about = {"name": name or type(module).__name__, "class": type(module).__name__}
            if weights:
                self._rows[id(module)] = [
                    {**about, "parameter": key, "input": None, **weight, "output": None}
                    for key, weight in weights.items()
                ]


def _weight(parameter: Tensor, replicated: str) -> dict[str, Any]:
    local = getattr(parameter, "_local_tensor", None)  # that of a DTensor
    if local is None:
        shape = list(parameter.shape)
        placement = replicated or NOT_SHARDED
        return {"local": shape, "global": shape, "placement": placement, "mesh": None}
    dtensor: Any = parameter
    return {
        "local": list(local.shape),
        "global": list(dtensor.shape),
        "placement": _placements(dtensor.placements),
        "mesh": dtensor.device_mesh.mesh.tolist(),
    }


def _placements(placements: Iterable[Any]) -> str:
    words = [
        f"{type(p).__name__.lstrip('_')}({p.dim})" if hasattr(p, "dim") else type(p).__name__
        for p in placements
    ]
    return f"({', '.join(words)}{',' if len(words) == 1 else ''})"


def _flat_parameters(root: Module) -> dict[int, dict[str, dict[str, Any]]]:
    """The weights that FSDP1 keeps in flat parameters, by module id and name.

    A flat parameter knows the modules, shapes and shard of what it holds
    (torch/distributed/fsdp/_flat_param.py). Its local part is one-dimensional: so many elements.
    """
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for fsdp in root.modules():
        handle = getattr(fsdp, "_handle", None)
        flat = getattr(handle, "flat_param", None)
        if handle is None or flat is None:
            continue
        group = handle.process_group
        sharded = handle.uses_sharded_strategy
        about = {"placement": "flat, sharded" if sharded else "flat, whole", "mesh": _ranks(group)}
        for info, shape, shard in zip(
            flat._param_infos, flat._shapes, flat._shard_param_infos, strict=True
        ):
            local = [shard.numel_in_shard or 0] if sharded else list(shape)
            weights = found.setdefault(id(info.module), {})
            weights[info.param_name] = {"local": local, "global": list(shape), **about}
        for shared in flat._shared_param_infos:
            of = found[id(shared.prim_module)][shared.prim_param_name]
            found.setdefault(id(shared.module), {})[shared.param_name] = of
    return found


def _ranks(group: Any) -> list[int]:
    import torch.distributed as dist

    return list(dist.get_process_group_ranks(group))


def _world() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else 1


def _shape_of_first(value: Any) -> list[int] | None:
    """The shape of the first tensor in nested tuples, lists and mappings; local for a DTensor."""
    if isinstance(value, Tensor):
        return list(getattr(value, "_local_tensor", value).shape)
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return None
    shapes = (_shape_of_first(v) for v in value)
    return next((shape for shape in shapes if shape is not None), None)


def render(rows: Iterable[Mapping[str, Any]]) -> str:
    """A table of `Dims.rows()`, one line a parameter, under a line of titles."""
    lines = [COLUMNS, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
    return "\n".join(line.rstrip() for line in padded) + "\n"


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    name = row["name"] if row["parameter"] == "weight" else f"{row['name']}.{row['parameter']}"
    mesh = "" if row["mesh"] is None else f" on mesh {row['mesh']}"
    shapes = [_text(row[key]) for key in ("input", "local", "global")]
    return name, row["class"], *shapes, f"{row['placement']}{mesh}", _text(row["output"])


def _text(shape: list[int] | None) -> str:
    return "?" if shape is None else "x".join(map(str, shape)) or "scalar"
