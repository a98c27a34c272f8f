"""One network of linen and of nnx, quantized in three ways, behind one interface."""

import re

import jax
from flax import nnx
from jax.tree_util import keystr, tree_leaves_with_path

import jqx
import jqx.linen
import jqx.nnx
from jqx._src.modules.quantized_function import Mode

from ..linen import networks as of_linen
from ..nnx import networks as of_nnx

POLICIES, images = of_linen.POLICIES, of_linen.images

HELD = r"\w*General\w*/|(conv_general_dilated|dot_general|quant_stats|quant_scales)/"
"""Parts of paths that name what holds variables: what a contraction holds counts as its layer's."""


def named(tree, prefix=""):
    """Leaves by path, of nested dicts or of entries by key."""
    leaves = tree_leaves_with_path(tree)
    paths = [
        f"{prefix}/{keystr(path, simple=True, separator='/')}".strip("/") for path, _ in leaves
    ]
    return {re.sub(HELD, "", path): leaf for path, (_, leaf) in zip(paths, leaves, strict=True)}


class Linen:
    """A module of linen with its variables."""

    float_network = staticmethod(of_linen.float_network)

    def __init__(self, way, policy, mode, scales="calibrated"):
        self.mode, self.variables = mode, of_linen.variables()
        self.module = lambda mode: of_linen.WAYS[way](policy, mode, scales)

    @staticmethod
    def params():
        return of_linen.variables()["params"]

    def __call__(self, x):
        if self.mode is not Mode.CALIBRATE:
            return self.module(self.mode).apply(self.variables, x)
        out, new = self.module(self.mode).apply(self.variables, x, mutable=["quant_stats"])
        self.variables = {**self.variables, **new}
        return out

    def compiled(self, x):
        return jax.jit(self.module(self.mode).apply)(self.variables, x)

    def gradients(self, x):
        """Those of the sum of squares, for the parameters."""
        module = self.module(self.mode)
        return jax.grad(lambda p: (module.apply({"params": p}, x) ** 2).sum())(self.params())

    def change(self, name, x, **options):
        """Calls `convert`, `fix_scales` or `learn_scales`."""
        mode = Mode.CONVERT if name == "convert" else Mode.SIMULATE
        change = getattr(jqx.linen, name)
        self.variables = change(self.module(mode), self.variables, x, **options)
        self.mode = mode

    def plan(self, x):
        return jqx.linen.make_plan(self.module(self.mode), self.variables, x)

    def leaves(self, *collections):
        """Leaves of `params`, `qparams`, `quant_stats` or `quant_scales`, by path."""
        trees = [named(self.variables.get(name, {})) for name in collections]
        return {path: leaf for tree in trees for path, leaf in tree.items()}


KINDS = {
    "params": nnx.Param,
    "qparams": jqx.nnx.QParam,
    "quant_stats": jqx.nnx.Stat,
    "quant_scales": jqx.nnx.Scale,
}
"""The variables of nnx that stand for collections of linen."""


class Nnx:
    """A model of nnx."""

    float_network = staticmethod(of_nnx.float_network)
    params = staticmethod(of_nnx.params)

    def __init__(self, way, policy, mode, scales="calibrated"):
        self.model = of_nnx.WAYS[way](policy, mode, scales)

    @property
    def mode(self):
        raise AttributeError("write only")

    @mode.setter
    def mode(self, mode):
        self.model.set_attributes(mode=mode)

    def __call__(self, x):
        return self.model(x)

    def compiled(self, x):
        return nnx.jit(lambda model, x: model(x))(self.model, x)

    def gradients(self, x):
        """Those of the sum of squares, for the parameters."""
        return nnx.to_pure_dict(nnx.grad(lambda model: (model(x) ** 2).sum())(self.model))

    def change(self, name, x, **options):
        """Calls `convert`, `fix_scales` or `learn_scales`."""
        getattr(jqx.nnx, name)(self.model, x, **options)

    def plan(self, x):
        return jqx.nnx.make_plan(self.model, x)

    def leaves(self, *collections):
        """Leaves of the variables that stand for collections of linen, by path."""
        kinds = nnx.Any(*(KINDS[name] for name in collections))
        flat = {}
        for path, variable in nnx.to_flat_state(nnx.state(self.model, kinds)):
            flat |= named(variable.get_value(), "/".join(map(str, path)))
        return flat


LIBRARIES = {"linen": Linen, "nnx": Nnx}
