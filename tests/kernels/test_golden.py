"""The bytes of every operation on a fixed input are pinned, for every backend: a change here changes artifacts."""

from __future__ import annotations

import pytest

from .backends import load, native_levels
from .golden import digests

EXPECTED = {
    "fp8_to_float32": "60bc50b74946f126bc18b74d7c2d7f4dd13b555b2870936b95839cc9527a9067",
    "fp8_to_bf16": "4226ee35da2e0e4ef1d3365ef621900676d7ef3cd516de22f31be4d5147197ad",
    "int4_to_float32": "cf5f1618bac2dd86f3701cdf5afff4ade5d3923f708bd9c0a0cc8baf307b9bde",
    "int4_to_bf16": "0a9139317bff48de89747eee50452a52f2c0a9d62964f320f3e06cca820835a8",
    "float_to_fp8": "dbc85a0d8d1d8bfbb87c5dc8f1fda092f10809a8111a0f0ca92f6171e4128a40",
    "float32_to_bf16": "36749e436d489706e892a5c5b2fb56ad29707ef818002577729e15bb5af356e9",
    "fp8_to_int4 rtn g32": "90713aba52c369ceb32dfd9f73736a191aa662684a9307d0abbafc90b181c53a",
    "float_to_int4 rtn g32": "acb5c0832374825355129ba2d16b3412c11b19494f037b2b62e8eaa6dfd613d1",
    "fp8_to_int4 rtn g64": "330edf8f64256e1efba273726fe3d95a84103e52d08d403ba9785d459639e523",
    "float_to_int4 rtn g64": "c684b9185ca3010c289fb50a40c3f966387a1613b6d6868c1d2e23029728b9e3",
    "fp8_to_int4 rtn g128": "f1bd635008b8c2aade93a87f0b06381c89c4066435632d15c0a7367df59dcbda",
    "float_to_int4 rtn g128": "c8e04fd83ee1d916271fc45fa42a22026ef60f4041eb9abecb4031ab17134c87",
    "fp8_to_int4 mse g32": "aa33254ca92721a8ff9ccb21347cd89671d6db2b108a404980e6b812e52f2aa0",
    "float_to_int4 mse g32": "a5afb57a4c84d6a5ee1b5d2ee176a08e92938cbf09b90a5eb5a74ee886aab439",
    "fp8_to_int4 mse g64": "e7219369b065265fd0a787a8a8a8ac1484c56d89090890498a282a43932a7e70",
    "float_to_int4 mse g64": "9987c5e8c762ae3ae6298f30a0ce07080019fb071dc14bd014cee64cb4a24337",
    "fp8_to_int4 mse g128": "b63e5029455bb2f4875b2366d8e1e013b5ba19b30e76899e35b1999e38487522",
    "float_to_int4 mse g128": "88c0eaba85b34f33541cf5e72fde4c29a9c6bca514234f0df6f45c7353c9bf88",
}


@pytest.mark.parametrize("name", ["torch", *native_levels()])
def test_bytes_are_pinned(name: str) -> None:
    assert digests(load(name)) == EXPECTED
