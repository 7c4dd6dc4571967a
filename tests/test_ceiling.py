"""The most that tuning could give: from planted times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmtune.capture.ceiling import ceiling
from gemmtune.gemm import Gemm
from gemmtune.table import Shape

G = Gemm(512, 256, 1024, "T", "N", *["bfloat16"] * 3, "-", 1024, 1024, 512)
TYPES = ("bfloat16", "float8e4m3", "float8e5m2")


def shape(time_us, calls=1.0, ranks="0", **changes):
    return Shape(G._replace(**changes), calls=calls, ranks=ranks, time_us=time_us)


shapes = st.builds(
    lambda us, calls, m, k, a: shape(us, calls, m=m, k=k, type_a=a, type_b=a),
    st.floats(0.1, 1e5),
    st.integers(1, 64),
    st.sampled_from((1, 64, 4096)),
    st.sampled_from((1, 64, 4096)),
    st.sampled_from(TYPES),
)


@given(st.lists(shapes, min_size=1, max_size=8))
def test_it_is_never_above_what_was_measured_and_keeps_the_largest_type(rows):
    found = ceiling(rows)
    assert found.gemm_us == pytest.approx(sum(r.calls * r.time_us for r in rows))
    assert 0 < found.best_us <= found.gemm_us
    assert 0 <= found.shorter(2 * found.gemm_us) < 0.5
    twice = ceiling([r._replace(time_us=2 * r.time_us) for r in rows])
    assert twice.best_us == pytest.approx(2 * found.best_us)


def test_a_slow_gemm_is_brought_to_the_best_rate_of_its_type():
    rows = [shape(100.0), shape(400.0, m=1024), shape(50.0, type_a="float8e4m3")]
    found = ceiling([*rows, shape(100.0, type_a="float8e5m2")])
    assert found.gemm_us == 650 and found.best_us == pytest.approx(100 + 200 + 50 + 50)
    assert found.shorter(1000.0) == pytest.approx(0.25)


def test_a_gemm_bound_by_memory_cannot_reach_the_rate_of_a_large_one():
    large, thin = shape(100.0, m=4096, n=4096, k=4096), shape(10.0, m=4096, n=1, k=4096)
    assert ceiling([large, thin]).best_us == 110.0  # moves more a second than the large one


def test_ranks_weigh_by_what_they_ran():
    assert ceiling([shape(100.0, 2, "0-3"), shape(100.0, 4, "0", m=64)]).gemm_us == 300.0


@pytest.mark.parametrize("rows", [[], [shape(0.0)], [shape(0.0), shape(1.0, m=2)], [shape(0, m=0)]])
def test_without_all_times_nothing_is_said(rows):
    assert ceiling(rows) is None
