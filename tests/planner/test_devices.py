"""The table of devices, and how a person names one."""

from __future__ import annotations

import pytest

from octavo.errors import InvalidParameterError
from octavo.planner.devices import find_device, list_devices
from octavo.units import GIB


@pytest.mark.parametrize(
    ("name", "id"),
    [
        ("h100-sxm", "h100-sxm"),
        ("h100", "h100-sxm"),
        ("h100-80gb", "h100-sxm"),
        ("H100 80GB", "h100-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),  # what the driver says
        ("NVIDIA A100-SXM4-80GB", "a100-80-sxm"),
        ("NVIDIA A100 80GB PCIe", "a100-80-pcie"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("rtx 4090", "rtx4090"),
        ("4090", "rtx4090"),
        ("h20", "h20"),  # and not h200, which begins so
        ("mi300", "mi300x"),
        ("AMD Instinct MI300X", "mi300x"),
        ("epyc", "epyc-9654"),
    ],
)
def test_a_device_is_found_by_what_people_and_drivers_call_it(name, id):
    assert find_device(name).id == id


def test_a_name_for_several_devices_is_refused_with_all_of_them():
    with pytest.raises(InvalidParameterError) as caught:
        find_device("a100")
    for each in ("a100-40", "a100-80-sxm", "a100-80-pcie"):
        assert each in caught.value.message


@pytest.mark.parametrize(("name", "meant"), [("rtx4900", "rtx4090"), ("h1000", "h100"), ("mi300xx", "mi300x")])
def test_a_slip_of_the_pen_is_answered_with_a_name_that_works(name, meant):
    with pytest.raises(InvalidParameterError) as caught:
        find_device(name)
    suggested = caught.value.hints[0].split("`")[1]
    assert find_device(suggested) == find_device(meant)


@pytest.mark.parametrize("name", ["", " ", "nvidia", "NVIDIA GeForce", "-", "toaster"])
def test_a_name_that_names_nothing_is_refused(name):
    with pytest.raises(InvalidParameterError, match="there is no device"):
        find_device(name)


def test_every_row_can_be_planned_with_and_says_where_its_figures_come_from():
    devices = list_devices()
    assert len(devices) == len({device.id for device in devices}) >= 47
    for device in devices:
        assert find_device(device.id) == device
        assert device.memory_bytes > 0 and device.bandwidth_bytes_per_s > 1e9
        assert device.visible.low_bytes <= device.visible_bytes <= device.visible.high_bytes
        # An engine never sees more than the memory there is, by more than two SKUs of one name differ.
        assert device.visible_bytes <= 1.04 * device.memory_bytes, device
        assert device.visible_bytes >= 0.74 * device.memory_bytes, device
        assert device.source and device.visible.source and device.provenance in {"file", "recalled"}
        if device.fp8_flop_per_s and device.fp16_flop_per_s:
            assert device.fp16_flop_per_s <= device.fp8_flop_per_s <= 2.2 * device.fp16_flop_per_s, device


def test_a_reading_of_a_device_is_narrower_than_a_guess_from_its_data_sheet():
    read, guessed = find_device("h100-sxm"), find_device("a30")
    assert read.visible_bytes == int(79.19 * GIB)
    assert read.visible.holds(79.14 * GIB) and read.visible.holds(79.22 * GIB)
    assert "guess" in guessed.visible.source
    width = guessed.visible.high_bytes - guessed.visible.low_bytes
    assert width / guessed.memory_bytes > 10 * (read.visible.high_bytes - read.visible.low_bytes) / read.memory_bytes


def test_only_large_devices_that_are_no_a100_get_large_batches():
    assert find_device("h100-sxm").gets_large_batches
    assert find_device("mi300x").gets_large_batches
    assert not find_device("a100-80-sxm").gets_large_batches
    assert not find_device("l40s").gets_large_batches
