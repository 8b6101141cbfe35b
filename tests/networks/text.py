"""Rows of text and sound: transformers and x-transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from networks.table import CLASSES, REALS, Built, Rows, padded, pooled, tokens
from problems import Net

ROWS = Rows()
network = ROWS.network

# What most configurations call their sizes.
SIZES: dict[str, Any] = {
    "vocab_size": 13, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12,
    "max_position_embeddings": 16, "num_labels": 3, "pad_token_id": 0,
}  # fmt: skip


def classifier(config: str, model: str, **options: Any) -> Built:
    import transformers

    settings = getattr(transformers, config)(**{**SIZES, **options})
    return getattr(transformers, model)(settings), padded(), CLASSES


# (configuration, class, what its configuration needs besides or calls otherwise)
CLASSIFIERS: list[tuple[str, str, dict[str, Any]]] = [
    ("BertConfig", "BertForSequenceClassification", {}),
    ("RobertaConfig", "RobertaForSequenceClassification", {}),
    ("ElectraConfig", "ElectraForSequenceClassification", {"embedding_size": 6}),
    ("AlbertConfig", "AlbertForSequenceClassification", {"embedding_size": 6}),
    ("DistilBertConfig", "DistilBertForSequenceClassification",
     {"dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 12}),
    ("DebertaV2Config", "DebertaV2ForSequenceClassification",
     {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False,
      "pooler_hidden_size": 8, "position_buckets": 4}),
    ("MPNetConfig", "MPNetForSequenceClassification", {}),
    ("ModernBertConfig", "ModernBertForSequenceClassification",
     {"global_attn_every_n_layers": 2, "local_attention": 4}),
    ("GPT2Config", "GPT2ForSequenceClassification", {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}),
    ("GPTNeoXConfig", "GPTNeoXForSequenceClassification", {}),
    ("BloomConfig", "BloomForSequenceClassification", {"n_layer": 2, "n_head": 2}),
    ("OPTConfig", "OPTForSequenceClassification", {"ffn_dim": 12, "word_embed_proj_dim": 8}),
    ("LlamaConfig", "LlamaForSequenceClassification", {"num_key_value_heads": 1}),
    ("MistralConfig", "MistralForSequenceClassification", {"num_key_value_heads": 1, "head_dim": 4}),
    ("Qwen2Config", "Qwen2ForSequenceClassification", {"num_key_value_heads": 1}),
    ("Qwen3Config", "Qwen3ForSequenceClassification", {"num_key_value_heads": 1, "head_dim": 4}),
    ("GemmaConfig", "GemmaForSequenceClassification", {"num_key_value_heads": 1, "head_dim": 4}),
    ("MixtralConfig", "MixtralForSequenceClassification",
     {"num_key_value_heads": 1, "num_local_experts": 3, "num_experts_per_tok": 2, "experts_implementation": "eager"}),
    ("BertConfig", "BertForTokenClassification", {}),
]  # fmt: skip

for config_, model_, options_ in CLASSIFIERS:
    network("transformers", model_)(lambda c=config_, m=model_, o=options_: classifier(c, m, **o))


@network("transformers", "XLNetForSequenceClassification")
def _() -> Built:
    from transformers import XLNetConfig, XLNetForSequenceClassification

    config = XLNetConfig(vocab_size=13, d_model=8, n_layer=2, n_head=2, d_inner=12, num_labels=3)
    return XLNetForSequenceClassification(config), padded(), CLASSES


@network("transformers", "FNetForSequenceClassification")
def _() -> Built:
    from transformers import FNetConfig, FNetForSequenceClassification

    return FNetForSequenceClassification(FNetConfig(**SIZES)), tokens(), CLASSES


@network("transformers", "T5EncoderModel")
def _() -> Built:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(vocab_size=13, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2)
    return pooled(T5EncoderModel(config), 8), padded(), CLASSES


@network("transformers", "CLIPTextModel")
def _() -> Built:
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(**SIZES, bos_token_id=11, eos_token_id=12)
    model = Net(lambda m, **x: m.head(m.net(**x).pooler_output), net=CLIPTextModel(config), head=nn.Linear(8, 3))
    return model, padded(), CLASSES


@network("transformers", "MambaModel")
def _() -> Built:
    from transformers import MambaConfig, MambaModel

    config = MambaConfig(
        vocab_size=13, hidden_size=6, state_size=3, num_hidden_layers=2, time_step_rank=2, use_cache=False
    )
    return pooled(MambaModel(config), 6), {"input_ids": tokens()}, CLASSES


@network("transformers", "GPT2LMHeadModel", "last layer")  # its weight is that of the embedding
def _() -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=7, n_positions=8, n_embd=8, n_layer=1, n_head=2, use_cache=False)
    return GPT2LMHeadModel(config), {"input_ids": tokens(7, 3)}, CLASSES


@network("transformers", "BertForMaskedLM", "last layer")  # its weight is that of the embedding
def _() -> Built:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**{**SIZES, "vocab_size": 7})), {"input_ids": tokens(7, 3)}, CLASSES


# -- sound and time series ------------------------------------------------------------------------------------------


def speech(config: str, model: str, **options: Any) -> Built:
    import transformers

    settings = getattr(transformers, config)(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12, conv_dim=(4, 4),
        conv_kernel=(4, 2), conv_stride=(2, 2), num_conv_pos_embeddings=3, num_conv_pos_embedding_groups=2,
        num_labels=3, classifier_proj_size=4, apply_spec_augment=False, **options,
    )  # fmt: skip
    return getattr(transformers, model)(settings), {"input_values": torch.randn(3, 30)}, CLASSES


network("transformers", "Wav2Vec2ForSequenceClassification")(
    lambda: speech("Wav2Vec2Config", "Wav2Vec2ForSequenceClassification", num_feat_extract_layers=2)
)
network("transformers", "HubertForSequenceClassification")(
    lambda: speech("HubertConfig", "HubertForSequenceClassification", num_feat_extract_layers=2)
)


@network("transformers", "ASTForAudioClassification")
def _() -> Built:
    from transformers import ASTConfig, ASTForAudioClassification

    config = ASTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12, patch_size=4,
                       frequency_stride=4, time_stride=4, max_length=8, num_mel_bins=8, num_labels=3)  # fmt: skip
    return ASTForAudioClassification(config), {"input_values": torch.randn(3, 8, 8)}, CLASSES


@network("transformers", "PatchTSTForRegression")
def _() -> Built:
    from transformers import PatchTSTConfig, PatchTSTForRegression

    config = PatchTSTConfig(num_input_channels=2, context_length=8, patch_length=4, patch_stride=4, d_model=8,
                            num_attention_heads=2, num_hidden_layers=1, ffn_dim=12, num_targets=2)  # fmt: skip
    model = Net(lambda m, x: m.net(past_values=x).regression_outputs, net=PatchTSTForRegression(config))
    return model, torch.randn(3, 8, 2), REALS


# -- x-transformers -------------------------------------------------------------------------------------------------

ENCODERS: dict[str, dict[str, Any]] = {
    "Encoder": {},
    "Encoder, rotary and gated": {"rotary_pos_emb": True, "rotary_emb_dim": 4, "ff_glu": True, "use_rmsnorm": True},
    "Encoder, alibi and talking heads": {"alibi_pos_bias": True, "attn_pre_talking_heads": True},
    "Encoder, T5 bias and scale norm": {"rel_pos_bias": True, "use_scalenorm": True},
    "Encoder, memory and sandwich": {"attn_num_mem_kv": 2, "sandwich_norm": True, "attn_qk_norm": True},
    "Encoder, macaron and gated values": {"macaron": True, "attn_gate_values": True},
}


def encoder(options: dict[str, Any]) -> Built:
    from x_transformers import Encoder, TransformerWrapper

    layers = Encoder(dim=8, depth=2, heads=2, attn_dim_head=4, ff_mult=1, **options)
    model = TransformerWrapper(num_tokens=13, max_seq_len=5, attn_layers=layers)
    return Net(lambda m, x: m.net(x).mean(1)[:, :3], net=model), tokens(), CLASSES


for name_, extras_ in ENCODERS.items():
    network("x_transformers", name_)(lambda extras=extras_: encoder(extras))


@network("x_transformers", "ViTransformerWrapper")
def _() -> Built:
    from x_transformers import Encoder, ViTransformerWrapper

    layers = Encoder(dim=8, depth=1, heads=2, attn_dim_head=4, ff_mult=1)
    model = ViTransformerWrapper(image_size=8, patch_size=4, num_classes=3, attn_layers=layers)
    return model, torch.randn(3, 3, 8, 8), CLASSES


@network("x_transformers", "ContinuousTransformerWrapper")
def _() -> Built:
    from x_transformers import ContinuousTransformerWrapper, Decoder

    layers = Decoder(dim=8, depth=1, heads=2, attn_dim_head=4, ff_mult=1)
    model = ContinuousTransformerWrapper(dim_in=2, dim_out=2, max_seq_len=4, attn_layers=layers)
    return model, torch.randn(3, 4, 2), REALS
