"""Pictures of measurements as HTML and SVG strings: pure functions, safe to put into a page."""

from ridgeline.profiling.drawing.bars import Bar, BarPart, stacked_bars
from ridgeline.profiling.drawing.curves import Series, curves
from ridgeline.profiling.drawing.geometry import Dot, Roofs
from ridgeline.profiling.drawing.intervals import Interval, intervals
from ridgeline.profiling.drawing.markup import Markup, element, join
from ridgeline.profiling.drawing.page import PALETTE, THEME, Section, page
from ridgeline.profiling.drawing.roofline import roofline
from ridgeline.profiling.drawing.tables import Column, table
from ridgeline.profiling.drawing.timeline import timeline
from ridgeline.profiling.drawing.waterfall import Rise, WaterfallStep, times, waterfall

__all__ = [
    "PALETTE",
    "THEME",
    "Bar",
    "BarPart",
    "Column",
    "Dot",
    "Interval",
    "Markup",
    "Rise",
    "Roofs",
    "Section",
    "Series",
    "WaterfallStep",
    "curves",
    "element",
    "intervals",
    "join",
    "page",
    "roofline",
    "stacked_bars",
    "table",
    "timeline",
    "times",
    "waterfall",
]
