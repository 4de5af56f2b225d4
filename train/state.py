"""What a step of training changes: parameters, optimiser state and step number, on a mesh."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ralm_jax.sharding import on_mesh


class State(NamedTuple):
    """What a step changes: parameters and optimiser state in float32, and the steps that are done."""

    params: Any
    optimizer: Any
    step: Any


def first_state(params: Any, optimizer: optax.GradientTransformation) -> State:
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    return State(wide, optimizer.init(wide), jnp.zeros((), jnp.int32))


def abstract_state(params: Any, optimizer: optax.GradientTransformation, mesh: Mesh) -> State:
    """`new_state` as shapes, dtypes and shardings; nothing is allocated, and `params` may be such as well."""
    shardings = jax.tree.map(lambda x: x.sharding, params)
    replicated = NamedSharding(mesh, PartitionSpec())
    shapes = jax.eval_shape(functools.partial(first_state, optimizer=optimizer), params)
    kept = optax.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        shapes.optimizer,
        shardings,
        transform_non_params=lambda _: replicated,
    )
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        State(shardings, kept, replicated),
    )


def new_state(params: Any, optimizer: optax.GradientTransformation, mesh: Mesh) -> State:
    """The state before the first step. What the optimiser keeps of a parameter lies where the parameter does."""
    shardings = jax.tree.map(lambda x: x.sharding, abstract_state(params, optimizer, mesh))
    with on_mesh(mesh):
        return jax.jit(functools.partial(first_state, optimizer=optimizer), out_shardings=shardings)(params)
