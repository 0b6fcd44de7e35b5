"""Why a site was rewritten or kept: stable codes, each with a sentence."""

from __future__ import annotations

import dataclasses
from enum import StrEnum


class Code(StrEnum):
    """Stable names of reasons; ``str(code)`` is what reports and JSON show."""

    PROFITABLE = "profitable"
    POLICY_ALWAYS = "policy_always"
    POLICY_ACCEPTED = "policy_accepted"
    NOT_PROFITABLE = "not_profitable"
    HIDDEN_AS_WRITTEN = "hidden_as_written"
    TRIED_FASTER = "tried_faster"
    TRIED_SLOWER = "tried_slower"
    TRIED_TOGETHER = "tried_together"
    POLICY_NEVER = "policy_never"
    POLICY_DECLINED = "policy_declined"
    UNKNOWN_HARDWARE = "unknown_hardware"
    NO_DOT = "no_dot"
    GATHERED_VALUE_ESCAPES = "gathered_value_escapes"
    PARTIAL_SUM_ESCAPES = "partial_sum_escapes"
    LOOP_INVARIANT = "loop_invariant"
    DOT_TAKEN = "dot_taken"
    DEPENDS_ON_ITSELF = "depends_on_itself"
    UNSUPPORTED_COLLECTIVE = "unsupported_collective"
    UNSUPPORTED_GROUPS = "unsupported_groups"
    INDIVISIBLE = "indivisible"
    SHARDED_ELSEWHERE = "sharded_elsewhere"
    UNSUPPORTED_DTYPE = "unsupported_dtype"
    AXIS_SIZE_ONE = "axis_size_one"
    EMPTY = "empty"
    SYMBOLIC_SHAPE = "symbolic_shape"
    UNUSED = "unused"
    SUMMED_ONCE = "summed_once"
    EXPLICIT_SHARDING = "explicit_sharding"
    OPAQUE_CALL = "opaque_call"
    DEVICES_APART = "devices_apart"
    REPLICATED = "replicated"


_SENTENCES = {
    Code.PROFITABLE: "The ring is predicted to be faster than the collective and its dots.",
    Code.POLICY_ALWAYS: 'The policy is "always" and the rewrite is legal.',
    Code.POLICY_ACCEPTED: "The given policy accepted the rewrite.",
    Code.NOT_PROFITABLE: "The ring is not predicted to be faster than the collective and its dots by enough.",
    Code.HIDDEN_AS_WRITTEN: (
        "As written the compiler runs the collective beside other dots, and a ring would save too little."
    ),
    Code.TRIED_FASTER: "A ring was compiled for this target and found faster.",
    Code.TRIED_SLOWER: "The best rings were compiled for this target, and none was found faster.",
    Code.TRIED_TOGETHER: (
        "The program around it was compiled for this target: with this ring it is not faster, or needs more "
        "memory."
    ),
    Code.POLICY_NEVER: 'The policy is "never".',
    Code.POLICY_DECLINED: "The given policy declined the rewrite.",
    Code.UNKNOWN_HARDWARE: "The cost model does not know this hardware; name one with hardware=.",
    Code.NO_DOT: "No dot is reached through equations that act block by block.",
    Code.GATHERED_VALUE_ESCAPES: "The gathered value ends in no dot: it is needed whole, or reduced.",
    Code.PARTIAL_SUM_ESCAPES: "A value between the dot and the collective is also used elsewhere.",
    Code.LOOP_INVARIANT: (
        "Its operand is the same in every iteration of the loop: do it once, before the loop."
    ),
    Code.DOT_TAKEN: "The dot that this collective belongs to is already part of another ring.",
    Code.DEPENDS_ON_ITSELF: "The dot's other operand depends on the gathered value itself.",
    Code.UNSUPPORTED_COLLECTIVE: "This form of the collective is not decomposed.",
    Code.UNSUPPORTED_GROUPS: "The collective runs within axis_index_groups of unequal size.",
    Code.INDIVISIBLE: "The sum cannot be scattered evenly over the axis.",
    Code.SHARDED_ELSEWHERE: (
        "Over other mesh axes the compiler shards as it likes, and would gather what a ring of a psum puts "
        "together over these as well."
    ),
    Code.UNSUPPORTED_DTYPE: "The collective's element type has no arithmetic that a ring could use.",
    Code.AXIS_SIZE_ONE: "The mesh axis has one device: nothing is communicated.",
    Code.EMPTY: "An array of the chain has no elements.",
    Code.SYMBOLIC_SHAPE: "The program around it is traced for sizes not yet known: no ring can be chosen.",
    Code.UNUSED: "Nothing uses its result; compilers drop it.",
    Code.SUMMED_ONCE: "Its result is only added to that of another sum: both are summed as one.",
    Code.EXPLICIT_SHARDING: "A value of the chain is also sharded over an axis of type Explicit.",
    Code.REPLICATED: (
        "The dot's result is the same on several devices, and a ring adds it up in another order on each."
    ),
    Code.DEVICES_APART: (
        "A branch or loop around it may run on some devices only, and all must take part in a ring's hops."
    ),
    Code.OPAQUE_CALL: "The collective is inside a call whose body cannot be replaced.",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Reason:
    """A code and what it means at this site.

    Attributes:
      code: the stable name.
      detail: what is special to the site, such as the equation that stopped the match; may be empty.
    """

    code: Code
    detail: str = ""

    @property
    def sentence(self) -> str:
        """The code's meaning and the detail, as text."""
        return f"{_SENTENCES[self.code]} {self.detail}".rstrip()
