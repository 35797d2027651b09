"""The backbone: timm's VisionTransformer, built, loaded, digested and hooked from outside; never copied."""

from __future__ import annotations

import difflib
import hashlib
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from workers.errors import UserError
from workers.job import BackboneSettings
from workers.model.noise import own_drop_paths
from workers.taskstate import load_tensors

DROPOUTS = ("drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate")


def build(settings: BackboneSettings) -> nn.Module:
    """A VisionTransformer without a classifier and with random weights; `load_weights` or a stage result fills it."""
    import timm
    from timm.models.vision_transformer import VisionTransformer

    dropout = next((name for name in DROPOUTS if settings.options.get(name)), None)
    if dropout:
        raise UserError(f"backbone.options.{dropout} is {settings.options[dropout]!r}; timm draws who is dropped anew on each rank, so that results would "
                        "depend on the number of ranks: leave it out, or use backbone.drop_path, which does not")
    if settings.name not in timm.list_models():
        close = difflib.get_close_matches(settings.name, timm.list_models(), 3) or ["vit_tiny_patch16_224"]
        raise UserError(f"backbone.name is {settings.name!r}, which timm does not have; some it has: {', '.join(close)}")
    try:
        model = timm.create_model(settings.name, num_classes=0, img_size=settings.img_size,
                                  drop_path_rate=settings.drop_path, **settings.options)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise UserError(f"backbone {settings.name!r} cannot be built at img_size {settings.img_size} with options {settings.options}: {error}; "
                        "it must be a timm VisionTransformer such as vit_tiny_patch16_224, and backbone.options arguments of it") from None
    if not isinstance(model, VisionTransformer):
        raise UserError(f"backbone.name is {settings.name!r}, a {type(model).__name__}; it must be a timm VisionTransformer such as vit_tiny_patch16_224")
    patch: Any = model.patch_embed.patch_size
    if any(settings.img_size % side for side in patch):
        raise UserError(f"backbone.img_size is {settings.img_size}, which is no multiple of the patch size {patch[0]} of {settings.name!r}; change it, "
                        "or backbone.options.patch_size")
    own_drop_paths(model)
    return model


def check(settings: BackboneSettings) -> None:
    """Raises UserError where `build` would, without memory for a single weight."""
    with torch.device("meta"):
        build(settings)


def load_weights(model: Any, settings: BackboneSettings) -> None:
    """Fills `model` from `settings.weights`: `hub` or a local safetensors file; position embeddings are resampled."""
    from timm.models.vision_transformer import checkpoint_filter_fn

    if settings.weights == "none":
        return
    if settings.weights == "hub":
        tensors = _from_hub(settings.name)
    else:
        try:
            with open(settings.weights, "rb") as stream:
                data = stream.read()
        except OSError as error:
            raise UserError(f"backbone.weights is {settings.weights!r}, which cannot be read ({error.strerror}); give a .safetensors file, `hub` or `none`"
                            ) from None
        try:
            tensors, _ = load_tensors(data, "weights")
        except UserError:
            raise UserError(f"backbone.weights {settings.weights!r} is not readable as safetensors; give a .safetensors file, `hub` or `none`") from None
    try:
        tensors = {name: t for name, t in checkpoint_filter_fn(tensors, model).items() if not name.startswith("head.")}
        problems = model.load_state_dict(tensors, strict=False)
        differs = [f"{kind} {names[:3]}" for kind, names in zip(("missing", "unexpected"), problems, strict=True) if names]
    except (RuntimeError, KeyError, ValueError, AttributeError, IndexError) as error:  # other shapes
        differs = [str(error).strip().splitlines()[-1].strip()]
    if differs:
        raise UserError(f"backbone.weights {settings.weights!r} do not fit {settings.name!r} ({', '.join(differs)}); give weights of the same architecture")


def _from_hub(name: str) -> dict[str, Tensor]:
    import timm

    try:
        return timm.create_model(name, pretrained=True).state_dict()
    except Exception as error:  # the hub's client raises many kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"backbone.weights is 'hub', and the weights of {name!r} cannot be had from it ({reason}); fetch them on a machine with a "
                        "network and give the .safetensors file, or choose another backbone.name") from None


def digest_of(model: nn.Module) -> str:
    """sha256 over names, dtypes, shapes and bytes of all parameters and buffers, in order of name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()


def to_bytes(model: nn.Module) -> bytes:
    return safetensors.torch.save({name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()})


def from_bytes(model: nn.Module, data: bytes, where: str) -> None:
    tensors, _ = load_tensors(data, where)
    model.load_state_dict(tensors)


def geometry(model: nn.Module) -> dict[str, Any]:
    """What masks need to know: number of blocks, of patch tokens and prefix tokens, grid, width, hidden width."""
    vit: Any = model
    grid = tuple(vit.patch_embed.grid_size)
    return {"depth": len(vit.blocks), "grid": grid, "tokens": grid[0] * grid[1], "prefix": vit.num_prefix_tokens,
            "width": vit.embed_dim, "hidden": vit.blocks[0].mlp.fc1.out_features}
