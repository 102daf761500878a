"""The plan of a run: its layout, parameters, FLOPs and memory in closed form. Nothing here imports torch."""

from shardwise.plans.choose import OriginalJob, choose, fit, micro_batch_size
from shardwise.plans.cut_stages import block_costs, cut, stage_blocks, stage_costs
from shardwise.plans.dtypes import Dtypes
from shardwise.plans.engine import Engine, engine_of
from shardwise.plans.flops import FLOP_CONVENTION, flops_per_token
from shardwise.plans.grid import COPIES
from shardwise.plans.memory import StateBytes, state_bytes
from shardwise.plans.model_spec import Float8Spec, ModelSpec
from shardwise.plans.plan import Decision, Plan, SavedLayout, SavedPlan, read_plan
from shardwise.plans.schedule import Action, Schedule, make_schedule
from shardwise.plans.timeline import Timeline, peak_in_flight, simulate

__all__ = [
    "COPIES",
    "FLOP_CONVENTION",
    "Action",
    "Decision",
    "Dtypes",
    "Engine",
    "Float8Spec",
    "ModelSpec",
    "OriginalJob",
    "Plan",
    "SavedLayout",
    "SavedPlan",
    "Schedule",
    "StateBytes",
    "Timeline",
    "block_costs",
    "choose",
    "cut",
    "engine_of",
    "fit",
    "flops_per_token",
    "make_schedule",
    "micro_batch_size",
    "peak_in_flight",
    "read_plan",
    "simulate",
    "stage_blocks",
    "stage_costs",
    "state_bytes",
]
