"""One declaration per parameter, from which everything else about it is derived."""

import math
import zlib
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Kind = Literal["matrix", "readout", "plain", "gate"]


@dataclass(frozen=True)
class Leaf:
    """A parameter: dimension letters, sizes, sharding, init, optimizer kind and accounting group.

    `kind`: `matrix` is stepped by MuonH, `readout` by AdamH, `plain` and `gate` by Adam (`gate` names the head
    gates and the router, which may have weight decay). `init`: a standard deviation for a normal truncated at
    3 sigma, or `ones`, `zeros`, or `identity` (tap 0 of a convolution is 1, the others 0).
    Leading dimensions `L` and `E` of a `matrix` are stacks: each last-two-dims slice is one matrix.
    """

    dims: str
    shape: tuple[int, ...]
    spec: P
    init: float | Literal["ones", "zeros", "identity"]
    kind: Kind
    part: str

    def __post_init__(self) -> None:
        assert len(self.dims.split()) == len(self.shape) == len(self.spec), self

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def is_leaf(x: Any) -> bool:
    return isinstance(x, Leaf)


def tree_map(f: Any, leaves: Any, *rest: Any) -> Any:
    """`jax.tree.map` over a tree of `Leaf`."""
    return jax.tree.map(f, leaves, *rest, is_leaf=is_leaf)


def flatten(leaves: Any) -> dict[str, Leaf]:
    """Leaves by name: `{'blocks/attention/q': Leaf(...), ...}`."""
    found = jax.tree_util.tree_flatten_with_path(leaves, is_leaf=is_leaf)[0]
    return {name(path): leaf for path, leaf in found}


def name(path: Any) -> str:
    """A tree path as `blocks/attention/q`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def stack(layers: int, leaves: Any) -> Any:
    """The leaves of one layer as the leaves of a stack of layers: a leading `L`, not divided."""

    def one(leaf: Leaf) -> Leaf:
        return Leaf(f"L {leaf.dims}", (layers, *leaf.shape), P(None, *leaf.spec), leaf.init, leaf.kind, leaf.part)

    return tree_map(one, leaves)


def shapes(leaves: Any, mesh: Any, dtype: Any = jnp.float32) -> Any:
    """Abstract arrays with shardings, for `eval_shape`, lowering and restoring."""
    return tree_map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=NamedSharding(mesh, leaf.spec)), leaves)


def init(leaves: Any, mesh: Mesh, seed: int, dtype: Any = jnp.float32) -> Any:
    """Arrays for a tree of leaves, each from its own stream: the value depends on (seed, name) alone."""
    key = jax.random.key(seed)

    def build(name: str, leaf: Leaf) -> jax.Array:
        if leaf.init == "ones":
            return jnp.ones(leaf.shape, dtype)
        if leaf.init == "zeros":
            return jnp.zeros(leaf.shape, dtype)
        if leaf.init == "identity":  # taps are the next-to-last dimension
            taps = jnp.zeros(leaf.shape, dtype)
            return taps.at[..., 0, :].set(1)
        unit = jax.random.truncated_normal(
            jax.random.fold_in(key, zlib.crc32(name.encode())), -3.0, 3.0, leaf.shape, jnp.float32
        )
        return (unit * leaf.init).astype(dtype)

    def all_of_them() -> Any:
        return jax.tree.unflatten(
            jax.tree.structure(leaves, is_leaf=is_leaf),
            [build(name, leaf) for name, leaf in flatten(leaves).items()],
        )

    shardings = tree_map(lambda leaf: NamedSharding(mesh, leaf.spec), leaves)
    return jax.jit(all_of_them, out_shardings=shardings)()
