"""Uses of parameters outside the classes of torch.nn: the operations that models of transformers apply to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.distribution.every_module import classes, draw
from tests.distribution.whole_results import Example

Use = Callable[..., torch.Tensor]


class Uses(nn.Module):
    """Parameters of these shapes, and a function of the inputs and of them."""

    def __init__(self, use: Use, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.use = use
        for place, shape in enumerate(shapes):
            self.register_parameter(f"p{place}", nn.Parameter(torch.randn(shape) / math.sqrt(shape[-1])))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.use(*inputs, *self._parameters.values())


def use(function: Use, inputs: tuple[Any, ...], *shapes: tuple[int, ...]) -> Example:
    return lambda: Uses(function, *shapes), lambda: tuple(make() for make in inputs)


def _x(*shape: int) -> tuple[Callable[[], torch.Tensor], ...]:
    return (lambda: draw(*shape),)


FUNCTIONAL: dict[str, Example] = {
    "linear": use(functional.linear, _x(3, 6), (5, 6), (5,)),
    "linear by names": use(lambda x, w, b: functional.linear(input=x, weight=w, bias=b), _x(6), (5, 6), (5,)),
    "linear of a transposed weight": use(lambda x, w: functional.linear(x, w.T), _x(6), (6, 5)),
    "linear of a part": use(lambda x, w: functional.linear(x, w[:4]), _x(6), (6, 6)),
    "linear of a normalized weight": use(
        lambda x, w: functional.linear(functional.normalize(x), functional.normalize(w)), _x(6), (5, 6)
    ),
    "embedding": use(functional.embedding, (lambda: classes(5),), (6, 5)),
    "embedding by names": use(lambda x, w: functional.embedding(input=x, weight=w), (lambda: classes(5),), (6, 5)),
    "embedding_bag": use(functional.embedding_bag, (lambda: classes(5),), (6, 5)),
    "bilinear": use(functional.bilinear, (*_x(6), *_x(5)), (3, 6, 5), (3,)),
    "conv1d": use(lambda x, w, b: functional.conv1d(x, w, b, padding=1), _x(4, 7), (6, 4, 3), (6,)),
    "conv1d of one channel each": use(
        lambda x, w: functional.conv1d(x, w.unsqueeze(1), padding=2, groups=6)[..., :5], _x(6, 5), (6, 3)
    ),
    "conv2d": use(functional.conv2d, _x(4, 5, 5), (6, 4, 3, 3), (6,)),
    "conv3d": use(functional.conv3d, _x(2, 3, 3, 3), (4, 2, 2, 2, 2), (4,)),
    "conv_transpose1d": use(functional.conv_transpose1d, _x(4, 5), (4, 6, 3), (6,)),
    "conv_transpose2d": use(functional.conv_transpose2d, _x(4, 3, 3), (4, 6, 3, 3), (6,)),
    "layer_norm": use(lambda x, w, b: functional.layer_norm(x, (6,), w, b), _x(3, 6), (6,), (6,)),
    "rms_norm": use(lambda x, w: functional.rms_norm(x, (6,), w), _x(3, 6), (6,)),
    "rms_norm by hand": use(lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), _x(3, 6), (6,)),
    "rms_norm of one more": use(lambda x, w: functional.rms_norm(x, (6,)) * (1.0 + w.float()), _x(3, 6), (6,)),
    "group_norm": use(lambda x, w, b: functional.group_norm(x, 2, w, b), _x(6, 3), (6,), (6,)),
    "batch_norm": use(
        lambda x, w, b: functional.batch_norm(x, None, None, weight=w, bias=b, training=True), _x(6, 3), (6,), (6,)
    ),
    "instance_norm": use(lambda x, w, b: functional.instance_norm(x, weight=w, bias=b), _x(6, 5), (6,), (6,)),
    "prelu": use(functional.prelu, _x(6, 3), (6,)),
    "softmax of sinks": use(
        lambda x, w: torch.cat([x, w.expand(x.shape[0], 1, 6).mT], -1).softmax(-1)[..., :-1], _x(6, 3), (6,)
    ),
    "glu": use(lambda x, w: functional.glu(x @ w, -1), _x(3, 6), (6, 8)),
    "softplus of steps": use(lambda x, w: functional.softplus(x + w), _x(3, 6), (6,)),
    "logsigmoid of decays": use(lambda x, w: functional.logsigmoid(x * w), _x(3, 6), (6,)),
    "interpolate of positions": use(
        lambda x, w: x + functional.interpolate(w[None], size=(4, 4), mode="bilinear").flatten(), _x(96), (6, 3, 3)
    ),
    "grid_sample of positions": use(
        lambda x, w: functional.grid_sample(w.expand(x.shape[0], -1, -1, -1), x.tanh(), align_corners=False),
        _x(3, 3, 2),
        (6, 4, 4),
    ),
    "pad of a table": use(lambda x, w: x @ functional.pad(w, (0, 2)), _x(3, 6), (6, 5)),
    "unfold of a picture": use(lambda x, w: w @ functional.unfold(x, 2), _x(3, 4, 4), (5, 12)),
    "dropout of a parameter": use(lambda x, w: x + functional.dropout(w, 0.0), _x(6), (6,)),
    "scaled_dot_product_attention": use(
        lambda x, q, k, v: functional.scaled_dot_product_attention(x @ q, x @ k, x @ v, is_causal=True),
        _x(2, 5, 6),
        *[(6, 4)] * 3,
    ),
    "scaled_dot_product_attention of learned keys": use(
        lambda x, k, v: functional.scaled_dot_product_attention(x, k.expand_as(x), v.expand_as(x)),
        _x(2, 5, 6),
        (5, 6),
        (5, 6),
    ),
    "multi_head_attention_forward": use(
        lambda x, w, b, out, out_b: functional.multi_head_attention_forward(
            *[x.transpose(0, 1)] * 3, 6, 2, w, b, None, None, False, 0.0, out, out_b, need_weights=False
        )[0].transpose(0, 1),
        _x(3, 6),
        (18, 6),
        (18,),
        (6, 6),
        (6,),
    ),
    "cosine_similarity": use(lambda x, w: functional.cosine_similarity(x[:, None], w, -1), _x(6), (5, 6)),
    "cross_entropy of a table": use(
        lambda x, y, w: functional.cross_entropy(x @ w.T, y), (*_x(6), lambda: classes()), (6, 6)
    ),
    "cross_entropy with ignored targets": use(
        lambda x, y, w: functional.cross_entropy(x @ w.T, y, ignore_index=1),
        (*_x(6), lambda: torch.tensor([0, 1, 1, 4])),
        (6, 6),
    ),
    "mse_loss": use(lambda x, w: functional.mse_loss(x @ w, x), _x(6), (6, 6)),
    "gumbel_softmax of a codebook": use(lambda x, w: (x @ w.T).softmax(-1) @ w, _x(6), (5, 6)),
}
"""Functions of torch.nn.functional that transformers' models call."""

OPERATIONS: dict[str, Example] = {
    "x + p": use(lambda x, w: x + w, _x(3, 6), (3, 6)),
    "p - x": use(lambda x, w: w - x, _x(3, 6), (6,)),
    "x * p": use(lambda x, w: x * w, _x(3, 6), (6,)),
    "x / p": use(lambda x, w: x / (w.abs() + 1), _x(3, 6), (6,)),
    "x @ p": use(lambda x, w: x @ w, _x(3, 6), (6, 5)),
    "p @ x": use(lambda x, w: w @ x, _x(6, 3), (5, 6)),
    "matmul": use(torch.matmul, _x(3, 6), (6, 5)),
    "mm": use(torch.mm, _x(6), (6, 5)),
    "bmm of experts": use(lambda x, w: torch.bmm(x.transpose(0, 1), w).transpose(0, 1), _x(3, 6), (3, 6, 5)),
    "baddbmm": use(
        lambda x, w, b: torch.baddbmm(b[:, None], x.transpose(0, 1), w).transpose(0, 1), _x(3, 6), (3, 6, 5), (3, 5)
    ),
    "addmm": use(lambda x, w, b: torch.addmm(b, x, w), _x(6), (6, 5), (5,)),
    "einsum": use(lambda x, w: torch.einsum("bsh,hnd->bsnd", x, w), _x(3, 6), (6, 2, 3)),
    "experts by index": use(
        lambda x, up, down: sum(functional.silu(x @ up[i].T) @ down[i].T for i in range(3)), _x(6), (3, 8, 6), (3, 6, 8)
    ),
    "experts' chunks": use(
        lambda x, w: (lambda gate, up: functional.silu(gate) * up)(*functional.linear(x, w[1]).chunk(2, -1)),
        _x(6),
        (3, 8, 6),
    ),
    "experts chosen": use(
        lambda x, y, w: torch.einsum("bh,boh->bo", x, w[y]), (*_x(6), lambda: classes(count=3)), (3, 5, 6)
    ),
    "rows by index": use(lambda y, w: w[y], (lambda: classes(5),), (6, 5)),
    "index_select": use(lambda y, w: torch.index_select(w, 0, y), (lambda: classes(),), (6, 5)),
    "gather": use(lambda y, w: torch.gather(w.expand(y.shape[0], -1), 1, y), (lambda: classes(5),), (6,)),
    "take_along_dim": use(lambda y, w: torch.take_along_dim(w[None], y, 1), (lambda: classes(5),), (6,)),
    "relative positions": use(
        lambda x, w: x + w[(torch.arange(4)[:, None] - torch.arange(4)) + 3].permute(2, 0, 1), _x(2, 4, 4), (7, 2)
    ),
    "cat of a class token": use(lambda x, w: torch.cat([w.expand(x.shape[0], -1, -1), x], 1), _x(3, 6), (1, 1, 6)),
    "cat of two parameters": use(lambda x, v, w: x @ torch.cat([v, w], -1), _x(6), (6, 2), (6, 3)),
    "stack": use(lambda x, v, w: x[..., None] * torch.stack([v, w], -1), _x(6), (6,), (6,)),
    "repeat": use(lambda x, w: x + w.repeat(x.shape[0], 3, 1), _x(3, 6), (1, 1, 6)),
    "repeat_interleave": use(lambda x, w: x * w.repeat_interleave(2), _x(6), (3,)),
    "tile": use(lambda x, w: x * torch.tile(w, (2,)), _x(6), (3,)),
    "broadcast_to": use(lambda x, w: x * torch.broadcast_to(w, x.shape), _x(3, 6), (6,)),
    "where of a mask token": use(lambda x, w: torch.where(x > 0, x, w), _x(3, 6), (6,)),
    "masked_fill": use(lambda x, w: (x * w).masked_fill(x > 0, 0), _x(3, 6), (6,)),
    "setitem": use(lambda x, w: (lambda y: (y.__setitem__(x > 1, 0.0), y)[1])(x * w), _x(3, 6), (6,)),
    "split": use(lambda x, w: sum(x @ part.T for part in w.split(2)), _x(6), (4, 6)),
    "chunk": use(lambda x, w: torch.stack([x @ part.T for part in w.chunk(2)], -1), _x(6), (4, 6)),
    "unbind": use(lambda x, w: torch.stack([x @ part for part in w.unbind(0)], -1), _x(6), (4, 6)),
    "tensor_split": use(lambda x, w: sum(x @ part.T for part in torch.tensor_split(w, 2)), _x(6), (4, 6)),
    "view": use(lambda x, w: x @ w.view(6, 4), _x(6), (6, 2, 2)),
    "reshape": use(lambda x, w: x @ w.reshape(6, 4), _x(6), (2, 3, 4)),
    "flatten": use(lambda x, w: x @ w.flatten(1), _x(6), (6, 2, 2)),
    "unflatten": use(lambda x, w: torch.einsum("bh,nhd->bnd", x, w.unflatten(0, (2, 6))), _x(6), (12, 3)),
    "permute": use(lambda x, w: x @ w.permute(1, 2, 0).flatten(1), _x(6), (2, 6, 2)),
    "transpose": use(lambda x, w: x @ w.transpose(0, 1), _x(6), (5, 6)),
    "t": use(lambda x, w: x @ w.t(), _x(6), (5, 6)),
    "mT": use(lambda x, w: x @ w.mT, _x(6), (5, 6)),
    "squeeze": use(lambda x, w: x * w.squeeze(), _x(6), (1, 6, 1)),
    "unsqueeze": use(lambda x, w: x * w.unsqueeze(0), _x(3, 6), (3, 6)),
    "flip": use(lambda x, w: x * w.flip(0), _x(6), (6,)),
    "roll": use(lambda x, w: x * w.roll(2, 0), _x(6), (6,)),
    "to another dtype": use(lambda x, w: (x.double() @ w.to(torch.float64)).float(), _x(6), (6, 5)),
    "float": use(lambda x, w: x * w.float(), _x(6), (6,)),
    "type_as": use(lambda x, w: x * w.type_as(x), _x(6), (6,)),
    "clone": use(lambda x, w: x * w.clone(), _x(6), (6,)),
    "contiguous": use(lambda x, w: x * w.contiguous(), _x(6), (6,)),
    "exp of A_log": use(lambda x, w: torch.exp(-torch.exp(w.float()) * x[..., None].abs()), _x(6), (6, 4)),
    "logit_scale": use(lambda x, w: x * w.exp(), _x(6), (1,)),
    "clamp": use(lambda x, w: x * torch.clamp(w, max=0.5), _x(6), (6,)),
    "tanh gate": use(lambda x, w: x + w.tanh() * x.sin(), _x(6), (1,)),
    "sigmoid gate": use(lambda x, w: torch.sigmoid(w) * x, _x(6), (6,)),
    "softmax of weights": use(lambda x, w: (x * w.softmax(0)[None, :, None]).sum(1), _x(4, 6), (4,)),
    "cumsum": use(lambda x, w: x * w.cumsum(-1), _x(6), (6,)),
    "cumprod": use(lambda x, w: x * w.cumprod(-1), _x(6), (6,)),
    "logcumsumexp": use(lambda x, w: x * w.logcumsumexp(-1), _x(6), (6,)),
    "logsumexp": use(lambda x, w: (x @ w).logsumexp(-1), _x(6), (6, 5)),
    "norm": use(lambda x, w: x @ (w / w.norm(dim=-1, keepdim=True)).T, _x(6), (5, 6)),
    "mean": use(lambda x, w: x * w.mean(0), _x(6), (5, 6)),
    "std": use(lambda x, w: x / w.std(), _x(6), (5, 6)),
    "var_mean": use(lambda x, w: x * torch.var_mean(w, 0)[0], _x(6), (5, 6)),
    "max": use(lambda x, w: x * w.max(), _x(6), (5, 6)),
    "topk": use(lambda x, w: (x @ w).topk(2, -1).values, _x(6), (6, 5)),
    "sort": use(lambda x, w: x * w.sort().values, _x(6), (6,)),
    "tril": use(lambda x, w: x @ w.tril(), _x(6), (6, 6)),
    "diagonal": use(lambda x, w: x * w.diagonal(), _x(6), (6, 6)),
    "diag": use(lambda x, w: x @ torch.diag(w), _x(6), (6,)),
    "outer": use(lambda x, v, w: x @ torch.outer(v, w), _x(6), (6,), (5,)),
    "kron": use(lambda x, v, w: x @ torch.kron(v, w), _x(6), (2, 2), (3, 3)),
    "cdist of a codebook": use(lambda x, w: torch.cdist(x, w), _x(6), (5, 6)),
    "nearest code": use(lambda x, w: w[torch.cdist(x, w).argmin(-1)], _x(6), (5, 6)),
    "lerp": use(lambda x, w: torch.lerp(x, -x, w), _x(6), (6,)),
    "addcmul": use(lambda x, w: torch.addcmul(x, w, x.sin()), _x(6), (6,)),
    "view_as_complex": use(
        lambda x, w: torch.view_as_real(torch.view_as_complex(x.contiguous()) * torch.view_as_complex(w)),
        _x(3, 2),
        (3, 2),
    ),
    "item": use(lambda x, w: x * w * w.detach().sum().item(), _x(6), (6,)),
    "len and loop": use(lambda x, w: torch.stack([x @ w[i] for i in range(len(w))], -1), _x(6), (4, 6)),
    "iteration": use(lambda x, w: torch.stack([x @ row for row in w], -1), _x(6), (4, 6)),
    "is not None": use(lambda x, w: x * w if w is not None and w.requires_grad else x, _x(6), (6,)),
    "new_zeros": use(lambda x, w: x * w + w.new_zeros(6), _x(6), (6,)),
    "zeros_like": use(lambda x, w: x * w + torch.zeros_like(w), _x(6), (6,)),
    "detach": use(lambda x, w: x * w + w.detach(), _x(6), (6,)),
    "inverse": use(lambda x, w: x @ torch.linalg.inv(w + 5 * torch.eye(6)), _x(6), (6, 6)),
    "qr": use(lambda x, w: x @ torch.linalg.qr(w).Q, _x(6), (6, 4)),
    "fft": use(lambda x, w: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(w), 6), _x(6), (6,)),
    "two uses": use(lambda x, w: (x @ w).relu() @ w.T, _x(6), (6, 5)),
    "augmented by a product": use(lambda x, a, b, w: x @ (w + a @ b), _x(6), (6, 2), (2, 5), (6, 5)),
}
"""Functions of torch and methods of its tensors, as transformers' models use them on parameters."""
