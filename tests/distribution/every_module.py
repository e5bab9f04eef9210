"""A small example of each class of torch.nn: how it is made, and inputs whose dim 0 is the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.distribution.whole_results import Example

BATCH = 4


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(BATCH, *shape)


def classes(*shape: int, count: int = 6) -> torch.Tensor:
    return torch.randint(0, count, (BATCH, *shape))


class Cut(nn.Module):
    """A linear layer, whose weight is cut, before a module without parameters."""

    def __init__(self, module: nn.Module, width: int, *, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.first, self.module, self.shape = nn.Linear(width, width), module, shape

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.module(x.unflatten(-1, self.shape) if self.shape else x, *others)


WITH_PARAMETERS: dict[str, Example] = {
    "Linear": (lambda: nn.Linear(6, 5), lambda: (draw(3, 6),)),
    "Bilinear": (lambda: nn.Bilinear(6, 5, 3), lambda: (draw(6), draw(5))),
    "Embedding": (lambda: nn.Embedding(7, 6, padding_idx=2), lambda: (classes(5),)),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(7, 6), lambda: (classes(5),)),
    "Conv1d": (lambda: nn.Conv1d(4, 6, 3), lambda: (draw(4, 8),)),
    "Conv2d": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), lambda: (draw(4, 8, 8),)),
    "Conv3d": (lambda: nn.Conv3d(2, 3, 2), lambda: (draw(2, 4, 4, 4),)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 6, 3), lambda: (draw(4, 8),)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), lambda: (draw(4, 5, 5),)),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(2, 3, 2), lambda: (draw(2, 3, 3, 3),)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(6), lambda: (draw(6, 3),)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(6), lambda: (draw(6, 3, 3),)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(3), lambda: (draw(3, 2, 2, 2),)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(6, affine=True), lambda: (draw(6, 5),)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(6, affine=True), lambda: (draw(6, 3, 3),)),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(3, affine=True), lambda: (draw(3, 2, 2, 2),)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 6), lambda: (draw(6, 3),)),
    "LayerNorm": (lambda: nn.LayerNorm((3, 6)), lambda: (draw(3, 6),)),
    "RMSNorm": (lambda: nn.RMSNorm(6), lambda: (draw(3, 6),)),
    "PReLU": (lambda: nn.PReLU(6), lambda: (draw(6, 3),)),
    "RNN": (lambda: nn.RNN(4, 5, 2, batch_first=True, bidirectional=True), lambda: (draw(3, 4),)),
    "LSTM": (lambda: nn.LSTM(4, 6, 2, batch_first=True, proj_size=3), lambda: (draw(3, 4),)),
    "GRU": (lambda: nn.GRU(4, 5, batch_first=True), lambda: (draw(3, 4),)),
    "RNNCell": (lambda: nn.RNNCell(4, 5), lambda: (draw(4),)),
    "LSTMCell": (lambda: nn.LSTMCell(4, 5), lambda: (draw(4),)),
    "GRUCell": (lambda: nn.GRUCell(4, 5), lambda: (draw(4),)),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True, kdim=6, vdim=5, add_bias_kv=True),
        lambda: (draw(3, 8), draw(4, 6), draw(4, 5)),
    ),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True),
        lambda: (draw(3, 8),),
    ),
    "TransformerDecoderLayer": (
        lambda: nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0, batch_first=True),
        lambda: (draw(3, 8), draw(4, 8)),
    ),
    "TransformerEncoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True), 2),
        lambda: (draw(3, 8),),
    ),
    "TransformerDecoder": (
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0, batch_first=True), 1),
        lambda: (draw(3, 8), draw(4, 8)),
    ),
    "Transformer": (
        lambda: nn.Transformer(8, 2, 1, 1, 12, dropout=0.0, batch_first=True),
        lambda: (draw(3, 8), draw(4, 8)),
    ),
    "AdaptiveLogSoftmaxWithLoss": (
        lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 12, [4, 8], head_bias=True),
        lambda: (draw(8), classes(count=12)),
    ),
}

_ELEMENTWISE = [
    "CELU", "ELU", "GELU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU",
    "LogSigmoid", "Mish", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softshrink", "Softsign", "Tanh",
    "Tanhshrink",
]  # fmt: skip

WITHOUT_PARAMETERS: dict[str, Example] = {
    **{name: (lambda name=name: Cut(getattr(nn, name)(), 6), lambda: (draw(6),)) for name in _ELEMENTWISE},
    **{
        name: (lambda name=name, p=p, shape=shape: Cut(getattr(nn, name)(p), 12, shape=shape), lambda: (draw(12),))
        for name, p, shape in (
            ("AlphaDropout", 0.0, ()),
            ("Dropout", 0.0, ()),
            ("Dropout1d", 0.0, (3, 4)),
            ("Dropout2d", 0.0, (3, 2, 2)),
            ("Dropout3d", 0.0, (3, 2, 2, 1)),
            ("FeatureAlphaDropout", 0.0, (3, 2, 2)),
        )
    },
    "GLU": (lambda: Cut(nn.GLU(), 6), lambda: (draw(6),)),
    "Threshold": (lambda: Cut(nn.Threshold(0.1, 0.5), 6), lambda: (draw(6),)),
    "RReLU": (lambda: Cut(nn.RReLU(0.2, 0.2), 6), lambda: (draw(6),)),
    "Softmax": (lambda: Cut(nn.Softmax(-1), 6), lambda: (draw(6),)),
    "Softmin": (lambda: Cut(nn.Softmin(-1), 6), lambda: (draw(6),)),
    "LogSoftmax": (lambda: Cut(nn.LogSoftmax(-1), 6), lambda: (draw(6),)),
    "Softmax2d": (lambda: Cut(nn.Softmax2d(), 12, shape=(3, 2, 2)), lambda: (draw(12),)),
}


def _on_grid(kind: str, *args: Any, ndim: int) -> Example:
    """A module of channels and `ndim` further dims."""
    shape = (3, *(4,) * ndim)
    width = 3 * 4**ndim
    return lambda: Cut(getattr(nn, kind)(*args), width, shape=shape), lambda: (draw(width),)


for _ndim in (1, 2, 3):
    for _kind, _args in (
        ("AdaptiveAvgPool", (2,)), ("AdaptiveMaxPool", (2,)), ("AvgPool", (2,)), ("MaxPool", (2,)), ("LPPool", (2, 2)),
        ("CircularPad", (1,)), ("ConstantPad", (1, 0.5)), ("ReflectionPad", (1,)), ("ReplicationPad", (1,)),
        ("ZeroPad", (1,)),
    ):  # fmt: skip
        WITHOUT_PARAMETERS[f"{_kind}{_ndim}d"] = _on_grid(f"{_kind}{_ndim}d", *_args, ndim=_ndim)

for _kind, _args, _ndim in (
    ("ChannelShuffle", (3,), 2), ("CrossMapLRN2d", (3,), 2), ("LocalResponseNorm", (2,), 2),
    ("PixelUnshuffle", (2,), 2), ("Upsample", (None, 2), 2), ("UpsamplingNearest2d", (None, 2), 2),
    ("UpsamplingBilinear2d", (None, 2), 2), ("Unfold", (2,), 2), ("Flatten", (), 2), ("Unflatten", (1, (3, 1)), 2),
):  # fmt: skip
    WITHOUT_PARAMETERS[_kind] = _on_grid(_kind, *_args, ndim=_ndim)

WITHOUT_PARAMETERS |= {
    "PixelShuffle": (lambda: Cut(nn.PixelShuffle(2), 16, shape=(4, 2, 2)), lambda: (draw(16),)),
    "Fold": (lambda: Cut(nn.Fold((3, 3), (2, 2)), 16, shape=(4, 4)), lambda: (draw(16),)),
    "CosineSimilarity": (lambda: Cut(nn.CosineSimilarity(), 6), lambda: (draw(6), draw(6))),
    "PairwiseDistance": (lambda: Cut(nn.PairwiseDistance(), 6), lambda: (draw(6), draw(6))),
    "BCELoss": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Sigmoid(), _With(nn.BCELoss(), 0.3)), lambda: (draw(6),)),
    "NLLLoss": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.LogSoftmax(-1), _With(nn.NLLLoss(), "classes")),
        lambda: (draw(6),),
    ),
    "CTCLoss": (lambda: _CTC(), lambda: (draw(5, 6),)),
}


class _With(nn.Module):
    """A loss with targets of its own: a constant, or classes equal for all samples."""

    def __init__(self, loss: nn.Module, target: Any) -> None:
        super().__init__()
        self.loss, self.target = loss, target

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.target == "classes":
            return self.loss(x, torch.zeros(len(x), dtype=torch.long))
        return self.loss(x, torch.full_like(x, self.target))


class _CTC(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.loss = nn.Linear(6, 6), nn.CTCLoss()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.first(x).log_softmax(-1).transpose(0, 1)
        count = x.shape[0]
        targets = torch.tensor([[1, 2]]).expand(count, 2)
        return self.loss(scores, targets, torch.full((count,), 5), torch.full((count,), 2))


def _signs() -> torch.Tensor:
    return torch.tensor([1.0, -1.0, 1.0, -1.0])


_TARGETS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "BCEWithLogitsLoss": lambda: (torch.rand(BATCH, 6),),
    "CosineEmbeddingLoss": lambda: (draw(6), _signs()),
    "CrossEntropyLoss": lambda: (torch.tensor([0, 3, -100, 5]),),
    "GaussianNLLLoss": lambda: (draw(6), torch.rand(BATCH, 6) + 0.5),
    "HingeEmbeddingLoss": lambda: (draw(6).sign(),),
    "HuberLoss": lambda: (draw(6),),
    "L1Loss": lambda: (draw(6),),
    "MSELoss": lambda: (draw(6),),
    "MarginRankingLoss": lambda: (draw(6), draw(6).sign()),
    "MultiLabelMarginLoss": lambda: (torch.tensor([[0, 3, -1, 0, 0, 0]] * BATCH),),
    "MultiLabelSoftMarginLoss": lambda: (torch.rand(BATCH, 6).round(),),
    "MultiMarginLoss": lambda: (classes(),),
    "PoissonNLLLoss": lambda: (torch.rand(BATCH, 6),),
    "SmoothL1Loss": lambda: (draw(6),),
    "SoftMarginLoss": lambda: (draw(6).sign(),),
    "TripletMarginLoss": lambda: (draw(6), draw(6)),
    "TripletMarginWithDistanceLoss": lambda: (draw(6), draw(6)),
}
for _kind, _make in _TARGETS.items():
    WITHOUT_PARAMETERS[_kind] = (
        lambda kind=_kind: Cut(getattr(nn, kind)(), 6),
        lambda make=_make: (draw(6), *make()),
    )

WITHOUT_PARAMETERS["KLDivLoss"] = (
    lambda: Cut(nn.KLDivLoss(reduction="batchmean"), 6),
    lambda: (torch.rand(BATCH, 6),) * 2,
)
if hasattr(nn, "LinearCrossEntropyLoss"):  # since torch 2.13
    WITH_PARAMETERS["LinearCrossEntropyLoss"] = (
        lambda: nn.LinearCrossEntropyLoss(6, 5, bias=True, ignore_index=-100),
        lambda: (draw(6), torch.tensor([0, 3, -100, 4])),
    )

LEFT_OUT = {
    "Buffer": "no module", "Container": "holds modules", "Module": "holds modules", "ModuleDict": "holds modules",
    "ModuleList": "holds modules", "Parameter": "no module", "ParameterDict": "holds parameters",
    "ParameterList": "holds parameters", "RNNBase": "base of RNN", "RNNCellBase": "base of RNNCell",
    "Sequential": "holds modules", "SyncBatchNorm": "for accelerators only: BatchNorm does as much here",
    "UninitializedBuffer": "no module", "UninitializedParameter": "no module",
    "DataParallel": "another wrapper", "NLLLoss2d": "the old name of NLLLoss",
    "FractionalMaxPool2d": "draws its windows", "FractionalMaxPool3d": "draws its windows",
    "MaxUnpool1d": "takes a pooling's indices", "MaxUnpool2d": "takes a pooling's indices",
    "MaxUnpool3d": "takes a pooling's indices", "LinearCrossEntropyOptions": "no module",
}  # fmt: skip
