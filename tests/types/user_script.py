"""What a user's type checker must see. mypy reads this file in `make lint`; it is never run.

Each `type: ignore` stands for an error that must be there: mypy reports one that is not needed, so
a public name that turned into `Any` fails here.
"""

from collections.abc import Iterator
from typing import assert_type

import ridgeline
from ridgeline import KV, Delta, Engine, Limits, Output, Parallel, Recipe, Sampling, Speculation

engine = ridgeline.Engine(
    "demo",
    Recipe(
        kv=KV(dtype="fp8"),
        limits=Limits(max_context=8192),
        speculation=Speculation(method="prompt-lookup"),
        parallel=Parallel(tensor=1),
    ),
)
assert_type(engine, Engine)
assert_type(engine.generate(["a", "b"], Sampling(max_tokens=8)), list[Output])
assert_type(engine.chat([{"role": "user", "content": "a"}]), list[Output])
assert_type(engine.stream("a"), Iterator[Delta])
assert_type(ridgeline.Tokenizer.load(ridgeline.resolve_model("demo")), ridgeline.Tokenizer)
assert_type(ridgeline.__version__, str)

print(engine.nope)  # type: ignore[attr-defined]
print(ridgeline.Engin)  # type: ignore[attr-defined]
ridgeline.Engine(recipe="demo")  # type: ignore[call-arg, arg-type]
Sampling(temprature=0.7)  # type: ignore[call-arg]
KV(dtype="fp9")  # type: ignore[arg-type]

try:
    engine.generate("a")
except ridgeline.RidgelineError as error:
    assert_type(error.exit_code, int)
