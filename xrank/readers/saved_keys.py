"""Keys under which trainers save a model, an optimizer and values of their own in one nested dict."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate

MODELS = frozenset({"model", "module", "state_dict", "model_state_dict", "model_state", "params"})
WRAPPERS = frozenset({"app", "app_state", "state"})
"""From torch's own tutorials: a Stateful that holds model and optimizer."""
OPTIMIZERS = frozenset(
    {"optim", "optimizer", "optimizers", "optimizer_state", "optimizer_states", "optimizer_state_dict"}
    | {"optim_state", "optim_states", "optim_state_dict", "optimizer_0", "opt_state"}
)
_TRAINERS = frozenset(
    {"lr_scheduler", "lr_schedulers", "scheduler", "schedulers", "dataloader", "train_state", "trainer", "extra_state"}
    | {"rng", "rng_state", "rng_states", "cuda_rng_state", "random_states", "epoch", "step", "global_step", "iteration"}
    | {"scaler", "grad_scaler", "loss_scaler", "callbacks", "sampler", "loops", "hyper_parameters"}
)
MOMENTS = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col", "exp_inf", "exp_avg_diff"}
    | {"momentum_buffer", "square_avg", "grad_avg", "acc_delta", "master_param"}
)
"""State that torch's optimizers, and similar ones, keep for a parameter."""
OPTIMIZER_KEYS = frozenset({"state", "param_groups"})
"""torch/optim/optimizer.py: state_dict."""


def leads_to_model(keys: Sequence[str | int]) -> bool:
    """Return whether a model lies under these keys by their names alone."""
    return bool(keys) and keys[-1] in MODELS and all(key in WRAPPERS for key in keys[:-1])


def is_left_out(key: str) -> bool:
    """Return whether what lies under a key belongs to an optimizer or a trainer."""
    # Some planners flatten names themselves: optimizer.state.exp_avg.…
    return key in OPTIMIZERS or key in _TRAINERS or key.partition(".")[0] in OPTIMIZERS


def names_of_optimizers(names: Collection[str]) -> frozenset[str]:
    """Return the flat names that belong to an optimizer, under any keys.

    torch names its state ``state.<parameter>.exp_avg``, behind the keys that lead to it, and the learning rates beside
    it ``param_groups.…lr``. If a state has groups beside it, all of it belongs to an optimizer; otherwise only the
    names beside a moment do.
    """
    whole: set[str] = set()
    owners: set[str] = set()
    for name in names:
        keys = name.split(".")
        if "param_groups" in keys:
            above = keys[: keys.index("param_groups")]
            whole.update(".".join([*above, key]) for key in OPTIMIZER_KEYS)
        if keys[-1] in MOMENTS and "state" in keys[:-1]:
            owners.add(".".join(keys[:-1]))
    return frozenset(
        name
        for name in names
        if name.rpartition(".")[0] in owners
        or (whole and not whole.isdisjoint(accumulate(name.split("."), "{}.{}".format)))
    )
