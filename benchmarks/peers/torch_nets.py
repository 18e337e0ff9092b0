"""The networks in PyTorch, with jaxtrain's names of parts, so that its weights fit; data, loss and optimizer.

For the three arms of PyTorch: by hand, Lightning, HF Trainer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
import work
from torch import Tensor, nn
from torch.nn import functional as F
from work import Workload


class Mlp(nn.Module):
    """[B, features] -> [B, outputs]."""

    def __init__(self, model: dict[str, Any], shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        widths = [shape[0], *model["hidden"]]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in zip(widths, model["hidden"], strict=False))
        self.head = nn.Linear(widths[-1], outputs)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(x)


class GptBlock(nn.Module):
    """Attention and hidden layer, normalised before."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()

        def dense(into: int, out: int) -> nn.Linear:
            return nn.Linear(into, out, bias=False)

        self.heads = heads
        self.attention_norm = nn.LayerNorm(width, 1e-6, bias=False)
        self.hidden_norm = nn.LayerNorm(width, 1e-6, bias=False)
        self.attention = nn.ModuleDict({"qkv": dense(width, 3 * width), "out": dense(width, width)})
        self.hidden = nn.ModuleDict({"up": dense(width, 4 * width), "down": dense(4 * width, width)})

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.attention["qkv"](self.attention_norm(x)).view(*x.shape[:2], self.heads, 3, -1)
        y = F.scaled_dot_product_attention(*qkv.permute(3, 0, 2, 1, 4), is_causal=True)
        x = x + self.attention["out"](y.transpose(1, 2).reshape(x.shape))
        return x + self.hidden["down"](F.gelu(self.hidden["up"](self.hidden_norm(x)), approximate="tanh"))


class Gpt(nn.Module):
    """Tokens [B, T] -> [B, T, vocabulary]; the output layer is the embedding."""

    def __init__(self, model: dict[str, Any], shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.token_embed = nn.Embedding(outputs, model["width"])
        self.position_embed = nn.Embedding(shape[0], model["width"])
        self.blocks = nn.ModuleList(GptBlock(model["heads"], model["width"]) for _ in range(model["layers"]))
        self.norm = nn.LayerNorm(model["width"], 1e-6, bias=False)
        # Without weights of jaxtrain's (on a GPU) these must begin small, as in nanoGPT.
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.token_embed(x) + self.position_embed(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.token_embed.weight)


def _conv(into: int, out: int, size: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(into, out, size, stride, padding=size // 2, bias=False)


class ResnetBlock(nn.Module):
    """Two 3x3 convolutions, or a bottleneck of three, beside a shortcut."""

    def __init__(self, into: int, width: int, stride: int, deep: bool) -> None:
        super().__init__()
        self.out = 4 * width if deep else width
        plan = [(1, width, 1), (3, width, stride), (1, self.out, 1)] if deep else [(3, width, stride), (3, width, 1)]
        ins = [into, *(out for _, out, _ in plan)]
        self.convs = nn.ModuleList(_conv(i, o, size, step) for i, (size, o, step) in zip(ins, plan, strict=False))
        self.norms = nn.ModuleList(nn.BatchNorm2d(o) for _, o, _ in plan)
        projects = stride != 1 or into != self.out
        self.project = _conv(into, self.out, 1, stride) if projects else None
        self.project_norm = nn.BatchNorm2d(self.out) if projects else None

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.project is None else self.project_norm(self.project(x))
        for conv, norm in zip(self.convs[:-1], self.norms[:-1], strict=True):
            x = F.relu(norm(conv(x)))
        return F.relu(shortcut + self.norms[-1](self.convs[-1](x)))


class Resnet(nn.Module):
    """[B, H, W, C] -> [B, outputs]: the ImageNet form of 18 or 50 layers."""

    def __init__(self, model: dict[str, Any], shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        counts, deep = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}[model["depth"]], model["depth"] == 50
        self.stem, self.stem_norm = _conv(shape[-1], model["width"], 7, 2), nn.BatchNorm2d(model["width"])
        self.blocks = nn.ModuleList()
        features = model["width"]
        for stage, count in enumerate(counts):
            for i in range(count):
                stride = 2 if stage and not i else 1
                self.blocks.append(ResnetBlock(features, model["width"] * 2**stage, stride, deep))
                features = self.blocks[-1].out
        self.head = nn.Linear(features, outputs)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 3, 1, 2)  # of rows as they are stored: this is channels_last
        x = F.max_pool2d(F.relu(self.stem_norm(self.stem(x))), 3, 2, 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class TcnBlock(nn.Module):
    """[B, C, T] -> [B, out, T]: two dilated causal convolutions beside a shortcut."""

    def __init__(self, into: int, out: int, size: int, dilation: int) -> None:
        super().__init__()
        self.before = (size - 1) * dilation
        self.convs = nn.ModuleList(nn.Conv1d(i, out, size, dilation=dilation, bias=False) for i in (into, out))
        self.norms = nn.ModuleList(nn.LayerNorm(out, 1e-6) for _ in range(2))
        self.project = nn.Linear(into, out) if into != out else None

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.project is None else self.project(x.transpose(1, 2)).transpose(1, 2)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = conv(F.pad(x, (self.before, 0)))
            x = F.relu(norm(x.transpose(1, 2)).transpose(1, 2))
        return F.relu(shortcut + x)


class Tcn(nn.Module):
    """[B, T, C] -> [B, outputs], from the last step."""

    def __init__(self, model: dict[str, Any], shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        widths = [shape[1], *model["channels"]]
        self.blocks = nn.ModuleList(
            TcnBlock(i, o, model["kernel_size"], 2**number)
            for number, (i, o) in enumerate(zip(widths, model["channels"], strict=False))
        )
        self.head = nn.Linear(widths[-1], outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, :, -1])


NETS = {"mlp": Mlp, "gpt": Gpt, "resnet": Resnet, "tcn": Tcn}
_AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 2, 0, 1)}
"""From flax's order of the axes of a kernel to PyTorch's."""


def make(
    model: dict[str, Any], shape: tuple[int, ...], outputs: int, weights: dict[str, Any] | None = None
) -> nn.Module:
    """The network, with given weights or its own."""
    net = NETS[model["kind"]](model, shape, outputs)
    left = dict(weights or {})
    for name, parameter in net.named_parameters() if weights else ():
        path = name.removesuffix(".weight")
        found = next(key for key in (name, f"{path}.kernel", f"{path}.scale", f"{path}.embedding") if key in left)
        value = torch.from_numpy(left.pop(found))
        value = value.permute(_AXES[value.ndim]) if found.endswith("kernel") else value
        assert parameter.shape == value.shape, name
        with torch.no_grad():
            parameter.copy_(value)
    assert not left, left.keys()
    return net


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    """AdamW; fused, which is the fastest form of it."""
    return torch.optim.AdamW(net.parameters(), work.RATE, (work.B1, work.B2), work.EPS, weight_decay=0, fused=True)


class Learner(nn.Module):
    """The network with its loss; it keeps the loss of each step."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.losses: list[Tensor] = []

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = self.net(inputs)
        loss = F.cross_entropy(outputs.flatten(0, -2), labels.flatten())
        self.losses.append(loss.detach())
        return {"loss": loss}


class Batches:
    """The rows of an epoch in its order, gathered a batch at a time: {inputs, labels}. Each epoch is the next one.

    0.015 ms a batch of the tiny mlp; a DataLoader over a TensorDataset, which collates rows, takes 0.14 ms.
    """

    def __init__(self, own: Workload, arrays: dict[str, Any], orders: Any, device: str = "cpu") -> None:
        def tensor(array: Any) -> Tensor:
            made = torch.from_numpy(array).to(device)
            return made if made.is_floating_point() else made.long()

        self._own, self._epoch = own, 0
        self._orders = tensor(orders)
        self._data = {name: tensor(array) for name, array in arrays.items()}

    def __len__(self) -> int:
        return self._own.steps

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        order, self._epoch = self._orders[self._epoch], self._epoch + 1
        for rows in work.batches(order, self._own.batch):
            inputs, labels = work.take(self._data, rows)
            yield {"inputs": inputs, "labels": labels}


def prepare() -> tuple[Workload, Learner, Batches]:
    """What an arm begins with: workload, network with its loss, rows."""
    options = work.parse()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    own = work.WORKLOADS[options.workload]
    start = work.load(options.folder, options.workload)
    net = make(own.model, own.shape, own.outputs, start.weights)
    return own, Learner(net), Batches(own, work.arrays(own), start.orders)
