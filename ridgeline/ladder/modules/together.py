"""The changes that are predicted to be fastest together, before anything was measured but the
profile; and a form with one of its changes taken back.

    changes = best_together(Candidate(module, ModuleForm(), work, example, {}), refused={"int4"})
    form_of(changes)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import reduce

from ridgeline.ladder.modules.bench import WORTH
from ridgeline.ladder.modules.rungs import Candidate, applies
from ridgeline.profiling.modules.changes import CHANGES, ModuleChange
from ridgeline.profiling.modules.form import ModuleForm
from ridgeline.profiling.modules.gains import predict


def best_together(candidate: Candidate, refused: Collection[str]) -> tuple[ModuleChange, ...]:
    """Each next change is the one that is predicted to give most on top of those before it, until
    none gives 1%, behind those that are free: torch takes other kernels without autograd, which no
    count tells. What another replaced (int8 by int4) is left out.
    """
    chosen = [each for each in offered(candidate, refused) if each.is_free]
    form = reduce(lambda form, change: change.of(form), chosen, candidate.form)
    while True:
        names = {change.name for change in chosen}
        offers = offered(replace(candidate, form=form), {*refused, *names})
        gains = [predict(candidate.work, form, each.of(form), each).speedup for each in offers]
        if not gains or max(gains) < WORTH:
            return in_effect(chosen, form)
        chosen.append(offers[gains.index(max(gains))])
        form = chosen[-1].of(form)


def offered(candidate: Candidate, refused: Collection[str]) -> list[ModuleChange]:
    """Changes that apply to the candidate's form, in the ladder's order."""
    result = []
    for change in CHANGES.values():
        if change.name not in refused:
            answer = applies(change, candidate)
            if answer.applies:
                result.append(answer.change or change)
    return result


def in_effect(changes: Iterable[ModuleChange], form: ModuleForm) -> tuple[ModuleChange, ...]:
    return tuple(
        change
        for change in changes
        if all(getattr(form, name) == value for name, value in change.edit.items())
    )


def form_of(changes: Iterable[ModuleChange]) -> ModuleForm:
    return reduce(lambda form, change: change.of(form), changes, ModuleForm())


def without(form: ModuleForm, change: ModuleChange) -> ModuleForm:
    plain = ModuleForm()
    return replace(form, **{name: getattr(plain, name) for name in change.edit})


def compiled_last(changes: Sequence[ModuleChange]) -> list[ModuleChange]:
    """In the ladder's order, but what is compiled or captured at the end: every form after it has
    to be compiled again.
    """
    order = list(CHANGES)
    return sorted(
        changes,
        key=lambda each: ("graphs" in each.edit, "compile" in each.edit, order.index(each.name)),
    )
