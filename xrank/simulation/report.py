"""The report of a simulation for JSON."""

from __future__ import annotations

from xrank.conversion.report import source_facts
from xrank.plan.report import OutputFacts, ProofFacts, Report, SimulationDetails
from xrank.simulation.prediction import ASSUMED, PARTS
from xrank.simulation.simulation import Simulation
from xrank.system import peak_rss_nbytes

_AMOUNTS = ("read_nbytes", "reads", "own_nbytes", "taken_nbytes", "given_nbytes", "messages", "written_nbytes")
"""Reported amounts of each rank: arrays of `RoundTraffic`."""


def simulation_report(found: Simulation) -> Report:
    """Convert a simulation to a report."""
    work, traffic, prediction = found.work, found.traffic, found.prediction
    outputs = [tensor.output for tensor in work.plan.tensors]
    columns = {name: traffic.total(name) for name in _AMOUNTS}
    columns["compared_nbytes"] = traffic.compared_nbytes
    columns["memory_nbytes"] = found.memory_nbytes
    seconds = {} if prediction is None else {name: prediction.parts[name] for name in PARTS}
    rows = [
        {
            "rank": rank,
            **{name: int(column[rank]) for name, column in columns.items()},
            **({"seconds": {name: round(float(part[rank]), 6) for name, part in seconds.items()}} if seconds else {}),
        }
        for rank in range(work.num_ranks)
    ]
    details = SimulationDetails(
        operation=work.operation,
        num_ranks=work.num_ranks,
        mesh=None if work.mesh is None else work.mesh.grid,
        num_rounds=len(traffic.rounds),
        is_each_read=traffic.is_each_read,
        rates=None if found.rates is None else found.rates.to_dict(),
        prediction=None
        if prediction is None
        else {
            "seconds": round(prediction.seconds, 6),
            "start_seconds": prediction.start_seconds,
            "slowest_rank": int(prediction.busy.argmax()),
            "assumed": list(ASSUMED),
        },
        totals={name: int(column.sum()) for name, column in columns.items()},
        ranks=rows,
    )
    return Report(
        command="simulate",
        path=work.path,
        seconds=found.seconds,
        peak_rss_nbytes=peak_rss_nbytes(),
        source=source_facts(work.source),
        proof=ProofFacts(coverage="proven"),
        plan=OutputFacts(
            num_tensors=len({output.name for output in outputs}),
            num_parameters=sum(output.num_elements for output in outputs),
            nbytes=sum(output.nbytes for output in outputs),
            num_files=len(work.plan.files),
            files_nbytes=work.plan.nbytes,
        ),
        notes=work.notes,
        details=details,
    )
