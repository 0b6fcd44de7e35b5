"""Jaxpr in, jaxpr out: finds chains of a collective and its dots, decides, and runs them as rings."""

from passes.decide import POLICIES, Policy, Trial, TryOut
from passes.derivative import with_derivative_of
from passes.excerpt import Choice, Excerpt
from passes.match import Match, match
from passes.plan import Plan, make_plan, sites
from passes.reasons import Code, Reason
from passes.rewrite import RewriteError, rewritten
from passes.schedule import RingSchedule
from passes.site import Site
from passes.whole import tried_whole

__all__ = [
    "POLICIES",
    "Choice",
    "Code",
    "Excerpt",
    "Match",
    "Plan",
    "Policy",
    "Reason",
    "RewriteError",
    "RingSchedule",
    "Site",
    "Trial",
    "TryOut",
    "make_plan",
    "match",
    "rewritten",
    "sites",
    "tried_whole",
    "with_derivative_of",
]
