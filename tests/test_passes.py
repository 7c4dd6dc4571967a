"""Telling dgrad from wgrad, pure."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gemmtune.capture.passes import Forward, match

dims = st.integers(1, 5)


@given(dims, dims, dims, st.booleans(), st.booleans())
def test_an_operand_of_the_forward_decides_where_dimensions_are_equal(
    rows: int, inner: int, cols: int, turned: bool, wgrad_first: bool
) -> None:
    """For y(rows, cols) = x @ w, however the backward writes its two products."""
    forward = Forward("layer", rows, inner, cols, x_storage=1, w_storage=2)
    dgrad = (inner, cols, rows, (2, 3)) if turned else (rows, cols, inner, (3, 2))
    wgrad = (cols, rows, inner, (3, 1)) if turned else (inner, rows, cols, (1, 3))
    order = [("wgrad", wgrad), ("dgrad", dgrad)]
    for name, (r, k, c, storages) in order if wgrad_first else reversed(order):
        assert match([forward], r, k, c, storages) == (name, forward)


def test_without_a_known_operand_the_gradient_of_w_comes_first() -> None:
    forward = Forward("square", 4, 4, 4, x_storage=1, w_storage=2)
    names = [match([forward], 4, 4, 4, (8, 9))[0] for _ in range(2)]
    assert names == ["wgrad", "dgrad"]


def test_equal_layers_of_one_node_share_its_backward_evenly() -> None:
    layers = [Forward(str(i), 6, 2, 3, x_storage=10 + i, w_storage=20 + i) for i in range(3)]
    owners = [match(layers, 6, 3, 2, (98, 99)) for _ in range(3)]
    assert [name for name, _ in owners] == ["dgrad"] * 3
    assert {f.site for _, f in owners if f} == {"0", "1", "2"}


def test_a_repeated_forward_inside_backward_is_an_fprop() -> None:
    forward = Forward("layer", 6, 2, 3, x_storage=1, w_storage=2)
    assert match([forward], 6, 2, 3, (1, 2)) == ("fprop", forward)


def test_a_product_that_fits_no_forward_is_other() -> None:
    assert match([Forward("layer", 6, 2, 3, 1, 2)], 7, 7, 7, (1, 2)) == ("other", None)
