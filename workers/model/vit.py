"""The backbone: build any timm image model, load its weights, and compute its digest.

timm's registry of models is the registry of backbones: our own models are added with
`register_model`, like timm's (see t2t.py). Batch norm stays in evaluation mode for every method,
even if the backbone is trained. Its running statistics are those of the loaded weights and never
change, so the outputs for an image depend only on the image, the shared weights and the state of
its task. Without loaded weights, the statistics are measured once on noise.
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
from workers.job import BackboneSettings, Task
from workers.model import context, norms, pretrained, signature
from workers.model.noise import replace_drop_paths
from workers.model.t2t import T2TVit
from workers.storage import hub
from workers.storage.regular_file import read_regular
from workers.storage.taskstate import load_tensors

DROPOUTS = ("drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate")
# maximum number of elements in all parameters and buffers of a backbone (40 GB in fp32); a file
# from an unknown source may ask for any number
MAX_ELEMENTS = 10_000_000_000
EXAMPLES = "vit_tiny_patch16_224, convnext_atto, resnet18 or mobilenetv3_small_100"
NOISE_IMAGES = 32  # number of noise images in `measure_statistics`
MAX_OUTLINES = 16  # maximum number of backbones in `_outlines`
# cache of `shared_outline`: backbones on the meta device, by the repr of their settings
_outlines: dict[str, nn.Module] = {}


def build(settings: BackboneSettings) -> nn.Module:
    """Build a backbone without a classifier and with random weights.

    `load_weights` or `from_bytes` sets its weights.

    Raises:
        UserError: If the settings are invalid.
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
    return _prepare_model(made, settings)


def _prepare_model(model: Any, settings: BackboneSettings) -> nn.Module:
    """Check a model from timm, and replace its stochastic depth and norms in place.

    Returns:
        The model, with dropout switched off, and with context (see context.py) if it is configured.

    Raises:
        UserError: If `img_size` does not fit the model, or the model does not support the settings.
    """
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
        context.insert_context(model, settings.context)
    prepared: nn.Module = model
    return prepared


def feature_width(model: Any) -> int:
    """Return the width of the features before the classifier.

    Some models have an extra layer before the classifier; then the width is that of this layer.
    """
    return int(getattr(model, "head_hidden_size", None) or model.num_features)


def remove_dropout(model: nn.Module) -> None:
    """Switch off the dropout that a few models have by default.

    timm draws it separately on each rank, so results would depend on the number of ranks.
    """
    for module in model.modules():
        if isinstance(module, (nn.Dropout, nn.Dropout2d)):
            module.p = 0.0
        for name in ("drop_rate", "attn_drop_rate"):  # arguments of F.dropout
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


@torch.no_grad()
def measure_statistics(model: nn.Module, img_size: int) -> None:
    """Measure the statistics of batch norms on random noise, for a network with random weights.

    For the noise, the outputs of each batch norm then have about unit variance, as in training
    mode. The noise is always the same.
    """
    layers = [*norms.find_norms_with_statistics(model).values()]
    if not layers:
        return
    noise = torch.randn(
        (NOISE_IMAGES, 3, img_size, img_size), generator=torch.Generator().manual_seed(0)
    )
    momenta = [layer.momentum for layer in layers]
    model.eval()
    for layer in layers:
        layer.momentum = 1.0  # only the statistics of this batch count
        layer.training = True  # `FrozenNorm.train` would not change the mode
        if getattr(layer, "num_batches_tracked", None) is not None:
            layer.num_batches_tracked.zero_()
    try:
        model(noise)
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
            layer.training = False


def compile_blocks(model: Any, **options: Any) -> None:
    """Compile each block of a ViT or ConvNeXt in place; compile other backbones as a whole.

    Compiled blocks are used for every way to call the backbone, for example forward_features or
    stage by stage. All blocks of a ViT, and those of a stage of a ConvNeXt, are equal, so the code
    compiled for the first block is used for all these blocks.

    Args:
        model: The backbone.
        options: Options of torch.compile.
    """
    # a block has variants for the widths of four stages, each with and without gradients
    torch_internals.set_compile_options(max_variants=32)
    for block in list_blocks(model) or [model]:
        block.compile(**options)


def list_blocks(model: Any) -> list[nn.Module]:
    """Return the blocks of a ViT, or those of all stages of a ConvNeXt; otherwise an empty list."""
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
        UserError: If `build` raises it, if the backbone is too large, or if it does not return one
            feature vector per image.
    """
    with torch.device("meta"):
        model = build(settings)
        count = count_elements(model)
        if count > MAX_ELEMENTS:
            raise UserError(
                f"backbone {settings.name!r} at img_size {settings.img_size} with options "
                f"{settings.options} has {count} weights, more than "
                f"{MAX_ELEMENTS}; make it smaller"
            )
        _check_features(model, settings)
    return model


def shared_outline(settings: BackboneSettings) -> nn.Module:
    """Return the result of `outline` from a cache; equal settings share one object.

    The caller must not change the result. The cache helps because the seeds of a run, the trials of
    a search and the versions of a model folder have the same backbone.
    """
    key = repr(settings)
    if key not in _outlines:
        if len(_outlines) == MAX_OUTLINES:
            _outlines.clear()
        _outlines[key] = outline(settings)
    return _outlines[key]


def count_elements(model: nn.Module) -> int:
    """Return the number of elements in all parameters and buffers of a model (not bytes)."""
    return sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))


def most_bytes(model: nn.Module) -> int:
    """Return the largest accepted size in bytes of a file of weights, or of a task's state.

    It is eight bytes for each element of the backbone, plus 1 GiB for heads and names.
    """
    return 8 * count_elements(model) + (1 << 30)


def _check_features(model: Any, settings: BackboneSettings) -> None:
    """Check that the model returns one feature vector of the declared width per image.

    This can fail, because options can change the head of the model. On the meta device nothing is
    computed.

    Raises:
        UserError: If the model fails, or returns features of another shape.
    """
    if isinstance(model, T2TVit):  # its random projections cannot be drawn on the meta device
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
    """Load the weights of `settings.weights` into `model`.

    The setting is one of: `hub` (timm's weights of `settings.name`), another model on the hub
    (`hf-hub:OWNER/NAME`), the path of a safetensors file, or `none`. Position embeddings are
    resampled. Parameters of context (see context.py) that the weights lack keep their initial
    values.

    Returns:
        Notes for the user: a classifier in the weights was ignored. Empty for `hub`.

    Raises:
        UserError: If the weights cannot be read, or do not fit.
    """
    if settings.weights == "none":
        return []
    tensors = _read_published(model, settings)
    classifier: dict[str, Tensor] = {}
    try:
        start = {
            name: model.get_parameter(name).detach()
            for name in context.context_parameter_names(model)
        }
        fitting, classifier = pretrained.convert_weights(tensors, model, settings.name)
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
    ) as error:  # weights of another architecture or with other shapes
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


def _read_published(model: Any, settings: BackboneSettings) -> dict[str, Tensor]:
    """Read the weights of `settings.weights`, which is not `none`, under their published names.

    Raises:
        UserError: If they cannot be read.
    """
    if settings.weights == "hub":
        return pretrained.from_hub(settings.name, settings.img_size)
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
    return tensors


def load_head(model: Any, settings: BackboneSettings, task: Task) -> dict[str, Tensor]:
    """Return the classifier in `settings.weights` as the head of a task.

    Args:
        model: The backbone, with these weights.
        settings: Settings of the backbone.
        task: The task, with the classes of the classifier in the order of its outputs.

    Returns:
        `weight`, (classes, features), and `bias`, (classes,), in fp32. A classifier without a bias
        gets zeros.

    Raises:
        UserError: If the weights have no classifier, or one that is not a linear layer on the
            features with an output for each class.
    """
    tensors = _read_published(model, settings)
    _, classifier = pretrained.convert_weights(tensors, model, settings.name)
    where = f"task {task.name!r} has role `pretrained`, and backbone.weights {settings.weights!r}"
    layers = sorted({name.rpartition(".")[0] for name in classifier})
    if not layers:
        raise UserError(
            f"{where} have no classifier; give weights that were saved with it, or the role `base`"
        )
    if len(layers) > 1 or f"{layers[0]}.weight" not in classifier:
        raise UserError(
            f"{where} have a classifier of several layers ({', '.join(layers)}); "
            "give weights with one linear layer"
        )
    weight = classifier[f"{layers[0]}.weight"].float()
    expected = (task.num_classes, model.num_features)
    if tuple(weight.shape) != expected:
        raise UserError(
            f"{where} have a classifier of shape {tuple(weight.shape)}, where {expected} (classes "
            "of the task, features of the backbone) is expected; list the classes of the "
            "classifier in the order of its outputs (`classes`, or the card's)"
        )
    bias = classifier.get(f"{layers[0]}.bias", torch.zeros(task.num_classes))
    others = classifier.keys() - {f"{layers[0]}.weight", f"{layers[0]}.bias"}
    if others or tuple(bias.shape) != expected[:1]:
        raise UserError(
            f"{where} have a classifier that is not a linear layer "
            f"({', '.join(sorted(classifier))}; bias of shape {tuple(bias.shape)}); give weights "
            "with one linear layer"
        )
    return {"weight": weight, "bias": bias.float()}


def compute_digest(model: nn.Module) -> str:
    """Return the sha256 of names, dtypes, shapes and bytes of all tensors in the `state_dict`.

    Tensors are sorted by name. The digest includes the settings of context (see context.py),
    because context can change the outputs without having parameters.
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

    A few models, for example CoaT, use a layer under several names; the weights are then stored
    under each name.
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
    """Load weights from safetensors.

    Args:
        model: The model.
        data: The content of a safetensors file.
        where: Origin of the weights, for messages.

    Raises:
        UserError: If the data are invalid, or the weights are those of another model.
    """
    tensors, _ = load_tensors(data, where)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:  # other names or shapes
        raise UserError(
            f"{where}: its weights are of another model ({' '.join(str(error).split()):.300}); "
            "make it again"
        ) from None


def geometry(model: nn.Module) -> dict[str, Any]:
    """Return sizes of a ViT.

    They are `depth` (number of blocks), `grid` (rows and columns of patches), `tokens` (number of
    patch tokens), `prefix` (number of prefix tokens), `width`, and `hidden` (width of the FFN).
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
