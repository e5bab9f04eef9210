"""transformers' Trainer writes a Hugging Face folder at each save, from any way to shard."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from xrank.integrations import Saves


class XrankCallback(TrainerCallback):
    """Writes the model to ``OUT/checkpoint-STEP`` at each save of the Trainer, while training goes on.

    It works with FSDP2, FSDP1, ZeRO-1 to 3, DistributedDataParallel and one process. No rank holds the whole model
    under FSDP and ZeRO-3. `Trainer.train` returns when the last folder is complete, and raises the failure of an
    export, at the latest, then.

    Args:
        out: the folder of the folders; not the Trainer's own ``output_dir``.
        **options: of `xrank.export_model`, such as `dtype`, `base_model`, `max_memory` or ``background=False``.

    Example:
        >>> from transformers import Trainer
        >>> from xrank.integrations.transformers import XrankCallback
        >>> callback = XrankCallback("models", dtype="bf16")  # Trainer(..., callbacks=[callback])
    """

    def __init__(self, out: str | os.PathLike[str], **options: Any) -> None:
        self._out, self._saves = os.fspath(out), Saves(options)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Begin an export."""
        self._saves.start(kwargs["model"], os.path.join(self._out, f"checkpoint-{state.global_step}"))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Wait for the last export."""
        self._saves.finish()
