"""LoRA adapters of a trainer, step by step: each step is an adapter of its own, so that an engine holds several."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from msgspec import Struct

from xrank import dtypes
from xrank.engine.hf_folder import lay_out_file
from xrank.errors import UsageError, names_own_arguments
from xrank.layout.output_files import OutputTensor
from xrank.ranks.memory import local_bytes
from xrank.recipes.adapter_names import CONFIG_NAME
from xrank.recipes.adapters import WEIGHTS_NAME
from xrank.refit.receive import TakenWeights, take_into
from xrank.refit.targets import AdapterTarget, UpdateReport

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


class Adapter(Struct, frozen=True, eq=False):
    """A LoRA adapter of one step. Later steps do not change it."""

    step: int
    tensors: Mapping[str, torch.Tensor]
    """Whole tensors under the names in PEFT's folders, in host memory."""
    config: Mapping[str, Any]
    """Content of PEFT's adapter_config.json."""
    report: UpdateReport

    def write(self, folder: str | os.PathLike[str]) -> str:
        """Write a folder as PEFT's `save_pretrained` does, and return its path, for engines that read adapters there.

        It appears whole, by a rename.

        Raises:
            UsageError: the folder exists.

        Example:
            >>> adapter = taken.update()  # doctest: +SKIP
            >>> path = adapter.write(f"/dev/shm/math/{adapter.step}")  # doctest: +SKIP
            >>> request = LoRARequest("math", adapter.step, path)  # vLLM's  # doctest: +SKIP
        """
        path = os.path.abspath(os.fspath(folder))
        if os.path.lexists(path):
            raise UsageError(
                f"{path} exists",
                file=path,
                want="a folder of its own for each step",
                next_step="give another folder",
            )
        file = lay_out_file(WEIGHTS_NAME, [_describe(name, tensor) for name, tensor in self.tensors.items()])
        staged = f"{path}.{os.getpid()}"
        os.makedirs(staged)
        with open(os.path.join(staged, WEIGHTS_NAME), "wb") as weights:
            weights.write(file.header)
            for output in file.tensors:
                source = local_bytes(self.tensors[output.name].contiguous())
                weights.write(source.find_row(0, source.nbytes) or b"")
        with open(os.path.join(staged, CONFIG_NAME), "w", encoding="utf-8") as config:
            json.dump(dict(self.config), config, indent=2)
        os.rename(staged, path)
        return path


def _describe(name: str, tensor: torch.Tensor) -> OutputTensor:
    return OutputTensor(name, dtypes.by_torch_name(str(tensor.dtype).removeprefix("torch.")).name, tuple(tensor.shape))


@names_own_arguments
def take_adapter(
    address: str | os.PathLike[str],
    *,
    proof: bool = False,
    max_memory: str | int = "64MB",
    group: ProcessGroup | None = None,
    timeout_seconds: float = 1800.0,
) -> TakenAdapter:
    """Connect an engine to the LoRA adapter of a trainer's PeftModel; every rank of the engine makes this call.

    Each rank gets whole tensors, because engines shard adapters themselves.

    Args:
        address: the directory of the trainer's `xrank.offer_weights`, of an adapter only or of a whole PeftModel.
        proof: as `xrank.take_weights`; so are the others.
        max_memory: bytes of buffers.
        group: the ranks of the engine.
        timeout_seconds: how long the engine's ranks may take to arrive.

    Raises:
        UsageError: an argument is wrong.

    Example:
        >>> with xrank.take_adapter("refit") as taken:  # doctest: +SKIP
        ...     first, second = taken.update(), taken.update()
        ...     serve(old=first.tensors, new=second.tensors)
    """
    target = AdapterTarget()
    weights = take_into(
        lambda: target,
        address,
        call="take_adapter",
        proof=proof,
        max_memory=max_memory,
        group=group,
        timeout_seconds=timeout_seconds,
    )
    return TakenAdapter(weights, target)


class TakenAdapter:
    """An engine rank's side, made by `take_adapter`. One thread may use it; it is a context manager, too."""

    def __init__(self, weights: TakenWeights, target: AdapterTarget) -> None:
        self._weights, self._target = weights, target

    def update(self, step: int | None = None, *, timeout_seconds: float = 600.0) -> Adapter:
        """Take the adapter of a step; every rank of the engine makes this call.

        The result has memory of its own: adapters of earlier steps stay as they are while requests use them.

        Raises:
            UsageError: the trainer offers no adapter, or the step is past.
            XrankError: as `TakenWeights.update`.
        """
        report = self._weights.update(step, timeout_seconds=timeout_seconds)
        tensors = {name: tensor.clone() for name, tensor in self._target.tensors.items()}
        return Adapter(report.step, tensors, json.loads(self._target.config_text or "{}"), report)

    def close(self) -> None:
        """Stop taking adapters: the trainer no longer waits for this rank. Further calls do nothing."""
        self._weights.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._weights.__exit__(kind, error, trace)
