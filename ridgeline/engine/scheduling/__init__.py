"""Which streams run in the next step, and which pages they hold: requests come in, a `StepPlan`
goes out, tokens come back. Integers only; no torch here, so a planner can drive it in milliseconds.

`Scheduler.plan` in scheduler.py plans a step; step_plan.py is what comes out of it, which
engine/steps/ turns into tensors. pages.py counts who holds each page, prefix_cache.py shares pages
and knows how many are left (how many there are is set by engine/memory/plan.py). state.py has the
words, routing.py chooses among replicas.
"""
