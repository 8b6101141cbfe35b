"""Rows of images and volumes: transformers, vit-pytorch, pytorchcv, monai and diffusers."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import nn

from networks.table import CLASSES, REALS, Built, Rows, image
from problems import Net

ROWS = Rows()
network = ROWS.network

SIZES: dict[str, Any] = {
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12, "image_size": 8,
    "patch_size": 4, "num_labels": 3,
}  # fmt: skip


def classifier(config: str, model: str, options: dict[str, Any]) -> Built:
    import transformers

    settings = getattr(transformers, config)(**options)
    return getattr(transformers, model)(settings), {"pixel_values": image(size=options.get("image_size", 16))}, CLASSES


# (configuration, class, configuration's arguments)
CLASSIFIERS: list[tuple[str, str, dict[str, Any]]] = [
    ("ViTConfig", "ViTForImageClassification", SIZES),
    ("DeiTConfig", "DeiTForImageClassification", SIZES),
    ("BeitConfig", "BeitForImageClassification",
     {**SIZES, "use_relative_position_bias": True, "layer_scale_init_value": 0.1}),
    ("Dinov2Config", "Dinov2ForImageClassification", SIZES),
    ("SwinConfig", "SwinForImageClassification",
     {"image_size": 8, "patch_size": 2, "embed_dim": 4, "depths": [2, 1], "num_heads": [1, 2], "window_size": 2,
      "mlp_ratio": 2.0, "num_labels": 3}),
    ("ConvNextConfig", "ConvNextForImageClassification",
     {"hidden_sizes": [4, 6], "depths": [1, 1], "num_stages": 2, "num_labels": 3}),
    ("ConvNextV2Config", "ConvNextV2ForImageClassification",
     {"hidden_sizes": [4, 6], "depths": [1, 1], "num_stages": 2, "num_labels": 3}),
    ("ResNetConfig", "ResNetForImageClassification",
     {"embedding_size": 4, "hidden_sizes": [4, 6], "depths": [1, 1], "layer_type": "basic", "num_labels": 3}),
    ("RegNetConfig", "RegNetForImageClassification",
     {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "groups_width": 2, "num_labels": 3}),
    ("PoolFormerConfig", "PoolFormerForImageClassification",
     {"hidden_sizes": [4, 6], "depths": [1, 1], "num_encoder_blocks": 2, "patch_sizes": [3, 3], "strides": [2, 2],
      "padding": [1, 1], "mlp_ratio": 2.0, "num_labels": 3}),
    ("SegformerConfig", "SegformerForImageClassification",
     {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [4, 6], "patch_sizes": [3, 3],
      "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "num_labels": 3}),
    ("SegformerConfig", "SegformerForSemanticSegmentation",
     {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [4, 6], "patch_sizes": [3, 3],
      "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 4, "num_labels": 3,
      "image_size": 8}),
]  # fmt: skip

for config_, model_, options_ in CLASSIFIERS:
    network("transformers", model_)(lambda c=config_, m=model_, o=options_: classifier(c, m, o))


@network("transformers", "CLIPVisionModel")
def _() -> Built:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(**{key: value for key, value in SIZES.items() if key != "num_labels"})
    model = Net(lambda m, x: m.head(m.net(x).pooler_output), net=CLIPVisionModel(config), head=nn.Linear(8, 3))
    return model, image(), CLASSES


# -- vit-pytorch ----------------------------------------------------------------------------------------------------


def module_of(package: str, name: str) -> ModuleType:
    """A module of a package whose own `__init__` cannot run: that of vit-pytorch imports torchvision."""
    if package not in sys.modules:
        spec = find_spec(package)
        assert spec is not None
        empty = ModuleType(package)
        empty.__path__ = list(spec.submodule_search_locations or [])
        sys.modules[package] = empty
    return import_module(f"{package}.{name}")


VIT: dict[str, Any] = {
    "image_size": 8,
    "patch_size": 4,
    "num_classes": 3,
    "dim": 8,
    "depth": 1,
    "heads": 2,
    "mlp_dim": 12,
}
VITS: list[tuple[str, str, dict[str, Any]]] = [
    ("vit", "ViT", {**VIT, "dim_head": 4}),
    ("simple_vit", "SimpleViT", {**VIT, "dim_head": 4}),
    ("deepvit", "DeepViT", {**VIT, "dim_head": 4}),
    ("cait", "CaiT", {**VIT, "dim_head": 4, "cls_depth": 1}),
    ("parallel_vit", "ViT", {**VIT, "dim_head": 4}),
    ("vit_for_small_dataset", "ViT", {**VIT, "dim_head": 4}),
    ("rvt", "RvT", {**VIT}),
    ("xcit", "XCiT", {**VIT, "dim_head": 4, "cls_depth": 1}),
]


def vit(module: str, name: str, options: dict[str, Any]) -> Built:
    return getattr(module_of("vit_pytorch", module), name)(**options), image(), CLASSES


for module_, name_, options_ in VITS:
    network("vit_pytorch", f"{module_}.{name_}")(lambda m=module_, n=name_, o=options_: vit(m, n, o))


# -- pytorchcv ------------------------------------------------------------------------------------------------------

RESNET: dict[str, Any] = {"channels": [[4], [6]], "init_block_channels": 4, "bottleneck": False, "conv1_stride": True}
CONVOLUTIONAL: list[tuple[str, str, dict[str, Any]]] = [
    ("resnet", "ResNet", RESNET),
    ("preresnet", "PreResNet", RESNET),
    ("seresnet", "SEResNet", {**RESNET, "channels": [[16]], "init_block_channels": 4}),
    ("densenet", "DenseNet", {"channels": [[6, 8], [6]], "init_block_channels": 4}),
    ("resnext", "ResNeXt", {"channels": [[8]], "init_block_channels": 4, "cardinality": 2, "bottleneck_width": 64}),
    ("mobilenetv2", "MobileNetV2",
     {"channels": [[4], [6]], "init_block_channels": 4, "final_block_channels": 8, "remove_exp_conv": False}),
    ("shufflenetv2", "ShuffleNetV2", {"channels": [[8, 8]], "init_block_channels": 4, "final_block_channels": 8}),
    ("squeezenet", "SqueezeNet",
     {"channels": [[8], [8]], "residuals": None, "init_block_kernel_size": 3, "init_block_channels": 4}),
    ("cbamresnet", "CbamResNet", {"channels": [[16]], "init_block_channels": 4, "bottleneck": False}),
]  # fmt: skip


def convolutional(module: str, name: str, options: dict[str, Any]) -> Built:
    kind = getattr(import_module(f"pytorchcv.models.{module}"), name)
    model = kind(**options, in_size=(16, 16), num_classes=3)
    for name_of, each in list(model.named_modules()):
        if isinstance(each, nn.AvgPool2d) and name_of.endswith("final_pool"):  # made for images of 224 pixels
            model.set_submodule(name_of, nn.AdaptiveAvgPool2d(1))
    return Net(lambda m, x: m.net(x).flatten(1), net=model), image(size=16), CLASSES


for module_, name_, options_ in CONVOLUTIONAL:
    network("pytorchcv", name_)(lambda m=module_, n=name_, o=options_: convolutional(m, n, o))


# -- monai ----------------------------------------------------------------------------------------------------------

LEVELS: dict[str, Any] = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "channels": (2, 4), "strides": (2,)}
VOLUMES: list[tuple[str, dict[str, Any], int, int]] = [
    ("UNet", {**LEVELS, "num_res_units": 1}, 2, 4),
    ("AttentionUnet", {**LEVELS}, 2, 4),
    ("AutoEncoder", {**LEVELS, "strides": (2, 2)}, 2, 8),
    ("BasicUNet", {"spatial_dims": 2, "features": (2, 2, 2, 2, 2, 2)}, 2, 32),
    ("SegResNet", {"spatial_dims": 2, "init_filters": 2, "num_groups": 2, "norm": ("GROUP", {"num_groups": 2}),
                   "blocks_down": (1, 1), "blocks_up": (1,)}, 2, 4),
    ("DynUNet", {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "kernel_size": (3, 3, 3), "strides": (1, 2, 2),
                 "upsample_kernel_size": (2, 2), "filters": (2, 2, 2)}, 2, 8),
    ("UNet in three dimensions", {**LEVELS, "spatial_dims": 3}, 3, 4),
]  # fmt: skip


def segmentation(name: str, options: dict[str, Any], dims: int, size: int) -> Built:
    """Of the outputs, four positions: brute force takes one backward pass each."""
    from monai.networks import nets

    corner = (slice(None), slice(None), *[slice(0, 2)] * 2, *[0] * (dims - 2))
    model = Net(lambda m, x: m.net(x)[corner], net=getattr(nets, name.split()[0])(**options))
    return model, torch.randn(3, 1, *[size] * dims), CLASSES


for name_, options_, dims_, size_ in VOLUMES:
    # the UNet with residual units adds other weights' output to that of its last convolution
    refused_ = ("last layer",) if name_ == "UNet" else ()
    network("monai", name_, *refused_)(lambda n=name_, o=options_, d=dims_, s=size_: segmentation(n, o, d, s))

SCANS: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("DenseNet", {"spatial_dims": 2, "in_channels": 1, "out_channels": 3, "init_features": 4, "growth_rate": 2,
                  "block_config": (1, 1), "bn_size": 1}, (1, 16, 16)),
    ("ResNet", {"block": "basic", "layers": [1, 1, 1, 1], "block_inplanes": [2, 2, 2, 2], "n_input_channels": 1,
                "conv1_t_size": 3, "num_classes": 3}, (1, 8, 8, 8)),
    ("Classifier", {"in_shape": (1, 8, 8), "classes": 3, "channels": (2, 4), "strides": (2, 2)}, (1, 8, 8)),
    ("FullyConnectedNet", {"in_channels": 4, "out_channels": 3, "hidden_channels": [5, 5]}, (4,)),
]  # fmt: skip


def scan(name: str, options: dict[str, Any], shape: tuple[int, ...]) -> Built:
    from monai.networks import nets

    return getattr(nets, name)(**options), torch.randn(3, *shape), CLASSES


for name_, options_, shape_ in SCANS:
    network("monai", name_)(lambda n=name_, o=options_, s=shape_: scan(n, o, s))


# -- diffusers ------------------------------------------------------------------------------------------------------


@network("diffusers", "UNet2DModel")
def _() -> Built:
    from diffusers import UNet2DModel

    net = UNet2DModel(
        sample_size=4, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(4, 4), norm_num_groups=2,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )  # fmt: skip
    model = Net(lambda m, x, t: m.net(x, t).sample[:, :, :2, :2], net=net)
    return model, (torch.randn(3, 1, 4, 4), torch.tensor([1, 5, 9])), REALS


@network("diffusers", "UNet2DConditionModel")
def _() -> Built:
    from diffusers import UNet2DConditionModel

    net = UNet2DConditionModel(
        sample_size=4, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(4,), norm_num_groups=2,
        down_block_types=("CrossAttnDownBlock2D",), up_block_types=("CrossAttnUpBlock2D",), cross_attention_dim=3,
        attention_head_dim=2,
    )  # fmt: skip
    model = Net(lambda m, x, t, words: m.net(x, t, words).sample[:, :, :2, :2], net=net)
    return model, (torch.randn(3, 1, 4, 4), torch.tensor([1, 5, 9]), torch.randn(3, 2, 3)), REALS


@network("diffusers", "AutoencoderKL")
def _() -> Built:
    from diffusers import AutoencoderKL

    net = AutoencoderKL(in_channels=1, out_channels=1, block_out_channels=(4,), norm_num_groups=2, latent_channels=1)
    model = Net(lambda m, x: m.net(x).sample[:, :, :2, :2], net=net)
    return model, torch.randn(3, 1, 4, 4), REALS


@network("diffusers", "DiTTransformer2DModel")
def _() -> Built:
    from diffusers import DiTTransformer2DModel

    net = DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=2, in_channels=1, out_channels=1,
                                num_layers=1, norm_num_groups=1, sample_size=4, num_embeds_ada_norm=5)  # fmt: skip
    model = Net(lambda m, x, t, c: m.net(x, t, c).sample[:, :, :2, :2], net=net)
    return model, (torch.randn(3, 1, 4, 4), torch.tensor([1, 5, 9]), torch.tensor([0, 3, 1])), REALS
