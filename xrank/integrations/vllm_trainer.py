"""The part of the backend "xrank" in each rank of a trainer that uses vLLM's trainer interface."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

from xrank.errors import UsageError
from xrank.integrations.vllm import BACKEND
from xrank.refit.publish import WeightsOffer, offer_weights


@dataclass
class XrankTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc, unused-ignore]  # checked without vLLM
    """The arguments of ``trainer_init``; all but `rank` and `timeout_seconds` are those of `xrank.offer_weights`."""

    backend: ClassVar[str] = BACKEND

    address: str
    """A directory that the trainer's ranks and vLLM's workers see."""
    model: Any
    layouts: Any = None
    mesh: Any = None
    recipe: str | None = None
    base_model: str | None = None
    dtype: Any = None
    transform: Any = None
    """Such as an `xrank.Quantization` for an engine that has loaded a quantized model."""
    snapshot: bool = False
    proof: bool = False
    group: Any = None
    timeout_seconds: float = 600.0
    """How long ranks and workers may take to arrive, and to take a step."""


class XrankTrainerWeightTransferEngine(TrainerWeightTransferEngine):  # type: ignore[misc, unused-ignore]
    """Offers a trainer rank's weights, and calls vLLM from the first rank. Made by `trainer_init` on every rank."""

    init_info_cls = XrankTrainerInitInfo

    def __init__(self, *, client: VLLMWeightSyncClient, offer: WeightsOffer, init_info: XrankTrainerInitInfo) -> None:
        super().__init__(client=client, source=None, is_sender=init_info.is_sender)
        self._offer, self._timeout_seconds = offer, init_info.timeout_seconds
        self._step = 0

    @classmethod
    def trainer_init(
        cls, init_info: XrankTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        """Offer the weights, and let vLLM's workers prepare to take them; every rank makes this call.

        Raises:
            UsageError: a source is given: weights are read where the model has them.
            XrankError: as `xrank.offer_weights`.
        """
        if source is not None:
            raise UsageError(
                'backend "xrank" reads the weights of each rank in place',
                next_step="omit source, and give the model in XrankTrainerInitInfo",
            )
        options = {name: getattr(init_info, name) for name in XrankTrainerInitInfo.__annotations__ if name != "backend"}
        offer = offer_weights(**options, on_engine_failure="raise")  # as vLLM's client, on the sender
        if init_info.is_sender:
            client.init_weight_transfer_engine({"address": init_info.address, "proof": init_info.proof})
        if torch.distributed.is_initialized():  # no rank publishes before the workers are there
            torch.distributed.barrier(init_info.group)
        return cls(client=client, offer=offer, init_info=init_info)

    def send_weights(self, step: int | None = None) -> None:
        """Let vLLM take the present weights; every rank makes this call.

        Args:
            step: larger than that of the last call; None: one more.

        Raises:
            XrankError: as `WeightsOffer.publish`.
        """
        self._step = self._step + 1 if step is None else step
        if not self.is_sender:
            self._offer.publish(self._step, timeout_seconds=self._timeout_seconds)
            return
        with ThreadPoolExecutor(1) as pool:  # the workers take the step while this rank shows it
            taken = pool.submit(self._call_workers, self._step)
            self._offer.publish(self._step, timeout_seconds=self._timeout_seconds)
            taken.result()

    def shutdown(self) -> None:
        """End the offer."""
        self._offer.close()

    def _call_workers(self, step: int) -> None:
        self.client.start_weight_update()
        self.client.update_weights({"step": step, "timeout_seconds": self._timeout_seconds})
        self.client.finish_weight_update(str(step))
