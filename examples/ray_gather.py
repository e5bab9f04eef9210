"""Gathers a checkpoint in a Ray task, on any node of the cluster that mounts the checkpoint and the output.

    python examples/ray_gather.py /nfs/run/checkpoint-2000 /nfs/models/step-2000

A gather needs no GPU and little memory, so the task asks for cores alone.
"""

from __future__ import annotations

import sys
from typing import Any

import ray


@ray.remote(num_cpus=2, max_retries=2)  # a task whose node dies runs again, and goes on from the finished files
def gather(source: str, out: str, **options: Any) -> dict[str, Any]:
    """Gather and verify one checkpoint, and return the report."""
    from xrank import gather_checkpoint, verify_model

    report = gather_checkpoint(source, out, **options)
    verify_model(out)
    return report.to_dict()


def main(source: str, out: str) -> None:
    """Run the task, and print what it wrote; an error of xrank's arrives as it was raised."""
    ray.init(log_to_driver=False)
    report = ray.get(gather.remote(source, out, workers=2, overwrite=True))
    print(f"wrote {out}: {report['output']['nbytes']:,} bytes of tensors in {report['seconds']:.1f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
