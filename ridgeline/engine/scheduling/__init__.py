"""Which streams run in the next step, and which pages they hold: requests come in, a `StepPlan`
goes out, tokens come back. Integers only; no torch here, so a planner can drive it in milliseconds.

state.py has the words, pages.py counts pages, prefix_cache.py shares them, scheduler.py is the
facade, routing.py chooses among replicas.
"""
