"""vLLM takes weights from a trainer's ranks: the backend "xrank" of its weight transfer.

vLLM calls `register` in each of its processes, by the entry point group ``vllm.general_plugins``; a trainer that uses
vLLM's ``WeightTransferTrainerFactory`` calls it itself. Written for the interface of vLLM 0.32
(``vllm/distributed/weight_transfer/{base,factory}.py``).
"""

from __future__ import annotations

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

BACKEND = "xrank"


def register() -> None:
    """Register the backend for vLLM's workers and for trainers; further calls do nothing.

    Example:
        >>> from xrank.integrations.vllm import register  # doctest: +SKIP
        >>> register()  # then WeightTransferTrainerFactory.trainer_init(...)  # doctest: +SKIP
    """
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "xrank.integrations.vllm_worker", "XrankWeightTransferEngine"
        )
    if BACKEND not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(
            BACKEND, "xrank.integrations.vllm_trainer", "XrankTrainerWeightTransferEngine"
        )
