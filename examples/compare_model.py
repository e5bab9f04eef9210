"""Compares a model folder with the reference of train_shards.py: names, dtypes, every byte, and the logits."""

from __future__ import annotations

import argparse
import os
import sys

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging


def first_difference(model: torch.nn.Module, reference: dict) -> str | None:
    """Say what differs first, or return None if nothing does."""
    found, wanted = model.state_dict(), reference["state_dict"]
    for name in sorted(found.keys() ^ wanted.keys()):
        return f"{name} is in the {'model' if name in found else 'reference'} only"
    for name, want in wanted.items():
        got = found[name]
        if (got.dtype, got.shape) != (want.dtype, want.shape):
            return f"{name} is {got.dtype} {tuple(got.shape)}, want {want.dtype} {tuple(want.shape)}"
        # As bytes, because numbers hide some differences: 0.0 equals -0.0, and NaN equals nothing.
        unequal = int((got.flatten().view(torch.uint8) != want.flatten().view(torch.uint8)).sum())
        if unequal:
            return f"{name}: {unequal:,} of {want.nbytes:,} bytes differ"
    with torch.no_grad():
        logits = model(input_ids=reference["tokens"]).logits
    if not torch.equal(logits, reference["logits"]):
        return f"the tensors are equal, but {int((logits != reference['logits']).sum()):,} of the logits differ"
    return None


def main() -> None:
    """Load the folder as anybody would, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a Hugging Face folder")
    parser.add_argument("reference", help="what train_shards.py wrote to --reference")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # as in train_shards.py: another order of summing gives other logits

    reference = torch.load(os.path.join(options.reference, "reference.pt"), weights_only=True)
    # dtype "auto": as stored. The info tells tensors that from_pretrained would pass over or make up.
    model, info = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto", output_loading_info=True)
    problems = {kind: names for kind, names in info.items() if names}
    difference = f"not loaded as it lies there: {problems}" if problems else first_difference(model, reference)
    if difference is not None:
        sys.exit(f"DIFFERENT  {options.model}: {difference}")
    tensors, logits = reference["state_dict"].values(), reference["logits"]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    print(f"equal    {len(tensors)} names and dtypes, {nbytes:,} bytes of tensors, {logits.numel():,} logits")


if __name__ == "__main__":
    main()
