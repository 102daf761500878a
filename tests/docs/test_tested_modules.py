"""Every module is imported by a test, or by its package for a test, or has a test that runs it by another
way."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN_BY = {
    # Commands are run as a user types them.
    "__main__": "cli/test_train_command.py",
    "cli.arguments": "cli/test_words.py",
    "library.columns": "cli/test_verify_command.py",
    # The names of the library, which tests take from the package itself.
    "library.functions": "library/test_library.py",
    "library.results": "library/test_library.py",
    "cli.config": "cli/test_bad_jobs.py",
    "cli.data": "cli/test_words.py",
    "cli.generate": "train/test_inference.py",
    "cli.job_command": "cli/test_bad_jobs.py",
    "cli.plan": "cli/test_plan_command.py",
    "library.plan_drawings": "cli/test_plan_command.py",
    "cli.plan_goals": "cli/test_plan_command.py",
    "library.program_address": "train/test_engine.py",
    "library.plan_job": "cli/test_plan_command.py",
    "library.submit_job": "cli/test_submit_command.py",
    "library.progress": "cli/test_words.py",
    "cli.templates.own-module.model": "cli/test_new.py",
    "lazy": "cli/test_start.py",
    # Codecs and optimizers are found by name in their registries.
    "codecs.bfloat16": "codecs/test_codecs.py",
    "codecs.chance": "codecs/test_codecs.py",
    "codecs.float16": "codecs/test_codecs.py",
    "codecs.float8": "codecs/test_codecs.py",
    "codecs.int4": "codecs/test_codecs.py",
    "codecs.kernels": "codecs/test_kernels.py",
    "codecs.powersgd": "codecs/test_codecs.py",
    "codecs.qsgd": "codecs/test_codecs.py",
    "codecs.randomk": "codecs/test_codecs.py",
    "codecs.sign": "codecs/test_codecs.py",
    "codecs.terngrad": "codecs/test_codecs.py",
    "codecs.topk": "codecs/test_codecs.py",
    "optimizers.groups": "optimizers/test_groups.py",
    "optimizers.try_torch_class": "optimizers/test_torch_class.py",
    "user_file": "optimizers/test_torch_class.py",
    "optimizers.adamw_kernel": "codecs/test_kernels.py",
    "optimizers.onebit_adam": "parallel/test_onebit.py",
    # Drivers are found by name, and workers are started for them.
    "drivers.by_speed": "train/test_shares.py",
    "drivers.contributor": "asynchronous/test_servers.py",
    "drivers.outer_optimizer": "train/test_local.py",
    "drivers.server_settings": "asynchronous/test_servers.py",
    "drivers.synchronous": "drivers/test_drivers.py",
    "drivers.whole_models": "drivers/test_drivers.py",
    # Several ranks train a job, and their result is compared with one device.
    "comm.async_sum": "parallel/test_compression.py",
    "comm.deferred_sums": "parallel/test_overlap.py",
    "comm.low_rank": "parallel/test_compression.py",
    "models.kernels": "models/test_linear_cross_entropy.py",
    "optim.pieces": "optim/test_adamw.py",
    "parallel.compiled": "parallel/test_compiled_blocks.py",
    "parallel.context": "parallel/test_ulysses.py",
    "parallel.data": "parallel/test_layouts.py",
    "parallel.float8_scales": "train/test_float8_runs.py",
    "parallel.modules": "parallel/test_printed_models.py",
    "parallel.overlap": "parallel/test_overlap.py",
    "parallel.residuals": "checkpoint/test_residuals.py",
    "parallel.seeds": "parallel/test_dropout.py",
    "parallel.stage_modules": "parallel/test_layouts.py",
    "parallel.tables": "parallel/test_own_module.py",
    # A checkpoint is written by one layout and read by another.
    "checkpoint.dcp": "checkpoint/test_any_layout.py",
    "checkpoint.saved_residuals": "checkpoint/test_residuals.py",
    "checkpoint.write_together": "checkpoint/test_failed_saves.py",
    # A job or a table of candidates goes in, and a plan or a price comes out.
    "config.dtype_names": "docs/test_tested_modules.py",
    "config.machine": "config/test_config_reading.py",
    "config.no_effect": "train/test_header.py",
    "cost.first_rank": "parallel/test_predictions.py",
    "cost.matmuls": "cost/test_prices_of_computing.py",
    "cost.pipeline_time": "search/test_planner_properties.py",
    "cost.price": "cost/test_traffic_formulas.py",
    "cost.stage_blocks": "parallel/test_predictions.py",
    "cost.step_flows": "cost/test_traffic_formulas.py",
    "cost.weight_flows": "cost/test_traffic_formulas.py",
    "plans.compilation": "train/test_header.py",
    "plans.sharding": "parallel/test_placements.py",
    "plans.slices": "parallel/test_planned_slices.py",
    "search.fits": "search/test_requirements.py",
    # A run is made and disturbed, and its records are read.
    "observe.compare_prediction": "observe/test_compare_prediction.py",
    "optim.rows": "optim/test_rows.py",
    "data.columnar": "data/test_data_sources.py",
    "data.ownership": "data/test_data_ownership.py",
    "resilience.hangs": "resilience/test_team.py",
    "resilience.user_code": "cli/test_own_module_jobs.py",
    "train.program_call": "train/test_engine.py",
    "train.program_request": "train/test_engine.py",
    "train.turns": "train/test_engine.py",
    "train.float8_check": "train/test_float8_runs.py",
    "train.non_finite": "train/test_non_finite.py",
    "train.record": "train/test_logs.py",
    "train.step_sums": "train/test_saves_and_checks.py",
    "proof.random_text": "proof/test_proof_rows.py",
    "proof.sabotage": "cli/test_verify_command.py",
}
"""Modules that no test imports by name, each with a test that runs it."""


def modules() -> dict[str, Path]:
    """Every file of the package, by the name of its module without `shardwise.`."""
    paths = {path.relative_to(ROOT / "shardwise"): path for path in (ROOT / "shardwise").rglob("*.py")}
    return {".".join(short.with_suffix("").parts): path for short, path in paths.items()}


def imported(path: Path) -> Iterator[str]:
    """The names that a file imports from shardwise, and texts that are such names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.replace(":", ".")


def names_in_tests() -> set[str]:
    """Names that tests import, with every beginning of them; and the modules from which a package takes a
    name that a test imports."""
    names = {name for path in (ROOT / "tests").rglob("*.py") for name in imported(path)}
    found = {name.rsplit(".", cut)[0] for name in names if name.startswith("shardwise.") for cut in range(3)}
    for package in (ROOT / "shardwise").rglob("__init__.py"):
        prefix = ".".join(package.parent.relative_to(ROOT).parts)
        for node in ast.walk(ast.parse(package.read_text())):
            if isinstance(node, ast.ImportFrom) and any(
                f"{prefix}.{one.name}" in names for one in node.names
            ):
                found.add(str(node.module))
    return {name.removeprefix("shardwise.") for name in found}


def test_every_module_has_a_test() -> None:
    everything, by_name = modules(), names_in_tests()
    without = {name for name in everything if not name.endswith("__init__")} - by_name
    assert sorted(without - RUN_BY.keys()) == [], "import it in a test, or name here the test that runs it"
    assert sorted(RUN_BY.keys() - without) == [], "tests import these by name"


def test_the_tests_that_are_named_exist() -> None:
    assert [name for name in RUN_BY.values() if not (ROOT / "tests" / name).is_file()] == []
