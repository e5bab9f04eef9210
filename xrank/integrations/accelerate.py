"""accelerate's `save_state` writes a Hugging Face folder as well, from any way to shard."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from xrank.integrations import Saves

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


class SaveStateHook(Saves):
    """Writes each prepared model at every `Accelerator.save_state`; `export_at_save` makes and registers it."""

    def __init__(self, folder: str, options: dict[str, Any]) -> None:
        super().__init__(options)
        self._folder = folder

    def __call__(self, models: Sequence[torch.nn.Module], weights: object, output_dir: str) -> None:
        """Begin the exports; accelerate calls this before it saves (`Accelerator.register_save_state_pre_hook`)."""
        for number, model in enumerate(models):
            name = self._folder if number == 0 else f"{self._folder}_{number}"
            self.start(model, os.path.join(output_dir, name))


def export_at_save(accelerator: Accelerator, *, folder: str = "huggingface", **options: Any) -> SaveStateHook:
    """Let each `accelerator.save_state(DIR)` also write the model to ``DIR/FOLDER``, while training goes on.

    It works with FSDP2, FSDP1, ZeRO-1 to 3, DistributedDataParallel and one process.

    Args:
        accelerator: the program's Accelerator.
        folder: the name of the folder; further prepared models get ``FOLDER_1`` and so on.
        **options: of `xrank.export_model`, such as `dtype`, `base_model`, `max_memory` or ``background=False``.

    Returns:
        The registered hook, whose `finish()` waits for the last export.

    Example:
        >>> from accelerate import Accelerator  # doctest: +SKIP
        >>> accelerator = Accelerator()  # doctest: +SKIP
        >>> hook = export_at_save(accelerator, dtype="bf16")  # doctest: +SKIP
        >>> accelerator.save_state("checkpoints/1")  # doctest: +SKIP
        >>> hook.finish()  # doctest: +SKIP
    """
    hook = SaveStateHook(folder, options)
    accelerator.register_save_state_pre_hook(hook)
    return hook
