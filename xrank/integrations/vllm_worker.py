"""The part of the backend "xrank" in each of vLLM's workers: it takes the trainer's weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from xrank.errors import UsageError
from xrank.integrations.vllm_form import CheckpointForm
from xrank.refit.report import UpdateReport
from xrank.refit.take import take_weights
from xrank.refit.taken_weights import TakenWeights


@dataclass
class XrankInitInfo(WeightTransferInitInfo):  # type: ignore[misc, unused-ignore]  # checked without vLLM
    """The arguments of ``init_weight_transfer_engine``."""

    address: str
    """The directory of the trainer's `xrank.offer_weights`."""
    max_memory: str | int = "64MB"
    timeout_seconds: float = 600.0
    """How long the workers may take to arrive."""


@dataclass
class XrankUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc, unused-ignore]  # checked without vLLM
    """The arguments of ``update_weights``."""

    step: int | None = None
    """The step to take; None: the next one that is visible, or the newest."""
    timeout_seconds: float = 600.0


class XrankWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc, unused-ignore]  # checked without vLLM
    """Takes each step's weights by `xrank.take_weights`, all of an engine's workers or none.

    ``update_weights`` fills the weights in the form of a checkpoint; ``finish_weight_update`` lets vLLM process them
    for its kernels, which compute with the old ones until then. So an update that fails leaves the engine as it was.
    """

    init_info_cls = XrankInitInfo
    update_info_cls = XrankUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._form: CheckpointForm | None = None
        self._weights: TakenWeights | None = None
        self._is_filled = False
        self.report: UpdateReport | None = None
        """The report of the last ``update_weights`` on this worker."""

    def init_transfer_engine(self, init_info: XrankInitInfo) -> None:
        """Prepare to take weights from the address; the workers of one engine (data parallel replica) belong together.

        Raises:
            XrankError: as `xrank.take_weights`.
        """
        self.shutdown()
        self._form = CheckpointForm(self.model, self.model_config, self.device)
        self._weights = take_weights(
            self._form.tensors,
            init_info.address,
            loader=self._form.load,
            max_memory=init_info.max_memory,
            group=get_world_group().cpu_group,
            timeout_seconds=init_info.timeout_seconds,
        )

    def start_weight_update(self) -> None:
        """Do nothing: kernels keep the old weights until `finish_weight_update`."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take a step; errors as `TakenWeights.update`. The copies are complete when it returns."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: XrankUpdateInfo) -> None:
        """Take a step; errors as `TakenWeights.update`."""
        if self._weights is None:
            raise UsageError(
                "this engine has no address to take weights from",
                want="init_weight_transfer_engine before update_weights",
                next_step='call init_weight_transfer_engine with {"address": DIR} first',
            )
        self._is_filled = False
        self.report = self._weights.update(update_info.step, timeout_seconds=update_info.timeout_seconds)
        self._is_filled = True

    def finish_weight_update(self) -> None:
        """Process the weights that `update_weights` has taken for vLLM's kernels."""
        if self._is_filled and self._form is not None:
            self._form.process()
        self._is_filled = False

    def shutdown(self) -> None:
        """Stop taking weights: the trainer no longer waits for this worker."""
        if self._weights is not None:
            self._weights.close()
        self._weights = self._form = None
        self._is_filled = False
