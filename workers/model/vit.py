"""The backbone: any timm model of images, built, loaded, digested and hooked from outside.

It is never copied. timm's registry of models is the registry of backbones: our own models are added
with `register_model`, like timm's (see t2t.py). Batch norm stays in evaluation mode for every
method, also if the backbone is trained: its running statistics are those of the loaded weights and
never change, so outputs depend only on the image, the shared weights and the state of its task.
Without loaded weights, the statistics are measured once on noise.
"""

from __future__ import annotations

import hashlib
from typing import Any

import safetensors.torch
import timm
import torch
from timm.models.convnext import ConvNeXt
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from workers.data import torch_internals
from workers.errors import UserError, describe_error
from workers.job import BackboneSettings
from workers.model import context, norms, pretrained, signature
from workers.model.noise import replace_drop_paths
from workers.model.t2t import T2TVit
from workers.storage import hub
from workers.storage.regular_file import read_regular
from workers.storage.taskstate import load_tensors

DROPOUTS = ("drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate")
# of weights and buffers together, 40 GB; a stranger's file may ask for any number
MAX_NUMBERS = 10_000_000_000
EXAMPLES = "vit_tiny_patch16_224, convnext_atto, resnet18 or mobilenetv3_small_100"
NOISE_IMAGES = 32  # that batch norms without loaded statistics are measured on
MAX_OUTLINES = 16  # that a process keeps
_outlines: dict[str, nn.Module] = {}  # by the settings in full


def build(settings: BackboneSettings) -> nn.Module:
    """Return a backbone without a classifier and with random weights.

    `load_weights` or the result of a stage fills it.
    """
    dropout = next(
        (name for name in (*DROPOUTS, "drop_block_rate") if settings.options.get(name)), None
    )
    if dropout:
        raise UserError(
            f"backbone.options.{dropout} is {settings.options[dropout]!r}; timm draws who is "
            "dropped separately on each rank, so that results would "
            "depend on the number of ranks: leave it out, or use backbone.drop_path, which does not"
        )
    if settings.options.get("in_chans", 3) != 3:
        raise UserError(
            f"backbone.options.in_chans is {settings.options['in_chans']!r}, and all images "
            "have three colours here; leave it out"
        )
    architecture = pretrained.check_name(settings.name)
    if settings.options:
        signature.check_options(architecture, settings.options)
    accepted = signature.list_arguments(architecture)
    given: dict[str, Any] = {}
    if "img_size" in accepted:
        given["img_size"] = settings.img_size
    if "drop_path_rate" in accepted:
        given["drop_path_rate"] = settings.drop_path
    elif settings.drop_path:
        raise UserError(
            f"backbone.drop_path is {settings.drop_path}, and {settings.name!r} has no stochastic "
            "depth; leave it out"
        )
    try:
        made: Any = timm.create_model(
            settings.name,
            num_classes=0,
            **given,
            **settings.options,
        )
    except Exception as error:  # models check their arguments in many ways, or not at all
        reason = describe_error(error)
        raise UserError(
            f"backbone {settings.name!r} cannot be built at img_size {settings.img_size} with "
            f"options {settings.options}: {reason:.300}; change img_size or the options, or "
            f"choose another timm model, such as {EXAMPLES}"
        ) from None
    return _prepared(made, settings)


def _prepared(model: Any, settings: BackboneSettings) -> nn.Module:
    """Return a model that timm made, checked and with our stochastic depth and norms, in place."""
    patch: Any = model.patch_embed.patch_size if isinstance(model, VisionTransformer) else (1,)
    if any(settings.img_size % side for side in patch):
        raise UserError(
            f"backbone.img_size is {settings.img_size}, which is not a multiple of the patch size "
            f"{patch[0]} of {settings.name!r}; change it, "
            "or backbone.options.patch_size"
        )
    stride: Any = model.feature_info[-1]["reduction"] if isinstance(model, ConvNeXt) else 1
    if settings.img_size % stride:
        raise UserError(
            f"backbone.img_size is {settings.img_size}, which is not a multiple of the total "
            f"stride {stride} of {settings.name!r}, whose maps would "
            "not fit into each other; change it, or backbone.options.patch_size or output_stride"
        )
    replace_drop_paths(model)
    remove_dropout(model)
    norms.freeze_statistics(model)
    model.num_features = feature_width(model)
    if settings.context:
        context.insert(model, settings.context)
    prepared: nn.Module = model
    return prepared


def feature_width(model: Any) -> int:
    """Return the width of the features before the classifier.

    Some models have an extra layer that sets it.
    """
    return int(getattr(model, "head_hidden_size", None) or model.num_features)


def remove_dropout(model: nn.Module) -> None:
    """Switch off the dropout that a few models have by default.

    timm draws it separately on each rank, so results would depend on the number of ranks.
    """
    for module in model.modules():
        if isinstance(module, (nn.Dropout, nn.Dropout2d)):
            module.p = 0.0
        for name in ("drop_rate", "attn_drop_rate"):  # read by forwards that call F.dropout
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


@torch.no_grad()
def measure_statistics(model: nn.Module, img_size: int) -> None:
    """Set the statistics of batch norms by running random noise, because random weights have none.

    A network then starts with unit variance in all its layers, as batch norm would keep it. The
    noise is the same everywhere.
    """
    layers = [*norms.layers_with_statistics(model).values()]
    if not layers:
        return
    noise = torch.randn(
        (NOISE_IMAGES, 3, img_size, img_size), generator=torch.Generator().manual_seed(0)
    )
    momenta = [layer.momentum for layer in layers]
    model.eval()
    for layer in layers:
        layer.momentum = 1.0  # the statistics of this batch alone
        layer.training = True  # `train` would do nothing
        if getattr(layer, "num_batches_tracked", None) is not None:
            layer.num_batches_tracked.zero_()
    try:
        model(noise)
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
            layer.training = False


def compile_blocks(model: Any, **options: Any) -> None:
    """Compile each block of a ViT or ConvNeXt in place; compile another backbone as a whole.

    Blocks run compiled for every way to call the backbone, for example forward_features or stage by
    stage. Blocks (in a ConvNeXt those of a stage) are alike, so the code of the first one serves
    all.

    Args:
        model: The backbone.
        options: Options of torch.compile.
    """
    # One block's code serves the widths of four stages, each with and without gradients.
    torch_internals.set_compile_options(max_variants=32)
    for block in list_blocks(model) or [model]:
        block.compile(**options)


def list_blocks(model: Any) -> list[nn.Module]:
    """Return the blocks of a ViT, or of all stages of a ConvNeXt; none of another backbone."""
    if isinstance(model, VisionTransformer):
        return [*model.blocks]
    if not isinstance(model, ConvNeXt):
        return []
    stages: Any = model.stages
    blocks: list[nn.Module] = []
    for stage in stages:
        blocks += stage.blocks
    return blocks


def outline(settings: BackboneSettings) -> nn.Module:
    """Return the backbone on the meta device, without memory for its weights.

    Raises:
        UserError: If `build` would raise it, or if the backbone would be too large.
    """
    with torch.device("meta"):
        model = build(settings)
        count = count_bytes(model)
        if count > MAX_NUMBERS:
            raise UserError(
                f"backbone {settings.name!r} at img_size {settings.img_size} with options "
                f"{settings.options} has {count} weights, more than "
                f"{MAX_NUMBERS}; make it smaller"
            )
        _check_features(model, settings)
    return model


def shared_outline(settings: BackboneSettings) -> nn.Module:
    """Return the read-only result of `outline`; equal settings share one object.

    Seeds of a run, trials of a search and versions of a model folder have the same backbone.
    """
    key = repr(settings)
    if key not in _outlines:
        if len(_outlines) == MAX_OUTLINES:
            _outlines.clear()
        _outlines[key] = outline(settings)
    return _outlines[key]


def count_bytes(model: nn.Module) -> int:
    """Return how many numbers the parameters and buffers of a model hold together."""
    return sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))


def most_bytes(model: nn.Module) -> int:
    """Return the largest accepted size of a file of weights, or of a task's state.

    It is eight bytes for each number of the backbone, and a gigabyte for heads and names.
    """
    return 8 * count_bytes(model) + (1 << 30)


def check(settings: BackboneSettings) -> nn.Module:
    """Return the backbone on the meta device, without memory for its weights.

    Raises:
        UserError: If `build` would raise it.
    """
    return outline(settings)


def _check_features(model: Any, settings: BackboneSettings) -> None:
    """Check that the model computes one row of features per image with its declared width.

    Options can change its head, which stays. Nothing is computed. The random projections of our
    T2T-ViT cannot be drawn without memory.

    Raises:
        UserError: If it does not.
    """
    if isinstance(model, T2TVit):
        return
    try:
        image = torch.empty(1, 3, settings.img_size, settings.img_size)
        with torch.no_grad():
            features = model.eval()(image)
    except Exception as error:  # models check their inputs in many ways, or not at all
        reason = describe_error(error)
        raise UserError(
            f"backbone {settings.name!r} with options {settings.options} cannot see an "
            f"image of {settings.img_size} pixels "
            f"({reason:.300}); change backbone.img_size or backbone.options"
        ) from None
    shape = tuple(getattr(features, "shape", ()))
    if shape != (1, model.num_features):
        raise UserError(
            f"backbone {settings.name!r} with options {settings.options} makes features of "
            f"shape {shape} of an image, where heads read "
            f"{(1, model.num_features)}; leave out global_pool and head_hidden_size, or choose "
            f"another timm model, such as {EXAMPLES}"
        )


def load_weights(model: Any, settings: BackboneSettings) -> list[str]:
    """Fill `model` from `settings.weights`: `hub`, a model on the hub or a local safetensors file.

    Position embeddings are resampled. Parameters of context that the weights lack keep their
    initial values.

    Returns:
        Notes about ignored parts of a person's own weights.

    Raises:
        UserError: If the weights do not fit.
    """
    if settings.weights == "none":
        return []
    if settings.weights == "hub":
        tensors = pretrained.from_hub(settings.name, settings.img_size)
    else:
        path = settings.weights
        if hub.is_hub_model(path):
            path = hub.model_file(path, pretrained.WEIGHTS_FILE)
        try:
            data = read_regular(path, most_bytes(model))
        except OSError as error:
            raise UserError(
                f"backbone.weights is {settings.weights!r}, which cannot be read "
                f"({error.strerror}); give a .safetensors file, `hub` or `none`"
            ) from None
        try:
            tensors, _ = load_tensors(data, "weights")
        except UserError:
            raise UserError(
                f"backbone.weights {settings.weights!r} is not readable as safetensors; give a "
                ".safetensors file, `hub` or `none`"
            ) from None
    classifier: dict[str, Tensor] = {}
    try:
        start = {
            name: model.get_parameter(name).detach()
            for name in context.context_parameter_names(model)
        }
        fitting, classifier = pretrained.fit(tensors, model, settings.name)
        problems = model.load_state_dict(start | fitting, strict=False)
        differs = []
        for kind, names in zip(("missing", "unexpected"), problems, strict=True):
            if names:
                differs.append(f"{kind} {names[:3]}")
    except (
        RuntimeError,
        KeyError,
        ValueError,
        AttributeError,
        IndexError,
        TypeError,
    ) as error:  # other shapes
        lines = str(error).strip().splitlines() or [type(error).__name__]
        differs = [lines[-1].strip()]
    if differs:
        raise UserError(
            f"backbone.weights {settings.weights!r} do not fit {settings.name!r} "
            f"({', '.join(differs)}); give weights of the same architecture"
        )
    if settings.weights == "hub" or not classifier:
        return []
    name, tensor = next(iter(classifier.items()))
    layer = name.rpartition(".")[0]
    return [
        f"the classifier in backbone.weights ({layer}, {tensor.shape[0]} classes) was left out: "
        "each task has a head of its own"
    ]


def compute_digest(model: nn.Module) -> str:
    """Return the sha256 of names, dtypes, shapes and bytes of all parameters and buffers, by name.

    It includes the settings of context, which has no parameters but changes the function of the
    weights.
    """
    digest = hashlib.sha256(context.encode_settings(model))
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        if tensor.numel():
            flat = tensor.detach().cpu().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def to_bytes(model: nn.Module) -> bytes:
    """Return the weights of a model as safetensors.

    A few models, for example CoaT, use a layer under several names; each name gets a copy.
    """
    weights: dict[str, Tensor] = {}
    addresses: set[int] = set()
    for name, tensor in model.state_dict().items():
        weight = tensor.detach().cpu().contiguous()
        if weight.data_ptr() in addresses:
            weight = weight.clone()
        addresses.add(weight.data_ptr())
        weights[name] = weight
    return safetensors.torch.save(weights)


def from_bytes(model: nn.Module, data: bytes, where: str) -> None:
    """Load weights from safetensors; raise `UserError` when they are not of this model."""
    tensors, _ = load_tensors(data, where)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:  # other names or shapes
        raise UserError(
            f"{where}: its weights are of another model ({' '.join(str(error).split()):.300}); "
            "make it again"
        ) from None


def geometry(model: nn.Module) -> dict[str, Any]:
    """Return the sizes that masks need.

    They are the number of blocks, of patch tokens and of prefix tokens, the grid, the width, and
    the hidden width.
    """
    vit: Any = model
    grid = tuple(vit.patch_embed.grid_size)
    return {
        "depth": len(vit.blocks),
        "grid": grid,
        "tokens": grid[0] * grid[1],
        "prefix": vit.num_prefix_tokens,
        "width": vit.embed_dim,
        "hidden": vit.blocks[0].mlp.fc2.in_features,
    }
