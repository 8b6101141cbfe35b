"""Rows of torch itself, of peft and of torch_geometric."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from networks.table import CLASSES, REALS, Built, Rows, padded, tokens
from problems import Net

ROWS = Rows()
network = ROWS.network


def recurrent(kind: type[nn.RNNBase], **options: Any) -> Built:
    layer = kind(3, 4, batch_first=True, **options)
    width = 4 * (2 if options.get("bidirectional") else 1)
    model = Net(lambda m, x: m.head(m.net(x)[0][:, -1]), net=layer, head=nn.Linear(width, 2))
    return model, torch.randn(3, 4, 3), CLASSES


network("torch", "RNN")(lambda: recurrent(nn.RNN))
network("torch", "LSTM")(lambda: recurrent(nn.LSTM))
network("torch", "LSTM of two directions")(lambda: recurrent(nn.LSTM, num_layers=2, bidirectional=True))
network("torch", "GRU")(lambda: recurrent(nn.GRU, num_layers=2))


@network("torch", "TransformerEncoder")
def _() -> Built:
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, activation="gelu")
    model = Net(lambda m, x: m.head(m.net(x).mean(1)), net=nn.TransformerEncoder(layer, 2), head=nn.Linear(6, 3))
    return model, torch.randn(3, 4, 6), CLASSES


@network("torch", "Transformer")
def _() -> Built:
    model = Net(
        lambda m, x: m.head(m.net(x, x[:, :2])[:, -1]),
        net=nn.Transformer(4, 2, 1, 1, 6, batch_first=True, norm_first=True),
        head=nn.Linear(4, 2),
    )
    return model, torch.randn(3, 4, 4), REALS


# -- peft -----------------------------------------------------------------------------------------------------------


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(vocab_size=13, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12,
                   max_position_embeddings=8, num_labels=3)
    )  # fmt: skip


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    return GPT2ForSequenceClassification(
        GPT2Config(vocab_size=13, n_positions=8, n_embd=8, n_layer=2, n_head=2, num_labels=3, pad_token_id=0)
    )


@network("peft", "LoraConfig of BERT")
def _() -> Built:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["classifier"], init_lora_weights=False)
    return get_peft_model(bert(), config), padded(), CLASSES


@network("peft", "LoraConfig of GPT-2")
def _() -> Built:
    from peft import LoraConfig, TaskType, get_peft_model

    config = LoraConfig(r=2, target_modules=["c_attn"], task_type=TaskType.SEQ_CLS, fan_in_fan_out=True)
    return get_peft_model(gpt2(), config), padded(), CLASSES


@network("peft", "LoraConfig with DoRA")
def _() -> Built:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["classifier"], use_dora=True)
    return get_peft_model(bert(), config), padded(), CLASSES


@network("peft", "IA3Config")
def _() -> Built:
    from peft import IA3Config, TaskType, get_peft_model

    config = IA3Config(
        task_type=TaskType.SEQ_CLS,
        target_modules=["key", "value", "output.dense"],
        feedforward_modules=["output.dense"],
    )
    return get_peft_model(bert(), config), padded(), CLASSES


@network("peft", "PromptTuningConfig")
def _() -> Built:
    from peft import PromptTuningConfig, TaskType, get_peft_model

    config = PromptTuningConfig(task_type=TaskType.SEQ_CLS, num_virtual_tokens=2)
    return get_peft_model(bert(), config), padded(), CLASSES


# -- torch_geometric: one graph of five nodes per data point ----------------------------------------------------------


def graphs() -> tuple[torch.Tensor, torch.Tensor]:
    """Node features [3, 5, 2] and dense, symmetric adjacency matrices [3, 5, 5]."""
    edges = (torch.rand(3, 5, 5) < 0.5).double().triu(1)
    return torch.randn(3, 5, 2), edges + edges.mT


def dense(name: str) -> Built:
    from torch_geometric import nn as geometric

    if name == "DenseGINConv":
        layer: Any = geometric.DenseGINConv(nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 4)), train_eps=True)
    elif name == "DenseGATConv":
        layer = geometric.DenseGATConv(2, 2, heads=2)
    else:
        layer = getattr(geometric, name)(2, 4)
    model = Net(lambda m, x, adj: m.head(torch.tanh(m.net(x, adj)).mean(1)), net=layer, head=nn.Linear(4, 3))
    return model, graphs(), CLASSES


for each in ("DenseGCNConv", "DenseGATConv", "DenseSAGEConv", "DenseGINConv", "DenseGraphConv"):
    network("torch_geometric", each)(lambda name=each: dense(name))


def sparse(name: str) -> Built:
    """The graphs of a batch as one graph with disjoint parts, as torch_geometric's own loader joins them."""
    from torch_geometric import nn as geometric

    def forward(m: Net, x: torch.Tensor, adj: torch.Tensor) -> torch.Tensor:
        graph, source, target = adj.nonzero().T
        nodes = adj.shape[1]
        edges = torch.stack([graph * nodes + source, graph * nodes + target])
        h = m.net(x.flatten(0, 1), edges)
        return m.head(geometric.global_mean_pool(h, torch.arange(len(x)).repeat_interleave(nodes), len(x)))

    return Net(forward, net=getattr(geometric, name)(2, 4, 2, 4), head=nn.Linear(4, 3)), graphs(), CLASSES


for each in ("GCN", "GAT", "GraphSAGE", "GIN"):
    network("torch_geometric", each)(lambda name=each: sparse(name))


@network("torch", "embedding bag of tokens")
def _() -> Built:
    return nn.Sequential(nn.EmbeddingBag(13, 4), nn.Tanh(), nn.Linear(4, 3)), tokens(), CLASSES
