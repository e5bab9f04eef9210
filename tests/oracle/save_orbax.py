"""Models with MaxText's names and layouts, saved by Orbax's CheckpointManager, and the logits that they compute.

    python -m tests.oracle.save_orbax FOLDER [PROCESS PORT]

Without a process number one process with 8 devices saves all cases; with one, two processes of 4 devices save one.
The forward pass has MaxText's conventions (MaxText/layers/attentions.py, embeddings.py): kernels [embed, heads, head
dim], queries that contain 1 / sqrt(head dim), rotary pairs that are neighbors (rope_type llama3.1) or halves.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={8 if len(sys.argv) < 3 else 4}"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, VOCAB, LENGTH = 3, 64, 96, 4, 2, 160, 12


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of model, and how it is saved."""

    model_type: str
    recipe: str
    head_dim: int = 16
    rope: str = "halves"
    is_scanned: bool = True
    dtype: Any = jnp.float32
    is_tied: bool = False
    options: tuple[tuple[str, bool], ...] = ()
    """Of Orbax's PyTreeCheckpointHandler; without any, StandardSave is used."""

    @property
    def scales_query(self) -> bool:
        return self.model_type != "qwen3"


CASES = {
    "llama3.1": Case("llama", "maxtext-llama3.1", rope="pairs"),
    "llama3.1, numbered layers": Case("llama", "maxtext-llama3.1", rope="pairs", is_scanned=False),
    "llama3.1, zarr3": Case("llama", "maxtext-llama3.1", rope="pairs", options=(("use_zarr3", True),)),
    "llama2, bf16": Case("llama", "maxtext-llama2", dtype=jnp.bfloat16, options=(("use_ocdbt", True),)),
    "llama2, folders": Case("llama", "maxtext-llama2", options=(("use_ocdbt", False),)),
    "mistral, zarr3 folders": Case(
        "mistral", "maxtext-mistral", head_dim=32, options=(("use_ocdbt", False), ("use_zarr3", True))
    ),
    "qwen3, tied": Case("qwen3", "maxtext-qwen3", head_dim=32, is_tied=True),
}
TWO_PROCESSES = "llama3.1"


def make_config(case: Case) -> dict[str, Any]:
    """Return the config.json of transformers."""
    return {
        "model_type": case.model_type,
        "architectures": [f"{case.model_type.capitalize()}ForCausalLM"],
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": case.head_dim,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": case.is_tied,
        "hidden_act": "silu",
        "sliding_window": None,
        "max_position_embeddings": 64,
    }


def make_params(case: Case) -> dict[str, Any]:
    """Return random parameters under MaxText's names."""
    random = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape) / 5, case.dtype)

    def layer() -> dict[str, Any]:
        attention = {
            "query": {"kernel": draw(HIDDEN, HEADS, case.head_dim)},
            "key": {"kernel": draw(HIDDEN, KV_HEADS, case.head_dim)},
            "value": {"kernel": draw(HIDDEN, KV_HEADS, case.head_dim)},
            "out": {"kernel": draw(HEADS, case.head_dim, HIDDEN)},
        }
        if case.model_type == "qwen3":
            attention |= {name: {"scale": 1 + draw(case.head_dim)} for name in ("query_norm", "key_norm")}
        return {
            "pre_self_attention_layer_norm": {"scale": 1 + draw(HIDDEN)},
            "self_attention": attention,
            "post_self_attention_layer_norm": {"scale": 1 + draw(HIDDEN)},
            "mlp": {
                "wi_0": {"kernel": draw(HIDDEN, FFN)},
                "wi_1": {"kernel": draw(HIDDEN, FFN)},
                "wo": {"kernel": draw(FFN, HIDDEN)},
            },
        }

    layers = [layer() for _ in range(LAYERS)]
    # param_scan_axis is 1: layers are the second dim.
    stacked = (
        {"layers": jax.tree.map(lambda *each: jnp.stack(each, axis=1), *layers)}
        if case.is_scanned
        else {f"layers_{number}": each for number, each in enumerate(layers)}
    )
    decoder = {**stacked, "decoder_norm": {"scale": 1 + draw(HIDDEN)}}
    if not case.is_tied:
        decoder["logits_dense"] = {"kernel": draw(HIDDEN, VOCAB)}
    return {"token_embedder": {"embedding": draw(VOCAB, HIDDEN)}, "decoder": decoder}


def forward(case: Case, params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """Return the logits [length, vocab] of one sequence, in float32."""
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
    decoder, embedding = params["decoder"], params["token_embedder"]["embedding"]
    hidden = embedding[tokens]
    for number in range(LAYERS):
        one = (
            jax.tree.map(lambda leaf, at=number: leaf[:, at], decoder["layers"])
            if case.is_scanned
            else decoder[f"layers_{number}"]
        )
        hidden = hidden + attend(case, one["self_attention"], norm(one["pre_self_attention_layer_norm"], hidden))
        normed = norm(one["post_self_attention_layer_norm"], hidden)
        gate, up = (normed @ one["mlp"][name]["kernel"] for name in ("wi_0", "wi_1"))
        hidden = hidden + (jax.nn.silu(gate) * up) @ one["mlp"]["wo"]["kernel"]
    hidden = norm(decoder["decoder_norm"], hidden)
    return hidden @ (embedding.T if case.is_tied else decoder["logits_dense"]["kernel"])


def norm(scale: dict[str, jax.Array], values: jax.Array) -> jax.Array:
    """RMSNorm over the last dim."""
    return values * jax.lax.rsqrt(jnp.mean(values**2, axis=-1, keepdims=True) + 1e-5) * scale["scale"]


def attend(case: Case, weights: dict[str, Any], values: jax.Array) -> jax.Array:
    """Causal attention with grouped keys."""
    query, key, value = (
        jnp.einsum("sh,hnd->snd", values, weights[name]["kernel"]) for name in ("query", "key", "value")
    )
    if case.model_type == "qwen3":
        query, key = norm(weights["query_norm"], query), norm(weights["key_norm"], key)
        query = query / jnp.sqrt(case.head_dim)
    query, key = rotate(case, query), rotate(case, key)
    key, value = (jnp.repeat(each, HEADS // KV_HEADS, axis=1) for each in (key, value))
    # No scale: MaxText's queries contain it.
    scores = jnp.einsum("snd,tnd->nst", query, key)
    scores = jnp.where(jnp.tril(jnp.ones((len(values), len(values)), bool)), scores, -jnp.inf)
    mixed = jnp.einsum("nst,tnd->snd", jax.nn.softmax(scores, axis=-1), value)
    return jnp.einsum("snd,ndh->sh", mixed, weights["out"]["kernel"])


def rotate(case: Case, values: jax.Array) -> jax.Array:
    """Rotary positions of [length, heads, head dim]."""
    half = case.head_dim // 2
    angles = jnp.arange(len(values))[:, None] / 10000.0 ** (jnp.arange(half) / half)
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    if case.rope == "pairs":
        first, second = values[..., ::2], values[..., 1::2]
        turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return turned.reshape(values.shape)
    first, second = jnp.split(values, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def place(tree: Any) -> Any:
    """Return a tree cut over all devices: the first dim over one axis of the mesh, the last over the other."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))

    def cut(leaf: jax.Array) -> jax.Array:
        spec = [None] * leaf.ndim
        if leaf.ndim > 1 and leaf.shape[0] % 4 == 0 and leaf.shape[-1] % 2 == 0:
            spec[0], spec[-1] = "fsdp", "tensor"
        return jax.make_array_from_callback(
            leaf.shape, NamedSharding(mesh, PartitionSpec(*spec)), lambda index: np.asarray(leaf)[index]
        )

    return jax.tree.map(cut, tree)


def save(folder: Path, case: Case) -> None:
    """Save a training state, a config.json beside it, and the logits."""
    params = make_params(case)
    state = {
        "params": {"params": params},
        "opt_state": optax.adamw(1e-3).init(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)),
        "step": jnp.array(7),
    }
    handler = {"items": ocp.PyTreeCheckpointHandler(**dict(case.options))} if case.options else None
    with ocp.CheckpointManager(folder / "run", item_handlers=handler) as manager:
        own = ocp.args.Composite(items=ocp.args.PyTreeSave(place(state))) if handler else None
        manager.save(7, args=own or ocp.args.StandardSave(place(state)))
        manager.wait_until_finished()
    if jax.process_index() == 0:
        (folder / "run" / "config.json").write_text(json.dumps(make_config(case)))
        tokens = np.random.default_rng(1).integers(0, VOCAB, LENGTH)
        np.savez(folder / "logits.npz", tokens=tokens, logits=np.asarray(forward(case, params, jnp.asarray(tokens))))


def main() -> None:
    folder = Path(sys.argv[1])
    if len(sys.argv) > 2:
        process, port = int(sys.argv[2]), sys.argv[3]
        jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)
        save(folder, CASES[TWO_PROCESSES])
        return
    for name, case in CASES.items():
        save(folder / name, case)


if __name__ == "__main__":
    main()
