"""Private parts of torch are used in `shardwise/_torch.py` alone, but for a short list with a reason each.

What begins with an underscore may change in any release. Imports of it are one way to use it; attributes are
the other: operators (`torch.ops.aten._…`), a module's `_parameters`, what torch's pipeline stages call
themselves. Found in the syntax tree: attributes with an underscore that the file does not define itself,
whatever is reached from torch's own names, and methods that replace a private one of torch's.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

PACKAGE = Path(__file__).parents[2] / "shardwise"
TORCH_CLASSES = (nn.Module, PipelineStage, DistributedDataParallel, torch.Tensor, torch.optim.Optimizer)

KERNELS = (
    "attention kernels that return the log-sum-exp, and their backwards, are operators without a public name"
)
PARAMETERS = (
    "a weight replaced in place, or read beside a property of its name, which `getattr` would ask instead"
)
STANDARD = {"_exit", "_current_frames", "_getframe", "_replace", "_asdict", "_fields"}
"""Documented names of Python's own library."""
ALLOWED = {
    "parallel/blockwise.py": {
        **dict.fromkeys(
            (f"_scaled_dot_product_{kind}_attention" for kind in ("cudnn", "flash", "efficient")), KERNELS
        ),
        **dict.fromkeys(
            (f"_scaled_dot_product_{kind}_attention_backward" for kind in ("cudnn", "flash", "efficient")),
            KERNELS,
        ),
        "_scaled_dot_product_flash_attention_for_cpu": KERNELS,
        "_scaled_dot_product_flash_attention_for_cpu_backward": KERNELS,
    },
    "parallel/recompute.py": {
        **dict.fromkeys(
            (f"_scaled_dot_product_{kind}_attention" for kind in ("cudnn", "flash", "efficient")), KERNELS
        ),
        "_scaled_dot_product_flash_attention_for_cpu": KERNELS,
        **dict.fromkeys(
            ("_grouped_mm", "_scaled_mm"),
            "selective recomputation names the operators whose results it keeps",
        ),
    },
    "parallel/modules.py": {"_parameters": PARAMETERS},
    "parallel/tensor.py": {"_parameters": PARAMETERS},
    "parallel/expert.py": {"_parameters": PARAMETERS},
    "parallel/apply.py": {"_parameters": PARAMETERS},
    "models/unallocated.py": {
        "_apply": "all that moves or casts a module goes through it, and would round or empty its buffers"
    },
    "models/transformer.py": {
        "_parameters": PARAMETERS,
        "_apply": "all that moves or casts a module goes through it, and would make two weights of a "
        "tied one",
    },
    "parallel/pipeline.py": {
        "_get_init_p2p_neighbors_ops": "torch 2.11 would send to itself at the bottom of a V"
    },
    "parallel/float8_scales.py": dict.fromkeys(
        ("_foreach_copy_", "_foreach_norm"), "one kernel for many tensors has no public name"
    ),
    "optim/rounding.py": {"_foreach_add_": "one kernel for many sums has no public name"},
    "optim/norm.py": {"_foreach_norm": "one kernel for many norms has no public name"},
    "optim/update.py": {
        "_foreach_add_": "one kernel for many sums has no public name",
        "_foreach_div_": "one kernel for many quotients has no public name",
    },
    "optimizers/try_torch_class.py": {
        "_python_dispatch": "torch documents TorchDispatchMode, and it has no public module"
    },
    "optimizers/torch_class.py": {
        "_foreach_add_": "one kernel for many sums has no public name",
        "_foreach_div_": "one kernel for many quotients has no public name",
    },
    "optimizers/sgd.py": {"_foreach_add_": "one kernel for many sums has no public name"},
}


def private_uses(source: str) -> Iterator[str]:
    """Private names of others that a file uses."""
    tree = ast.parse(source)
    own, roots = _defined(tree), _torch_names(tree)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and _is_private(node.attr)
            and (node.attr not in own or _root(node) in roots)
        ):
            yield node.attr
        if isinstance(node, ast.ClassDef) and node.bases:
            methods = (
                item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
            )
            yield from (
                name
                for name in methods
                if _is_private(name) and any(hasattr(cls, name) for cls in TORCH_CLASSES)
            )
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            yield from (part for part in (node.module or "").split(".") if _is_private(part))
            yield from (name.name for name in node.names if _is_private(name.name))
        if isinstance(node, ast.Import):
            names = (name.name for name in node.names if name.name.startswith("torch."))
            yield from (part for name in names for part in name.split(".") if _is_private(part))


def _is_private(name: str) -> bool:
    return (
        name.startswith("_") and not name.startswith("__") and name.strip("_") != "" and name not in STANDARD
    )


def _defined(tree: ast.Module) -> set[str]:
    """Names that the file gives to functions, classes, variables and attributes."""
    names = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    stored = (node for node in ast.walk(tree) if isinstance(getattr(node, "ctx", None), ast.Store))
    for node in stored:
        names |= (
            {node.id}
            if isinstance(node, ast.Name)
            else {node.attr}
            if isinstance(node, ast.Attribute)
            else set()
        )
    return names


def _torch_names(tree: ast.Module) -> set[str]:
    """Names under which the file knows torch and its parts."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.asname or "torch" for name in node.names if name.name.partition(".")[0] == "torch"}
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            found |= {name.asname or name.name for name in node.names}
    return found


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _files() -> list[str]:
    return sorted(
        str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if path.name != "_torch.py"
    )


def test_private_parts_of_torch_are_used_in_one_file_and_where_a_reason_is_given() -> None:
    used = {file: set(private_uses((PACKAGE / file).read_text())) for file in _files()}
    extra = {file: sorted(names - set(ALLOWED.get(file, {}))) for file, names in used.items()}
    assert {file: names for file, names in extra.items() if names} == {}
    unused = {file: sorted(set(reasons) - used[file]) for file, reasons in ALLOWED.items()}
    assert {file: names for file, names in unused.items() if names} == {}, (
        "no longer used: take them off the list"
    )


@pytest.mark.parametrize(
    "planted",
    [
        "import torch\ntorch.ops.aten._softmax(x)",
        "weights = module._parameters['weight']",
        "keep = module._non_persistent_buffers_set",
        "import torch.distributed as dist\ndist.distributed_c10d._world.group_count = 0",
        # a file with a `_world` of its own
        "import torch.distributed as dist\nself._world = dist.distributed_c10d._world",
        "stage._stage_forward_meta = None\nunit._get_fsdp_state()",
        "class Stage(PipelineStage):\n    def _get_init_p2p_neighbors_ops(self): ...",
        "from torch.distributed.fsdp._fully_shard import _fsdp_param",
        "import torch._dynamo",
    ],
)
def test_a_planted_use_is_seen(planted: str) -> None:
    assert list(private_uses(planted))


def test_what_a_file_calls_private_itself_is_its_own() -> None:
    assert not list(
        private_uses(
            "class Own:\n    def _count(self):\n        self._seen = self._seen + 1\n\nOwn()._count()"
        )
    )
