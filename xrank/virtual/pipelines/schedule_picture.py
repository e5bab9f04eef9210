"""The timeline of a pipeline's schedule."""

from __future__ import annotations

from xrank.pictures.page import Lane, Span, draw_timeline
from xrank.pictures.picture import Picture
from xrank.virtual.pipelines.schedule import Schedule, StageWork
from xrank.words import plural


def picture_schedule(schedule: Schedule) -> Picture:
    """Return the timeline: a lane for each stage; forwards and backwards with the numbers of their runs."""
    has_chunks = schedule.num_chunks > 1
    kinds = [
        f"{direction} of chunk {chunk}" if has_chunks else direction
        for chunk in range(schedule.num_chunks)
        for direction in ("forward", "backward")
    ]
    lanes = [
        Lane(f"stage {stage}", tuple(_span(work) for work in works)) for stage, works in enumerate(schedule.stages)
    ]
    facts = (
        f"{schedule.name}: {plural(schedule.num_runs, 'run')}, {plural(schedule.num_stages, 'stage')}"
        f"{f', {schedule.num_chunks} chunks a stage' if has_chunks else ''}; {plural(schedule.num_cycles, 'cycle')}, "
        f"{schedule.bubble_fraction:.1%} idle; at most {max(schedule.peak_live_activations)} live activations a stage"
    )
    body = (f"<p>{facts}</p>", *draw_timeline(lanes, kinds, "cycle"))
    return Picture(f"Schedule {schedule.name}", "\n".join((facts, *_text_lines(schedule))), body)


def _span(work: StageWork) -> Span:
    title = f"{work.direction} of run {work.run}, chunk {work.chunk}, in cycle {work.cycle}"
    return Span(work.cycle, 1, 2 * work.chunk + (work.direction == "backward"), str(work.run), title)


def _text_lines(schedule: Schedule) -> list[str]:
    """Return a line for each stage: ``F0`` and ``B0`` for the forward and the backward of run 0, dots while idle."""
    width = len(str(schedule.num_runs - 1)) + (2 if schedule.num_chunks > 1 else 1)
    lines = []
    for stage, works in enumerate(schedule.stages):
        cells = ["." * width] * schedule.num_cycles
        for work in works:
            chunk = chr(ord("a") + work.chunk % 26) if schedule.num_chunks > 1 else ""
            cells[work.cycle] = f"{work.direction[0].upper()}{work.run}{chunk}".ljust(width)
        lines.append(f"stage {stage}  {' '.join(cells)}".rstrip())
    return lines
