"""The command-line parser: argparse with mistakes as UsageErrors, and help in two lengths.

`--help` shows the flags most people need, by group; `--help-all` shows every flag of the same
parser. A verb names the short list in `MAIN_FLAGS`; without one, `--help` shows them all.

    group(parser, "quality").add_argument("--max-kl", type=float)
    parser.main_flags = ("--max-kl",)
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from ridgeline.errors import UsageError, near_matches

MAX_WIDTH = 100  # columns of help on a wide terminal
GENERAL = "general"
ALWAYS_SHOWN = ("--json", "--debug", "--help", "--help-all", "--version")


class Parser(argparse.ArgumentParser):
    """Flags must be written in full: an abbreviation would change its meaning with the next
    flag.
    """

    def __init__(self, **options: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(
            **{"formatter_class": formatter} | options, allow_abbrev=False, add_help=False
        )
        self.main_flags: tuple[str, ...] = ()
        self._positionals.title = "arguments"

    def add_help_flag(self) -> None:
        group(self, GENERAL).add_argument("-h", "--help", action=ShowHelp, help="show this help")

    def add_help_all_flag(self) -> None:
        group(self, GENERAL).add_argument(
            "--help-all", action=ShowHelp, everything=True, help="show every flag"
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see: {self.prog} --help)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            name = (
                "verb" if action.dest == "verb" else "/".join(action.option_strings) or action.dest
            )
            allowed = ", ".join(map(str, action.choices))
            hint = near_matches(str(value), map(str, action.choices))
            raise UsageError(f"{name} {value!r} is not known; use one of {allowed}{hint}")

    def format_help(self, everything: bool = False) -> str:
        """What it does, how it is called, its flags by group, examples."""
        formatter = self._get_formatter()
        formatter._width = min(formatter._width, MAX_WIDTH)
        formatter.add_text(self.description)
        formatter.add_usage(self.short_usage(), [], [])
        last = ("output", GENERAL)  # the rest is in the order of its making
        for section in sorted(
            self._action_groups,
            key=lambda each: last.index(each.title) if each.title in last else -1,
        ):
            shown = [each for each in section._group_actions if everything or self.is_shown(each)]
            formatter.start_section(section.title)
            formatter.add_text(section.description)
            formatter.add_arguments(shown)
            formatter.end_section()
        hidden = 0 if everything else sum(not self.is_shown(each) for each in self._actions)
        if hidden:
            formatter.add_text(f"{hidden} more flags: {self.prog} --help-all")
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def short_usage(self) -> str:
        """`ridgeline quantize MODEL --out DIR [flags]`: without the flags that may be left out."""
        if self.usage is not None:
            return self.usage
        words = [self.prog]
        for action in self._actions:
            name = str(action.metavar or action.dest.upper())
            if not action.option_strings:
                words.append(name if action.required else f"[{name}]")
            elif action.required:
                words.append(f"{action.option_strings[0]} {name}")
        return " ".join([*words, "[flags]"])

    def is_shown(self, action: argparse.Action) -> bool:
        """Whether the short help has it. What is suppressed is in no help and does not count as
        hidden.
        """
        flags = action.option_strings
        if not flags or not self.main_flags or action.help == argparse.SUPPRESS:
            return True
        return any(flag in self.main_flags or flag in ALWAYS_SHOWN for flag in flags)


class ShowHelp(argparse.Action):
    """`--help` and `--help-all`: print and end, as argparse's own does."""

    def __init__(self, *, everything: bool = False, **options: Any) -> None:
        super().__init__(**options | {"nargs": 0, "default": argparse.SUPPRESS})
        self.everything = everything

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, Parser), "every parser of the command line is one of ours"
        print(parser.format_help(self.everything), end="")
        parser.exit()


def group(parser: argparse.ArgumentParser, title: str) -> argparse._ArgumentGroup:
    """The parser's group of this title, made where there is none yet."""
    for each in parser._action_groups:
        if each.title == title:
            return each
    return parser.add_argument_group(title)


def example(commands: str) -> str:
    """The end of a verb's help: commands to try, one a line."""
    return "example:\n" + "\n".join(f"  {line}" for line in commands.splitlines())
