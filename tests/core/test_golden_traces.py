"""Golden traces: scripted workloads as tables of steps, to be read in a diff.

Each line is a step: what was computed (`request:start+tokens`, `!` where a token is sampled), who waits and why, blocks
in use, and what happened on the way. After a change that is meant to change them:

    OCTAVO_WRITE_GOLDEN=1 python -m pytest tests/core/test_golden_traces.py
"""

import os
from pathlib import Path

import pytest

from octavo.core.events import (
    BlockCopied,
    BlockEvicted,
    PrefixDiverged,
    RequestAdmitted,
    RequestArrived,
    RequestDelayed,
    RequestFinished,
    RequestForked,
    RequestPreempted,
    StepScheduled,
)
from octavo.core.kv_cache import GroupSpec
from octavo.testing.factories import CoreSetup, Rig

GOLDEN = Path(__file__).parent / "golden"


def note(event):
    """Return what a line says about an event, or nothing."""
    match event:
        case RequestArrived():
            return f"{event.request_id} arrives with {event.num_prompt_tokens}"
        case RequestAdmitted():
            hit = f"{event.num_block_hit_tokens}+{event.num_copied_hit_tokens}"
            verb = "resumes" if event.is_resumed else "starts"
            return f"{event.request_id} {verb}" + (f", {hit} hit" if hit != "0+0" else "")
        case RequestDelayed():
            return f"{event.request_id} waits for {event.reason}"
        case RequestPreempted():
            return f"{event.request_id} gives way to {event.for_request_id} ({event.reason})"
        case RequestForked():
            return f"{event.request_id} shares {event.num_shared_tokens} with {event.parent_id}"
        case RequestFinished():
            return f"{event.request_id} ends ({event.reason}, {event.num_output_tokens} out)"
        case BlockCopied():
            return f"copy {event.source}>{event.destination}"
        case BlockEvicted():
            return f"evict {event.block_id}"
        case PrefixDiverged():
            return f"{event.request_id} diverges at {event.position}"
    return None


def describe(plan):
    sampled = {row.request_id for row in plan.samples}
    parts = []
    for index, request_id in enumerate(plan.request_ids):
        num_tokens = plan.query_offsets[index + 1] - plan.query_offsets[index]
        mark = "!" if request_id in sampled else ""
        parts.append(f"{request_id}:{plan.start_positions[index]}+{num_tokens}{mark}")
    return " ".join(parts)


def trace(rig, script):
    """Run a script of step number -> action and return its table."""
    lines = [
        f"blocks {rig.setup.num_blocks} of {rig.setup.block_size}, groups "
        + ", ".join("full" if spec.window is None else f"window {spec.window}" for spec in rig.setup.groups)
        + f", seats {rig.setup.max_num_seqs}, tokens a step {rig.setup.max_num_batched_tokens}, {rig.setup.policy}",
        "",
        "step  used  tables",
    ]
    num_steps = 0
    num_read = 0
    while rig.scheduler.has_unfinished or num_steps <= max(script):
        if num_steps in script:
            script[num_steps](rig)
        plan = rig.schedule()
        tables = "  ".join(
            f"{request.request_id}={'|'.join(','.join(map(str, table)) for table in rig.paged.tables(request))}"
            for request in rig.scheduler.running
        )
        rig.commit(plan)
        rig.counts()
        events, num_read = rig.events[num_read:], len(rig.events)
        [step] = [event for event in events if isinstance(event, StepScheduled)]
        used = step.num_usable_blocks - step.num_free_blocks
        lines.append(f"{step.step:>4}  {used:>4}  {tables}")
        lines.append(f"            {describe(plan)}")
        notes = [text for event in events if (text := note(event))]
        lines.extend(f"            - {text}" for text in notes)
        num_steps += 1
        assert num_steps < 200
    return "\n".join(lines) + "\n"


def prefixes_and_pressure():
    """A prefix computed once, a hit inside a block, three answers, a pool too small for all."""
    shared = list(range(10))
    rig = Rig(CoreSetup(num_blocks=9, max_num_seqs=4, max_num_batched_tokens=8))
    script = {
        0: lambda rig: (
            rig.add([*shared, 20, 21], "A", max_tokens=5),
            rig.add([*shared, 30], "B", max_tokens=4),
        ),
        2: lambda rig: rig.add(range(50, 57), "C", max_tokens=12),
        5: lambda rig: rig.add_answers([*shared, 40], 3, "D", temperature=1.0, max_tokens=5),
    }
    return rig, script


def priorities_windows_and_aborts():
    """A full and a window group, a seat taken by an urgent request, an abort, and a second turn."""
    rig = Rig(
        CoreSetup(
            num_blocks=24,
            groups=(GroupSpec(), GroupSpec(window=6)),
            max_num_seqs=2,
            max_num_batched_tokens=8,
            policy="priority",
        )
    )
    script = {
        0: lambda rig: (
            rig.add(11, "slow", priority=5, max_tokens=9),
            rig.add(range(40, 45), "mid", priority=3, max_tokens=6),
        ),
        3: lambda rig: rig.add(range(60, 63), "urgent", priority=0, max_tokens=3),
        5: lambda rig: rig.finish(rig.scheduler._requests["mid"]),
        11: lambda rig: rig.add([*range(11), *rig.output(rig.scheduler._requests["slow"]), 90], "turn2", max_tokens=2),
    }
    return rig, script


@pytest.mark.parametrize(
    "workload", [prefixes_and_pressure, priorities_windows_and_aborts], ids=lambda one: one.__name__
)
def test_steps_are_the_ones_that_were_reviewed(workload):
    table = f"{workload.__doc__}\n\n{trace(*workload())}"
    file = GOLDEN / f"{workload.__name__}.txt"
    if os.environ.get("OCTAVO_WRITE_GOLDEN"):
        file.write_text(table)

    assert table == file.read_text()
