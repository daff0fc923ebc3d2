"""English-looking text of any length, always the same: on every machine, under every Python.

Tests that train a vocabulary or a small model, or that look at what random weights answer, hang on
each byte of their text. Python's own documentation, which is at hand everywhere, is another one
from release to release.

    TEXT                # half a million characters
    documents()[3]      # one of those that it is made of
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from functools import cache

SIZE = 460_000  # characters
_COMMON = (
    "the of and to a in is that for it as with by on be this are from or an at which not but can "
    "if when all one each there has more its than so may must other then no only they was have "
    "will would some what about into out up do any their these where been after before such her "
    "his we you he she who how over under between through because while both same own most first"
)
_STEMS = (
    "account act add address air allow answer appear apple area argue arm arrive art ask attach "
    "attempt author avoid balance band bank base basket beam bear begin bell belong bird block "
    "blood board boat body bone book border bottle bottom bound branch bread break bridge bring "
    "brother brush bucket build burn button buy cable call camp candle carry cart cast catch "
    "cause cell center chain chair chalk chance change charge chart check chest child choice "
    "circle city claim class clean clear climb clock close cloth cloud coal coast coat code coin "
    "cold collect color column common compare complete condition connect consider contain "
    "continue control cook copy corn corner correct cost cotton count country courage course "
    "cover create credit cross crowd crown current curtain curve cycle damage dance danger dark "
    "date daughter deal debt decide deep degree depend describe desert design desk detail develop "
    "differ dinner direct discover discuss distance divide doctor door doubt draw dream dress "
    "drink drive drop dust ear earth east edge effect effort egg electric empty engine enter "
    "equal error event example exchange exist expand expect expert explain express eye fact fail "
    "fall family farm father fear feather feed feel field fight figure fill final find finger "
    "finish fire fish fit flag flame flat flight floor flow flower fold follow food foot force "
    "forest forget form forward frame free friend front fruit function garden gate gather general "
    "gift give glass goat gold govern grain grand grass gray great green ground group grow guard "
    "guess guide hair half hammer hand handle hang happen harbor hard harvest hat head health "
    "hear heart heat heavy height help hill hold hole hollow home honey hope horn horse hospital "
    "hour house humor hunt idea import improve include increase index industry ink insect inside "
    "instance invent iron island item join journey judge jump keep kettle key kick kind king "
    "kitchen knee knife knot know lake lamp land language large laugh law layer lead leaf learn "
    "leather leave left leg length lesson letter level library lift light limit line lion lip "
    "liquid list listen little lock long look loss loud love machine manage map mark market mass "
    "match matter meal measure meat medical meet member memory metal method middle milk mind mine "
    "minute mix model money month moon morning mother motion mountain mouth move muscle music "
    "nail name narrow nation natural near neck need nerve net noise normal north nose note number "
    "object observe offer office oil open operate opinion orange order organ ornament oven owner "
    "page pain paint paper parallel parcel parent part pass past paste path pattern payment peace "
    "pencil people pepper perfect person picture piece pin pipe place plane plant plate play "
    "please plough pocket point poison polish poor porter position possible pot potato powder "
    "power present press price print prison private probable problem process produce profit "
    "promise proof property protest public pull pump punish purpose push quality question quick "
    "quiet rail rain range rate reach read ready reason receipt record refer regret relate "
    "religion remember repair repeat report represent request respect responsible rest result "
    "return reward rhythm rice right ring river road rock roll roof room root rough round rule "
    "run safe sail salt sand scale school science scissors screw sea search seat second secret "
    "seed select self send sense separate serious serve set shade shake shape sharp sheep shelf "
    "ship shirt shock shoe short show side sign silk silver simple sister size skin sky sleep "
    "slip slope slow small smash smell smile smoke smooth snake snow soap society sock soft solid "
    "song sort sound south space spade special sponge spoon spring square stage stamp star start "
    "state station steam steel stem step stick stiff stitch stocking stomach stone stop store "
    "story strange street stretch string strong structure substance sudden sugar suggest summer "
    "support surprise sweet swim system table tail talk taste teach tear test theory thick thin "
    "thought thread throat thumb thunder ticket tie tight time tin toe together tomorrow tongue "
    "tooth top touch town trade train transport tray tree trick trouble turn twist umbrella unit "
    "use value verse vessel view violent voice walk wall warm wash waste watch water wave wax "
    "weather week weight west wheel whip whistle white wide wind window wine wing winter wire "
    "wise wood wool word work worm wound write year yellow young"
)
COMMON, STEMS = _COMMON.split(), _STEMS.split()
ENDINGS = ("", "", "", "s", "s", "ed", "ing", "er", "ly", "ment", "able", "ness")


class Draws:
    """Numbers that look random: the same ones wherever it runs."""

    def __init__(self, seed: int) -> None:
        self._state = (seed * 0x9E3779B97F4A7C15 + 0x2545F4914F6CDD1D) % 2**64

    def below(self, count: int) -> int:
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self._state >> 33) * count >> 31

    def chance(self, percent: int) -> bool:
        return self.below(100) < percent

    def of(self, choices: Sequence[str]) -> str:
        return choices[self.below(len(choices))]

    def early(self, choices: Sequence[str]) -> str:
        """The first ones most often, as words in a language are."""
        return choices[min(self.below(len(choices)), self.below(len(choices)))]


@cache
def documents() -> tuple[str, ...]:
    return tuple(_documents())


def _documents() -> Iterator[str]:
    size = number = 0
    while size < SIZE:
        text = document(number)
        size, number = size + len(text) + 1, number + 1
        yield text


def document(seed: int) -> str:
    """A title, and paragraphs: with a line of code or a list among them."""
    draws = Draws(seed)
    title = f"{_word(draws).capitalize()} and {_word(draws)}s"
    parts = [f"{title}\n{'*' * len(title)}"]
    for _ in range(4 + draws.below(14)):
        parts.append(_paragraph(draws))
        if draws.chance(12):
            parts.append("\n".join(f"   {_code(draws)}" for _ in range(2 + draws.below(4))))
        elif draws.chance(8):
            parts.append("\n".join(f"* {_sentence(draws)}" for _ in range(2 + draws.below(3))))
    return "\n\n".join(parts) + "\n"


def _paragraph(draws: Draws) -> str:
    text = " ".join(_sentence(draws) for _ in range(3 + draws.below(6)))
    return textwrap.fill(text, 72, break_long_words=False, break_on_hyphens=False)


def _sentence(draws: Draws) -> str:
    words = [_next(draws) for _ in range(6 + draws.below(16))]
    words.append(_word(draws))  # none ends with "the"
    words[0] = words[0].capitalize() if words[0][0].isalpha() else words[0]
    return " ".join(words) + draws.of((".", ".", ".", ".", ".", ".", "?", "!"))


def _next(draws: Draws) -> str:
    what = draws.below(100)
    if what < 44:
        return draws.early(COMMON)
    if what < 87:
        return _word(draws)
    if what < 93:
        return _word(draws) + draws.of((",", ",", ",", ";", ":"))
    if what < 95:
        return _number(draws)
    if what < 97:
        return f"“{_word(draws)} {_word(draws)}”"
    if what < 98:
        return f"({draws.early(COMMON)} {_word(draws)})"
    return f"“{_name(draws)}()”" if draws.chance(50) else f"{_word(draws)}-{_word(draws)}"


def _word(draws: Draws) -> str:
    stem, ending = draws.early(STEMS), draws.of(ENDINGS)
    return (
        stem[:-1] + ending if ending[:1] in ("e", "i", "a") and stem[-1] == "e" else stem + ending
    )


def _number(draws: Draws) -> str:
    whole = draws.below(10 ** (1 + draws.below(4)))
    return f"{whole}.{draws.below(10)}" if draws.chance(20) else f"{whole}"


def _name(draws: Draws) -> str:
    return f"{draws.of(STEMS)}_{draws.of(STEMS)}" if draws.chance(40) else draws.of(STEMS)


def _code(draws: Draws) -> str:
    """Between them these have every sign of ASCII."""
    one, other, number = _name(draws), _name(draws), _number(draws)
    return draws.of(
        (
            f"for {one} in {other}({number}):",
            f'>>> {one}("{_word(draws)}", {other}={number})',
            f"{one} = {other}.{_name(draws)}[{number}]  # {_word(draws)}",
            f"<{one} {other}='{number}'>{_word(draws)}</{one}>",
            f"{{{one!r}: {number}, {other!r}: ~{number} ^ {one} & {other} | {number}}}",
            f"@{one.upper()}; ${other} += `{one} % {number}`, \\{other}/{one} - {number}!?",
        )
    )


TEXT = "\n".join(documents())
