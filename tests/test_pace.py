"""How many threads take part: simulated machines, each a function from threads to time."""

import pytest

from cpu_fallback.team.placement import WINDOW_NS, Pace

DECODE, PREFILL = (1, 1), (128, 1)
STEP_NS = 5_000_000


def run(pace, machine, seconds=5.0, size=DECODE):
    """Let a pace step on a machine: threads -> (ns of a step, ns lost); returns (steps, trials)."""
    clock = steps = lost = 0
    sizes = [pace.active]

    def take():
        nonlocal lost
        taken, lost = lost, 0
        return taken

    while clock < seconds * 1e9:
        ns, waited = machine(pace.active)
        clock += ns
        lost += waited
        steps += 1
        pace.stepped(size, ns, take)
        if pace.active != sizes[-1]:
            sizes.append(pace.active)
    return steps, sizes


def free(threads):
    return STEP_NS * 4 // threads, 0


def contended(threads):
    """With a core for one thread only, others are waited for."""
    return (STEP_NS * 4, 0) if threads == 1 else (STEP_NS * 10, STEP_NS * 6)


def one_core_short(threads):
    return (STEP_NS * 4 // threads, 0) if threads < 4 else (STEP_NS * 3, STEP_NS * 2)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_a_free_team_never_tries_anything(threads):
    assert run(Pace(threads), free)[1] == [threads]


@pytest.mark.parametrize("threads", [2, 4, 16])
def test_a_starved_team_shrinks_to_one_thread_and_loses_little(threads):
    pace = Pace(threads)
    steps, _ = run(pace, contended, 20)
    assert steps > 0.85 * 20e9 / (STEP_NS * 4)
    assert run(pace, contended, 20)[0] > 0.95 * 20e9 / (STEP_NS * 4)


def test_a_team_that_lost_one_core_goes_on_with_the_others():
    pace = Pace(4)
    run(pace, one_core_short, 5)
    assert run(pace, one_core_short, 20)[0] > 0.9 * 20e9 / (STEP_NS * 4 / 3)


def test_a_team_comes_back_when_its_cores_are_free_again():
    pace = Pace(2)
    run(pace, contended, 20)
    _, sizes = run(pace, free, 10)
    assert sizes[-1] == 2
    assert run(pace, free, 5)[1] == [2]


def test_waiting_that_fewer_threads_do_not_help_is_put_up_with():
    pace = Pace(2)

    def unbalanced(threads):
        return (STEP_NS, STEP_NS // 4) if threads == 2 else (2 * STEP_NS, 0)

    steps, sizes = run(pace, unbalanced, 60)
    assert steps > 0.97 * 60e9 / STEP_NS
    assert 3 < len(sizes) < 30


def test_a_trial_without_a_fast_step_ends_at_once():
    """A virtual machine that stands still now and then makes one thread wait for the other."""
    pace, turns = Pace(2), []

    def interrupted(threads):
        turns.append(threads)
        stalled = len(turns) % 10 == 0
        if threads == 1:
            return 8 * STEP_NS // 5, 0
        return (3 * STEP_NS, 2 * STEP_NS) if stalled else (STEP_NS, 0)

    _, sizes = run(pace, interrupted, 1)
    assert sizes[:3] == [2, 1, 2]
    assert turns.count(1) <= 3 * sizes.count(1)


def test_short_replies_do_not_keep_a_team_small():
    """A reply ends before a trial with more threads does; the next one begins with them."""
    pace = Pace(2)
    run(pace, contended, 0.5)
    assert pace.active == 1
    for _ in range(3):
        pace.stepped(PREFILL, 20 * STEP_NS, lambda: 0)
        run(pace, free, 0.15)
    assert pace.active == 2


def test_a_step_of_another_size_ends_a_trial():
    pace = Pace(2)
    lost = WINDOW_NS // 2
    pace.stepped(DECODE, WINDOW_NS, lambda: 0)
    pace.stepped(DECODE, WINDOW_NS, lambda: lost)
    assert pace.active == 1
    pace.stepped(PREFILL, STEP_NS, lambda: 0)
    assert pace.active == 2


def test_all_take_part_in_a_step_of_many_tokens():
    pace = Pace(4)
    run(pace, contended, 20)
    assert pace.active == 1 and pace.of(DECODE[0]) == 1
    assert pace.of(PREFILL[0]) == 4
    _, trials = run(pace, contended, 20, PREFILL)
    assert trials == [1] and pace.of(PREFILL[0]) == 4
