"""A model that is run and the same model when it is only counted have the same numbers."""

from __future__ import annotations

import pytest

from octavo.errors import ModelError
from octavo.models.catalogue import find_model, list_models
from octavo.models.config import spec_from_hf
from octavo.models.shape_config import shape_from_hf
from octavo.models.spec_shape import shape_of_spec
from octavo.planner.forward_shape import forward_shape
from octavo.planner.kv_arithmetic import kv_layout
from octavo.planner.weight_arithmetic import rank_weights


def runnable():
    for name in list_models():
        try:
            yield pytest.param(spec_from_hf(find_model(name).config, where=name, name=name), id=name)
        except ModelError:
            continue


@pytest.mark.parametrize("spec", list(runnable()))
def test_run_and_counted_sizes_agree(spec):
    name = spec.name
    counted = shape_from_hf(find_model(name).config, where=name, name=name)
    run = shape_of_spec(spec, dtype=counted.dtype)

    assert run.num_parameters == spec.num_parameters == counted.num_parameters
    assert run.num_active_parameters == counted.num_active_parameters
    assert run.layers == counted.layers
    assert forward_shape(run) == forward_shape(counted)
    for ranks in (1, 2, 4):
        ours, theirs = (rank_weights(each, tensor_parallel_size=ranks).num_bytes for each in (run, counted))
        assert ours == pytest.approx(theirs, rel=1e-3), ranks
    assert kv_layout(run).token_bytes == kv_layout(counted).token_bytes
