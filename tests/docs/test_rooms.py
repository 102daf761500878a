"""What import-linter's contracts do not say: no module imports itself in a circle, and collectives are sent
from `comm` alone."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

PACKAGE = Path(__file__).parents[2] / "shardwise"
COLLECTIVES = {
    "send",
    "recv",
    "isend",
    "irecv",
    "batch_isend_irecv",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
}
COLLECTIVES |= {
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
}
COLLECTIVES |= {"all_gather_object", "broadcast_object_list", "all_gather_single", "reduce_scatter_single"}
BESIDE_TRAINING = {
    "probe": "measures the collectives themselves",
    "proof": "puts comm to the test, and compares what ranks hold without it",
    "_torch.py": "names that torch changes",
}


INTERFACE = "shardwise.drivers.driver"
"""Names what a run is for its types alone: a driver is given a run, and a run has a driver."""


def test_no_module_imports_itself_in_a_circle() -> None:
    """Imports for type checkers only count too: who has to know whom is the same question there."""
    graph = grimp.build_graph("shardwise", exclude_type_checking_imports=False, cache_dir=None)
    at_runtime = grimp.build_graph("shardwise", exclude_type_checking_imports=True, cache_dir=None)
    packages = {
        module for module in graph.modules if graph.find_children(module)
    }  # which only name what their modules have
    imports = {
        module: (at_runtime if module == INTERFACE else graph).find_modules_directly_imported_by(module)
        - packages
        for module in graph.modules - packages
    }
    TopologicalSorter(imports).prepare()  # raises where there is a cycle, and names it


def collectives(source: str) -> set[str]:
    """Collectives of torch.distributed that a file calls or hands on."""
    tree = ast.parse(source)
    called = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_dist(node.value)
    }
    imported = {
        name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in ("torch.distributed", "shardwise._torch")
        for name in node.names
    }
    return (called | imported) & COLLECTIVES


def _is_dist(node: ast.expr) -> bool:
    return (isinstance(node, ast.Name) and node.id == "dist") or (
        isinstance(node, ast.Attribute) and node.attr == "distributed"
    )


def test_what_training_sends_is_sent_from_comm() -> None:
    files = {path.relative_to(PACKAGE): path.read_text() for path in PACKAGE.rglob("*.py")}
    sending = {str(file): sorted(collectives(text)) for file, text in files.items() if collectives(text)}
    elsewhere = {
        file: names for file, names in sending.items() if file.split("/")[0] not in {"comm", *BESIDE_TRAINING}
    }
    assert elsewhere == {}
    assert {"comm/comm.py", "comm/hooks.py", "comm/peers.py"} <= set(sending)


def test_a_planted_collective_is_seen() -> None:
    assert collectives("import torch.distributed as dist\ndist.all_reduce(x)") == {"all_reduce"}
    assert collectives("import torch\ntorch.distributed.send(x)") == {"send"}
    assert collectives("from torch.distributed import broadcast") == {"broadcast"}
