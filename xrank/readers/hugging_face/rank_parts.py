"""Names of safetensors files with one rank's parts of tensors: alone, none of them shows that it is not a whole model.

Sources: vLLM's sharded_state (model_executor/model_loader/sharded_state_loader.py: DEFAULT_PATTERN), TensorRT-LLM
(examples/*/convert_checkpoint.py), torch_checkpointing (schema.py: ItemSpec.layout; metadata_serialization.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection

ENGINE_PART = re.compile(r"model-(.*-)?(rank|tp)-\d+-part-\d+\.safetensors|rank\d+\.safetensors")
"""Names of files with a rank's part of a model that an inference engine saved."""
_NUMBERED = re.compile(r"(.+)_\d+\.safetensors")
_FIRST, _WHOLE = "model_0.safetensors", "model.safetensors"
_METADATA = "metadata.pkl"


def is_rank_part(name: str, beside: Collection[str]) -> bool:
    """Return whether a safetensors file has a rank's parts of tensors.

    Args:
        name: the file's name.
        beside: the names of all entries of its folder. accelerate gives a second whole model a number, too, but its
            first model has none: ``model.safetensors``, ``model_1.safetensors``.
    """
    numbered = _NUMBERED.fullmatch(name)
    if numbered is None:
        return ENGINE_PART.fullmatch(name) is not None
    return _METADATA in beside or (numbered[1] == "model" and _FIRST in beside and _WHOLE not in beside)
