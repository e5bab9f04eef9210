"""A vLLM model's weights in the form of a checkpoint, beside the form that its kernels use.

After it has loaded a model, vLLM may pack, quantize or swap the weights of each layer for its kernels. Its layerwise
reload (``vllm/model_executor/model_loader/reload``) gives a layer the parameters back that its loader fills, and
processes them again. This module keeps such parameters in host memory over all updates, so that their addresses and
what a loader copies into them stay the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm import _custom_ops as custom_ops
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
    initialize_online_processing,
    is_deferred_attention_layer,
)
from vllm.utils.torch_utils import set_default_torch_dtype

from xrank.errors import ContradictionError, UsageError
from xrank.refit.proof import HeldDigests, whole_parts
from xrank.refit.receive import TakenWeights
from xrank.refit.taking import take_weights
from xrank.refit.targets import UpdateReport


@dataclass(frozen=True, slots=True, eq=False)
class _Parameter:
    """A parameter of a layer in the form of a checkpoint."""

    layer: torch.nn.Module
    name: str
    """Name in the layer."""
    tensor: torch.Tensor
    """In host memory, with vLLM's class and attributes."""

    @property
    def present(self) -> Any:
        """The tensor that the layer has now."""
        return getattr(self.layer, self.name)


class CheckpointForm:
    """The parameters that the loader of a worker's loaded model fills."""

    def __init__(self, model: torch.nn.Module, model_config: Any, device: torch.device) -> None:
        self._model, self._model_config, self._device = model, model_config, device
        self._parameters: list[_Parameter] = []
        self._left_out: list[tuple[torch.nn.Module, str]] = []
        """Scales of attention, which vLLM drops after the first load; kernels keep those of the first load."""
        self.tensors: dict[str, torch.Tensor] = {}
        """Name -> the tensor to fill; tied parameters are one tensor under the first one's name."""
        with self._restored():
            first: dict[int, torch.Tensor] = {}
            for path, layer in self._model.named_modules():
                kernel_tensors = get_layerwise_info(layer).kernel_tensors
                for name, present in layer._parameters.items():
                    if present is None:
                        continue
                    kernels = None if kernel_tensors is None else kernel_tensors[0]
                    if kernels is not None and name not in kernels and is_deferred_attention_layer(layer):
                        self._left_out.append((layer, name))
                        continue
                    kernel = present if kernels is None else kernels.get(name, present)
                    tensor = first.get(id(kernel))
                    if tensor is None:
                        tensor = first[id(kernel)] = _make_tensor(present)
                        self.tensors[f"{path}.{name}" if path else name] = tensor
                    self._parameters.append(_Parameter(layer, name, tensor))

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Run the model's own loader on `tensors`; kernels keep theirs."""
        with self._restored():
            for parameter in self._parameters:
                setattr(parameter.layer, parameter.name, parameter.tensor)
            for layer, name in self._left_out:
                layer._parameters[name].weight_loader = _refuse  # type: ignore[union-attr]
            return self._model.load_weights(weights)  # type: ignore[operator]

    def process(self) -> None:
        """Let vLLM process `tensors` for its kernels, layer by layer, into the memory that they use."""
        # The default element type as at vLLM's first load: some of its kernels are made for it.
        with torch.no_grad(), self._device, set_default_torch_dtype(self._model_config.dtype), _keep_kernel_scales():
            if self._device.type == "cpu":
                # Otherwise vLLM 0.32 does not pack the weights of experts for its CPU kernels again, and computes with
                # unpacked ones (``UnquantizedFusedMoEMethod._setup_kernel``). No CPU graph keeps addresses.
                for layer in self._model.modules():
                    method: Any = getattr(layer, "quant_method", None)
                    if getattr(method, "moe_kernel", None) is not None:
                        method.moe_kernel = None
            initialize_layerwise_reload(self._model)
            loaders = [_get_original_loader(parameter.present) for parameter in self._parameters]
            for parameter in self._parameters:
                parameter.present.weight_loader = _fill
            for layer in {id(parameter.layer): parameter.layer for parameter in self._parameters}.values():
                initialize_online_processing(layer)  # it counts what `_fill` fills
            for parameter in self._parameters:
                present = parameter.present
                present.weight_loader(present, parameter.tensor)
            finalize_layerwise_reload(self._model, self._model_config)
        for parameter, loader in zip(self._parameters, loaders, strict=True):
            present = parameter.present
            if getattr(present, "weight_loader", None) is _fill:  # a parameter that vLLM does not exchange
                present.weight_loader = loader

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """Give all layers the parameters of a checkpoint, on the meta device, and those of the kernels back."""
        # As vLLM's own backend "sharded_rdt" does; the package has no public function that undoes the first one.
        kept = [(layer, dict(layer._parameters)) for layer in self._model.modules()]
        loaders = [
            (parameter, parameter.weight_loader)  # type: ignore[union-attr]
            for _, parameters in kept
            for parameter in parameters.values()
            if hasattr(parameter, "weight_loader")
        ]
        initialize_layerwise_reload(self._model)
        try:
            yield
        finally:
            for layer, parameters in kept:
                info = get_layerwise_info(layer)
                if info.can_load():
                    _place_kernel_tensors(layer, info)
                    info.reset()
                for name, parameter in parameters.items():
                    if parameter is not None and layer._parameters.get(name) is not parameter:
                        setattr(layer, name, parameter)
            for parameter, loader in loaders:
                parameter.weight_loader = loader  # type: ignore[union-attr]


def _make_tensor(present: torch.Tensor) -> torch.Tensor:
    """Return host memory for a parameter, with vLLM's class and attributes of it and its own loader."""
    tensor: Any = torch.zeros_like(present, device="cpu", requires_grad=False)
    tensor.__class__ = present.__class__
    tensor.__dict__ = present.__dict__.copy()
    if hasattr(tensor, "weight_loader"):
        tensor.weight_loader = _get_original_loader(present)
    made: torch.Tensor = tensor
    return made


@contextmanager
def _keep_kernel_scales() -> Iterator[None]:
    """Keep the scales of kernels alive that have only their address.

    vLLM 0.32 makes a new oneDNN kernel for int8 at each reload, copies the new scales to the old ones' place, and frees
    the new ones, which the kernel reads (``_custom_ops.create_onednn_scaled_mm``).
    """
    create = custom_ops.create_onednn_scaled_mm

    def create_and_keep(weight: torch.Tensor, weight_scales: torch.Tensor, *args: Any) -> Any:
        handler = create(weight, weight_scales, *args)
        handler.kept_scales = weight_scales
        return handler

    custom_ops.create_onednn_scaled_mm = create_and_keep
    try:
        yield
    finally:
        custom_ops.create_onednn_scaled_mm = create


def _fill(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    param.data.copy_(loaded_weight)


def _refuse(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    raise UsageError(
        "vLLM takes scales of the key-value cache only at its start",
        next_step="do not offer the scales of keys, values and queries from the trainer",
    )


@dataclass
class XrankInitInfo(WeightTransferInitInfo):  # type: ignore[misc, unused-ignore]  # checked without vLLM
    """The arguments of ``init_weight_transfer_engine``."""

    address: str | None = None
    """The directory of the trainer's `xrank.offer_weights`."""
    deltas: str | None = None
    """A folder of versions, or its URL, in the place of an address."""
    base_model: str | None = None
    """The model that the first version is based on, if none is whole."""
    max_memory: str | int = "64MB"
    timeout_seconds: float = 600.0
    """How long the workers may take to arrive."""
    proof: bool = False
    """Whether to compare digests with the trainer's, and to digest the kernels' weights for `WeightChecker`."""


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
        self._kernels: HeldDigests | None = None
        """Digests of the weights that kernels compute with."""
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
            deltas=init_info.deltas,
            base_model=init_info.base_model,
            loader=self._form.load,
            max_memory=init_info.max_memory,
            proof=init_info.proof,
            group=get_world_group().cpu_group,
            timeout_seconds=init_info.timeout_seconds,
        )
        self._kernels = HeldDigests(get_world_group().rank) if init_info.proof else None

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
                next_step='call init_weight_transfer_engine with {"address": DIR} first',
            )
        self._is_filled = False
        self.report = self._weights.update(update_info.step, timeout_seconds=update_info.timeout_seconds)
        self._is_filled = True

    def finish_weight_update(self) -> None:
        """Process the weights that `update_weights` has taken for vLLM's kernels."""
        if self._is_filled and self._form is not None:
            self._form.process()
            if self._kernels is not None:
                self._kernels.record(whole_parts(self.model.named_parameters()))
        self._is_filled = False

    def find_changed(self) -> list[str]:
        """Return what is not as it was after the last step, with rank and rows: of kernels, and of the host's copies.

        Raises:
            UsageError: there is no step, or the engine's ``init_info`` lacks ``"proof": true``.
        """
        if self._kernels is None or self._weights is None or not self._kernels.parts:
            raise UsageError(
                "this engine has no digests to compare with",
                next_step='call init_weight_transfer_engine with "proof": True, and take a step',
            )
        present = whole_parts(self.model.named_parameters())
        changed = [
            f"{name}, engine rank {self._kernels.rank}: {where}" for name, where in self._kernels.find_changed(present)
        ]
        try:
            self._weights.check()
        except ContradictionError as error:
            changed.append(f"{error} (of the copy in the form of a checkpoint)")
        return changed

    def shutdown(self) -> None:
        """Stop taking weights: the trainer no longer waits for this worker."""
        if self._weights is not None:
            self._weights.close()
        self._weights = self._form = self._kernels = None
        self._is_filled = False


class WeightChecker:
    """An extension of vLLM's workers (``worker_extension_cls``): the actions of vLLM's proposed ``/weight_checker``.

    Digests of ``checksum`` and of a baseline are those of vLLM's own ``compute_weight_checksums``: of all parameters
    as the worker's kernels use them. Without a baseline, ``compare`` asks whether the worker still holds the last step
    that it took. That step was compared with the trainer's values in the form of a checkpoint.

    Example:
        >>> from vllm import LLM  # doctest: +SKIP
        >>> llm = LLM(model, worker_extension_cls="xrank.integrations.vllm_worker.WeightChecker")  # doctest: +SKIP
        >>> llm.collective_rpc("weight_checker", args=("compare",))  # doctest: +SKIP
        [{'match': True, 'mismatches': []}]
    """

    def weight_checker(self: Any, action: str, baseline: dict[str, str] | None = None) -> dict[str, Any]:
        """Do an action on this worker.

        Args:
            action: ``"checksum"`` returns ``{"checksums": {name: digest}}``. ``"reset"`` overwrites the weights with
                zeros. ``"compare"`` returns ``{"match": bool, "mismatches": [...]}``.
            baseline: earlier checksums, of any workers; None: compare with the last step.

        Raises:
            UsageError: another action, or no digests to compare with.
        """
        if action == "checksum":
            return {"checksums": self.compute_weight_checksums()}
        if action == "reset":
            self.reset_weights()
            return {"status": "reset"}
        if action != "compare":
            raise UsageError(
                "weight_checker has no such action",
                got=repr(action),
                want="checksum, reset or compare",
                next_step="give one of these",
            )
        if baseline is None:
            engine = self.weight_transfer_engine
            changed = engine.find_changed() if isinstance(engine, XrankWeightTransferEngine) else None
            if changed is None:
                raise UsageError(
                    "this engine has no digests to compare with",
                    next_step='give a baseline, or start vLLM with the weight transfer backend "xrank"',
                )
        else:
            present = self.compute_weight_checksums()
            changed = sorted(name for name in present if baseline.get(name) != present[name])
        return {"match": not changed, "mismatches": changed}
