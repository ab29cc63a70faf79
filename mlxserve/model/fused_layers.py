"""FusedLayers: fewer kernels per layer, where kernel launches dominate.

A GPU starts the kernels of a step of decodes one after another, some 1 us each: a layer of
Qwen 3 has 19, which this reduces to 12. A CPU gains nothing (see `load.py`), so this is for layers on Metal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from metal_kernels.metal import MetalBackend
from metal_kernels.step_ways import StepWay
from mlxserve.cache.kv import Backends
from mlxserve.model.fused_qkv import attention_product, fuse_qkv, separate
from mlxserve.model.joined_products import JoinedProduct, SharedLayer, Sharing, share
from mlxserve.model.load import LoadedModel


@dataclass(frozen=True, slots=True)
class FusedLayers:
    """The changes made to a model's layers."""

    attention: list[nn.Module]
    sharing: list[Sharing]
    modules: list[nn.Module]  # their layers and arrays are attributes of the instance

    @classmethod
    def fuse(cls, model: nn.Module, dtype: mx.Dtype, context: int) -> FusedLayers:
        """Fuse layers that provably compute the same. The weights take as much memory as before.

        dtype: of the rows; context: positions
        """
        attention, sharing = fuse_qkv(model, dtype, context), share(model, dtype)
        modules = model.modules()
        for module in modules:
            # nn.Module's `__getattr__` is entered only where the usual lookup has failed: it took 5,300
            # instructions instead of 100 with Python 3.11, as many as a call of an op.
            vars(module).update(module)
        mx.clear_cache()  # frees the weights as they were
        return cls(attention, sharing, modules)

    def __bool__(self) -> bool:
        return bool(self.attention or self.sharing)

    def __str__(self) -> str:
        return (
            f"attention is fused in {len(self.attention)} layers, and {len(self.sharing)} modules share "
            "products"
        )

    def undo(self) -> None:
        for module in self.modules:
            for name in module:
                vars(module).pop(name, None)
        separate(self.attention)
        for each in self.sharing:
            each.undo()


def joined_products(model: nn.Module) -> list[JoinedProduct]:
    """Return the products of a model that several layers share."""
    found = [attention_product(module) for module in model.modules()]
    shared = [module.product for module in model.modules() if isinstance(module, SharedLayer)]
    products = [*(product for product in found if product is not None), *shared]
    return list({id(product): product for product in products}.values())


def can_fuse(loaded: LoadedModel, backends: Backends) -> bool:
    """True if fusion pays off and nothing depends on the layers as they are.

    Adapters are attached to layers, and ranks have parts of them.
    """
    if loaded.by_sequence or loaded.group is not None or loaded.adapters is not None:
        return False
    by_layer = backends if isinstance(backends, Sequence) else [backends]
    return bool(by_layer) and all(
        isinstance(backend, MetalBackend) and StepWay.ROTATED not in backend.without
        for backend in by_layer
    )
