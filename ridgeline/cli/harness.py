"""lm-evaluation-harness runs its tasks on Ridgeline.

    python -m ridgeline.cli.harness --model ridgeline --model_args pretrained=demo,kv_dtype=int8 \\
        --tasks arc_easy

The command makes the model known and goes on as `lm_eval` would: the harness's release 0.4.13 looks
for no models outside its own folder. Its main branch finds them by the entry point `lm_eval.models`
in pyproject.toml. model_args are `pretrained` and the flags of a recipe with underscores for
hyphens. What the harness asks for is answered in quality/harness.py.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ridgeline.cli.arguments.options import add_flags, flag_words, from_flags
from ridgeline.cli.arguments.parser import Parser
from ridgeline.engine import Engine
from ridgeline.engine.loading.saved import saved_recipe
from ridgeline.errors import RidgelineError, UsageError, near_matches
from ridgeline.models.checkpoint import resolve_model
from ridgeline.progress import shown
from ridgeline.quality.harness import HarnessAnswers
from ridgeline.recipe import Recipe
from ridgeline.version import __version__

try:
    from lm_eval.api.model import LM
except ImportError:  # it is an extra; who comes by the entry point has it
    LM = object

NAME = "ridgeline"
MARK = "\ue000goes on\ue000"  # behind a message that is to be continued


class RidgelineLM(LM):
    """The harness's `--model ridgeline`. The engine fills its batches itself: `batch_size` and
    `max_batch_size`, which the harness always gives, change nothing.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        device: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **model_args: Any,
    ) -> None:
        super().__init__()
        if not pretrained:
            raise UsageError("model_args names no model; add pretrained=MODEL")
        parser = Parser(prog=f"lm_eval --model {NAME}")
        add_flags(parser, Recipe)
        flags = parser.parse_args(_words(model_args, {each.dest for each in parser._actions}))
        with shown(True) as progress:
            path = resolve_model(str(pretrained), progress=progress)
            recipe = from_flags(flags, Recipe, saved_recipe(path))
            self.engine = Engine(path, recipe, device=device or "auto", progress=progress)
        self.answers = HarnessAnswers(self.engine)
        self._pretrained = str(pretrained)

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        with shown(not disable_tqdm) as progress:
            return self.answers.likelihoods([request.args for request in requests], progress)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        texts = [request.args[0] for request in requests]
        with shown(not disable_tqdm) as progress:
            return self.answers.text_likelihoods(texts, progress)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        with shown(not disable_tqdm) as progress:
            return self.answers.completions([request.args for request in requests], progress)

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """Without a generation prompt the last message is left open: the model continues it."""
        tokenizer, messages = self.answers.tokenizer, list(chat_history)
        if add_generation_prompt:
            return tokenizer.chat_text(messages)
        messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}{MARK}"}
        text, mark, _ = tokenizer.chat_text(messages, add_generation_prompt=False).rpartition(MARK)
        if not mark:
            raise UsageError("the model's chat template leaves out the last message")
        return text

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.answers.tokenizer.chat_template if chat_template else None

    @property
    def tokenizer_name(self) -> str:
        return self._pretrained.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """For the harness's record of a run."""
        return {"ridgeline_version": __version__, "recipe": asdict(self.engine.recipe)}


def _words(model_args: Mapping[str, Any], known: set[str]) -> list[str]:
    words: list[str] = []
    for name, value in model_args.items():
        if name not in known:
            hint = near_matches(name, known)
            raise UsageError(
                f"model_args has {name!r}, which is no flag of a recipe (see: ridgeline eval "
                f"--help-all){hint}"
            )
        words += flag_words(name.replace("_", "-"), value)
    return words


def main() -> int:
    """`lm_eval`'s own command line, with this model known to it."""
    try:
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import get_model, register_model
    except ImportError as error:
        print(
            f"ridgeline: error: the harness needs the package {error.name}; try: "
            "pip install 'ridgeline[harness]'",
            file=sys.stderr,
        )
        return UsageError.exit_code
    try:
        get_model(NAME)
    except (KeyError, ValueError):
        register_model(NAME)(RidgelineLM)
    sys.argv[0] = "lm_eval"
    try:
        cli_evaluate()
    except RidgelineError as error:
        print(f"ridgeline: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
