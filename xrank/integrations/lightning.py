"""Lightning's Trainer writes a Hugging Face folder at each checkpoint."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch.distributed.fsdp import FullyShardedDataParallel

from xrank.errors import UsageError
from xrank.integrations import Saves


class XrankCallback(Callback):  # type: ignore[misc, unused-ignore]  # checked without Lightning
    """Writes the model to ``OUT/step-STEP`` at each checkpoint of the Trainer, while training goes on.

    It works with one process, DDPStrategy, ModelParallelStrategy (FSDP2, tensor parallel) and DeepSpeedStrategy.
    `Trainer.fit` returns when the last folder is complete, and raises the failure of an export, at the latest, then.

    Args:
        out: the folder of the folders.
        attribute: the attribute of the LightningModule that is the model; empty: the LightningModule itself.
        **options: of `xrank.export_model`, such as `dtype`, `base_model`, `max_memory` or ``background=False``.

    Example:
        >>> from xrank.integrations.lightning import XrankCallback  # doctest: +SKIP
        >>> callback = XrankCallback("models", dtype="bf16")  # Trainer(callbacks=[callback])  # doctest: +SKIP
    """

    def __init__(self, out: str | os.PathLike[str], *, attribute: str = "model", **options: Any) -> None:
        self._out, self._attribute, self._saves = os.fspath(out), attribute, Saves(options)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Begin an export.

        Raises:
            UsageError: FSDP1 holds the model's parameters together with the LightningModule's.
        """
        if isinstance(trainer.strategy.model, FullyShardedDataParallel):
            raise UsageError(
                "the callback cannot export from FSDPStrategy: its flat parameters also contain "
                "parameters of the LightningModule",
                got="FSDPStrategy (FSDP1)",
                want="ModelParallelStrategy (FSDP2), DeepSpeedStrategy, DDPStrategy or one process",
                next_step="use ModelParallelStrategy, or gather Lightning's checkpoints: xrank gather",
            )
        model = getattr(pl_module, self._attribute) if self._attribute else pl_module
        self._saves.start(model, os.path.join(self._out, f"step-{trainer.global_step}"))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for the last export."""
        self._saves.finish()
