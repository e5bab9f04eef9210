"""Compares the digests of tensors in a model's manifest with those of the data that was read."""

from __future__ import annotations

import os
import threading

from xrank.errors import CorruptError
from xrank.plan.digests import TensorDigest, digest_text
from xrank.plan.file_parts import FilePart
from xrank.plan.planner import Plan, TensorPlan
from xrank.plan.source import StoredModel
from xrank.writers.manifest import MANIFEST_NAME, read_manifest


class ManifestDigests:
    """Compares each tensor that is read whole and unchanged; a manifest has no digests of other tensors.

    Args:
        source: a model folder under its own names; without a manifest, nothing is compared.
        plan: a plan with one tensor in each file.

    Raises:
        CorruptError: the manifest is invalid.
    """

    def __init__(self, source: StoredModel, plan: Plan) -> None:
        self.num_compared = 0
        self._plan = plan
        self._path = os.path.join(source.path, MANIFEST_NAME)
        is_model = source.format == "safetensors" and source.recipe is None and os.path.exists(self._path)
        tensors = read_manifest(self._path)["tensors"] if is_model else {}
        self._digests = {name: str(tensor["digest"]) for name, tensor in tensors.items()}
        self._lock = threading.Lock()

    def compare(self, part: FilePart) -> None:
        """Compare the digest of one file's tensor, after all its windows are read; any thread may call this.

        Raises:
            CorruptError: the manifest has another digest.
        """
        tensor = self._plan.files[part.index].tensors[0]
        want = self._digests.get(tensor.output.name)
        if want is None or not _is_as_stored(tensor):
            return
        digest = TensorDigest(tensor.output.nbytes)
        for _, known in part.digests:
            digest.join(known)
        got = digest_text(digest.digest())
        if got != want:
            raise CorruptError(
                f"{tensor.output.name}: its bytes are not those that were gathered",
                tensor=tensor.output.name,
                file=self._path,
                got=got,
                want=f"{want}, as in {MANIFEST_NAME}",
                next_step="gather the model again, or copy the file again from a good copy",
            )
        with self._lock:
            self.num_compared += 1


def _is_as_stored(tensor: TensorPlan) -> bool:
    output = tensor.output
    return (
        not tensor.changed
        and tensor.source_dtype == output.dtype
        and output.shape == output.global_shape
        and not output.is_padded
    )
