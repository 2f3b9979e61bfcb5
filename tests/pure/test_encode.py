"""The choice of a codec never makes a save longer, and follows the device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.chunktable import RAW
from ckptstore.errors import InvalidInputError
from ckptstore.plan.encode import CHOICES, CodecRules, Measured, choose_codec, save_s_per_byte

SPEEDS = st.floats(1e6, 1e11)
MEASURED = st.dictionaries(
    st.sampled_from(["zstd", "byteplane+zstd", "delta"]),
    st.builds(Measured, ratio=st.floats(0.001, 1.5), nbytes_per_s=st.floats(1e7, 1e10)),
)
CORES = st.integers(1, 64)

# BF16 weights on one core, from docs/explanation/performance.md
WEIGHTS = {
    "zstd": Measured(ratio=0.78, nbytes_per_s=0.75e9),
    "byteplane+zstd": Measured(ratio=0.68, nbytes_per_s=0.5e9),
    "delta": Measured(ratio=0.013, nbytes_per_s=2.5e9),
}
FULL = {name: each for name, each in WEIGHTS.items() if name != "delta"}


@given(measured=MEASURED, device=SPEEDS, cores=CORES)
def test_a_save_never_takes_longer_than_raw_and_is_shorter_by_a_tenth_if_encoded(
    measured: dict[str, Measured], device: float, cores: int
) -> None:
    chosen = choose_codec(measured, device_nbytes_per_s=device, cores=cores)
    raw_s = save_s_per_byte(None, device_nbytes_per_s=device, cores=cores)
    taken_s = save_s_per_byte(measured.get(chosen), device_nbytes_per_s=device, cores=cores)
    assert chosen == RAW or taken_s <= 0.9 * raw_s * (1 + 1e-9)


@given(measured=MEASURED, device=SPEEDS, cores=CORES, slower=st.floats(0.001, 1))
def test_what_pays_on_a_device_pays_on_a_slower_one(
    measured: dict[str, Measured], device: float, cores: int, slower: float
) -> None:
    if choose_codec(measured, device_nbytes_per_s=device, cores=cores) != RAW:
        assert choose_codec(measured, device_nbytes_per_s=device * slower * 0.999, cores=cores) != RAW


@given(measured=MEASURED, cores=CORES)
def test_a_device_of_unknown_speed_is_written_raw(measured: dict[str, Measured], cores: int) -> None:
    assert choose_codec(measured, device_nbytes_per_s=None, cores=cores) == RAW


@pytest.mark.parametrize("cores", [1, 2, 4])
def test_a_fast_disk_gets_raw_and_an_object_store_the_smallest(cores: int) -> None:
    assert choose_codec(WEIGHTS, device_nbytes_per_s=4e9, cores=cores) == RAW
    assert choose_codec(FULL, device_nbytes_per_s=4e9, cores=cores) == RAW
    assert choose_codec(WEIGHTS, device_nbytes_per_s=0.2e9, cores=cores) == "delta"
    assert choose_codec(FULL, device_nbytes_per_s=0.2e9, cores=cores) == "byteplane+zstd"


def test_the_first_rule_that_fits_counts() -> None:
    rules = CodecRules.of({"*.bias": "raw", "bfloat16": "delta", "*.exp_avg*": "byteplane+zstd"})
    assert rules.find("a.bias", "bfloat16") == "raw"
    assert rules.find("a.weight", "bfloat16") == "delta"
    assert rules.find("a.weight.exp_avg_sq", "float32") == "byteplane+zstd"
    assert rules.find("a.weight", "float32") == "raw"
    assert all(CodecRules.of(choice).find("x", "int8") == choice for choice in CHOICES)
    assert CodecRules.of("raw").is_raw and CodecRules.of({}).is_raw and not rules.is_raw


@pytest.mark.parametrize("codec", ["gzip", {"*": "sparse+zstd"}, {"a": "zstd", "b": ""}])
def test_what_is_no_choice_is_refused(codec: str | dict[str, str]) -> None:
    with pytest.raises(InvalidInputError, match="is none: use raw, auto"):
        CodecRules.of(codec)
