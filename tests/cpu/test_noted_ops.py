"""What steps note, profiles know: an op that a forward pass notes (engine/steps/notes.py) has a
cost and a count of launches. Nothing else would say that one was forgotten.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
import torch
from engines import tiny

import ridgeline
from ridgeline.kernels.cost import OpCost
from ridgeline.models.cost import StepCost
from ridgeline.profiling.op_costs import OF_OPS, StepFacts, cost_of
from ridgeline.profiling.predicting.launching import LAYER_OPS, STEP_OPS
from ridgeline.profiling.tracing.division import ATTENTION_OPS, COMMUNICATION_OPS
from ridgeline.profiling.tracing.scopes import ScopeCall

PACKAGE = Path(ridgeline.__file__).parent
NOTING = ("Note", "note", "_note", "_noted")  # called with an op's name


@cache
def noted_ops() -> set[str]:
    """Names of ops that stand in calls of NOTING, anywhere in the package."""
    names: set[str] = set()
    for path in [*(PACKAGE / "engine").rglob("*.py"), *(PACKAGE / "profiling").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                function = getattr(node.func, "attr", getattr(node.func, "id", ""))
                value = node.args[0].value
                names |= {value} if function in NOTING and isinstance(value, str) else set()
    return names - {""}  # the end of an op


@pytest.mark.smoke
def test_noted_ops_are_found() -> None:
    assert {"step_start", "rotary", "decode_attention", "keep_tokens", "all_reduce"} <= noted_ops()


@pytest.mark.smoke
def test_every_noted_op_has_a_cost() -> None:
    assert noted_ops() == {*OF_OPS, *ATTENTION_OPS}


@pytest.mark.smoke
def test_every_noted_op_is_in_the_count_of_launches() -> None:
    """Add it to LAYER_OPS or STEP_OPS, and what it launches to the counts beside them."""
    assert noted_ops() == {*LAYER_OPS, *STEP_OPS, *COMMUNICATION_OPS}


def test_rotating_keys_alone_has_its_work_counted() -> None:
    """As prompts that begin together do, whose attention reads no pages."""
    model = tiny("llama-mha")
    config = model.config
    facts = StepFacts(model, torch.bfloat16, "bf16", StepCost(0, 0, 0, 0, 0, 0), None, num_tokens=7)
    call = ScopeCall(0, "rotary", "op", (7, config.num_kv_heads, config.head_dim))
    keys = 7 * config.num_kv_heads * config.head_dim * 2
    angles = 2 * 7 * (config.head_dim // 2) * 4
    assert cost_of(call, facts) == OpCost(keys + angles, keys)
