"""How Megatron-core makes each tiny model of tests/recipes/families; a family's module adds its entries."""

from __future__ import annotations

from tests.oracle.megatron_cores import hybrid, known, text, vision
from tests.oracle.megatron_cores.core import Core

__all__ = ["CORES", "Core"]

CORES: dict[str, Core] = {**known.CORES, **text.CORES, **vision.CORES, **hybrid.CORES}
