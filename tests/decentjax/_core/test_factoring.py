"""Matrices of leaves, and bases that both ends of an edge find alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decentjax._core.factoring import (
    first_basis,
    is_reduced,
    matrix_shape,
    orthonormal,
)


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((), (1, 1)),
        ((9,), (9, 1)),
        ((4, 6), (4, 6)),
        ((100, 2, 3), (100, 6)),
        ((2, 3, 100), (6, 100)),
        ((3, 3, 4, 10), (36, 10)),
    ],
)
def test_the_matrix_of_a_leaf_has_the_fewest_rows_and_columns(shape, wanted):
    assert matrix_shape(shape) == wanted


@pytest.mark.parametrize(
    ("shape", "rank", "rate", "wanted"),
    [
        ((16, 16), 4, 2.0, True),  # 2 * 4 * 32 numbers of 256.
        ((16, 16), 5, 2.0, False),
        ((16, 16), 5, 1.5, True),
        ((16,), 1, 1.0, False),
        ((0, 16), 1, 1.0, False),
        ((2, 1000), 2, 1.0, False),  # The rank is that of the matrix.
        ((2, 2), 1, 1.0, True),
    ],
)
def test_a_leaf_is_sent_as_factors_where_these_are_smaller(shape, rank, rate, wanted):
    assert is_reduced(shape, rank, rate) == wanted


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("is_wide", [False, True])
def test_first_bases_are_orthonormal_and_those_of_two_leaves_differ(dtype, is_wide):
    with jax.enable_x64(is_wide or dtype == "float64"):
        one, same, other = (np.asarray(first_basis(n, 30, 4, dtype)) for n in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert one.dtype == dtype
    assert np.abs(one - other).max() > 0.1
    np.testing.assert_allclose(one.T @ one, np.eye(4), atol=1e-5)


def factors(seed=0):
    """Of two edges, of three leaves; two of the leaves have one shape."""
    draw = np.random.default_rng(seed).standard_normal
    shapes = {0: (2, 9, 3), 4: (2, 7, 3), 5: (2, 9, 3)}
    return {n: jnp.float32(draw(shape)) for n, shape in shapes.items()}


BEFORE = {n: jnp.zeros_like(x) for n, x in factors().items()}


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_basis_is_orthonormal_and_spans_the_columns(size, is_compiled):
    of = jax.jit(orthonormal) if is_compiled else orthonormal
    given = {n: size * x for n, x in factors().items()}
    found = of(given, BEFORE)
    for number, x in factors().items():
        for basis, columns in zip(np.float64(found[number]), x, strict=True):
            np.testing.assert_allclose(basis.T @ basis, np.eye(3), atol=1e-5)
            inside = basis @ (basis.T @ columns)
            np.testing.assert_allclose(inside, columns, atol=1e-5)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_both_ends_of_an_edge_find_one_basis_bit_for_bit(is_compiled, has_zeros):
    of = jax.jit(orthonormal) if is_compiled else orthonormal
    for seed in range(20):
        one = factors(seed)
        if has_zeros:  # A row of them, and a column, which has no direction.
            one = {n: x.at[:, 1].set(0.0).at[:, :, 2].set(0.0) for n, x in one.items()}
        # Equal numbers have the difference +0 at both ends.
        found, other = of(one, BEFORE), of({n: 0 - x for n, x in one.items()}, BEFORE)
        for number in one:
            bits = [np.asarray(x[number]).view("int32") for x in (found, other)]
            np.testing.assert_array_equal(*bits)
            assert np.isfinite(found[number]).all()


def test_almost_equal_columns_have_a_basis_all_the_same():
    """Of which one pass of Gram-Schmidt would leave some degrees."""
    given = {
        n: x.at[..., 1].set(x[..., 0] + 1e-6 * x[..., 1]) for n, x in factors().items()
    }
    for found in orthonormal(given, BEFORE).values():
        for basis in np.float64(found):
            np.testing.assert_allclose(basis.T @ basis, np.eye(3), atol=1e-5)


def test_where_models_are_equal_the_basis_stays():
    given = {n: x.at[1].set(0.0) for n, x in factors().items()}
    before = orthonormal(factors(seed=1), BEFORE)
    for number, basis in orthonormal(given, before).items():
        np.testing.assert_allclose(basis[1], before[number][1], atol=1e-6)
        assert np.abs(basis[0] - before[number][0]).max() > 0.01
