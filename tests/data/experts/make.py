"""Writes a tiny decoder whose experts are a loop: each takes the rows of the tokens that use it, and adds its results
to theirs. This is how mixtures of experts were written before grouped products, and how torch exports them.

Run with torch 2.13 (and onnxscript for the second exporter); the tests need neither.

    python tests/data/experts/make.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import torch
from torch import Tensor, nn
from torch.nn import functional

HERE = Path(__file__).parent
WIDTH, INNER, EXPERTS, USED, WORDS = 16, 24, 4, 2, 31


class Expert(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, INNER, bias=False)
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        shares, choices = self.router(rows).softmax(-1).topk(USED)
        shares = shares / shares.sum(-1, keepdim=True)
        uses = functional.one_hot(choices, EXPERTS).permute(2, 1, 0)  # [expert, choice, token]
        result = torch.zeros_like(rows)
        for k, expert in enumerate(self.experts):
            choice, token = torch.where(uses[k])
            result.index_add_(0, token, expert(rows[token]) * shares[token, choice].unsqueeze(1))
        return result.reshape(x.shape)


class Decoder(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.table, self.query = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mixture, self.head = Mixture(), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        q = self.query(x)[:, None]
        x = x + functional.scaled_dot_product_attention(q, q, x[:, None], is_causal=True)[:, 0]
        return self.head(x + self.mixture(x))


def main() -> None:
    torch.manual_seed(0)
    model, ids = Decoder().eval(), torch.randint(0, WORDS, (2, 9))
    np.savez(HERE / "loop.npz", input_ids=ids.numpy(), logits=model(ids).detach().numpy())
    names = {"input_names": ["input_ids"], "output_names": ["logits"]}
    script, dynamo = HERE / "loop.script.onnx", HERE / "loop.dynamo.onnx"
    torch.onnx.export(model, (ids,), script, dynamo=False, dynamic_axes={"input_ids": {0: "b", 1: "n"}}, **names)
    sizes = {0: torch.export.Dim("b"), 1: torch.export.Dim("n")}
    torch.onnx.export(model, (ids,), dynamo, dynamo=True, external_data=False, dynamic_shapes=(sizes,), **names)
    for path in (script, dynamo):
        file = onnx.load(path)
        for node in file.graph.node:  # where in the sources they come from
            node.doc_string = ""
            del node.metadata_props[:]
        onnx.save(file, path)


main()
