"""Paged attention: write this step's keys and values into their slots, then attend to all of a sequence's slots so far.

A ``Backend`` knows the pool and the layers; once a step its ``plan`` sees where every sequence lies, and the plan's
``attend`` then runs layer by layer. The reference is the oracle of the others.
"""

from worker.attention.base import Backend, Extent, Fixed, Fixing, Numbers, Plan, Scores, Shape, outlined, slots_of
from worker.attention.gathered import GatheredAttention
from worker.attention.native import NativeAttention, NativePlan
from worker.attention.reference import ReferenceAttention
from worker.attention.repeatable import RepeatableAttention
from worker.attention.segments import SegmentAttention
from worker.attention.windowed import FixingWindows, TwoPools, WindowedAttention, WindowedPlan

__all__ = [
    "Backend",
    "Extent",
    "Fixed",
    "Fixing",
    "FixingWindows",
    "GatheredAttention",
    "NativeAttention",
    "NativePlan",
    "Numbers",
    "Plan",
    "ReferenceAttention",
    "RepeatableAttention",
    "Scores",
    "SegmentAttention",
    "Shape",
    "TwoPools",
    "WindowedAttention",
    "WindowedPlan",
    "outlined",
    "slots_of",
]
