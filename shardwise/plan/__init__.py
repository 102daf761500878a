"""The plan of a run: its layout, parameters, FLOPs and memory in closed form. Nothing here imports torch."""

from shardwise.plan.choose import OriginalJob, choose, fit, micro_batch_size
from shardwise.plan.cut_stages import block_costs, cut, stage_blocks, stage_costs
from shardwise.plan.dtypes import Dtypes
from shardwise.plan.engine import Engine, engine_of
from shardwise.plan.flops import FLOP_CONVENTION, flops_per_token
from shardwise.plan.grid import COPIES
from shardwise.plan.memory import StateBytes, state_bytes
from shardwise.plan.model_spec import Float8Spec, ModelSpec
from shardwise.plan.plan import Decision, Plan, SavedLayout, SavedPlan, read_plan
from shardwise.plan.schedule import Action, Schedule, make_schedule
from shardwise.plan.timeline import Timeline, peak_in_flight, simulate

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
