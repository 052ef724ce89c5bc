"""Our own product: against float64, at every edge of its blocking, and the same bits for a row at any place."""

import pytest
import torch

from rollout_engine.kernels import linear
from rollout_engine.kernels.cpu import build, gemm, recipes

needs_compiler = pytest.mark.skipif(build.load_kernels() is None, reason="no C++ compiler")
DTYPES = [torch.float32, torch.bfloat16]
# Around panels of 32 columns, tiles of 16 units, odd K, and one of each.
SHAPES = [(1, 1), (7, 50), (32, 64), (33, 31), (131, 77), (384, 128), (200, 1030)]
WINDOWS = [(0, 1), (3, 2), (17, 5), (9, 12), (9, 16), (1, 17), (0, 33), (5, 47), (2, 64)]


def product(x, weight, bias=None):
    return gemm.matmul(x, gemm.pack(weight), bias)


@needs_compiler
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_product(dtype, shape, with_bias):
    weight, x = torch.randn(shape).to(dtype), torch.randn(70, shape[1]).to(dtype)
    bias = torch.randn(shape[0]).to(dtype) if with_bias else None
    expected = x.double() @ weight.double().T
    expected = expected if bias is None else expected + bias.double()
    tolerance = {"rtol": 2**-8, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(product(x, weight, bias).double(), expected, **tolerance)


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_bits_in_any_batch_on_any_number_of_threads(dtype, shape, thread_count):
    weight, bias, x = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype), torch.randn(70, shape[1]).to(dtype)
    operand = gemm.pack(weight)
    whole = gemm.matmul(x, operand, bias)
    for threads in (1, 2, 3):
        thread_count(threads)
        assert torch.equal(gemm.pack(weight).panels, operand.panels)
        for start, rows in WINDOWS:
            part = gemm.matmul(x[start : start + rows], operand, bias)
            assert torch.equal(part, whole[start : start + rows])


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_bits_in_blocks_of_any_height(dtype):
    weight, x = torch.randn(70, 300).to(dtype), torch.randn(260, 300).to(dtype)
    operand = gemm.pack(weight)
    whole = gemm.matmul(x, operand, None)
    for rows in (*range(1, 19), 127, 128, 129, 259):
        assert torch.equal(gemm.matmul(x[:rows], operand, None), whole[:rows])
        assert torch.equal(gemm.matmul(x[-rows:], operand, None), whole[-rows:])


@needs_compiler
def test_rows_beyond_the_cache_are_cut_into_parts_with_the_same_bits(thread_count):
    weight, x = torch.randn(40, 2048).to(torch.bfloat16), torch.randn(700, 2048).to(torch.bfloat16)
    operand = gemm.pack(weight)
    thread_count(2)
    whole = gemm.matmul(x, operand, None)
    assert torch.equal(torch.cat([gemm.matmul(part, operand, None) for part in x.split(100)]), whole)


@needs_compiler
def test_the_bias_is_added_before_rounding():
    x, weight = torch.ones(1, 1, dtype=torch.bfloat16), torch.full((1, 1), 256.0, dtype=torch.bfloat16)
    bias = torch.tensor([1.0], dtype=torch.bfloat16)  # 257 lies between 256 and 258: to even, 256
    assert product(x, weight, bias).item() == 256
    three = torch.tensor([3.0], dtype=torch.bfloat16)  # 259 lies between 258 and 260: to even, 260
    assert product(x, weight, three).item() == 260


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_a_number_stays_in_its_row_and_column(dtype):
    x, weight = torch.randn(40, 48).to(dtype), torch.randn(70, 48).to(dtype)
    clean = product(x, weight)
    x[5, 7] = float("nan")
    weight[66, 3] = float("inf")
    spoilt = product(x, weight)
    assert spoilt[5].isnan().all() and not spoilt[:, 66].isfinite().any()
    others = torch.ones_like(clean, dtype=torch.bool)
    others[5], others[:, 66] = False, False
    assert torch.equal(spoilt[others], clean[others])


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_may_be_slices(dtype):
    wide, tall = torch.randn(20, 96).to(dtype), torch.randn(64, 96).to(dtype)
    x, weight = wide[:, 1:65], tall[:, 3:67]
    assert torch.equal(product(x, weight), product(x.clone(), weight.clone()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_compiler_products_are_borrowed(dtype, monkeypatch):
    monkeypatch.setattr(build, "load_kernels", lambda: None)
    monkeypatch.setattr(linear, "_plan", linear._plan.__wrapped__)
    weight = torch.randn(48, 64).to(dtype)
    plan = linear.plan_for(weight)
    assert plan.kernel != linear.OWN
    assert linear.matmul(torch.randn(5, 64).to(dtype), linear.pack(weight, plan), None, plan).shape == (5, 48)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_slow_instruction_set_asks_the_library_first(dtype, monkeypatch):
    monkeypatch.setattr(gemm, "is_fast", lambda dtype: False)
    candidates = linear._candidates(dtype)
    assert candidates[0].kernel == linear.ONEDNN and candidates[-1].kernel == linear.OWN


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_avx2_with_fused_products_is_fast_enough_to_be_asked_first(dtype):
    if not {"avx2", "fma"} <= recipes.cpu_features():
        pytest.skip("no AVX2 with FMA")
    assert gemm.is_fast(dtype)
    assert linear._candidates(dtype)[0].kernel == linear.OWN


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_weight_gives_its_weight_back(dtype, shape):
    weight = torch.randn(shape).to(dtype)
    assert torch.equal(gemm.unpack(gemm.pack(weight)), weight)


@needs_compiler
def test_weights_are_packed_into_one_piece_of_memory():
    weights = [torch.randn(33, 31), torch.randn(200, 64), torch.randn(64, 50).to(torch.bfloat16)]
    rooms = gemm.empty_panels(weights)
    assert len({room.untyped_storage().data_ptr() for room in rooms}) == 1
    packed = [gemm.pack(weight, room) for weight, room in zip(weights, rooms, strict=True)]
    for weight, copy, room in zip(weights, packed, rooms, strict=True):
        assert copy.panels is room
        assert torch.equal(gemm.unpack(copy), weight)


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_gathered_among_panels_is_packed_where_it_lies(dtype, shape):
    weight = torch.randn(shape).to(dtype)
    (room,) = gemm.empty_panels([weight])
    room.fill_(-1)  # of what was there before, nothing may stay
    gemm.rows_of(room, dtype)[: shape[0], : shape[1]].copy_(weight)
    packed = gemm.pack_in_place(room, weight.to("meta"))
    assert packed.panels is room
    assert torch.equal(room, gemm.pack(weight).panels)


@needs_compiler
@pytest.mark.parametrize("num_threads", [1, 3])
def test_panels_of_several_weights_are_moved_at_once(num_threads, thread_count):
    weights = [torch.randn(200, 64), torch.randn(64, 50).bfloat16(), torch.randn(33, 31), torch.randn(7, 3).bfloat16()]
    packed = list(map(gemm.pack, weights))
    thread_count(num_threads)
    copies, rows, again = (list(map(torch.empty_like, (p.panels for p in packed))) for _ in range(3))
    gemm.move_panels(gemm.COPY, zip(packed, copies, strict=True))
    assert all(map(torch.equal, copies, (p.panels for p in packed)))
    gemm.move_panels(gemm.UNPACK, zip(packed, rows, strict=True))
    for weight, room in zip(weights, rows, strict=True):
        assert torch.equal(gemm.rows_of(room, weight.dtype)[: weight.shape[0], : weight.shape[1]], weight)
    staged = [p._replace(panels=room) for p, room in zip(packed, rows, strict=True)]
    gemm.move_panels(gemm.PACK, zip(staged, again, strict=True))
    gemm.move_panels(gemm.PACK, zip(staged, rows, strict=True))
    assert all(map(torch.equal, again, copies)) and all(map(torch.equal, rows, copies))
    gemm.move_panels(gemm.COPY, [])


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_single_rows_can_be_read_from_a_packed_weight(dtype, shape):
    weight = torch.randn(shape).to(dtype)
    indices = torch.randint(shape[0], (3, 5))
    assert torch.equal(gemm.select_rows(gemm.pack(weight), indices), weight[indices])
    assert gemm.select_rows(gemm.pack(weight), indices[:0]).shape == (0, 5, shape[1])


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("rows", "in_features", "out_features"), [(1, 64, 32), (13, 63, 70), (200, 128, 259)])
def test_float32_results_of_bfloat16_are_those_that_are_rounded(rows, in_features, out_features, has_bias):
    x, weight = torch.randn(rows, in_features).bfloat16(), torch.randn(out_features, in_features).bfloat16()
    bias = torch.randn(out_features).bfloat16() if has_bias else None
    packed = gemm.pack(weight)
    wide = gemm.matmul(x, packed, bias, float32_out=True)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.bfloat16(), gemm.matmul(x, packed, bias))
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(wide.double(), exact, atol=1e-4, rtol=1e-5)
    for row in range(0, rows, 7):
        assert torch.equal(gemm.matmul(x[row : row + 1], packed, bias, float32_out=True), wide[row : row + 1])
