"""Dots one after the other with collectives beside them: what is exposed, by hand and by its bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.list_schedule import Schedule, Step, list_schedule


def dots(seconds: float, *needs: int) -> Step:
    return Step(needs, dots_s=seconds)


def beside(seconds: float, *needs: int) -> Step:
    return Step(needs, wire_s=seconds)


def alone(seconds: float, *needs: int) -> Step:
    return Step(needs, dots_s=seconds, wire_s=seconds)


def test_what_dots_wait_for_is_exposed() -> None:
    assert list_schedule([beside(3.0), dots(5.0, 0)]) == Schedule(8.0, (3.0, 0.0))
    assert list_schedule([dots(5.0), beside(3.0, 0)]) == Schedule(8.0, (0.0, 3.0))


def test_a_second_weight_is_gathered_beside_the_first_ones_dots() -> None:
    found = list_schedule([beside(3.0), dots(5.0, 0), beside(3.0), dots(5.0, 1, 2)])
    assert found == Schedule(13.0, (3.0, 0.0, 0.0, 0.0))


def test_dots_hide_as_much_as_they_are_long() -> None:
    found = list_schedule([beside(3.0), dots(2.0, 0), beside(3.0), dots(5.0, 1, 2)])
    assert found == Schedule(11.0, (3.0, 0.0, 1.0, 0.0))


def test_collectives_take_the_wire_in_turn() -> None:
    """The second starts when the first is done, and is exposed by what the dots are shorter than both."""
    found = list_schedule([dots(1.0), beside(4.0, 0), beside(4.0, 0), dots(6.0, 0)])
    assert found == Schedule(9.0, (0.0, 0.0, 2.0, 0.0))


def test_dots_that_are_ready_run_while_others_wait() -> None:
    """A weight's gradient runs while what it does not need is summed, though it comes later."""
    found = list_schedule([dots(2.0), beside(3.0, 0), dots(2.0, 1), dots(2.0)])
    assert found == Schedule(7.0, (0.0, 1.0, 0.0, 0.0))


def test_dots_that_a_collective_waits_for_run_before_those_that_none_does() -> None:
    """Both gradients of weights run beside the sum of the input's, whichever of all comes first."""
    found = list_schedule([dots(2.0), dots(3.0), dots(2.0, 1), beside(4.0, 1)])
    assert found == Schedule(7.0, (0.0, 0.0, 0.0, 0.0))
    in_order = list_schedule([dots(2.0), dots(3.0), dots(2.0, 1), beside(4.0, 1)], by_need=False)
    assert in_order == Schedule(9.0, (0.0, 0.0, 0.0, 2.0))


def test_of_collectives_that_could_start_the_one_goes_first_that_dots_wait_for_first() -> None:
    """A backward pass gathers all weights anew at once, in the program's order, and reads the last first."""
    found = list_schedule([beside(4.0), beside(2.0), dots(5.0, 1), dots(1.0, 0, 2)])
    assert found == Schedule(8.0, (0.0, 2.0, 0.0, 0.0))
    in_order = list_schedule([beside(4.0), beside(2.0), dots(5.0, 1), dots(1.0, 0, 2)], by_need=False)
    assert in_order == Schedule(12.0, (4.0, 2.0, 0.0, 0.0))
    third = list_schedule(
        [beside(1.0), beside(4.0), beside(2.0), dots(1.0, 0), dots(5.0, 2, 3), dots(1.0, 1, 4)]
    )
    assert third == Schedule(9.0, (1.0, 0.0, 1.0, 0.0, 0.0, 0.0))


def test_what_runs_alone_waits_for_the_wire_and_hides_nothing() -> None:
    assert list_schedule([beside(3.0), alone(2.0), dots(4.0, 0, 1)]) == Schedule(9.0, (3.0, 0.0, 0.0))
    assert list_schedule([alone(2.0), beside(3.0), dots(4.0, 0, 1)]) == Schedule(9.0, (0.0, 3.0, 0.0))


def test_hops_beside_dots_leave_the_wire_to_others_when_they_are_through() -> None:
    ring = Step((), dots_s=10.0, wire_s=4.0)
    assert list_schedule([ring, beside(5.0), dots(1.0, 0, 1)]) == Schedule(11.0, (0.0, 0.0, 0.0))
    assert list_schedule([ring, beside(9.0, 0), dots(1.0, 1)]).exposed_s == (0.0, 9.0, 0.0)


def test_hops_that_wait_for_the_wire_are_late_by_what_is_on_it() -> None:
    ring = Step((), dots_s=10.0, wire_s=8.0)
    assert list_schedule([beside(5.0), ring, dots(1.0, 0, 1)]) == Schedule(14.0, (3.0, 0.0, 0.0))
    assert list_schedule([beside(5.0), beside(1.0), ring]) == Schedule(14.0, (3.0, 1.0, 0.0))


def test_steps_of_no_time_pass_on() -> None:
    found = list_schedule([dots(1.0), Step((0,)), Step((1,)), beside(2.0, 2), Step((3,)), dots(1.0, 4)])
    assert found == Schedule(4.0, (0.0, 0.0, 0.0, 2.0, 0.0, 0.0))


def test_nothing_takes_no_time() -> None:
    assert list_schedule([]) == Schedule(0.0, ())
    assert list_schedule([Step(()), Step((0, 0))]) == Schedule(0.0, (0.0, 0.0))


@pytest.mark.parametrize("needed", [1, 2, -1])
def test_a_step_that_needs_itself_or_a_later_one_is_refused(needed: int) -> None:
    with pytest.raises(ValueError, match=f"step 1 needs step {needed}, which is not before it"):
        list_schedule([dots(1.0), dots(1.0, needed), dots(1.0)])


@st.composite
def programs(draw: st.DrawFn) -> list[Step]:
    count = draw(st.integers(1, 12))
    seconds = st.floats(0.0, 5.0).map(lambda s: round(s, 2))
    steps = []
    for number in range(count):
        needs = draw(st.lists(st.integers(0, number - 1), max_size=3)) if number else []
        ring = Step(tuple(needs), dots_s=draw(seconds), wire_s=draw(seconds))
        kinds = [kind(draw(seconds), *needs) for kind in (dots, beside, alone)]
        steps.append(draw(st.sampled_from((*kinds, ring))))
    return steps


@given(programs(), st.booleans())
def test_all_that_runs_and_all_that_is_exposed_is_the_whole(steps: list[Step], by_need: bool) -> None:
    found = list_schedule(steps, by_need=by_need)
    busy_s = sum(max(step.dots_s, step.wire_s) for step in steps if step.dots_s)
    assert busy_s + sum(found.exposed_s) == pytest.approx(found.total_s)
    for step, exposed_s in zip(steps, found.exposed_s, strict=True):
        assert 0.0 <= exposed_s <= (0.0 if step.dots_s else step.wire_s + 1e-9)
    ends: list[float] = []
    for step in steps:
        ends.append(max((ends[n] for n in step.needs), default=0.0) + max(step.dots_s, step.wire_s))
    assert found.total_s >= max(ends) - 1e-9
    assert found.total_s <= sum(max(step.dots_s, step.wire_s) for step in steps) + 1e-9
